"""Ten steps of a class head in float64 by the plain formula: what the head must do wherever its rows are."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.programs.selection import FullSoftmax, PartialFC
from geartrain.ams.values.optimizers.registry import SparseMomentum
from geartrain.ams.values.specs import Ids, Normal
from geartrain.bridge.head.class_head import ClassHead
from geartrain.bridge.head.loss.margins.angular import ArcFace, CombinedMargin, CosFace, SphereFace
from geartrain.bridge.head.loss.margins.margin import Margin
from geartrain.bridge.rows.optimizer import RowOptimizer
from tests.support.reference import plain_gradients, sampled_weights

CLASSES, DIM, BATCH, STEPS = 4500, 12, 24, 10
"""More classes than buckets, so that a bucket has a second class."""
SELECTIONS = [FullSoftmax(), PartialFC(sample_rate=0.1, seed=7)]
MARGINS: list[Margin | None] = [
    ArcFace(scale=16, margin=0.3),
    CosFace(scale=16, margin=0.2),
    SphereFace(scale=16, margin=1.35),
    CombinedMargin(scale=64, m1=1.1, m2=0.2, m3=0.1),
    None,
]
OPTIMIZER = SparseMomentum(lr=0.5, momentum=0.9, weight_decay=1e-3)


@dataclass(frozen=True)
class Trained:
    """What ten steps gave."""

    losses: npt.NDArray[Any]
    """[STEPS]."""
    feature_gradients: npt.NDArray[Any]
    """[STEPS, BATCH, DIM]."""
    rows: npt.NDArray[Any]
    """[CLASSES, DIM] at the end."""


def first_rows() -> npt.NDArray[np.float32]:
    return np.random.default_rng(3).normal(size=(CLASSES, DIM)).astype(np.float32) * np.float32(0.3)


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    features = torch.randn(BATCH, DIM, generator=generator, requires_grad=True)
    # Some classes occur twice in a batch, and some in several steps.
    return features, torch.randint(CLASSES, (BATCH,), generator=generator) // 3 * 3 % (CLASSES // (1 + step % 3))


@cache
def expected(select: FullSoftmax | PartialFC, margin: Margin | None) -> Trained:
    rows = torch.from_numpy(first_rows()).double()
    velocity = torch.zeros_like(rows)
    losses, gradients = [], []
    for step in range(STEPS):
        features, labels = batch_of(step)
        active = select.select(labels.numpy(), CLASSES, step)
        ids: Ids = active.ids
        targets = torch.from_numpy(active.positions(labels.numpy()))
        weights = sampled_weights(select, margin, ids, labels, CLASSES)
        general = margin.combined if margin is not None else None
        loss, dx, dw = plain_gradients(features, rows[ids], targets, general, weights)
        direction = dw + OPTIMIZER.weight_decay * rows[ids]
        velocity[ids] = OPTIMIZER.momentum * velocity[ids] + direction
        rows[ids] -= OPTIMIZER.lr * velocity[ids]
        losses.append(float(loss))
        gradients.append(dx.numpy())
    return Trained(np.array(losses), np.stack(gradients), rows.numpy())


def head_of(cluster: Cluster, place: str, select: FullSoftmax | PartialFC, margin: Margin | None) -> ClassHead:
    head = ClassHead(
        cluster,
        "classes",
        num_classes=CLASSES,
        dim=DIM,
        select=select,
        margin=margin,
        optimizer=OPTIMIZER,
        initializer=Normal(std=0.1),
        rows=place,
    )
    head.table.assign(np.arange(CLASSES), first_rows())
    return head


def train(head: ClassHead) -> Trained:
    rows = RowOptimizer(head)
    losses, gradients = [], []
    for step in range(STEPS):
        features, labels = batch_of(step)
        loss = head(features, labels)
        loss.backward()
        rows.step()
        rows.zero_grad()
        assert features.grad is not None
        losses.append(float(loss.detach()))
        gradients.append(features.grad.numpy())
    return Trained(np.array(losses), np.stack(gradients), head.weights().numpy())


def require_close(found: Trained, wanted: Trained) -> None:
    np.testing.assert_allclose(found.losses, wanted.losses, rtol=1e-5)
    scale = np.abs(wanted.feature_gradients).max()
    np.testing.assert_allclose(found.feature_gradients, wanted.feature_gradients, rtol=1e-3, atol=2e-5 * scale)
    np.testing.assert_allclose(found.rows, wanted.rows, rtol=1e-3, atol=2e-5)
