"""A dense table and a batcher that are as plain as can be: an engine's counterparts in tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from geartrain.ams.values.errors import ShardUnavailable
from geartrain.ams.values.gear_messages import GearAccount


class PlainDense:
    """SGD on the module itself."""

    def __init__(self, module: nn.Module, lr: float = 0.1) -> None:
        self.module, self.lr = module, lr
        self.version = 0
        self.pushed: list[float | None] = []
        self.fails = 0

    def refresh(self) -> bool:
        return False

    def zero_grad(self) -> None:
        self.module.zero_grad()

    def push(self, *, lr: float | None = None) -> None:
        self.pushed.append(lr)
        if self.fails:
            self.fails -= 1
            raise ShardUnavailable("shard 0 does not answer")
        with torch.no_grad():
            for parameter in self.module.parameters():
                if parameter.grad is not None:
                    parameter -= (self.lr if lr is None else lr) * parameter.grad
        self.version += 1


@dataclass
class PlainBatcher:
    """Every delivery is due at once."""

    batches: list[Any] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    failures: dict[int, str] = field(default_factory=dict)
    received: int = 0
    applied: int = 0

    def add(self, _source: str, _sequence: int, ids: Any, gradients: Any, _: Any, **more: Any):
        number = len(self.batches) + len(self.finished) + 1
        self.batches.append(SimpleNamespace(number=number, ids=ids, gradients=gradients, lr=more["lr"]))
        self.received += len(ids)

    def due(self, _: int | None = None) -> Any:
        return self.batches[0] if self.batches else None

    def flush(self) -> None:
        pass

    def done(self, number: int) -> None:
        self.applied += len(self.batches.pop(0).ids)
        self.finished.append(number)

    def failed(self, _: int, ids: Mapping[int, str]) -> None:
        self.failures.update(ids)

    def has_counted(self, _source: str, _sequence: int) -> bool:
        return False

    def account(self, _: str | None = None) -> GearAccount:
        waiting = self.received - self.applied
        return GearAccount(
            received=self.received,
            due=waiting,
            applied=self.applied - len(self.failures),
            dropped_failed=len(self.failures),
        )
