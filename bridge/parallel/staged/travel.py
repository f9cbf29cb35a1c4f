"""Autograd functions for samples sent from one stage to the next, with their gradients on the way back.

The backward pass visits micro-batches from last to first on every rank, in the order of autograd. A stage's gradients
are scaled as if its own modules were averaged; on the way back they become those of the stage before.

Legend: S samples of a sender, T samples that an owner receives.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from geartrain.bridge.parallel.staged.stage_link import StagedBatch, StageLink


def departed(rows_SD: Tensor, link: StageLink, batch: StagedBatch) -> Tensor:
    """Return 0 (0-dim), as a function of rows sent to the next stage: its backward waits for their gradient."""
    # The loss of a stage that is not trained has a backward pass, too: every rank calls it.
    anchor = torch.empty(0, requires_grad=True)
    token: Tensor = _Departed.apply(rows_SD, anchor, link, batch)  # type: ignore[no-untyped-call]
    return token


def arrived(rows_TD: Tensor, link: StageLink, batch: StagedBatch) -> Tensor:
    """Return the rows received from the stage before, whose gradient is sent back there."""
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
        del upstream  # the owners' gradient contains theirs; every rank runs the same script
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
        ctx.link.send(ctx.spans, gradient_TD)
        return None, None, None, None
