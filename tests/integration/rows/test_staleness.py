"""How many writes lie between a pull and the push that follows it, over every carrier."""

from __future__ import annotations

import numpy as np
import torch

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.table import pull_together
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.bridge.embedding.field import Field
from geartrain.bridge.embedding.group import EmbeddingGroup
from geartrain.bridge.rows.optimizer import RowOptimizer

IDS = np.arange(400, dtype=np.int64)
GRADIENTS = np.ones((400, 2), np.float32)


def staleness_of(cluster: Cluster, table: str) -> tuple[int, ...]:
    (found,) = (item for item in cluster.status().tables if item.name == table)
    return found.staleness


def test_a_table_counts_the_writes_between_pull_and_push(cluster: Cluster) -> None:
    table = cluster.create_table("t", dim=2, optimizer=SGD(0.1))
    out = np.empty((400, 2), np.float32)
    others = 0
    for wanted in (0, 1, 3, 4, 3):
        (pulled_at,) = pull_together([(table, IDS, out)])
        assert pulled_at == [others] * len(pulled_at)
        for _ in range(wanted):
            table.push(IDS, GRADIENTS)
        assert not table.push(IDS, GRADIENTS, pulled_at=pulled_at).duplicate
        others += wanted + 1
    shards = len(pulled_at)
    assert staleness_of(cluster, "t") == (shards, shards, 2 * shards, shards)
    table.push(IDS, GRADIENTS)  # says nothing, and counts nothing
    (pulled_at,) = pull_together([(table, IDS, out)])
    table.push(IDS, GRADIENTS, pulled_at=[writes + 1 for writes in pulled_at])  # nobody can have pulled that
    assert sum(staleness_of(cluster, "t")) == 5 * shards


def test_embeddings_say_when_their_rows_were_pulled(cluster: Cluster) -> None:
    fields = EmbeddingGroup(cluster, "g", [Field("a", dim=2), Field("b", dim=1)], optimizer=SGD(0.1))
    rows = RowOptimizer(fields)
    ids = torch.from_numpy(IDS)
    for _ in range(2):  # micro-batches of one step: the older one counts
        sum(vector.sum() for vector in fields({"a": ids, "b": ids}).values()).backward()
        fields.table("a").push(IDS, GRADIENTS)
    rows.step()
    counted = {name: staleness_of(cluster, f"g/{name}") for name in "ab"}
    shards = sum(counted["b"])
    assert counted == {"a": (0, 0, shards), "b": (shards,)}
