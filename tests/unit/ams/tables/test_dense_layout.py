"""Where rows of dense tables lie: whatever comes when, they are what they are, and take the memory of rows."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.ams.kernels import memory
from geartrain.ams.kernels.reference.row_table import ReferenceTable
from geartrain.ams.tables.compiled_store import table_hash
from geartrain.ams.tables.row_table import RowTable
from geartrain.ams.values.errors import OutOfMemory
from geartrain.ams.values.optimizers.registry import Adam, Momentum, RowOptimizerSpec, SparseMomentum
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
OPTIMIZERS = [Momentum(0.5, momentum=0.5), Adam(0.1)]


def spec_of(num_rows: int, optimizer: RowOptimizerSpec, dim: int = DIM) -> TableSpec:
    return TableSpec(name="t", dim=dim, num_rows=num_rows, optimizer=optimizer)


State = dict[int, tuple[bytes, bytes]]


class Model:
    """A dense table and a dict of the same rows."""

    def __init__(self, num_rows: int, owned: np.ndarray, optimizer: RowOptimizerSpec) -> None:
        spec = spec_of(num_rows, optimizer)
        every = np.arange(num_rows)
        self.legal = every[np.isin(every % 4096, owned)]
        self.owned, self.spec = owned, spec
        self.table = RowTable(spec, owned)
        self.dict = ReferenceTable(DIM, optimizer, spec.initializer, spec.seed, table_hash("t"))
        self.frozen: State | None = None
        self.read: State = {}

    def state(self) -> State:
        return {one: (row.tobytes(), self.dict.slots_of(one).tobytes()) for one, row in self.dict.rows.items()}

    def write(self, name: str, ids: np.ndarray, seed: int) -> None:
        rows = np.random.default_rng(seed).standard_normal((len(ids), DIM)).astype(np.float32)
        if name == "push":
            assert self.table.push(ids, rows) == self.dict.push(ids, rows, self.spec.optimizer.lr)
        else:
            assert self.table.assign(ids, rows) == self.dict.assign(ids, rows)

    def read_some(self, most: int) -> int:
        stored = self.table.read_frozen(most)
        assert stored.slots is not None
        for one, row, slot in zip(stored.ids.tolist(), stored.rows, stored.slots, strict=True):
            assert one not in self.read, "a row was read twice"
            self.read[one] = (row.tobytes(), slot.tobytes())
        return len(stored.ids)

    def step(self, name: str, ids: np.ndarray, seed: int) -> None:
        if name in ("push", "assign"):
            self.write(name, ids, seed)
        elif name == "freeze" and self.frozen is None:
            self.frozen, self.read = self.state(), {}
            assert self.table.freeze() == len(self.frozen)
        elif name == "read" and self.frozen is not None:
            self.read_some(7)
        elif name == "thaw" and self.frozen is not None:
            while self.read_some(100):
                pass
            assert self.read == self.frozen
            self.table.thaw(kept=True)
            self.frozen = None
        elif name == "restore" and self.frozen is None:
            self.table.freeze()
            fresh = RowTable(self.spec, self.owned)
            while len((part := self.table.read_frozen(13)).ids):
                fresh.restore(*part)
            self.table = fresh
        elif name == "refuse":
            before, used = memory.memory_limit(), memory.memory_used()
            memory.set_memory_limit(used + seed % 2000)
            try:
                self.write("push", ids, seed)
            except OutOfMemory:
                undone = (
                    memory.memory_used() == used or self.frozen is not None
                )  # the freeze may refuse what had got its room
                assert undone, "what was counted for a refused push still counts"
            finally:
                memory.set_memory_limit(before)

    def check(self) -> None:
        out, present = np.empty((len(self.legal), DIM), np.float32), np.zeros(len(self.legal), bool)
        self.table.pull(self.legal, out, present=present)
        np.testing.assert_array_equal(out, self.dict.pull(self.legal))
        assert set(self.legal[present].tolist()) == set(self.dict.rows)
        assert self.table.num_present == len(self.dict.rows)
        self.step("thaw", self.legal, 0)
        self.step("freeze", self.legal, 0)
        self.step("thaw", self.legal, 0)


STEPS = ["push"] * 6 + ["assign", "freeze", "read", "thaw", "restore", "refuse", "refuse"]


@settings(max_examples=60, deadline=None)
@given(
    num_rows=st.sampled_from([1, 10, 40, 100, 4097]),
    owned=st.sampled_from(list(OWNED.values())),
    optimizer=st.sampled_from(OPTIMIZERS),
    steps=st.lists(
        st.tuples(st.sampled_from(STEPS), st.integers(0, 30), st.integers(0, 2**31)), min_size=6, max_size=16
    ),
)
def test_rows_are_those_of_a_dict_whatever_comes_when(
    num_rows: int, owned: np.ndarray, optimizer: RowOptimizerSpec, steps: list[tuple[str, int, int]]
) -> None:
    model = Model(num_rows, owned, optimizer)
    for name, percent, seed in steps:
        count = min(30, -(-len(model.legal) * percent // 100))
        ids = np.random.default_rng(seed).choice(model.legal, count, replace=False)
        model.step(name, ids, seed)
    model.check()


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


def test_untouched_rows_are_caught_up_though_their_rows_were_put_in_order() -> None:
    """The sweep for old rows goes by position: a row that moves is neither left out nor swept twice."""
    spec: dict[str, Any] = {"name": "t", "dim": 4, "initializer": Constant(0.5)}
    spec["optimizer"] = SparseMomentum(0.1, momentum=0.9, weight_decay=0.01, untouched="elapsed")
    tables = [RowTable(TableSpec(**spec, num_rows=rows), ALL_BUCKETS, window=8) for rows in (60, 6000)]
    generator = np.random.default_rng(1)
    for _ in range(60):  # the first table is in order after a while, the second never
        some = np.sort(generator.choice(60, 3, replace=False))
        gradients = generator.standard_normal((3, 4)).astype(np.float32)
        for table in tables:
            table.push(some, gradients)
    for table in tables:
        table.freeze()
    one, other = (table.read_frozen(60) for table in tables)
    for name in ("ids", "rows", "slots", "steps"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


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
