"""Dense tables of far more ids than rows: memory, freezes and sweeps cost what the rows that are there cost."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.ams.tables.row_table import RowTable
from geartrain.ams.values.optimizers.registry import SGD, Momentum, SparseMomentum
from geartrain.ams.values.specs import Constant, TableSpec

ALL_BUCKETS = np.arange(4096)
VAST = 2**61
PLACES = [0, 2**15 - 3, 2**24, 2**28 - 3, 2**33 - 3, 2**38, 2**60, VAST - 64]
"""Where ids begin: on either side of what a page, and a node, of a set of positions holds."""
some_ids = st.sets(st.builds(sum, st.tuples(st.sampled_from(PLACES), st.integers(0, 5))), min_size=1, max_size=12)
some_ids = some_ids.map(lambda ids: np.array(sorted(ids), np.int64))
some_steps = st.lists(
    st.tuples(st.sampled_from(["push", "assign", "freeze", "freeze touched", "read", "keep", "give up"]), some_ids),
    max_size=25,
)


def sorted_rows(stored: Any) -> list[tuple[int, bytes, bytes]]:
    rows = zip(stored.ids.tolist(), stored.rows, stored.slots, strict=True)
    return sorted((one, row.tobytes(), slot.tobytes()) for one, row, slot in rows)


class Both:
    """A vast dense table, and a hashed one of the same name: they hold the same rows."""

    def __init__(self) -> None:
        spec = {"name": "t", "dim": 3, "optimizer": Momentum(0.1, momentum=0.5)}
        self.tables = [
            RowTable(TableSpec(**spec, num_rows=VAST), ALL_BUCKETS),
            RowTable(TableSpec(**spec), ALL_BUCKETS),
        ]
        self.frozen = False

    def each(self, call: Any) -> Any:
        one, other = (call(table) for table in self.tables)
        assert one == other
        return one

    def step(self, name: str, ids: np.ndarray, value: float) -> None:
        rows = np.full((len(ids), 3), value, np.float32)
        if name == "push":
            self.each(lambda table: table.push(ids, rows))
        elif name == "assign":
            self.each(lambda table: table.assign(ids, rows))
        elif name.startswith("freeze") and not self.frozen:
            self.each(lambda table: table.freeze(since=None if name == "freeze" else table.latest_moment))
            self.frozen = True
        elif name == "read" and self.frozen:  # all: the order of two kinds of table differs
            self.each(lambda table: sorted_rows(table.read_frozen(200)))
        elif name in ("keep", "give up") and self.frozen:
            for table in self.tables:
                table.thaw(kept=name == "keep")
            self.frozen = False

    def check(self) -> None:
        ids = np.concatenate([np.arange(place, place + 6) for place in PLACES])

        def pulled(table: RowTable) -> tuple[bytes, bytes]:
            out, present = np.empty((len(ids), 3), np.float32), np.zeros(len(ids), np.bool_)
            table.pull(ids, out, present=present)
            return out.tobytes(), present.tobytes()

        self.each(pulled)
        self.each(lambda table: table.num_present)
        for name in ("give up", "freeze touched", "read", "give up", "freeze", "read"):
            self.step(name, ids, 0.0)


@settings(max_examples=80, deadline=None)
@given(steps=some_steps)
def test_a_vast_dense_table_does_what_a_hashed_one_does(steps: list[tuple[str, np.ndarray]]) -> None:
    both = Both()
    for number, (name, ids) in enumerate(steps):
        both.step(name, ids, 0.25 * (number + 1))
    both.check()


def test_untouched_rows_of_a_vast_table_move_as_those_of_a_small_one() -> None:
    """The sweep looks at the rows that there are, in the order of their ids."""
    count = 40
    near, far = np.arange(count), np.sort(np.random.default_rng(0).integers(0, VAST, count))
    spec = {"name": "t", "dim": 4, "initializer": Constant(0.5)}
    spec["optimizer"] = SparseMomentum(0.1, momentum=0.9, weight_decay=0.01, untouched="elapsed")
    small = RowTable(TableSpec(**spec, num_rows=count), ALL_BUCKETS, window=8)
    vast = RowTable(TableSpec(**spec, num_rows=VAST), ALL_BUCKETS, window=8)
    generator = np.random.default_rng(1)
    for step in range(60):
        some = np.arange(count) if step == 0 else np.sort(generator.choice(count, 3, replace=False))
        gradients = generator.standard_normal((len(some), 4)).astype(np.float32)
        small.push(near[some], gradients)
        vast.push(far[some], gradients)
    small.freeze()
    vast.freeze()
    one, other = small.read_frozen(count), vast.read_frozen(count)
    np.testing.assert_array_equal(far[one.ids], other.ids)
    for name in ("rows", "slots", "steps"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


_MEASURED = """
import resource, sys
import numpy as np
from pathlib import Path
from geartrain.ams.values.optimizers.registry import Momentum, SparseMomentum
from geartrain.ams.values.specs import TableSpec
from geartrain.ams.tables.row_table import RowTable

MIB = 1 << 20
def sizes():
    return [int(pages) * resource.getpagesize() for pages in Path("/proc/self/statm").read_text().split()[:2]]

address_space, resident = sizes()
resource.setrlimit(resource.RLIMIT_AS, (address_space + 512 * MIB,) * 2)  # else a fault takes all of the machine
num_rows, optimizer = int(sys.argv[1]), eval(sys.argv[2])
table = RowTable(TableSpec(name="t", dim=8, num_rows=num_rows, optimizer=optimizer), np.arange(4096))
ids = np.array([7, num_rows // 2, num_rows - 1])
for kept in (True, False):
    table.push(ids, np.ones((3, 8), np.float32))
    assert table.freeze(since=table.latest_moment if kept else None) == 3
    table.push(ids, np.ones((3, 8), np.float32))
    assert table.read_frozen(10).ids.tolist() == ids.tolist()
    table.thaw(kept=kept)
print(table.memory_bytes, sizes()[1] - resident)
"""


@pytest.mark.exact_memory
@pytest.mark.parametrize("num_rows", [2**32, 2**38, 2**61])
@pytest.mark.parametrize("optimizer", ["Momentum(0.1)", 'SparseMomentum(0.1, untouched="elapsed")'])
def test_rows_at_the_end_of_a_vast_table_cost_what_rows_cost(num_rows: int, optimizer: str) -> None:
    """Rows, slots and numbers of steps touch a huge page of 2 MiB each; bits and numbers of a row a few KiB."""
    command = [sys.executable, "-c", _MEASURED, str(num_rows), optimizer]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    told, resident = map(int, result.stdout.split())
    assert told < 2**20 and resident < 17 * 2**20  # with pages of the core itself


@pytest.mark.exact_memory
def test_a_table_that_cannot_grow_says_so_and_changes_nothing() -> None:
    """The system refuses memory: with what a write would have taken, it leaves no trace."""
    script = """
import resource
import numpy as np
from pathlib import Path
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.specs import TableSpec
from geartrain.ams.tables.row_table import RowTable

table = RowTable(TableSpec(name="t", dim=65_536, num_rows=2**61, optimizer=SGD(0.1)), np.arange(4096))
table.assign(np.array([1, 2]), np.ones((2, 65_536), np.float32))
far, rows = np.arange(2**40, 2**60, 2**50)[:300], np.ones((300, 65_536), np.float32)
address_space = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (address_space + (50 << 20),) * 2)  # room for some of the 75 MiB
for write in (table.push, table.assign):
    try:
        write(far, rows)
    except MemoryError:
        continue
    raise SystemExit("it was not refused")
out, present = np.empty((3, 65_536), np.float32), np.zeros(3, bool)
table.pull(np.array([1, 2, far[0]]), out, present=present)
assert present.tolist() == [True, True, False] and out[:2].min() == 1 and table.num_present == 2
assert table.freeze() == 2
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


def test_a_vast_table_of_one_bucket_uses_its_last_row() -> None:
    table = RowTable(TableSpec(name="t", dim=1, num_rows=VAST, optimizer=SGD(0.1)), np.array([4095]))
    last = np.array([VAST - 1])
    assert table.assign(last, np.ones((1, 1), np.float32)) == 1
    out = np.zeros((1, 1), np.float32)
    table.pull(last, out)
    assert out[0, 0] == 1 and table.num_present == 1
