"""An engine over a dense table that is as plain as can be, and what is delivered to it in tests."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import geartrain as gt
from geartrain.ams.values.errors import ShardUnavailable
from geartrain.ams.values.gear_messages import Delivery
from geartrain.bridge.gear.dense_pass import DensePass
from geartrain.bridge.gear.engine import DenseEngine
from geartrain.bridge.gear.gradient_batcher import GradientBatcher
from geartrain.bridge.gear.sample_source import Samples

IMAGES = torch.randn(20, 5, generator=torch.Generator().manual_seed(1))
DIM = 3


def configured(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of a slow gear, those of its configuration in an object of their own."""
    names = {setting.name for setting in fields(gt.SlowGearConfig)}
    rarer = {name: value for name, value in settings.items() if name in names}
    return {name: value for name, value in settings.items() if name not in names} | {
        "config": gt.SlowGearConfig(**rarer)
    }


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

    def push(self, sequence: int | None = None, *, lr: float | None = None) -> None:  # noqa: ARG002
        self.pushed.append(lr)
        if self.fails:
            self.fails -= 1
            raise ShardUnavailable("shard 0 does not answer")
        with torch.no_grad():
            for parameter in self.module.parameters():
                if parameter.grad is not None:
                    parameter -= (self.lr if lr is None else lr) * parameter.grad
        self.version += 1


class RecordingBatcher(GradientBatcher):
    """Every delivery is due at once."""

    def __init__(self, config: gt.SlowGearConfig) -> None:
        super().__init__(DIM, 1, config)
        self.failed: list[int] = []
        self.settled = 0

    def complete(self, failed: Collection[int] = ()) -> None:
        super().complete(failed)
        self.failed += failed
        self.settled += 1


def engine_of(
    module: nn.Module, samples: Any, mode: Any = "sync", **settings: Any
) -> tuple[DenseEngine, PlainDense, RecordingBatcher]:
    config = gt.SlowGearConfig(clock=lambda: 100.0, **settings)
    dense, batcher = PlainDense(module), RecordingBatcher(config)
    dense_pass = DensePass(module, Samples(samples), DIM, config)
    return DenseEngine(dense_pass, dense, batcher, config, mode=mode), dense, batcher  # type: ignore[arg-type]


def delivery(ids: Any, gradients: Tensor | None = None, sequence: int = 1, **others: Any) -> Delivery:
    given: dict[str, Any] = {"source": "fast", "incarnation": 1, "lr": None, "versions": np.zeros(len(ids), np.int64)}
    gradients = torch.ones(len(ids), DIM) if gradients is None else gradients
    given |= {"sequence": sequence, "ids": np.array(ids, np.int64), "gradients_KD": gradients.numpy()}
    return Delivery(**given | others)


def assert_trained(module: nn.Module, reference: nn.Module, ids: list[int], gradients: Tensor, lr: float = 0.1) -> None:
    """``module`` is ``reference`` after one update by the gradients of these ids."""
    reference(IMAGES[ids]).backward(gradients)
    for mine, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs - lr * theirs.grad)
