"""A client that does not wait for dead shards still learns that the cluster has moved on."""

from __future__ import annotations

import itertools

import grpc
import numpy as np
import pytest

from geartrain.ams.values.errors import ShardRestarted
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.specs import Constant
from tests.model.simulated import CONFIG, Client, Clock, Network, SimulatedCluster, send_rows_in_messages


def test_without_patience_a_client_goes_on_with_the_shards_that_still_hold_its_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network, numbers = Network(lambda _, answer: answer()), itertools.count(1)
    monkeypatch.setattr(grpc, "insecure_channel", network.channel)
    send_rows_in_messages(monkeypatch, network)
    cluster = SimulatedCluster(network, Clock(), 2, lambda: next(numbers))
    try:
        client = Client(cluster, "stream", 1).cluster
        client._calls.config = CONFIG.model_copy(update={"recovery_timeout_seconds": 0})
        table = client.create_table("t", dim=2, optimizer=SGD(1.0), num_rows=8, initializer=Constant(3.0))
        cluster.kill(1)
        cluster.start(1)
        cluster.beat()
        assert (table.pull(np.array([0, 2])) == 3).all()
        with pytest.raises(ShardRestarted, match="shard 1 was restarted"):
            table.pull(np.array([1]))
    finally:
        cluster.close()
