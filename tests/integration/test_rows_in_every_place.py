"""The class head gives what the formula gives, wherever its rows are and whatever carries the requests."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.programs.selection import FullSoftmax, PartialFC
from geartrain.bridge.head.loss.margins.angular import CosFace
from geartrain.bridge.head.loss.margins.margin import Margin
from geartrain.launch.hosting import local
from tests.integration.head_recipe import MARGINS, SELECTIONS, batch_of, expected, head_of, require_close, train

PLACES = ["pull", "hosted"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("margin", MARGINS, ids=lambda margin: type(margin).__name__)
@pytest.mark.parametrize("select", SELECTIONS, ids=lambda select: type(select).__name__)
@pytest.mark.parametrize("num_shards", [1, 3])
def test_ten_steps_are_those_of_the_plain_formula(
    num_shards: int, select: FullSoftmax | PartialFC, margin: Margin | None, place: str
) -> None:
    with local(num_shards) as cluster:
        require_close(train(head_of(cluster, place, select, margin)), expected(select, margin))


@pytest.mark.parametrize("select", SELECTIONS, ids=lambda select: type(select).__name__)
def test_every_carrier_carries_them(cluster: Cluster, select: FullSoftmax | PartialFC) -> None:
    margin = CosFace(scale=16, margin=0.2)
    require_close(train(head_of(cluster, "hosted", select, margin)), expected(select, margin))


@pytest.mark.parametrize("place", PLACES)
def test_what_reads_the_rows_reads_them_anywhere(place: str) -> None:
    with local(2) as cluster:
        head = head_of(cluster, place, FullSoftmax(), CosFace(scale=64))
        features, labels = batch_of(0)
        training = head(features, labels).detach()
        head.eval()
        torch.testing.assert_close(head(features, labels).detach(), training)
        _, best = head.predict(features, k=1)
        unit = torch.nn.functional.normalize(head.weights())
        assert torch.equal(best[:, 0], (features @ unit.t()).argmax(1))
        images = torch.eye(12)
        assert head.imprint([(images, torch.arange(12))], torch.nn.Identity()) == 12
        np.testing.assert_allclose(head.weights(torch.arange(12)).numpy(), images.numpy(), atol=1e-6)
