"""Autograd functions for samples sent from one stage to the next, and for their gradients, which are sent back.

The backward pass visits micro-batches from last to first on every rank, in the order of autograd. Each stage scales
gradients for a mean over its own ranks; those it sends back are rescaled for the ranks of the stage before.

Legend: S samples of a sender, T samples that an owner receives.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from geartrain.bridge.parallel.staged.stage_link import StagedBatch, StageLink


def departed(rows_SD: Tensor, link: StageLink, batch: StagedBatch) -> Tensor:
    """Return 0 (0-dim), as a function of the rows sent to the next stage: its backward receives their gradient."""
    # The anchor gives a stage without trained parameters a backward pass, too: every rank must take part.
    anchor = torch.empty(0, requires_grad=True)
    token: Tensor = _Departed.apply(rows_SD, anchor, link, batch)  # type: ignore[no-untyped-call]
    return token


def arrived(rows_TD: Tensor, link: StageLink, batch: StagedBatch) -> Tensor:
    """Return the rows received from the stage before; their backward sends the gradient back to it."""
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
        del upstream  # every rank goes backward with the same factor, which the owners' gradient contains
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
