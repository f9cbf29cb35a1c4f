"""Dense tables of far more ids than rows: memory, freezes and sweeps cost what the rows that are there cost."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from geartrain.ams.tables.row_table import RowTable
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.specs import TableSpec

VAST = 2**61
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

def use(num_rows):
    table = RowTable(TableSpec(name="t", dim=8, num_rows=num_rows, optimizer=eval(sys.argv[2])), np.arange(4096))
    ids = np.array([7, num_rows // 2, num_rows - 1])
    for kept in (True, False):
        table.push(ids, np.ones((3, 8), np.float32))
        assert table.freeze(since=table.latest_moment if kept else None) == 3
        table.push(ids, np.ones((3, 8), np.float32))
        assert table.read_frozen(10).ids.tolist() == ids.tolist()
        table.thaw(kept=kept)
    return table

use(100)  # pages of the core itself are no memory of a table
address_space, resident = sizes()
resource.setrlimit(resource.RLIMIT_AS, (address_space + 512 * MIB,) * 2)  # else a fault takes all of the machine
table = use(int(sys.argv[1]))
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
    assert told < 2**20 and resident < 16 * 2**20


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
