"""Rows of an AMS table as a ``torch.optim.Optimizer``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from geartrain.ams.arguments import real_number
from geartrain.ams.errors import InvalidArgument
from geartrain.bridge.gear.slow_gear import SlowGear
from geartrain.bridge.heads.class_head import ClassHead
from geartrain.bridge.heads.row_update import PendingUpdate

Head = ClassHead | SlowGear


class RowOptimizer(torch.optim.Optimizer):
    """Applies the row gradients that heads have collected; the arithmetic runs in the shards.

    A slow gear (:class:`geartrain.SlowGear`) counts as a head: its feature gradients are delivered to the dense part.
    One param_group per head with ``lr`` (from the table's optimizer) and ``table`` (its name), so that LR schedulers
    work; momentum and weight decay belong to the table and cannot be changed here. The group's parameter is a stand-in
    of one element whose gradient is the factor on the rows' gradients, which is how ``torch.amp.GradScaler`` unscales
    and skips (``scaler.step(rows)``, ``scaler.unscale_(rows)``).
    """

    def __init__(self, *heads: Head | Iterable[Head], lr: float | None = None) -> None:
        """Train the rows of one or several heads; ``lr`` replaces that of their tables."""
        flat = [head for item in heads for head in (item if isinstance(item, Iterable) else [item])]
        if not flat or not all(isinstance(head, ClassHead | SlowGear) for head in flat):
            raise InvalidArgument(f"RowOptimizer takes one or more ClassHeads or SlowGears; it was given {heads!r}")
        if len({id(head) for head in flat}) < len(flat):
            raise InvalidArgument("a head was given to RowOptimizer twice; give each once")
        if lr is not None:
            lr = real_number("lr", lr.item() if isinstance(lr, Tensor) else lr)
        self._updates: dict[int, PendingUpdate[Any]] = {id(head.row_update.carrier): head.row_update for head in flat}
        groups = [
            {
                "params": [head.row_update.carrier],
                "lr": head.table.spec.optimizer.lr if lr is None else lr,
                "table": head.name,
            }
            for head in flat
        ]
        super().__init__(groups, {})

    def _group_updates(self) -> list[tuple[dict[str, Any], PendingUpdate[Any]]]:
        return [(group, self._updates[id(group["params"][0])]) for group in self.param_groups]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only the heads given at construction can be trained: anything else is InvalidArgument."""
        params = param_group["params"]
        if len(params) != 1 or id(params[0]) not in self._updates:
            raise InvalidArgument("RowOptimizer trains rows only; give dense parameters to an optimizer of their own")
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Push the pending row gradients: one push per table and shard (per block for rows that are streamed).

        Raises NonFinite before any push if a gradient or the learning rate is not finite. After an error the gradients
        that were not pushed are still pending: call step() again, or zero_grad() to drop them.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        pairs = [(float(group["lr"]), update) for group, update in self._group_updates()]
        for lr, update in pairs:
            if not (math.isfinite(lr) and lr >= 0):
                raise InvalidArgument(f"lr of table {update.table.spec.name!r} is {lr!r}; it must be finite and >= 0")
            update.check_finite()
        for lr, update in pairs:
            update.apply(lr)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002
        """Drop the pending row gradients; nothing is pushed."""
        super().zero_grad(set_to_none=True)
        for update in self._updates.values():
            update.discard()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the pending gradients so that their 2-norm over all heads is at most ``max_norm``; return the norm.

        With GradScaler call ``scaler.unscale_(rows)`` first. Streamed rows cost one more pull of all of them. With
        ranks the norm of the sum is known to no rank: InvalidArgument.
        """
        if not max_norm > 0:
            raise InvalidArgument(f"max_norm is {max_norm!r}; it must be > 0")
        if any(update.ranks is not None for update in self._updates.values()):
            raise InvalidArgument("clip_grad_norm_ is not defined with ranks: the gradient is summed in the shards")
        norm = math.sqrt(math.fsum(update.squared_norm() for update in self._updates.values()))
        factor = min(1.0, max_norm / (norm + 1e-6)) if math.isfinite(norm) else 1.0
        for update in self._updates.values():
            if update.carrier.grad is not None:
                update.carrier.grad.mul_(factor)
        return torch.tensor(norm)
