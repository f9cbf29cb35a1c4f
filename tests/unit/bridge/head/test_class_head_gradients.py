"""Loss, feature gradient and row gradients against the plain formula in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.ams.programs.selection import FullSoftmax, PartialFC
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.bridge.head.class_head import ClassHead
from geartrain.bridge.head.loss.config import HeadConfig
from geartrain.bridge.head.loss.margins.angular import ArcFace, CombinedMargin, CosFace, SphereFace
from geartrain.bridge.head.loss.margins.margin import Margin
from geartrain.bridge.rows.optimizer import RowOptimizer
from geartrain.launch.hosting import local
from tests.support import heads
from tests.support.reference import UNIT_SGD, FakeCluster, merged_gradient, plain_gradients, sampled_weights

MARGINS: list[Margin | None] = [
    None,
    ArcFace(scale=64, margin=0.5),
    CosFace(scale=30, margin=0.35),
    SphereFace(scale=8, margin=1.35),
    CombinedMargin(scale=16, m1=2.0, m2=0.3, m3=0.1),
    ArcFace(scale=100, margin=0.5),
]


def check(
    margin: Margin | None,
    select: FullSoftmax | PartialFC,
    batch: int,
    num_classes: int,
    dim: int,
    *,
    holds: bool,
    keep_bytes: int,
    dtype: torch.dtype = torch.float64,
    tolerance: float = 1e-6,
) -> None:
    torch.manual_seed(batch)
    cluster = FakeCluster(seed=batch)
    head = ClassHead(
        cluster,
        "classes",
        num_classes=num_classes,
        dim=dim,
        select=select,
        margin=margin,
        optimizer=UNIT_SGD,
        config=HeadConfig(rows_cache_bytes=(1 << 40) if holds else 0, logits_cache_bytes=keep_bytes),
    )
    table = cluster.tables["classes"]
    features = torch.randn(batch, dim, dtype=dtype, requires_grad=True)
    labels = torch.randint(num_classes, (batch,))
    active = select.select(labels.numpy(), num_classes, 0)
    rows = torch.from_numpy(table.rows[active.ids])
    targets = torch.from_numpy(active.positions(labels.numpy()))
    loss, feature_gradient, row_gradient = plain_gradients(
        features,
        rows,
        targets,
        None if margin is None else margin.combined,
        sampled_weights(select, margin, active.ids, labels, num_classes),
    )

    optimizer = RowOptimizer(head)
    mine = head(features, labels)
    (mine * 3).backward()
    optimizer.step()
    assert features.grad is not None
    scale = float(feature_gradient.abs().max()) + 1e-30
    torch.testing.assert_close(mine.detach().double(), loss, rtol=tolerance, atol=tolerance)
    assert float((features.grad.double() / 3 - feature_gradient).abs().max()) <= tolerance * scale + 1e-9
    dense = np.zeros(table.rows.shape)
    dense[active.ids] = 3 * row_gradient.numpy()
    np.testing.assert_allclose(
        merged_gradient(table), dense, rtol=0, atol=max(2e-6, tolerance) * np.abs(dense).max() + 1e-9
    )


@settings(deadline=None, max_examples=40)
@given(
    margin=st.sampled_from(MARGINS),
    rate=st.floats(0.01, 1),
    batch=st.integers(1, 40),
    num_classes=st.integers(1, 60),
    dim=st.integers(1, 20),
    holds=st.booleans(),
    keep=st.integers(0, 20_000),
    corrected=st.sampled_from([None, True, False]),
)
def test_gradients_are_right_for_any_shape(
    margin: Margin | None,
    rate: float,
    batch: int,
    num_classes: int,
    dim: int,
    holds: bool,
    keep: int,
    corrected: bool | None,
) -> None:
    select = PartialFC(sample_rate=rate, corrected=corrected)
    check(margin, select, batch, num_classes, dim, holds=holds, keep_bytes=keep, tolerance=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("holds", [True, False])
def test_a_target_far_above_all_other_logits_leaves_them_in_the_loss(dtype: torch.dtype, holds: bool) -> None:
    cluster, margin = FakeCluster(), CombinedMargin(m1=4, scale=90)
    head = ClassHead(
        cluster,
        "classes",
        num_classes=3,
        dim=2,
        select=FullSoftmax(),
        margin=margin,
        optimizer=UNIT_SGD,
        config=HeadConfig(rows_cache_bytes=(1 << 40) if holds else 0),
    )
    cosines = np.array([0.5, -0.8, -0.7])
    cluster.tables["classes"].rows[:] = np.stack([cosines, np.sqrt(1 - cosines**2)], axis=1)
    rows = torch.from_numpy(cluster.tables["classes"].rows)
    features = torch.tensor([[1.0, 0.0]], dtype=dtype, requires_grad=True)
    expected, gradient, _ = plain_gradients(features, rows, torch.tensor([0]), margin)
    loss = head(features, torch.tensor([0]))
    loss.backward()
    assert features.grad is not None
    torch.testing.assert_close(loss.detach().double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(features.grad.double(), gradient, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("place", heads.PLACES)
def test_a_class_of_another_micro_batch_keeps_its_gradient_however_far_above_the_others_it_is(place: str) -> None:
    """Against the active classes of a sample its exponential is infinite, and it is none of them."""
    features, labels = torch.full((2, 1, 1), 300.0), torch.tensor([[0], [1]])
    rows = np.array([[-1.0], [1.0], [0.5]], np.float32)
    with local(num_shards=2) as cluster:
        head = heads.make_head(
            cluster,
            "classes",
            num_classes=3,
            dim=1,
            select=PartialFC(sample_rate=0.01),  # the label alone
            margin=None,
            optimizer=SGD(1.0, weight_decay=0.01),  # moves the rows even where the loss does not
            **heads.PLACES[place],
        )
        head.table.assign(np.arange(3), rows)
        for own, label in zip(features, labels, strict=True):
            head(own, label).backward()
        rows_step = RowOptimizer(head)
        assert rows_step.squared_norm() == 0.0
        rows_step.step()
        after = np.empty_like(rows)
        head.table.pull_into(np.arange(3), after)
    np.testing.assert_allclose(after, rows * [[0.99], [0.99], [1.0]], rtol=1e-6)
