"""Cross entropy over logits whose classes lie on several ranks: one maximum and one sum over the ranks, per sample.

The formula is that of ``torch.nn.functional.cross_entropy`` with class indices. With p the softmax of logits z, label
y, class weights w (1 without), smoothing ε over C classes, N the divisor of the reduction:

    loss = Σ [(1 − ε) w_y (lse − z_y) + ε/C Σ_c w_c (lse − z_c)] / N
    ∂loss/∂z_c = [((1 − ε) w_y + ε/C Σ w) p_c − (1 − ε) w_y [c = y] − ε/C w_c] / N

Time O(B·L); memory beside the logits O(B) and some chunks. Sums are float32, of float64 logits float64.

Legend: B samples of all ranks, C classes, L of them here, N rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from geartrain.ams.values.errors import InvalidArgument
from geartrain.bridge.parallel.split.layer import without_autocast
from geartrain.bridge.parallel.split.shard import RowShard

_CHUNK = {"cpu": 1 << 19}
"""Logits that are worked on at a time: on a CPU they stay in its cache."""
_DEVICE_CHUNK = 1 << 26


@dataclass(frozen=True, eq=False)
class SplitLoss:
    """What ``F.cross_entropy`` is given, and where the classes are."""

    shard: RowShard
    weight_C: Tensor | None
    ignore_index: int
    smoothing: float
    reduction: str
    sizes: Sequence[int]

    def check(self) -> None:
        """Raise InvalidArgument for what cannot be; the same on every rank."""
        if self.reduction not in ("mean", "sum"):
            raise InvalidArgument(
                f"reduction is {self.reduction!r}; cross entropy over split logits takes 'mean' or 'sum', over the "
                "samples of all ranks"
            )
        if not 0 <= self.smoothing <= 1:
            raise InvalidArgument(f"label_smoothing is {self.smoothing!r}; it must be in [0, 1]")
        if self.weight_C is not None and self.weight_C.shape != (self.shard.num,):
            raise InvalidArgument(
                f"weight has shape {tuple(self.weight_C.shape)}; it must be one number for each of the "
                f"{self.shard.num} classes, on every rank"
            )


def split_cross_entropy(
    local_BL: Tensor, labels_B: Tensor, loss: SplitLoss, *, takes_memory: Callable[[], bool]
) -> Tensor:
    """The loss (0-dim, float32 or float64) over the classes of all ranks, the same on each.

    ``local_BL`` are the logits of the classes that are here, ``labels_B`` the labels of all samples, both on one
    device. Two all-reduces, of B and of 3·B numbers (4·B with smoothing). The backward pass asks ``takes_memory()``
    whether it may write the gradient over the logits, which nobody may read then.
    """
    return _SplitCrossEntropy.apply(local_BL, labels_B, loss, takes_memory)  # type: ignore[no-untyped-call,no-any-return]


class _SplitCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, local_BL: Tensor, labels_B: Tensor, loss: SplitLoss, takes_memory: Callable[[], bool]
    ) -> Tensor:
        with without_autocast(local_BL.device):
            sample = _Samples(local_BL, labels_B, loss)
            value, ctx.lse_B = sample.loss(local_BL)
        ctx.sample, ctx.takes_memory = sample, takes_memory
        ctx.save_for_backward(local_BL)
        return value

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.lse_B is None:
            raise InvalidArgument(
                "backward ran a second time over the loss of split logits, whose memory now holds their gradient; "
                "compute the loss again (retain_graph does not help)"
            )
        (local_BL,) = ctx.saved_tensors
        with without_autocast(local_BL.device):
            in_place = ctx.takes_memory()
            out_BL = local_BL.detach() if in_place else torch.empty_like(local_BL)
            ctx.sample.write_gradient(local_BL.detach(), ctx.lse_B, upstream, out_BL)
        if in_place:
            ctx.lse_B = None
        return out_BL, None, None, None


class _Samples:
    """The samples of one loss, as this rank sees them."""

    def __init__(self, local_BL: Tensor, labels_B: Tensor, loss: SplitLoss) -> None:
        self._what = loss
        self._link = loss.shard.group.link
        self._sum_dtype = torch.float64 if local_BL.dtype == torch.float64 else torch.float32
        self._counts_B = labels_B != loss.ignore_index
        places_B = labels_B - loss.shard.first
        self._is_here_B = self._counts_B & (places_B >= 0) & (places_B < loss.shard.num_local)
        self._places_B = places_B.clamp(0, max(0, loss.shard.num_local - 1))
        weight_C = None if loss.weight_C is None else loss.weight_C.detach().to(local_BL.device, self._sum_dtype)
        self._weight_L = None if weight_C is None else weight_C[loss.shard.first : loss.shard.stop]
        ones_B = self._counts_B.to(self._sum_dtype)
        self._weights_B = ones_B if weight_C is None else ones_B * weight_C[labels_B.clamp(0, loss.shard.num - 1)]
        """Of each sample: its class's, 0 where it does not count."""
        total = float(loss.shard.num) if weight_C is None else weight_C.sum()
        self._spread_B = ones_B * (loss.smoothing / loss.shard.num)
        """What of a sample goes to each class."""
        self._total_weight = total
        self._divisor = self._weights_B.sum() if loss.reduction == "mean" else ones_B.new_ones(())

    def loss(self, local_BL: Tensor) -> tuple[Tensor, Tensor]:
        """The loss, and the logarithm of the sum of exponentials [B] over all classes."""
        rows = len(local_BL)
        if not rows:
            return self._weights_B.sum() / self._divisor, self._weights_B
        highest_B, sums_B, weighted_B = self._local_sums(local_BL)
        top_B = self._link.max(highest_B)
        base_B = torch.where(torch.isfinite(top_B), top_B, 0.0)
        target_B = self._target_logits(local_BL)
        own = [sums_B * torch.exp(highest_B - base_B), target_B, self._is_here_B.to(self._sum_dtype)]
        joint = self._link.sum(torch.stack([*own, weighted_B] if self._what.smoothing else own))
        lse_B = base_B + torch.log(joint[0])
        is_known_B = ~self._counts_B | (joint[2] > 0)
        lse_B = torch.where(is_known_B, lse_B, torch.nan)
        losses_B = (1 - self._what.smoothing) * self._weights_B * (lse_B - joint[1])
        if self._what.smoothing:
            losses_B = losses_B + self._spread_B * (self._total_weight * lse_B - joint[3])
        losses_B = torch.where(self._counts_B, losses_B, 0.0)
        return losses_B.sum() / self._divisor, lse_B

    def write_gradient(self, local_BL: Tensor, lse_B: Tensor, upstream: Tensor, out_BL: Tensor) -> None:
        """Write the derivative by the logits to ``out_BL``, which may be their own memory."""
        loss = self._what
        factor = upstream.to(self._sum_dtype) / self._divisor
        own_B = (1 - loss.smoothing) * self._weights_B * factor
        spread_B = self._spread_B * factor
        all_B = own_B + spread_B * self._total_weight if loss.smoothing else own_B
        hot_B = torch.where(self._is_here_B, -own_B, 0.0)
        for rows in self._chunks(local_BL):
            probabilities_NL = (
                local_BL[rows] if local_BL.dtype == self._sum_dtype else local_BL[rows].to(self._sum_dtype)
            )
            work_NL = out_BL[rows] if out_BL.dtype == self._sum_dtype else torch.empty_like(probabilities_NL)
            torch.sub(probabilities_NL, lse_B[rows].unsqueeze(1), out=work_NL)
            work_NL.exp_().mul_(all_B[rows].unsqueeze(1))
            if loss.smoothing and self._weight_L is None:
                work_NL.sub_(spread_B[rows].unsqueeze(1))
            elif loss.smoothing and self._weight_L is not None:
                work_NL.addcmul_(spread_B[rows].unsqueeze(1), self._weight_L, value=-1)
            if work_NL.shape[1]:
                work_NL.scatter_add_(1, self._places_B[rows].unsqueeze(1), hot_B[rows].unsqueeze(1))
            if work_NL.data_ptr() != out_BL[rows].data_ptr():
                out_BL[rows] = work_NL

    def _local_sums(self, local_BL: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of each sample over the classes here: the largest logit, Σ exp(z − largest), Σ w·z."""
        rows, here = local_BL.shape
        highest_B = local_BL.new_full((rows,), -torch.inf, dtype=self._sum_dtype)
        sums_B, weighted_B = torch.zeros_like(highest_B), torch.zeros_like(highest_B)
        if not here:
            return highest_B, sums_B, weighted_B
        for chunk in self._chunks(local_BL):
            logits_NL = local_BL[chunk].detach().to(self._sum_dtype)
            most_N = logits_NL.amax(1)
            highest_B[chunk] = most_N
            if self._what.smoothing:
                weighted_B[chunk] = logits_NL.sum(1) if self._weight_L is None else logits_NL @ self._weight_L
            base_N = torch.where(torch.isfinite(most_N), most_N, 0.0)
            sums_B[chunk] = (logits_NL - base_N.unsqueeze(1)).exp_().sum(1)
        return highest_B, sums_B, weighted_B

    def _target_logits(self, local_BL: Tensor) -> Tensor:
        """That of each sample's label where it is here, else 0."""
        if not local_BL.shape[1]:
            return torch.zeros_like(self._weights_B)
        target_B = local_BL.detach().gather(1, self._places_B.unsqueeze(1)).squeeze(1).to(self._sum_dtype)
        return torch.where(self._is_here_B, target_B, 0.0)

    def _chunks(self, local_BL: Tensor) -> list[slice]:
        rows, here = local_BL.shape
        step = max(1, _CHUNK.get(local_BL.device.type, _DEVICE_CHUNK) // max(1, here))
        return [slice(start, start + step) for start in range(0, rows, step)]
