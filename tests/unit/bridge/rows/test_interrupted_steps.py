"""Ctrl-C at any call or return of a step: step() again applies the gradients once, wherever the rows are."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from tests.support.heads import PLACES, make_batch, make_head

CLASSES, DIM = 12, 4
ROWS = np.random.default_rng(0).normal(size=(CLASSES, DIM)).astype(np.float32)
MODULES = ("geartrain.bridge.rows", "geartrain.bridge.embedding.update", "geartrain.bridge.head.backends")


def interrupt(step: Callable[[], object], event: int) -> int:
    """Interrupt ``step`` at its call or return number ``event`` in MODULES; return how many there were."""
    seen = 0

    def trace(frame: FrameType, kind: str, argument: Any) -> Any:  # noqa: ARG001
        nonlocal seen
        if kind in ("call", "return") and frame.f_globals["__name__"].startswith(MODULES):
            seen += 1
            if seen == event:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        step()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return seen


def head(cluster: Cluster, name: str, settings: dict[str, Any]) -> tuple[gt.ClassHead, torch.Tensor]:
    module = make_head(cluster, name, num_classes=CLASSES, dim=DIM, optimizer=gt.SGD(1.0), **settings)
    cluster.table(name).assign(np.arange(CLASSES), ROWS)
    return module, module(*make_batch(6, CLASSES, DIM))


def embeddings(cluster: Cluster, name: str, settings: dict[str, Any]) -> tuple[gt.EmbeddingGroup, torch.Tensor]:
    field = gt.Field("id", DIM, num_rows=CLASSES, pooling="sum", **settings)
    module = gt.EmbeddingGroup(cluster, name, [field], optimizer=gt.SGD(1.0))
    module.table("id").assign(np.arange(CLASSES), ROWS)
    return module, module({"id": torch.arange(6).view(3, 2)})["id"].square().sum()


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        *((head, PLACES[place]) for place in ("held", "streamed", "hosted")),
        *((embeddings, {"where": where}) for where in ("pull", "hosted")),
    ],
)
def test_a_step_that_is_called_again_applies_once(cluster: Cluster, make: Any, settings: dict[str, Any]) -> None:
    def trained(name: str, event: int) -> tuple[np.ndarray, int]:
        module, loss = make(cluster, name, settings)
        table = module.table("id") if make is embeddings else cluster.table(name)
        optimizer = gt.RowOptimizer(module)
        loss.backward()
        num_events = interrupt(optimizer.step, event)
        optimizer.step()
        optimizer.step()
        return table.pull(np.arange(CLASSES)), num_events

    expected, num_events = trained("t0", 0)
    assert num_events > 20
    for event in range(1, num_events + 1):
        rows, _ = trained(f"t{event}", event)
        np.testing.assert_allclose(rows, expected, rtol=1e-5, err_msg=f"interrupted at event {event} of {num_events}")
