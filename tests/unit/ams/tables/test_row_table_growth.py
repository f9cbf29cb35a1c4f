"""Growth: the index while it doubles, runs of full lines, slabs, and memory."""

import numpy as np
import pytest

from geartrain.ams.kernels import _core, ops
from geartrain.ams.tables.row_table import RowTable
from geartrain.ams.values.optimizers.registry import SGD, Momentum
from geartrain.ams.values.specs import TableSpec

ALL_BUCKETS = np.arange(4096)
MASK = 2**64 - 1


def make(dim: int = 1, num_rows: int | None = None, owned: np.ndarray = ALL_BUCKETS) -> RowTable:
    return RowTable(TableSpec(name="t", dim=dim, optimizer=SGD(0.1), num_rows=num_rows), owned)


def id_with_hash(hashed: int) -> int:
    """The id that lies at ``hashed`` in this process's hash tables: the inverse of splitmix64(id ^ seed)."""
    x = hashed
    x = (x ^ (x >> 31) ^ (x >> 62)) * pow(0x94D049BB133111EB, -1, 2**64) & MASK
    x = (x ^ (x >> 27) ^ (x >> 54)) * pow(0xBF58476D1CE4E5B9, -1, 2**64) & MASK
    return (((x ^ (x >> 30) ^ (x >> 60)) - 0x9E3779B97F4A7C15) & MASK) ^ _core.hash_seed


def value_of(ids: np.ndarray) -> np.ndarray:
    return (ops.splitmix64(ids) >> np.uint64(44)).astype(np.float32)[:, None]


def assert_holds(table: RowTable, ids: np.ndarray) -> None:
    out, present = np.empty((len(ids), 1), np.float32), np.zeros(len(ids), bool)
    table.pull(ids, out, present=present)
    assert present.all()
    np.testing.assert_array_equal(out, value_of(ids))


def test_every_id_is_found_at_every_stage_of_growth() -> None:
    table, ids = make(), np.unique(np.random.default_rng(0).integers(0, 2**63 - 1, 6000))
    np.random.default_rng(1).shuffle(ids)
    absent = ids[3000:] ^ 1
    for end in range(0, 3000, 37):
        part = ids[end : end + 37]
        assert table.assign(part, value_of(part)) == len(part)
        assert table.assign(part, value_of(part)) == 0
        assert_holds(table, ids[: end + 37])
    present = np.zeros(len(absent), bool)
    table.pull(absent, np.empty((len(absent), 1), np.float32), present=present)
    assert not present.any()


@pytest.mark.parametrize("batch", [1, 50, 5000, 400_000])
def test_growth_by_any_batch_keeps_every_row(batch: int) -> None:
    table = make()
    total = 2000 if batch == 1 else 400_000 if batch == 400_000 else 60_000
    ids = np.unique(np.random.default_rng(2).integers(0, 2**63 - 1, total))
    for begin in range(0, len(ids), batch):
        part = ids[begin : begin + batch]
        table.assign(part, value_of(part))
    assert table.num_present == len(ids)
    assert_holds(table, ids)


def test_an_id_takes_57_bytes_at_most_at_every_stage_of_growth() -> None:
    table, ids = make(), np.unique(np.random.default_rng(2).integers(0, 2**63 - 1, 80_000))
    for begin in range(0, len(ids), 500):
        part = ids[begin : begin + 500]
        table.assign(part, value_of(part))
        if table.num_present > 2000:
            assert table.memory_bytes <= table.num_present * (4 + 57)


@pytest.mark.parametrize("place", [0, 2**52 - 1, 2**51], ids=["first line", "last line, runs over the end", "middle"])
def test_ids_that_all_hash_to_one_line_are_found_through_growth(place: int) -> None:
    hashes = [(place << 12) | low for low in range(1200)]
    ids = np.array([i for i in map(id_with_hash, hashes) if i < 2**63], np.int64)
    assert len(ids) > 400
    places = ops.splitmix64(ids.astype(np.uint64) ^ np.uint64(_core.hash_seed)) >> np.uint64(12)
    assert np.all(places == np.uint64(place))
    others = np.unique(np.random.default_rng(3).integers(0, 2**63 - 1, 2000))
    table = make()
    for begin in range(0, 2000, 20):
        for part in (ids[begin // 4 : begin // 4 + 5], others[begin : begin + 20]):
            table.assign(part, value_of(part))
            assert_holds(table, ids[: begin // 4 + len(part) // 4])
    assert_holds(table, others)


def test_rows_cross_slabs_without_moving() -> None:
    """A slab holds about 32 MiB: 128 rows of the widest table."""
    dim, count = 65_536, 300
    spec = TableSpec(name="wide", dim=dim, optimizer=Momentum(0.5), dtype="float16")
    table = RowTable(spec, ALL_BUCKETS)
    for begin in range(0, count, 50):
        ids = np.arange(begin, begin + 50)
        table.assign(ids, np.broadcast_to(ids[:, None].astype(np.float16), (50, dim)))
    out = np.empty((count, dim), np.float16)
    table.pull(np.arange(count), out)
    np.testing.assert_array_equal(out, np.broadcast_to(np.arange(count, dtype=np.float16)[:, None], out.shape))
