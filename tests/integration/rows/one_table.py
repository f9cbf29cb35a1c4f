"""One table of a served cluster, all of whose rows are pushed and pulled at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc
import numpy as np

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.factory import connect
from geartrain.ams.rpc.services import SHARD
from geartrain.ams.values.config import ClientConfig
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.specs import Constant
from tests.integration.conftest import ServedCluster

NUM_ROWS, DIM = 4_000, 32
IDS = np.arange(NUM_ROWS)
ONES = np.ones((NUM_ROWS, DIM), np.float32)
Served = Callable[..., ServedCluster]


@contextmanager
def connected(cluster: ServedCluster, **settings: object) -> Iterator[Cluster]:
    """A client of ``cluster``, with a table "t" of zeros whose learning rate is 1."""
    config = ClientConfig(attempt_timeout_seconds=10.0, recovery_timeout_seconds=20.0, **settings)  # type: ignore[arg-type]
    with connect(cluster.address, config=config) as ours:
        ours.create_table("t", dim=DIM, optimizer=SGD(1.0), num_rows=NUM_ROWS, initializer=Constant(0), reuse=True)
        yield ours


def stub(channel: grpc.Channel, method: str) -> Callable[[bytes], bytes]:
    """A method of a shard, from encoded request to encoded reply."""
    return channel.unary_unary(f"/{SHARD.name}/{method}")  # type: ignore[return-value]
