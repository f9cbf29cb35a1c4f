"""Cross entropy over classes on several ranks: one maximum and one sum over the ranks, per sample.

Of a [B, C] matrix of logits, ranks exchange only some numbers per sample (PLSC, section 2; partial FC): the largest
logit, the sum of exponentials, and the logit of the target, which one rank has.

The formula is that of ``torch.nn.functional.cross_entropy`` with class indices. With p the softmax of logits z, label
y, class weights w (1 without), smoothing ε over C classes:

    loss = (1 − ε) w_y (lse − z_y) + ε/C Σ_c w_c (lse − z_c)
    ∂loss/∂z_c = ((1 − ε) w_y + ε/C Σ w) p_c − (1 − ε) w_y [c = y] − ε/C w_c

Time O(B·L); memory beside the logits O(B) and some chunks. Sums are float32, of float64 logits float64.

Legend: B samples of all ranks, C classes, L of them here, N rows of a chunk.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from geartrain.ams.values.errors import InvalidArgument
from geartrain.bridge.collectives.communicator import Communicator

_CHUNK = {"cpu": 1 << 19}
"""Number of logits of a chunk: on a CPU it fits its cache."""
_DEVICE_CHUNK = 1 << 26


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context in which every operation computes in its operands' type."""
    if not torch.amp.is_autocast_available(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def joint_sums(
    link: Communicator | None,
    shift_B: Tensor,
    sum_B: Tensor,
    others: Sequence[Tensor],
    *,
    exp: Callable[[Tensor], Tensor] = torch.exp,
    shifted: bool = True,
    highest_B: Tensor | None = None,
) -> tuple[Tensor, list[Tensor], Tensor | None]:
    """Return sums over the classes of all ranks, from each rank's sums of ``exp``(logit − its own shift).

    Returns the common shift [B]; the sums [B] with that shift and those of each of ``others``, in the type of
    ``sum_B``; and the maximum over the ranks of ``highest_B`` [B], if given. ``shifted``: whether ranks have different
    shifts. Two all-reduces; one, if there is no maximum to find. ``link`` None: this process has all classes.
    """
    if link is None or link.world_size == 1:
        return shift_B, [sum_B, *others], highest_B
    maxima = [*([shift_B] if shifted else []), *([] if highest_B is None else [highest_B])]
    joint_maxima = link.max(torch.stack(maxima)) if maxima else None
    top_B = joint_maxima[0] if joint_maxima is not None and shifted else shift_B
    base_B = torch.where(torch.isfinite(top_B), top_B, 0.0)
    sums = link.sum(torch.stack([sum_B * exp(shift_B - base_B), *(other.to(sum_B.dtype) for other in others)]))
    return top_B, list(sums), None if highest_B is None or joint_maxima is None else joint_maxima[-1]


@dataclass(frozen=True, eq=False, kw_only=True)
class LocalLabels:
    """Labels of all samples, as numbers of columns of this rank's logits."""

    places_B: Tensor
    """Column of each label, int64; outside the logits if another rank has the class."""
    counts_B: Tensor
    """Whether each sample counts, bool; False: it is ignored."""
    weights_B: Tensor
    """Weight of each sample, in the dtype of the losses; 0 where it is ignored."""
    smoothing: float = 0.0
    num_classes: int = 1
    """Number of classes of all ranks, over which labels are smoothed."""
    weight_L: Tensor | None = None
    """Weight of each class here in smoothed labels; None: 1."""
    total_weight: Tensor | float = 1.0
    """Sum of the weights of all classes."""


def split_cross_entropy(
    local_BL: Tensor,
    labels: LocalLabels,
    link: Communicator | None,
    *,
    takes_memory: Callable[[], bool] = lambda: False,
) -> Tensor:
    """Return the losses [B] over the classes of all ranks, the same on each; NaN where no rank has a sample's class.

    ``local_BL`` are the logits of the classes here. Two all-reduces, of B and of 3·B numbers (4·B with smoothing);
    ``link`` None: all classes are here. The backward pass calls ``takes_memory()`` to learn whether it may overwrite
    the logits by the gradient, after which they must not be read.
    """
    losses: Tensor = _SplitCrossEntropy.apply(local_BL, labels, link, takes_memory)  # type: ignore[no-untyped-call]
    return losses


class _SplitCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, local_BL: Tensor, labels: LocalLabels, link: Communicator | None, takes_memory: Callable[[], bool]
    ) -> Tensor:
        with without_autocast(local_BL.device):
            samples = SplitSamples(local_BL, labels, link)
            losses_B = samples.losses(local_BL)
        ctx.samples, ctx.takes_memory = samples, takes_memory
        ctx.save_for_backward(local_BL)
        return losses_B

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream_B: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.samples is None:
            raise InvalidArgument(
                "backward ran a second time over the loss of split logits, whose memory now holds their gradient; "
                "compute the loss again (retain_graph does not help)"
            )
        (local_BL,) = ctx.saved_tensors
        in_place = ctx.takes_memory()
        out_BL = local_BL.detach() if in_place else torch.empty_like(local_BL)
        with without_autocast(local_BL.device):
            ctx.samples.write_gradient(local_BL.detach(), upstream_B, out_BL)
        if in_place:
            ctx.samples = None
        return out_BL, None, None, None


class SplitSamples:
    """Samples of one loss on this rank."""

    def __init__(self, local_BL: Tensor, labels: LocalLabels, link: Communicator | None) -> None:
        self._labels, self._link = labels, link
        self._sum_dtype = torch.float64 if local_BL.dtype == torch.float64 else torch.float32
        num_local = local_BL.shape[1]
        self._counts_B = labels.counts_B
        self._is_here_B = self._counts_B & (labels.places_B >= 0) & (labels.places_B < num_local)
        self._places_B = labels.places_B.clamp(0, max(0, num_local - 1))
        self._spread_B = self._counts_B.to(self._sum_dtype) * (labels.smoothing / labels.num_classes)
        """Share of each sample's label that smoothing gives to each class."""
        self._top_B = self._sum_B = self._spread_B
        """Largest logit of each sample, and the sum of exponentials over it, over all classes."""
        self._kept_B: Tensor | None = None
        """Shift of each sample's exponentials; None: the logits' memory holds logits."""

    def losses(self, local_BL: Tensor, *, keeps_exponentials: bool = False) -> Tensor:
        """Return the losses [B].

        ``keeps_exponentials``: overwrite the logits, which have the type of the losses, by their exponentials, which
        :meth:`write_gradient` then uses.
        """
        labels = self._labels
        if not len(local_BL):
            self._top_B = self._sum_B = labels.weights_B
            return labels.weights_B.clone()
        target_B = self._target_logits(local_BL)
        highest_B, sums_B, weighted_B = self._local_sums(local_BL, in_place=keeps_exponentials)
        others = [target_B, self._is_here_B, *([weighted_B] if labels.smoothing else [])]
        top_B, (sum_B, target_B, owners_B, *weighted), _ = joint_sums(self._link, highest_B, sums_B, others)
        self._top_B = torch.where(torch.isfinite(top_B), top_B, 0.0)
        self._sum_B = torch.where(~self._counts_B | (owners_B > 0), sum_B, torch.nan)
        log_sum_B = torch.log(self._sum_B)
        losses_B = (1 - labels.smoothing) * labels.weights_B * (self._top_B - target_B + log_sum_B)
        if labels.smoothing:
            lse_B = self._top_B + log_sum_B
            losses_B = losses_B + self._spread_B * (labels.total_weight * lse_B - weighted[0])
        return torch.where(self._counts_B, losses_B, 0.0)

    def write_gradient(self, local_BL: Tensor, upstream_B: Tensor, out_BL: Tensor) -> None:
        """Write the derivative by the logits to ``out_BL``, which may be their own memory."""
        labels, upstream_B = self._labels, upstream_B.to(self._sum_dtype)
        own_B = (1 - labels.smoothing) * labels.weights_B * upstream_B
        spread_B = self._spread_B * upstream_B if labels.smoothing else own_B
        all_B = own_B + spread_B * labels.total_weight if labels.smoothing else own_B
        hot_B = torch.where(self._is_here_B, -own_B, 0.0)
        # Not exp(logit - log-sum-exp): that is rounded, at 600 by 3e-5, and so would be the sum of the probabilities.
        times_B = all_B / self._sum_B
        for rows in self._chunks(local_BL):
            logits_NL = local_BL[rows].to(self._sum_dtype)
            work_NL = out_BL[rows] if out_BL.dtype == self._sum_dtype else torch.empty_like(logits_NL)
            if self._kept_B is None:
                torch.sub(logits_NL, self._top_B[rows].unsqueeze(1), out=work_NL)
                work_NL.exp_().mul_(times_B[rows].unsqueeze(1))
            else:
                factor_N = torch.exp(self._kept_B[rows] - self._top_B[rows]) * times_B[rows]
                torch.mul(logits_NL, factor_N.unsqueeze(1), out=work_NL)
            if labels.smoothing and labels.weight_L is None:
                work_NL.sub_(spread_B[rows].unsqueeze(1))
            elif labels.weight_L is not None and labels.smoothing:
                work_NL.addcmul_(spread_B[rows].unsqueeze(1), labels.weight_L, value=-1)
            if work_NL.shape[1]:
                work_NL.scatter_add_(1, self._places_B[rows].unsqueeze(1), hot_B[rows].unsqueeze(1))
            if work_NL.data_ptr() != out_BL[rows].data_ptr():
                out_BL[rows] = work_NL

    def _local_sums(self, local_BL: Tensor, *, in_place: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return for each sample, over the classes here: the largest logit, Σ exp(z − largest), Σ w·z."""
        highest_B = local_BL.new_full(local_BL.shape[:1], -torch.inf, dtype=self._sum_dtype)
        sums_B, weighted_B = torch.zeros_like(highest_B), torch.zeros_like(highest_B)
        weight_L = self._labels.weight_L
        for chunk in self._chunks(local_BL) if local_BL.shape[1] else ():
            logits_NL = local_BL[chunk].detach().to(self._sum_dtype)
            highest_B[chunk] = max_N = logits_NL.amax(1)
            if self._labels.smoothing:
                weighted_B[chunk] = logits_NL.sum(1) if weight_L is None else logits_NL @ weight_L
            base_N = torch.where(torch.isfinite(max_N), max_N, 0.0)
            shifted_NL = torch.sub(logits_NL, base_N.unsqueeze(1), out=logits_NL if in_place else None)
            sums_B[chunk] = shifted_NL.exp_().sum(1)
        if in_place:
            self._kept_B = torch.where(torch.isfinite(highest_B), highest_B, 0.0)
        return highest_B, sums_B, weighted_B

    def _target_logits(self, local_BL: Tensor) -> Tensor:
        """Return the logit of each sample's label if it is here, else 0."""
        if not local_BL.shape[1]:
            return torch.zeros_like(self._spread_B)
        target_B = local_BL.detach().gather(1, self._places_B.unsqueeze(1)).squeeze(1).to(self._sum_dtype)
        return torch.where(self._is_here_B, target_B, 0.0)

    @staticmethod
    def _chunks(local_BL: Tensor) -> list[slice]:
        rows, here = local_BL.shape
        step = max(1, _CHUNK.get(local_BL.device.type, _DEVICE_CHUNK) // max(1, here))
        return [slice(start, start + step) for start in range(0, rows, step)]
