"""Admission over every carrier, in models, and in snapshots on other numbers of shards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.factory import local
from geartrain.ams.kernels._core import ScatteredRows
from geartrain.ams.storage.snapshot.compaction import compact
from geartrain.ams.values.admission.rules import MinCount, Probability
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.specs import Constant
from geartrain.bridge.embedding.field import Field
from geartrain.bridge.embedding.group import EmbeddingGroup
from geartrain.bridge.rows.optimizer import RowOptimizer

IDS = np.arange(300, dtype=np.int64)
RULE = MinCount(3, 1 << 16)


def test_equal_ids_of_a_push_are_as_many_occurrences(cluster: Cluster) -> None:
    table = cluster.create_table("t", dim=2, optimizer=SGD(1.0), admission=RULE, initializer=Constant(0.0))
    assert cluster.table("t").spec.admission == RULE
    once, thrice = IDS, np.repeat(IDS[::3], 2)
    ones = np.ones((len(once) + len(thrice), 2), np.float32)
    done = table.push(np.concatenate([once, thrice]), ones)
    assert done.created == 100
    np.testing.assert_array_equal(table.present(IDS), IDS % 3 == 0)
    np.testing.assert_array_equal(table.pull(IDS)[:, 0], np.where(IDS % 3 == 0, -3.0, 0.0))
    table.push(IDS, ones[:300], occurrences=np.where(IDS % 3 == 1, 2, 1))
    np.testing.assert_array_equal(table.present(IDS), IDS % 3 != 2)
    np.testing.assert_array_equal(
        table.pull(IDS)[:, 0], np.where(IDS % 3 == 0, -4.0, np.where(IDS % 3 == 1, -1.0, 0.0))
    )
    (status,) = cluster.status().tables
    assert (status.rows, status.refused_ids) == (200, 100)
    assert (status.refused_gradients, status.refused_occurrences) == (300, 300)
    with pytest.raises(InvalidArgument, match="occurrences are float64"):
        table.push(IDS, ones[:300], occurrences=np.ones(300))
    with pytest.raises(InvalidArgument, match="occurrences reach from -1"):
        table.push(IDS[:1], ones[:1], occurrences=[-1])


def test_the_rows_that_come_with_a_push_are_initial_ones_where_ids_are_refused(cluster: Cluster) -> None:
    table = cluster.create_table("t", dim=2, optimizer=SGD(1.0), admission=RULE)
    first = table.pull(IDS)
    table.push(IDS[::2], np.ones((150, 2), np.float32), occurrences=np.full(150, 2))
    into = np.full(600, 7, np.float32)
    write = table.prepare_push(IDS, np.ones((300, 2), np.float32))
    _, writes = write.send_and_pull(ScatteredRows((into,), 2))
    if writes is None:  # rows of messages come by themselves
        return
    np.testing.assert_array_equal(into.reshape(300, 2), table.pull(IDS))
    np.testing.assert_array_equal(into.reshape(300, 2), np.where(IDS[:, None] % 2 == 0, first - 1, first))


def test_embeddings_count_what_a_batch_looks_up(cluster: Cluster) -> None:
    members = [
        Field("item", dim=2, admission=RULE, padding_id=0),
        Field("history", table="item", pooling="mean"),
        Field("user", dim=2, admission=Probability(1.0)),
    ]
    fields = EmbeddingGroup(cluster, "g", members, optimizer=SGD(1.0))
    rows = RowOptimizer(fields)
    items = torch.tensor([[1, 2, 0], [1, 3, 4]])
    history = (torch.tensor([1, 2, 5, 5]), torch.tensor([0, 3, 4]))
    before = fields.table("item").pull(np.arange(1, 6))
    for step in range(2):
        vectors = fields({"item": items, "history": history, "user": items[:, 0]})
        sum(vector.sum() for vector in vectors.values()).backward()
        rows.step()
        rows.zero_grad()
        present = fields.table("item").present(np.arange(6))
        assert present.tolist() == [False, True, bool(step), False, False, bool(step)]
    after = fields.table("item").pull(np.arange(1, 6))
    np.testing.assert_array_equal(after[[2, 3]], before[[2, 3]])
    assert (after[[0, 1, 4]] != before[[0, 1, 4]]).all()
    assert fields.table("user").present([1]).all()


@pytest.fixture
def trained(tmp_path: Path) -> Iterator[Path]:
    """A snapshot and one that adds to it: each of IDS has been seen twice, the even ones before the first."""
    with local(2) as cluster:
        table = cluster.create_table("t", dim=2, optimizer=SGD(1.0), admission=MinCount(3, 1 << 22))
        evens = IDS[::2]
        for _ in range(2):
            table.push(evens, np.ones((150, 2), np.float32))
        cluster.snapshot(tmp_path, "whole").result(60)
        table.push(IDS[1::2], np.ones((150, 2), np.float32), occurrences=np.full(150, 2))
        cluster.snapshot(tmp_path, "added", parent="whole").result(60)
    yield tmp_path


@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_what_was_counted_is_restored_on_any_number_of_shards(trained: Path, num_shards: int) -> None:
    compact(trained, "added", new_name="compacted")
    for name, present in (("whole", IDS % 2 == 0), ("added", IDS >= 0), ("compacted", IDS >= 0)):
        with local(num_shards) as cluster:
            cluster.restore(trained / name)
            table = cluster.table("t")
            assert cluster.status().tables[0].refused_ids == np.count_nonzero(present)
            table.push(IDS, np.ones((300, 2), np.float32))
            np.testing.assert_array_equal(table.present(IDS), present)


@pytest.mark.parametrize("rule", [Probability(0.3), MinCount(2, 4096)])
def test_restored_on_as_many_shards_it_admits_as_without_the_restore(
    tmp_path: Path, rule: Probability | MinCount
) -> None:
    """Shards have made different numbers of pushes, and a filter's range of buckets is of two of them."""
    generator = np.random.default_rng(0)
    with local(3) as cluster, local(3) as later:
        table = cluster.create_table("t", dim=2, optimizer=SGD(1.0), admission=rule)
        for num_ids in (1, 400, 2, 3, 400, 1):
            ids = generator.choice(4_000, num_ids, replace=False)
            table.push(ids, np.ones((num_ids, 2), np.float32))
        cluster.snapshot(tmp_path, "s").result()
        later.restore(tmp_path / "s")
        for _ in range(3):
            ids = generator.choice(4_000, 400, replace=False)
            table.push(ids, np.ones((400, 2), np.float32))
            later.table("t").push(ids, np.ones((400, 2), np.float32))
        np.testing.assert_array_equal(later.table("t").present(np.arange(4_000)), table.present(np.arange(4_000)))
