"""Sampled classes that stand for those not sampled: the loss over them is, on average, that over all classes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import geartrain as gt
from geartrain.ams.programs.selection import SamplingCorrection
from geartrain.ams.values.errors import InvalidArgument
from geartrain.bridge.head.backends.active_rows import DeviceActive, HostActive
from tests.support import heads
from tests.support.reference import FakeCluster, merged_gradient, plain_gradients

CLASSES, DIM, BATCH, SAMPLES = 1000, 32, 7, 200


def make_head(**settings: Any) -> tuple[gt.ClassHead, FakeCluster]:
    cluster = FakeCluster(seed=2)
    settings = {"select": gt.PartialFC(0.1), "margin": None, "optimizer": gt.SGD(1.0), **settings}
    return heads.make_head(cluster, "classes", num_classes=CLASSES, dim=DIM, **settings), cluster


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    labels = torch.randint(CLASSES, (BATCH,), generator=generator)
    features = torch.from_numpy(make_head()[1].tables["classes"].rows).double()[labels]  # as if it had learned
    return features / features.norm(dim=1, keepdim=True), labels


def mean_gradients(**settings: Any) -> tuple[Tensor, np.ndarray]:
    """Over many samples: of the features [B, D], and of the rows [C, D]."""
    head, cluster = make_head(**settings)
    features, labels = batch()
    total, rows = torch.zeros_like(features), np.zeros((CLASSES, DIM))
    optimizer, table = gt.RowOptimizer(head), cluster.tables["classes"]
    start = table.rows.copy()
    for step in range(SAMPLES):
        head.row_update.step = step
        own = features.clone().requires_grad_()
        head(own, labels).backward()
        optimizer.step()
        assert own.grad is not None
        total += own.grad
        rows += merged_gradient(table)
        table.pushes.clear()
        table.rows[:] = start
    return total / SAMPLES, rows / SAMPLES


def distance(mine: Any, its: Any) -> float:
    return float(np.linalg.norm(np.asarray(mine) - np.asarray(its)) / np.linalg.norm(np.asarray(its)))


def test_the_expected_gradient_is_that_over_all_classes() -> None:
    features, labels = batch()
    rows = torch.from_numpy(make_head()[1].tables["classes"].rows)
    _, full, full_rows = plain_gradients(features, rows, labels, None)
    mine, mine_rows = mean_gradients()
    assert distance(mine, full) < 0.03
    assert distance(mine_rows, full_rows) < 0.05
    plain, _ = mean_gradients(select=gt.PartialFC(0.1, corrected=False))
    assert distance(plain, full) > 0.4


def test_it_is_on_exactly_where_there_is_no_margin() -> None:
    features, labels = batch()
    margin = gt.CosFace(8, 0.1)

    def loss(margin: Any, corrected: bool | None) -> float:
        return float(
            make_head(margin=margin, select=gt.PartialFC(0.1, corrected=corrected))[0](features, labels).detach()
        )

    assert loss(None, None) == loss(None, True) != loss(None, False)
    assert loss(margin, None) == loss(margin, False) != loss(margin, True)
    with pytest.raises(InvalidArgument, match="corrected"):
        gt.PartialFC(corrected="yes")  # type: ignore[arg-type]


def test_nothing_is_corrected_where_nothing_was_left_to_chance() -> None:
    labels = np.array([3, 1, 3])
    assert SamplingCorrection.of(labels, 2, 10) is None  # labels alone
    assert SamplingCorrection.of(labels, 10, 10) is None  # all classes
    correction = SamplingCorrection.of(labels, 4, 10)
    assert correction is not None
    assert correction.log2_weight == 2.0  # 2 of 8
    np.testing.assert_array_equal(correction.positives, [1, 3])


def test_a_device_finds_what_the_host_finds() -> None:
    numbers = np.array([2, 3, 6, 8, 9])
    host = HostActive(len(numbers), numbers)
    device = DeviceActive(len(numbers), torch.from_numpy(numbers), torch.device("cpu"))
    labels = np.array([8, -4, 3, 8, 50])  # two are other ranks'
    expected = torch.tensor([1.5, 0.0, 1.5, 0.0, 1.5])
    for active in (host, device):
        torch.testing.assert_close(active.offsets(labels, 1.5), expected)
