"""Rows of several tables in one request to each shard."""

from __future__ import annotations

import numpy as np
import pytest

import geartrain as gt
from geartrain.ams.client.table import pull_together


def test_rows_are_those_of_pulls_one_by_one() -> None:
    with gt.local(num_shards=3) as cluster, gt.local() as other:
        tables = [
            cluster.create_table("a", dim=2, optimizer=gt.SGD(1.0)),
            cluster.create_table("b", dim=5, optimizer=gt.SGD(1.0), num_rows=100, dtype="bfloat16"),
            other.create_table("c", dim=1, optimizer=gt.SGD(1.0)),
        ]
        ids = [np.array([5, 3, 2**40]), np.arange(99, -1, -1), np.array([7])]
        for table, own in zip(tables, ids, strict=True):
            table.push(own, np.ones((len(own), table.spec.dim), np.float32))
        outs = [np.empty((len(own), t.spec.dim), t.spec.numpy_dtype) for t, own in zip(tables, ids, strict=True)]
        pull_together(list(zip(tables, ids, outs, strict=True)))
        for table, own, out in zip(tables, ids, outs, strict=True):
            np.testing.assert_array_equal(out, table.pull(own))


def test_a_table_that_is_gone_is_named_and_the_others_are_read() -> None:
    with gt.local(num_shards=2) as cluster:
        gone, there = (cluster.create_table(name, dim=2, optimizer=gt.SGD(1.0)) for name in ("gone", "there"))
        cluster.drop_table("gone")
        out = np.zeros((4, 2), np.float32)
        with pytest.raises(gt.errors.TableNotFound, match="gone"):
            pull_together([(there, np.arange(4), out), (gone, np.arange(4), np.zeros((4, 2), np.float32))])
        np.testing.assert_array_equal(out, there.pull(np.arange(4)))
