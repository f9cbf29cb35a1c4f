"""An update of hosted rows whose messages or replies get lost is applied once; one whose shard died says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.factory import connect
from geartrain.ams.observe import failpoints
from geartrain.ams.programs.selection import PartialFC
from geartrain.ams.values.config import ClientConfig
from geartrain.ams.values.errors import ShardRestarted, ShardUnavailable, StaleClient
from geartrain.ams.values.optimizers.registry import SparseMomentum
from geartrain.ams.values.specs import Normal
from geartrain.bridge.head.class_head import ClassHead
from geartrain.bridge.head.loss.margins.angular import CosFace
from geartrain.bridge.rows.optimizer import RowOptimizer
from geartrain.launch.hosting import local
from tests.integration.conftest import ServedCluster

CLASSES, DIM, BATCH, STEPS = 600, 16, 1200, 3
PARTS = ClientConfig(part_bytes=64 << 10, attempt_timeout_seconds=10.0, recovery_timeout_seconds=20.0)
"""1,200 samples of 16 numbers are more than one part."""


def make_head(cluster: Cluster) -> ClassHead:
    return ClassHead(
        cluster,
        "t",
        num_classes=CLASSES,
        dim=DIM,
        select=PartialFC(0.5),
        margin=CosFace(8, 0.1),
        optimizer=SparseMomentum(1.0, momentum=0.9),
        initializer=Normal(std=0.3),
        rows="hosted",
        reuse=True,
    )


def backward(head: ClassHead, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    head(torch.randn(BATCH, DIM, generator=generator), torch.randint(CLASSES, (BATCH,), generator=generator)).backward()


def train(head: ClassHead, lose: str = "") -> np.ndarray[Any, Any]:
    rows = RowOptimizer(head)
    for step in range(STEPS):
        backward(head, step)
        with failpoints.armed(lose if step == 1 else "") as passes:
            try:
                rows.step()
            except ShardUnavailable:
                rows.step()
        assert sum(passes.fired.values()) == (1 if lose and step == 1 else 0)
        rows.zero_grad()
    assert head.step == STEPS
    return head.weights().numpy()


@pytest.fixture(scope="module")
def undisturbed() -> np.ndarray[Any, Any]:
    with local(2) as cluster:
        return train(make_head(cluster))


@pytest.mark.parametrize(
    "lost",
    [
        "shard.reply.before=error@1",
        "shard.reply.before=error@2",
        "shard.parts.before=error@2",
        "shard.apply.before=error@2",
        "client.send.before=error@1",
        "client.reply.after=error@1",
    ],
)
def test_what_gets_lost_is_sent_again_and_applied_once(
    served: Callable[..., ServedCluster], undisturbed: np.ndarray[Any, Any], lost: str
) -> None:
    with connect(served(2).address, config=PARTS) as cluster:
        np.testing.assert_array_equal(train(make_head(cluster), lost), undisturbed)


def test_a_shard_that_died_between_loss_and_update_is_told(served: Callable[..., ServedCluster]) -> None:
    cluster = served(2)
    with connect(cluster.address, config=PARTS) as client:
        head = make_head(client)
        backward(head, 0)
        cluster.servers[1].stop(0)
        cluster.servers[1] = cluster.start_server(1)
        with pytest.raises(ShardRestarted, match="shard 1"):
            RowOptimizer(head).step()
        assert head.step == 0


def test_a_process_that_was_superseded_updates_nothing(served: Callable[..., ServedCluster]) -> None:
    address = served(2).address
    with connect(address, stream="job/rank0", incarnation=5) as old, connect(address) as other:
        head = make_head(old)
        backward(head, 0)
        other.fence("job", 6)
        before = other.table("t").pull(np.arange(CLASSES))
        with pytest.raises(StaleClient):
            RowOptimizer(head).step()
        np.testing.assert_array_equal(other.table("t").pull(np.arange(CLASSES)), before)
