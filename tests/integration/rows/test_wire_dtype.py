"""Rows of a float32 table that travel in 16 bits: the same by every carrier."""

from __future__ import annotations

import numpy as np
import pytest

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.ams.values.errors import InvalidArgument, NonFinite, TableNotFound
from geartrain.ams.values.specs import DTYPES, DTypeName

WIRES: tuple[DTypeName, ...] = ("bfloat16", "float16")
DIM = 24


def rounded(rows: np.ndarray, wire: str) -> np.ndarray:
    return rows.astype(DTYPES[wire]).astype(np.float32)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("num_rows", [None, 5_000])
def test_pulled_rows_are_those_of_the_table_rounded_to_the_nearest(
    cluster: Cluster, wire: DTypeName, num_rows: int | None
) -> None:
    table = cluster.create_table("t", dim=DIM, optimizer=gt.SGD(1.0), num_rows=num_rows, seed=5)
    narrow = cluster.table("t", wire_dtype=wire)
    ids = np.random.default_rng(0).integers(0, 5_000, 700)
    distinct = np.unique(ids)[:400]
    narrow.assign(distinct, normal(1, len(distinct), DIM))
    np.testing.assert_array_equal(table.pull(distinct), normal(1, len(distinct), DIM))  # not rounded
    pulled = narrow.pull(ids)
    assert pulled.dtype == np.float32
    np.testing.assert_array_equal(pulled, rounded(table.pull(ids), wire))
    np.testing.assert_array_equal(narrow.present(ids), np.isin(ids, distinct))


def test_rows_that_moved_untouched_are_pulled_rounded(cluster: Cluster) -> None:
    optimizer = gt.SparseMomentum(lr=0.1, weight_decay=0.01, untouched="elapsed")
    table = cluster.create_table("t", dim=DIM, optimizer=optimizer, num_rows=100)
    for step in range(6):
        table.push([step, step + 50], normal(step, 2, DIM))
    np.testing.assert_array_equal(
        table.with_wire("bfloat16").pull(np.arange(100)), rounded(table.pull(np.arange(100)), "bfloat16")
    )


@pytest.mark.parametrize("wire", WIRES)
def test_a_gradient_is_applied_as_it_travels(cluster: Cluster, wire: DTypeName) -> None:
    optimizer = gt.SparseMomentum(lr=0.1)
    table = cluster.create_table("t", dim=DIM, optimizer=optimizer)
    twin = cluster.create_table("twin", dim=DIM, optimizer=optimizer, seed=0)
    lossy = table.with_wire(wire)
    ids = np.random.default_rng(2).permutation(900)
    gradients = normal(3, 900, DIM)
    before, before_twin = table.pull(ids), twin.pull(ids)
    lossy.push(ids, gradients, scale=0.5)
    twin.push(ids, rounded(gradients, wire), scale=0.5)
    np.testing.assert_allclose(table.pull(ids) - before, twin.pull(ids) - before_twin, rtol=0, atol=1e-7)


def test_numbers_beyond_float16_are_named_and_none_becomes_infinite(cluster: Cluster) -> None:
    table = cluster.create_table("t", dim=2, optimizer=gt.SGD(1.0), initializer=gt.Constant(0.0), num_rows=50)
    narrow = table.with_wire("float16")
    rows = np.zeros((50, 2), np.float32)
    rows[31, 1] = -70_000
    with pytest.raises(NonFinite, match=r"gradient of id 31 .*70000.0, beyond the range of float16 .65504.*bfloat16"):
        narrow.push(np.arange(50), rows)
    np.testing.assert_array_equal(table.pull(np.arange(50)), 0)
    table.assign(np.arange(50), rows)
    with pytest.raises(
        NonFinite, match=r"row of id 31 .* is beyond the range of float16; pull it with wire_dtype=.bfl"
    ):
        narrow.pull(np.arange(50))
    np.testing.assert_array_equal(narrow.pull(np.arange(31)), 0)
    assert np.isfinite(table.with_wire("bfloat16").pull([31])).all()
    with pytest.raises(NonFinite, match="NaN or infinity"):
        narrow.push([3], np.full((1, 2), np.nan, np.float32))


def test_the_wire_is_of_float32_tables_and_of_known_types() -> None:
    with gt.local() as cluster:
        cluster.create_table("half", dim=2, optimizer=gt.SGD(1.0), dtype="bfloat16")
        assert cluster.table("half", wire_dtype="bfloat16").wire_dtype is None
        with pytest.raises(
            InvalidArgument, match=r"wire_dtype is 'float16', and the rows of table 'half' are bfloat16"
        ):
            cluster.table("half", wire_dtype="float16")
        with pytest.raises(InvalidArgument, match="wire_dtype is 'int8'; it must be one of"):
            cluster.create_table("t", dim=2, optimizer=gt.SGD(1.0), wire_dtype="int8")  # type: ignore[arg-type]
        with pytest.raises(TableNotFound):
            cluster.table("t")
