"""Losses of a class head as two plain functions, for class centers in a layer outside Geartrain.

Both work on one process, or on the ranks of a ``group`` that hold consecutive ranges of the classes (class parallel;
PLSC, section 2): rank r holds C_local of the C classes, the ranges may differ in length, and the samples are those of
the joint batch, the same on every rank.

Legend: B samples, C classes, K sampled classes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from geartrain.ams.programs.selection import positives_and_sample
from geartrain.ams.values.arguments import integer
from geartrain.ams.values.errors import InvalidArgument, InvalidIds, InvalidRows
from geartrain.bridge.collectives.communicator import Communicator
from geartrain.bridge.collectives.cross_entropy import LocalLabels, SplitSamples
from geartrain.bridge.head.loss.checks import checked_labels
from geartrain.bridge.head.loss.config import Reduction, checked_label_smoothing, checked_reduction
from geartrain.bridge.head.loss.margins.angular import CombinedMargin
from geartrain.bridge.head.loss.margins.scale import scale_of
from geartrain.bridge.head.loss.sample_weights import checked_weight
from geartrain.bridge.kernels.sampling import filled_by_sample, room_for


def margin_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    m1: float = 1.0,
    m2: float = 0.5,
    m3: float = 0.0,
    scale: float = 64.0,
    group: dist.ProcessGroup | None = None,
    *,
    weight: Tensor | None = None,
    reduction: Reduction = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Cross entropy of scale · cos θ whose target becomes scale · (ψ(m1·θ + m2) − m3); PLSC, section 2.1.

    ArcFace is (1, 0.5, 0), CosFace (1, 0, 0.35), SphereFace (1.35, 0, 0); ψ is that of
    :mod:`geartrain.bridge.head.loss.margins.angular`. The gradient is exact; 16-bit logits are converted to float32 for
    the computation. Their gradient, scale · probability / B for a negative, is rounded to their type, which for float16
    ends at 6e-8: with a million classes or more keep the logits in float32, or scale the loss.

    Args:
        logits: cos θ, floating point [B, C]; with ``group`` this rank's columns [B, C_local].
        labels: int64 [B] in [0, C) or ``ignore_index``, on the device of the logits.
        m1: Multiplies the angle, >= 1.
        m2: Added to the angle, radians in [0, π].
        m3: Subtracted from the cosine, >= 0.
        scale: Multiplies every logit, > 0.
        group: The ranks that hold the other classes. They exchange one number each and, per sample, a maximum and
            three sums (four with smoothed labels); never the logits. Every rank returns the same loss, whose backward
            gives each the gradient of its own columns.
        weight: What each sample counts, [B] on the device of the logits (None: 1); the mean is Σ w·loss / Σ w. With
            ``label_smoothing`` that is not what weights of classes are to ``torch.nn.functional.cross_entropy``.
        reduction: "mean" or "sum" over the samples, 0-dim, or "none", [B].
        ignore_index: A label whose samples have no loss and are not counted in the mean; None: there is none. Where
            nothing counts the mean is 0.
        label_smoothing: So much of a sample's target, in [0, 1], is spread evenly over all classes; this part is over
            the logits without a margin.

    Returns:
        The loss, float32 (float64 for float64 logits). Memory: one matrix like the logits in that type, until backward.

    Raises:
        InvalidRows: the logits are not [B, C] of floats with B, C >= 1.
        InvalidIds: the labels are of another type or length, or one is outside the classes. The values are looked at
            on the CPU only: on another device such a sample's loss is NaN.
        InvalidArgument: a margin, ``scale``, ``weight``, ``reduction`` or ``label_smoothing`` is out of range; the
            values of weights are looked at on the CPU only.
    """
    margin = CombinedMargin(scale=scale, m1=m1, m2=m2, m3=m3)
    checked_reduction(reduction)
    smoothing = checked_label_smoothing(label_smoothing)
    if not isinstance(logits, Tensor) or logits.ndim != 2 or 0 in logits.shape or not logits.is_floating_point():
        found = f"{logits.dtype} {list(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise InvalidRows(f"logits are {found}; they must be a floating point tensor [B, C] with B and C at least 1")
    if not isinstance(labels, Tensor) or labels.dtype != torch.int64 or labels.shape != logits.shape[:1]:
        found = f"{labels.dtype} {list(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
        raise InvalidIds(f"labels are {found}; they must be a torch.int64 tensor [{len(logits)}], one per sample")
    if labels.device != logits.device:
        raise InvalidIds(f"labels are on {labels.device}, logits on {logits.device}; move them to one device")
    link = None if group is None else Communicator(group)
    before, total = _span(logits.shape[1], logits.device, link)
    if labels.device.type == "cpu":
        checked_labels(labels, len(labels), int(total), ignore_index)
    counts_B = _counts(weight, logits)
    if ignore_index is not None:
        counted_B = labels != ignore_index
        labels, counts_B = labels.where(counted_B, 0), counts_B * counted_B
    if weight is not None and reduction == "mean":  # so that neither weights nor their sum leave the losses' range
        one = torch.ones_like(counts_B[0])
        exponent = torch.frexp(counts_B.detach().amax()).exponent.clamp_min(-1022)  # 2**1022 is no infinity
        counts_B = counts_B * torch.ldexp(one, -exponent)
    loss_B: Tensor = _MarginCrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits, labels - before, margin, smoothing, total, link
    )
    counts_B = counts_B.to(loss_B.dtype)
    loss_B = (loss_B * counts_B).masked_fill(counts_B == 0, 0.0)
    if reduction == "none":
        return loss_B
    if reduction == "sum":
        return loss_B.sum()
    sum_of_counts = counts_B.sum()
    return loss_B.sum() / torch.where(sum_of_counts > 0, sum_of_counts, 1.0)


def _counts(weight: Tensor | None, logits: Tensor) -> Tensor:
    """Return the weight of each sample [B] in float64; ones in float32."""
    if weight is None:
        return torch.ones(len(logits), dtype=torch.float32, device=logits.device)
    if not isinstance(weight, Tensor) or weight.device.type == "cpu":
        checked_weight(weight.detach() if isinstance(weight, Tensor) else weight, len(logits))
    if weight.shape != logits.shape[:1] or weight.device != logits.device:
        raise InvalidArgument(
            f"weight is {list(weight.shape)} on {weight.device}; it must be [{len(logits)}] on {logits.device}"
        )
    return weight.double()


class _MarginCrossEntropy(torch.autograd.Function):
    """Losses [B] of logits [B, C_local]; the labels are counted from the first of these columns.

    One function, for its memory: besides the logits one matrix until the backward pass, two in it. Autograd would
    copy the matrix for each gather and scatter.
    """

    @staticmethod
    def forward(
        ctx: Any,
        cos_BC: Tensor,
        places_B: Tensor,
        margin: CombinedMargin,
        smoothing: float,
        num_classes: Tensor,
        link: Communicator | None,
    ) -> Tensor:
        compute = torch.float64 if cos_BC.dtype == torch.float64 else torch.float32
        inside_B = (places_B >= 0) & (places_B < cos_BC.shape[1])
        columns = places_B.clamp(0, cos_BC.shape[1] - 1).unsqueeze(1)
        target = margin.target(cos_BC.gather(1, columns).squeeze(1).to(compute))
        logits_BC = cos_BC.to(compute) * scale_of(margin)
        mean_B = logits_BC.sum(1) / num_classes if smoothing else None
        own_B = torch.where(inside_B, target.logits_B, logits_BC.gather(1, columns).squeeze(1))
        logits_BC.scatter_(1, columns, own_B.unsqueeze(1))
        ones_B = torch.ones_like(own_B)
        labels = LocalLabels(places_B=places_B, counts_B=ones_B.bool(), weights_B=ones_B)
        ctx.samples = SplitSamples(logits_BC, labels, link)
        losses_B = ctx.samples.losses(logits_BC, keeps_exponentials=True)
        if mean_B is not None:
            spread_B = torch.where(inside_B, target.logits_B, 0.0) - mean_B
            losses_B = losses_B + smoothing * (spread_B if link is None else link.sum(spread_B))
        ctx.save_for_backward(logits_BC, columns, inside_B, target.by_cos_B)
        ctx.scale, ctx.dtype = scale_of(margin), cos_BC.dtype
        ctx.smoothing, ctx.spread = smoothing, smoothing / num_classes.to(compute) * scale_of(margin)
        joined: Tensor = losses_B
        return joined

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream_B: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        logits_BC, columns, inside_B, slope_B = ctx.saved_tensors
        gradient_BC = torch.empty_like(logits_BC)
        ctx.samples.write_gradient(logits_BC, upstream_B, gradient_BC)
        target_B = (gradient_BC.gather(1, columns).squeeze(1) + ctx.smoothing * upstream_B) * slope_B
        gradient_BC.mul_(ctx.scale)
        if ctx.smoothing:
            spread_B = ctx.spread * upstream_B
            gradient_BC.sub_(spread_B.unsqueeze(1))
            target_B = target_B - spread_B
        own_B = torch.where(inside_B, target_B, gradient_BC.gather(1, columns).squeeze(1))
        return gradient_BC.scatter_(1, columns, own_B.unsqueeze(1)).to(ctx.dtype), None, None, None, None, None


def class_center_sample(
    labels: Tensor,
    num_classes: int,
    num_samples: int,
    seed: int,
    step: int,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the classes among the labels, filled up with random others to ``num_samples`` (PLSC, section 2.2; partial
    FC).

    The result is the same for the same arguments on any device, and without a group has the classes that
    :class:`PartialFC` makes active. O(K log K) time, whatever the number of classes. The host does not wait for labels
    on a device if they are at most ``num_samples``. A loss without a margin over these classes is that over all
    classes, on average, if log((C − P) / (K − P)) is added to the logits of the sampled classes that are none of the P
    distinct labels.

    Args:
        labels: int64 [B] on any device, in [0, C).
        num_classes: C; with ``group`` the number of this rank's classes, C_local.
        num_samples: K, >= 1; of this rank. More positives than that are all kept; more than the classes are all of
            them.
        seed: Key of the sampling, with the step; an unsigned 64-bit integer.
        step: Number of the step, >= 0.
        group: The ranks that hold the other classes; each samples among its own. They exchange two numbers each.

    Returns:
        (labels [B] int64 counted among the sampled classes, those of all ranks in rank order, as
        :func:`margin_cross_entropy` takes them; sampled classes [K] int64, rising, counted from this rank's first),
        both on the device of the labels.

    Raises:
        InvalidIds: a label is outside the classes, or the labels are not int64 [B]. The values are looked at on the CPU
            only: on another device such a label becomes -1, whose loss is NaN.
        InvalidArgument: a number is out of range.
    """
    for name, value, least in (("num_classes", num_classes, 1), ("num_samples", num_samples, 1), ("step", step, 0)):
        integer(name, value, least)
    integer("seed", seed, 0, 2**64 - 1)
    link = None if group is None else Communicator(group)
    rank = 0 if link is None else link.rank
    device = labels.device if isinstance(labels, Tensor) else torch.device("cpu")
    if device.type != "cpu":
        return _sample_on_device(labels, num_classes, num_samples, (seed + rank) % 2**64, step, link)
    before, total = (int(number) for number in _span(num_classes, device, link))
    all_labels = checked_labels(labels, len(labels), total)
    own = all_labels[(all_labels >= before) & (all_labels < before + num_classes)] - before
    active = positives_and_sample(own, num_classes, num_samples, (seed + rank) % 2**64, step)
    first, _ = _span(active.num, device, link)
    positions_B = np.zeros(len(all_labels), np.int64)
    mine = (all_labels >= before) & (all_labels < before + num_classes)
    positions_B[mine] = active.positions(own) + int(first)
    remapped_B = torch.from_numpy(positions_B).to(device)
    return remapped_B if link is None else link.sum(remapped_B), torch.from_numpy(active.ids).to(device)


def _sample_on_device(
    labels: Tensor, num_classes: int, num_samples: int, seed: int, step: int, link: Communicator | None
) -> tuple[Tensor, Tensor]:
    """Do :func:`class_center_sample` in fixed shapes; two exchanges between the hosts and an all-reduce of 8·B
    bytes."""
    if labels.dtype != torch.int64 or labels.ndim != 1:
        raise InvalidIds(f"labels are {labels.dtype} {list(labels.shape)}; they must be a torch.int64 tensor [B]")
    own_B = labels - _before(num_classes, link)
    budget = min(num_samples, num_classes)
    if budget == num_classes:
        ids_K = torch.arange(num_classes, device=labels.device)
    else:
        room = room_for(len(labels), budget, num_classes, num_classes)
        sample = filled_by_sample(own_B, num_classes, budget, seed, step, start=0, stop=num_classes, room=room)
        ids_K = sample.ids_A if room == budget else sample.ids_A[: int(sample.num)]
    found_B = torch.searchsorted(ids_K, own_B).clamp_(max=len(ids_K) - 1)
    # One more than the number, so that zero means a label on no rank.
    said_B = torch.where(ids_K[found_B] == own_B, found_B + (_before(len(ids_K), link) + 1), 0)
    return (said_B if link is None else link.sum(said_B)) - 1, ids_K


def _before(count: int, link: Communicator | None) -> int:
    """Return the sum over the ranks before this one, exchanged between the hosts."""
    return 0 if link is None else sum(theirs for (theirs,) in link.exchange([count])[: link.rank])


def _span(count: int, device: torch.device, link: Communicator | None) -> tuple[Tensor, Tensor]:
    """Return (sum over the ranks before this one, sum over all ranks) of ``count``, both 0-dim int64 on the device."""
    own = torch.tensor([count], dtype=torch.int64, device=device)
    if link is None:
        return torch.zeros((), dtype=torch.int64, device=device), own.sum()
    counts_R = link.gather(own, [1] * link.world_size)
    return counts_R[: link.rank].sum(), counts_R.sum()
