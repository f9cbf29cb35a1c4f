"""Requests of one process for several tables, large enough that these are served on several threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.table import Table, pull_together
from geartrain.ams.values.errors import NonFinite, TableNotFound

TABLES, ROWS, DIM = 6, 2000, 64
"""3 MiB of rows, 0.5 of a table."""
IDS = np.random.default_rng(0).permutation(10 * ROWS)[:ROWS]
GRADIENTS = np.random.default_rng(1).standard_normal((ROWS, DIM)).astype(np.float32)


@pytest.fixture(params=[1, 2])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with gt.local(num_shards=request.param) as made:
        yield made


def tables_of(cluster: Cluster) -> list[Table]:
    return [cluster.create_table(f"t{n}", dim=DIM, optimizer=gt.Adagrad(0.1), seed=n) for n in range(TABLES)]


def pushes_of(tables: list[Table]) -> list[Any]:
    return [table.prepare_push(IDS, (n + 1) * GRADIENTS) for n, table in enumerate(tables)]


def pulled(tables: list[Table]) -> list[Any]:
    rows = [np.empty((ROWS, DIM), np.float32) for _ in tables]
    pull_together([(table, IDS, own) for table, own in zip(tables, rows, strict=True)])
    return rows


def test_many_tables_together_are_as_each_by_itself(cluster: Cluster) -> None:
    tables = tables_of(cluster)
    before = pulled(tables)
    for table, own in zip(tables, before, strict=True):
        np.testing.assert_array_equal(own, table.pull(IDS))
    for _ in range(2):
        first, *others = pushes_of(tables)
        first.send_with(others)
    together = pulled(tables)
    assert [table.versions() for table in tables] == [(2,) * cluster.num_shards] * TABLES
    for table in tables:
        cluster.drop_table(table.spec.name)
    tables = tables_of(cluster)
    for _ in range(2):
        for write in pushes_of(tables):
            write.send()
    for table, own in zip(tables, together, strict=True):
        np.testing.assert_array_equal(own, table.pull(IDS))


def test_one_that_is_refused_leaves_the_others_applied_and_can_be_given_up(cluster: Cluster) -> None:
    tables = tables_of(cluster)
    writes = pushes_of(tables)
    bad = GRADIENTS.copy()
    bad[:, 3] = np.inf  # for every shard
    writes[2].abandon()
    writes[2] = tables[2].prepare_push(IDS, bad, known_finite=True)
    cluster.drop_table("t4")
    with pytest.raises((NonFinite, TableNotFound)):
        writes[0].send_with(writes[1:])
    assert [write.is_sent for write in writes] == [True, True, False, True, False, True]
    writes[2].abandon()
    writes[4].abandon()
    del tables[4]
    assert [table.version() for table in tables] == [1, 1, 0, 1, 1]
    assert not tables[2].present(IDS).any() and tables[0].present(IDS).all()
    again = pushes_of(tables)
    again[0].send_with(again[1:])
    assert [table.version() for table in tables] == [2, 2, 1, 2, 2]


def test_a_pull_from_one_that_is_gone_raises_and_the_others_are_read(cluster: Cluster) -> None:
    tables = tables_of(cluster)
    rows = [np.zeros((ROWS, DIM), np.float32) for _ in tables]
    cluster.drop_table("t3")
    with pytest.raises(TableNotFound, match="t3"):
        pull_together([(table, IDS, own) for table, own in zip(tables, rows, strict=True)])
    assert [bool(own.any()) for own in rows] == [True, True, True, False, True, True]


def test_a_repetition_changes_nothing(cluster: Cluster) -> None:
    tables = tables_of(cluster)
    writes = pushes_of(tables)
    for write in writes:
        write._rows.write(write._rows_to_send())  # nobody hears of the replies
    expected = pulled(tables)
    writes[0].send_with(writes[1:])
    for own, old in zip(pulled(tables), expected, strict=True):
        np.testing.assert_array_equal(own, old)
    assert [table.versions() for table in tables] == [(1,) * cluster.num_shards] * TABLES
