"""A class head with SparseMomentum(untouched="elapsed") equals torch's dense SGD, wherever its rows are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from geartrain.ams.programs.selection import FullSoftmax, PartialFC
from geartrain.ams.server import hosting
from geartrain.ams.values.optimizers.registry import SparseMomentum
from geartrain.ams.values.specs import DTypeName, Normal
from geartrain.bridge.head.backends import row_stream
from geartrain.bridge.head.class_head import ClassHead
from geartrain.bridge.head.loss.margins.angular import CosFace
from geartrain.bridge.head.weights import export_rows
from geartrain.bridge.rows.optimizer import RowOptimizer
from geartrain.launch.hosting import local
from tests.support import heads
from tests.support.reference import plain_gradients

CLASSES, DIM, BATCH, STEPS = 3000, 8, 12, 8
MARGIN = CosFace(8, 0.1)
OPTIMIZER = SparseMomentum(1.0, momentum=0.8, weight_decay=0.01, untouched="elapsed")


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, DIM, generator=generator), torch.randint(CLASSES, (BATCH,), generator=generator)


def rate(step: int) -> float:
    return 1.0 - step / (2 * STEPS)


def dense(rows_CD: torch.Tensor, select: FullSoftmax | PartialFC) -> torch.Tensor:
    """The rows after all steps of torch.optim.SGD in float64, whose gradient has every row of the table."""
    rows = torch.nn.Parameter(rows_CD.double().clone())
    optimizer = torch.optim.SGD([rows], lr=1.0, momentum=OPTIMIZER.momentum, weight_decay=OPTIMIZER.weight_decay)
    for step in range(STEPS):
        features, labels = batch(step)
        active = select.select(labels.numpy(), CLASSES, step)
        ids, targets = torch.from_numpy(active.ids), torch.from_numpy(active.positions(labels.numpy()))
        _, _, gradient = plain_gradients(features, rows.detach()[ids], targets, MARGIN.combined)
        rows.grad = torch.zeros_like(rows).index_copy_(0, ids, gradient)
        optimizer.param_groups[0]["lr"] = rate(step)
        optimizer.step()
    return rows.detach()


PLACES: dict[str, dict[str, Any]] = {
    "held": {"rows": "pull"},
    "streamed": {"rows": "pull", "rows_cache_bytes": 0},
    "hosted": {"rows": "hosted"},
    "hosted-chunked": {"rows": "hosted"},
}


@pytest.mark.parametrize("select", [FullSoftmax(), PartialFC(0.2, seed=1)])
@pytest.mark.parametrize("place", PLACES)
def test_rows_of_a_head_equal_dense_momentum(
    place: str, select: FullSoftmax | PartialFC, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(row_stream, "BLOCK_BYTES", 0)  # blocks of 1,024 rows: several pushes a step
    if place == "hosted-chunked":
        monkeypatch.setattr(hosting, "HELD_BYTES", 0)
    with local(2) as cluster:
        head = make_head(cluster, select, **PLACES[place])
        expected = dense(head.weights(), select)
        train(head)
        scale = float(expected.abs().max())
        np.testing.assert_allclose(head.weights().numpy(), expected.numpy(), rtol=0, atol=2e-4 * scale)
        export_rows(head.table, tmp_path / "rows.safetensors")
        np.testing.assert_array_equal(load_file(tmp_path / "rows.safetensors")["weight"], head.weights())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_rows_follow_it_as_far_as_they_can_tell(dtype: DTypeName) -> None:
    with local(2) as cluster:
        head = make_head(cluster, PartialFC(0.2, seed=1), rows="pull", dtype=dtype, slot_dtype=dtype)
        first = head.weights().double()
        expected = dense(first, PartialFC(0.2, seed=1))
        train(head)
        error = (head.weights().double() - expected).norm() / (expected - first).norm()
        assert error < {"float16": 0.01, "bfloat16": 0.08}[dtype]


def make_head(cluster: Any, select: FullSoftmax | PartialFC, **settings: Any) -> ClassHead:
    return heads.make_head(
        cluster,
        "classes",
        num_classes=CLASSES,
        dim=DIM,
        select=select,
        margin=MARGIN,
        optimizer=OPTIMIZER,
        initializer=Normal(std=0.3),
        **settings,
    )


def train(head: ClassHead) -> None:
    rows = RowOptimizer(head)
    for step in range(STEPS):
        features, labels = batch(step)
        rows.param_groups[0]["lr"] = rate(step)
        head(features.requires_grad_(), labels).backward()
        rows.step()
        rows.zero_grad()
