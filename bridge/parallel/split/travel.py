"""Samples on their way to split layers and back, for autograd.

With replicated modules every rank has its own samples, and its gradients are averaged over the R ranks (DDP, FSDP2).
For the average to be the gradient of one loss over all samples, a gradient by a replicated module's output is R times
that of the loss; in split layers it is that of the loss. The functions here convert.

Legend: B samples of all ranks, S of this one, D width, R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from geartrain.bridge.collectives.communicator import Communicator, Pending


class _AllSamples(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, own_SD: Tensor, arriving: Pending[Tensor], link: Communicator, sizes: Sequence[int]
    ) -> Tensor:
        ctx.link, ctx.sizes, ctx.dtype = link, sizes, own_SD.dtype
        joint_BD = arriving.result()
        return joint_BD.view_as(joint_BD) if joint_BD is own_SD else joint_BD

    @staticmethod
    def backward(ctx: Any, gradient_BD: Tensor) -> tuple[Tensor, None, None, None]:
        wide_BD = gradient_BD.float() if gradient_BD.dtype.itemsize < 4 else gradient_BD
        own_SD = ctx.link.sum_to_owners(wide_BD.contiguous(), ctx.sizes)
        if ctx.link.world_size > 1:
            own_SD = own_SD * ctx.link.world_size
        return own_SD.to(ctx.dtype), None, None, None


class _OwnSamples(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts_BD: Tensor, link: Communicator, sizes: Sequence[int]) -> Tensor:
        ctx.link, ctx.sizes = link, sizes
        own_SD = link.sum_to_owners(parts_BD, sizes)
        return own_SD.view_as(own_SD) if own_SD is parts_BD else own_SD

    @staticmethod
    def backward(ctx: Any, gradient_SD: Tensor) -> tuple[Tensor, None, None]:
        joint_BD = ctx.link.gather(gradient_SD.contiguous(), ctx.sizes)
        return (joint_BD / ctx.link.world_size if ctx.link.world_size > 1 else joint_BD), None, None


def all_samples(own_SD: Tensor, arriving: Pending[Tensor], link: Communicator, sizes: Sequence[int]) -> Tensor:
    """Return the samples [B, D] of all ranks, whose gathering ``link.start_gather(own_SD, sizes)`` has started.

    Backward: one reduce-scatter of B·D numbers (of at least 32 bits).
    """
    joint: Tensor = _AllSamples.apply(own_SD, arriving, link, sizes)  # type: ignore[no-untyped-call]
    return joint


def own_samples(parts_BD: Tensor, link: Communicator, sizes: Sequence[int]) -> Tensor:
    """Return this rank's samples [S, D] of the sum of ``parts_BD`` over the ranks: one reduce-scatter.

    Backward: one all-gather.
    """
    own: Tensor = _OwnSamples.apply(parts_BD, link, sizes)  # type: ignore[no-untyped-call]
    return own


class _WholeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local_BL: Tensor, link: Communicator, sizes: Sequence[int], widths: Sequence[int]) -> Tensor:
        ctx.link, ctx.sizes, ctx.widths = link, sizes, widths
        own, here = sizes[link.rank], widths[link.rank]
        arrived = link.all_to_all(
            local_BL.contiguous().view(-1), [size * here for size in sizes], [own * width for width in widths]
        )
        parts = torch.split(arrived, [own * width for width in widths])
        return torch.cat([part.view(own, width) for part, width in zip(parts, widths, strict=True)], 1)

    @staticmethod
    def backward(ctx: Any, gradient_SC: Tensor) -> tuple[Tensor, None, None, None]:
        link, sizes, widths = ctx.link, ctx.sizes, ctx.widths
        own, here = sizes[link.rank], widths[link.rank]
        leaving = torch.cat([part.reshape(-1) for part in torch.split(gradient_SC, list(widths), 1)])
        arrived = link.all_to_all(leaving, [own * width for width in widths], [size * here for size in sizes])
        return arrived.view(sum(sizes), here) / link.world_size, None, None, None


def whole_rows(local_BL: Tensor, link: Communicator, sizes: Sequence[int], widths: Sequence[int]) -> Tensor:
    """Return all columns [S, C] of the own samples, of which each rank has ``widths``: one all-to-all; so backward."""
    if link.world_size == 1:
        return local_BL
    whole: Tensor = _WholeRows.apply(local_BL, link, sizes, widths)  # type: ignore[no-untyped-call]
    return whole
