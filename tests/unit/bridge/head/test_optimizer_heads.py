"""Class centers trained by every optimizer, wherever they are worked on: what torch makes of a linear layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import geartrain as gt
from tests.support.head_settings import head_settings
from tests.support.torch_twins import TORCH_TWINS

CLASSES, DIM, BATCH, STEPS = 3_000, 8, 16, 4


@pytest.mark.parametrize("name", TORCH_TWINS)
@pytest.mark.parametrize(
    "settings",
    [{"rows": "pull"}, {"rows": "pull", "rows_cache_bytes": 0}, {"rows": "hosted"}, {"rows": "ranks"}],
    ids=["held", "streamed", "hosted", "ranks"],
)
def test_a_head_trains_as_a_linear_layer_does(settings: dict[str, Any], name: str) -> None:
    optimizer, of_torch = TORCH_TWINS[name]
    with gt.local(num_shards=2) as cluster:
        head = gt.ClassHead(
            None if settings["rows"] == "ranks" else cluster,
            "t",
            **head_settings(
                num_classes=CLASSES,
                dim=DIM,
                select=gt.FullSoftmax(),
                margin=None,
                optimizer=optimizer,
                initializer=gt.Normal(std=0.1),
                **settings,
            ),
        )
        weights = nn.Parameter(head.weights().double())
        rows, reference = gt.RowOptimizer(head), of_torch(weights)
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(step)
            features = torch.randn(BATCH, DIM, generator=generator)
            labels = torch.randint(CLASSES, (BATCH,), generator=generator)
            head(features, labels).backward()
            rows.step()
            rows.zero_grad()
            reference.zero_grad()
            nn.functional.cross_entropy(features.double() @ weights.T, labels).backward()
            reference.step()
        torch.testing.assert_close(head.weights().double(), weights.detach(), rtol=1e-3, atol=1e-5)
