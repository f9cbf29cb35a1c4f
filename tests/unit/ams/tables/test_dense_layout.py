"""Where rows of dense tables lie: whatever comes when, they are what they are, and take the memory of rows."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from geartrain.ams.tables.row_table import RowTable
from geartrain.ams.values.optimizers.registry import Momentum, RowOptimizerSpec, SparseMomentum
from geartrain.ams.values.placement import BUCKET_ORDER, buckets_of_shard, even_placement
from geartrain.ams.values.specs import Constant, TableSpec

ALL_BUCKETS = np.arange(4096)
DIM = 2
OWNED = {
    "one shard": ALL_BUCKETS,
    "one of four": buckets_of_shard(even_placement(4), 2),
    "one of three": buckets_of_shard(even_placement(3), 1),
    "a few": np.array([0, 7, 63, 64, 4095]),
}


def spec_of(num_rows: int, optimizer: RowOptimizerSpec, dim: int = DIM) -> TableSpec:
    return TableSpec(name="t", dim=dim, num_rows=num_rows, optimizer=optimizer)


@pytest.mark.parametrize("owned", OWNED.values(), ids=OWNED)
def test_rows_of_several_regions_survive_that_they_are_put_in_order(owned: np.ndarray) -> None:
    """A region of a row as wide as this has 2048 rows."""
    table, num_rows = RowTable(spec_of(6000, Momentum(1.0), dim=1024), owned), 6000
    every = np.arange(num_rows)
    ids = np.random.default_rng(0).permutation(every[np.isin(every % 4096, owned)])
    gradients = np.repeat(-ids.astype(np.float32)[:, None], 1024, axis=1)
    start = np.empty((len(ids), 1024), np.float32)
    table.pull(ids, start)
    for begin in range(0, len(ids), 300):
        table.push(ids[begin : begin + 300], gradients[begin : begin + 300])
    out = np.empty((len(ids), 1024), np.float32)
    table.pull(ids, out)
    np.testing.assert_array_equal(out, start - gradients)
    table.freeze()
    stored = table.read_frozen(num_rows)
    assert stored.slots is not None and len(stored.ids) == len(ids)
    np.testing.assert_array_equal(stored.slots[:, 0], -stored.ids.astype(np.float32))


def test_rows_of_one_shard_are_read_in_the_order_of_their_ids() -> None:
    table, ids = RowTable(spec_of(9000, Momentum(0.1)), ALL_BUCKETS), np.random.default_rng(0).permutation(9000)
    for part in np.array_split(ids, 9):
        table.push(part, np.ones((len(part), DIM), np.float32))
    table.freeze()
    np.testing.assert_array_equal(table.read_frozen(9000).ids, np.arange(9000))


def test_a_bucket_more_or_less_changes_the_place_of_no_other_row() -> None:
    orders = []
    for num_owned in (1365, 1366, 1400):
        table = RowTable(spec_of(50_000, Momentum(0.1)), np.sort(BUCKET_ORDER[:num_owned]))
        ids = np.arange(50_000)
        ids = ids[BUCKET_ORDER[ids % 4096] < num_owned]
        table.assign(ids, np.ones((len(ids), DIM), np.float32))
        table.freeze()
        orders.append(table.read_frozen(50_000).ids)
    for more in orders[1:]:
        np.testing.assert_array_equal(more[np.isin(more, orders[0])], orders[0])


def test_untouched_rows_are_caught_up_wherever_they_lie() -> None:
    """The sweep for old rows goes by position: a row that moves is neither left out nor swept twice."""
    count, vast = 60, 2**61
    far = np.sort(np.random.default_rng(0).integers(0, vast, count))
    spec: dict[str, Any] = {"name": "t", "dim": 4, "initializer": Constant(0.5)}
    spec["optimizer"] = SparseMomentum(0.1, momentum=0.9, weight_decay=0.01, untouched="elapsed")
    # The first table is in order after a while, the second never, and the third has few rows of very many.
    ids_of = {count: np.arange(count), 100 * count: np.arange(count), vast: far}
    tables = {rows: RowTable(TableSpec(**spec, num_rows=rows), ALL_BUCKETS, window=8) for rows in ids_of}
    generator = np.random.default_rng(1)
    for _ in range(60):
        some = np.sort(generator.choice(count, 3, replace=False))
        gradients = generator.standard_normal((3, 4)).astype(np.float32)
        for rows, table in tables.items():
            table.push(ids_of[rows][some], gradients)
    for table in tables.values():
        table.freeze()
    first, *others = ((ids_of[rows], table.read_frozen(count)) for rows, table in tables.items())
    for ids, stored in others:
        np.testing.assert_array_equal(ids[first[1].ids], stored.ids)
        for name in ("rows", "slots", "steps"):
            np.testing.assert_array_equal(getattr(first[1], name), getattr(stored, name))


_FILLED = """
import sys
import numpy as np, psutil
from geartrain.ams.kernels import memory
from geartrain.ams.tables.row_table import RowTable
from geartrain.ams.values.optimizers.registry import Momentum
from geartrain.ams.values.specs import Constant, TableSpec

num_rows, dim = int(sys.argv[1]), 64
ids = np.random.default_rng(0).permutation(num_rows)
gradients = np.ones((len(ids) // 50, dim), np.float32)
spec = TableSpec(name="t", dim=dim, num_rows=num_rows, optimizer=Momentum(0.1), initializer=Constant(0.0))
table = RowTable(spec, np.arange(4096))
process = psutil.Process()
resident = process.memory_info().rss
done = 0
for percent in map(int, sys.argv[2:]):
    for begin in range(done, num_rows * percent // 100, len(gradients)):
        table.push(ids[begin : begin + len(gradients)], gradients)
        done = begin + len(gradients)
    print(done, table.memory_bytes, memory.memory_used(), process.memory_info().rss - resident)
"""


def filled(num_rows: int, *percents: int) -> list[tuple[int, int, int, int]]:
    """Fill a table at random in a process of its own. At each share: rows, bytes told, counted and resident."""
    command = [sys.executable, "-c", _FILLED, str(num_rows), *map(str, percents)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return [tuple(map(int, line.split())) for line in result.stdout.splitlines()]  # type: ignore[misc]


@pytest.mark.exact_memory
def test_rows_written_at_random_take_twice_their_bytes_and_eight_a_class_at_most() -> None:
    num_rows, row_bytes, slack = 400_000, 2 * 64 * 4, 12 << 20
    for rows, told, counted, resident in filled(num_rows, 2, 10, 48, 52, 100):
        bound = 2 * rows * row_bytes + 8 * num_rows
        assert rows * row_bytes <= told <= bound
        assert counted <= bound + slack, "each array counts whole pages of 2 MiB"
        assert resident <= bound + slack
    assert rows == num_rows
    assert told <= 1.01 * rows * row_bytes + num_rows, "a full table takes the memory of its rows"
    assert resident <= told + slack
