"""What a head does where its caller says nothing."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.bridge.head.loss.margins.scale import automatic_scale
from tests.support import heads
from tests.support.reference import FakeCluster

CLASSES, DIM = 40, 6
PLACES = ["pull", "hosted", "ranks"]


def batch(seed: int, classes: int = CLASSES) -> tuple[torch.Tensor, torch.Tensor]:
    return heads.make_batch(12, classes, DIM, seed)


def test_rows_begin_as_those_of_linear_do() -> None:
    with gt.local() as cluster:
        rows = gt.ClassHead(cluster, "h", num_classes=5000, dim=16).weights()
    linear = nn.Linear(16, 5000).weight
    assert float(rows.abs().max()) <= 0.25 == 1 / math.sqrt(16)
    assert float(rows.std()) == pytest.approx(float(linear.detach().std()), rel=0.01)


def test_all_classes_are_active_up_to_so_many_and_a_corrected_sample_beyond() -> None:
    select = gt.ClassHead(FakeCluster(), "h", num_classes=2, dim=DIM).select
    assert [select.budget(num) for num in (1, 65_536, 65_537, 2_000_000)] == [1, 65_536, 65_536, 200_000]
    assert select.corrects(None)
    few, many = (select.select(np.array([1]), num, 0) for num in (65_536, 65_537))
    assert (few.sorted_ids, few.num, many.num) == (None, 65_536, 65_536)
    assert many.sorted_ids is not None


@pytest.mark.parametrize(
    ("settings", "rate"),
    [
        ({}, 1e-3),
        ({"select": gt.PartialFC(0.25)}, 4e-3),
        ({"select": gt.KNNSoftmax(0.25)}, 4e-3),
        ({"select": gt.PartialFC(0.1, min_active=1000)}, 2e-3),
        ({"select": gt.PartialFC(0.25), "num_live_classes": 30}, 1e-3),
        ({"select": gt.PartialFC(0.25), "optimizer": gt.AdamW()}, 1e-3),
        ({"select": gt.FullSoftmax()}, 1e-3),
    ],
)
def test_the_rate_makes_up_for_the_steps_in_which_a_drawn_class_is_not_active(
    settings: dict[str, Any], rate: float
) -> None:
    with gt.local(1) as cluster:
        head = heads.make_head(cluster, "h", num_classes=2000, dim=DIM, **settings)
        assert gt.RowOptimizer(head).param_groups[0]["lr"] == pytest.approx(rate)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"num_classes": 10}, gt.SparseMomentum(lr=5e-4)),
        ({"num_classes": 2000}, gt.SparseMomentum(lr=0.1)),
        ({"num_classes": 2_000_000}, gt.SparseMomentum(lr=0.2)),
        ({"num_classes": 2000, "select": gt.PartialFC(0.25)}, gt.SparseMomentum(lr=0.1)),
        ({"num_classes": 2_000_000, "num_live_classes": 10}, gt.SparseMomentum(lr=5e-4)),
        ({"num_classes": 2000, "margin": gt.CosFace(16)}, gt.SparseMomentum(lr=0.1)),
        ({"num_classes": 2000, "margin": gt.ArcFace(32)}, gt.AdamW(1e-3)),
        ({"num_classes": 2000, "reduction": "sum"}, gt.AdamW(1e-3)),
        ({"num_classes": 2000, "optimizer": gt.AdamW(1e-3)}, gt.AdamW(1e-3)),
    ],
)
def test_rows_under_a_margin_learn_by_momentum_at_the_rate_of_their_number(
    settings: dict[str, Any], expected: Any
) -> None:
    head = heads.make_head(FakeCluster(), "h", dim=DIM, **{"margin": gt.ArcFace(), **settings})
    assert head.table.spec.optimizer == expected


def test_rows_under_a_margin_turn_as_fast_whatever_the_number_of_classes_and_the_batch() -> None:
    turned = []
    for num_classes, size in ((10, 100), (10, 1000), (1000, 2000)):
        generator = torch.Generator().manual_seed(1)
        labels = torch.arange(size) % num_classes
        features = torch.randn(num_classes, 32, generator=generator)[labels]
        with gt.local(1) as cluster:
            head = gt.ClassHead(cluster, "h", num_classes=num_classes, dim=32, margin=gt.ArcFace())
            before, rows = head.weights(), gt.RowOptimizer(head)
            head(features, labels).backward()
            rows.step()
            cosines = F.cosine_similarity(before.double(), head.weights().double())
        turned.append(float(cosines.clamp(-1, 1).acos().mean()))
    assert max(turned) < 2 * min(turned), turned


def test_labels_of_a_batch_count_as_active_for_the_rate_of_few_classes() -> None:
    with gt.local(1) as cluster:
        head = gt.ClassHead(cluster, "h", num_classes=10, dim=DIM, select=gt.PartialFC(0.1))
        assert gt.RowOptimizer(head).param_groups[0]["lr"] == pytest.approx(1e-3, rel=0.01)


@pytest.mark.parametrize("rows", PLACES)
def test_as_many_classes_are_active_wherever_the_rows_are(cluster: Cluster, rows: str) -> None:
    features, labels = batch(0)
    settings: dict[str, Any] = {"num_classes": CLASSES, "dim": DIM, "select": gt.PartialFC(0.01, min_active=25)}
    held = heads.make_head(cluster, "h", **settings)
    head = heads.make_head(cluster, "again", rows=rows, **settings)
    head.table.assign(np.arange(CLASSES), held.weights().numpy())
    assert float(head(features, labels).detach()) == pytest.approx(float(held(features, labels).detach()))
    held.retire_classes(torch.arange(25, CLASSES))
    with pytest.raises(gt.errors.InvalidIds):
        held(features, labels)
    assert held.select.budget(held.num_live_classes) == held.num_live_classes == 25


@pytest.mark.parametrize("margin", [gt.ArcFace(), gt.CosFace(margin=0.1), gt.CombinedMargin(m1=1.2), gt.SphereFace()])
def test_a_margin_without_a_scale_has_that_of_the_number_of_classes(margin: Any) -> None:
    def made(num_classes: int) -> gt.ClassHead:
        return gt.ClassHead(FakeCluster(), "h", num_classes=num_classes, dim=DIM, margin=margin)

    head = made(10_000_000)
    assert head.margin.scale == automatic_scale(10_000_000) == pytest.approx(math.sqrt(2) * math.log(1e7), rel=1e-6)
    assert f"scale={head.margin.scale}" in repr(head)
    two = made(2)
    assert two.margin.scale == automatic_scale(2) == automatic_scale(1) > 1
    assert math.isfinite(float(two(*batch(0, classes=2)).detach()))
    two.margin = None
    two.margin = margin
    assert two.margin.scale == automatic_scale(2)
    with pytest.raises(gt.errors.InvalidArgument, match=r"scale of .* is None.*give a number"):
        margin.target(torch.zeros(1))


def test_a_scale_that_is_given_stays() -> None:
    head = gt.ClassHead(FakeCluster(), "h", num_classes=CLASSES, dim=DIM, margin=gt.ArcFace(30))
    assert head.margin == gt.ArcFace(scale=30)
