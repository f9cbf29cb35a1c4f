"""What an owner of the split layer does: computes with samples that senders give it, and gives back what comes of them.

The owners deal the samples among themselves, and work on them as ranks do that have samples of their own.

Legend: T samples that this owner takes, D width, C classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from geartrain.bridge.parallel.split.linear import SplitLinear
from geartrain.bridge.parallel.staged.stage_link import StagedBatch, StageLink


def answer(
    stages: StageLink,
    layer: SplitLinear,
    loss: Callable[[Tensor, Tensor], Tensor],
    device: torch.device,
    failure: Exception | None,
) -> Tensor | None:
    """Do what the senders ask for; the loss over the samples of all of them (0-dim), None if they ask for logits.

    ``loss`` is of (features [T, D], labels [T]). Its backward gives the senders the gradients of their features.
    """
    batch = stages.begin(failure, None)
    features_TD = torch.empty(batch.num_taken, layer.in_features, dtype=batch.dtype, device=device)
    if not batch.asks_for_loss:
        stages.take(batch.spans, features_TD)
        stages.give(batch.spans, _tell_outcome(stages, lambda: layer(features_TD).whole().detach()))
        return None
    labels_T = torch.empty(batch.num_taken, dtype=torch.int64, device=device)
    stages.take(batch.spans, features_TD, labels_T)
    if batch.wants_gradient:
        anchor = torch.empty(0, requires_grad=True)
        features_TD = _GivenFeatures.apply(features_TD, anchor, stages, batch)  # type: ignore[no-untyped-call]
    value = _tell_outcome(stages, lambda: loss(features_TD, labels_T))
    own = stages.owners.index(stages.link.rank)
    asking = [rank for number, rank in enumerate(stages.senders) if number % len(stages.owners) == own]
    stages.link.start_transfers([(value.detach(), rank) for rank in asking], []).result()
    return value


def _tell_outcome(stages: StageLink, compute: Callable[[], Tensor]) -> Tensor:
    """What ``compute()`` gives; tells the senders whether it failed."""
    try:
        value = compute()
    except Exception as exc:  # of any kind: the senders wait for this rank
        stages.answer(exc, None)
        raise
    stages.answer(None, value.dtype)
    return value


class _GivenFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features_TD: Tensor, anchor: Tensor, stages: StageLink, batch: StagedBatch) -> Tensor:
        del anchor
        ctx.stages, ctx.spans = stages, batch.spans
        return features_TD.view_as(features_TD)

    @staticmethod
    def backward(ctx: Any, gradient_TD: Tensor) -> tuple[None, None, None, None]:
        ctx.stages.give(ctx.spans, gradient_TD)
        return None, None, None, None
