"""Autograd node of a look-up: its backward queues the gradients of the rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from geartrain.ams.values.errors import InvalidArgument
from geartrain.bridge.rows.pending import BackwardCall, PendingUpdate


class Vectors(torch.autograd.Function):
    """Vectors of all fields, computed by ``look_up``; ``call`` receives their gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        call: BackwardCall,
        trained: Sequence[PendingUpdate[Any]],
        look_up: Callable[[], Sequence[Tensor]],
        *stand_ins: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return the vectors; row gradients count for those ``stand_ins`` of ``trained`` that autograd reaches."""
        del stand_ins
        ctx.call, ctx.trained = call, trained
        ctx.set_materialize_grads(False)
        return tuple(look_up())

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        """Queue the row gradients when autograd accumulates. Raises InvalidArgument with create_graph=True."""
        if torch.is_grad_enabled():  # the gradient would count as a constant
            raise InvalidArgument(
                "embeddings have no second derivatives: create_graph=True cannot go through their rows; take the "
                "gradient without it"
            )
        return (None, None, None, *[update.defer(ctx.call, upstream) for update in ctx.trained])
