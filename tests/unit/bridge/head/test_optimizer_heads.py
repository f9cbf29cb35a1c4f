"""Class centers trained by every optimizer, wherever they are worked on: what torch makes of a linear layer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from tests.support import heads
from tests.support.torch_twins import TORCH_TWINS

CLASSES, DIM, BATCH, STEPS = 3_000, 8, 16, 4


@pytest.mark.parametrize("name", TORCH_TWINS)
@pytest.mark.parametrize("place", heads.PLACES)
def test_a_head_trains_as_a_linear_layer_does(cluster: Cluster, place: str, name: str) -> None:
    optimizer, of_torch = TORCH_TWINS[name]
    head = heads.make_head(
        cluster,
        "t",
        num_classes=CLASSES,
        dim=DIM,
        select=gt.FullSoftmax(),
        margin=None,
        optimizer=optimizer,
        initializer=gt.Normal(std=0.1),
        **heads.PLACES[place],
    )
    weights = nn.Parameter(head.weights().double())
    rows, reference = gt.RowOptimizer(head), of_torch(weights)
    for step in range(STEPS):
        features, labels = heads.make_batch(BATCH, CLASSES, DIM, step)
        head(features, labels).backward()
        rows.step()
        rows.zero_grad()
        reference.zero_grad()
        nn.functional.cross_entropy(features.double() @ weights.T, labels).backward()
        reference.step()
    torch.testing.assert_close(head.weights().double(), weights.detach(), rtol=1e-3, atol=1e-5)
