"""Samples that go from one stage to the next, as autograd sees them: their gradients come back.

The backward pass goes over micro-batches from the last to the first on every rank: autograd takes what was made last.
A stage's gradients are scaled as if its own modules were averaged; on the way they become those of the stage before.

Legend: S samples of a sender, T samples that an owner takes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from geartrain.bridge.parallel.staged.stage_link import StagedBatch, StageLink


def departed(rows_SD: Tensor, link: StageLink, batch: StagedBatch) -> Tensor:
    """0 (0-dim), as a function of rows that went to the next stage: its backward waits for their gradient."""
    # The loss of a stage that is not trained has a backward pass, too: every rank calls it.
    anchor = torch.empty(0, requires_grad=True)
    token: Tensor = _Departed.apply(rows_SD, anchor, link, batch)  # type: ignore[no-untyped-call]
    return token


def arrived(rows_TD: Tensor, link: StageLink, batch: StagedBatch) -> Tensor:
    """The rows that came from the stage before, whose gradient goes back there."""
    anchor = torch.empty(0, requires_grad=True)
    rows: Tensor = _Arrived.apply(rows_TD, anchor, link, batch)  # type: ignore[no-untyped-call]
    return rows


class _Departed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_SD: Tensor, anchor: Tensor, link: StageLink, batch: StagedBatch) -> Tensor:
        del anchor
        ctx.link, ctx.batch = link, batch
        ctx.shape, ctx.dtype, ctx.device = rows_SD.shape, rows_SD.dtype, rows_SD.device
        return rows_SD.new_zeros(())

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, None, None, None]:
        del upstream  # what the owners send has theirs in it; the same script gives the same
        if not ctx.batch.wants_gradient:
            return None, None, None, None
        link: StageLink = ctx.link
        gradient_SD = torch.empty(ctx.shape, dtype=ctx.dtype, device=ctx.device)
        link.receive(ctx.batch.spans, gradient_SD)
        return gradient_SD.mul_(len(link.senders) / len(link.owners)), None, None, None


class _Arrived(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_TD: Tensor, anchor: Tensor, link: StageLink, batch: StagedBatch) -> Tensor:
        del anchor
        ctx.link, ctx.spans = link, batch.spans
        return rows_TD.view_as(rows_TD)

    @staticmethod
    def backward(ctx: Any, gradient_TD: Tensor) -> tuple[None, None, None, None]:
        ctx.link.give(ctx.spans, gradient_TD)
        return None, None, None, None
