"""A very large request may use several threads; nobody can tell from the rows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from geartrain.ams.tables.row_table import RowTable
from geartrain.ams.values.errors import NonFinite
from geartrain.ams.values.optimizers.momentum import Untouched
from geartrain.ams.values.optimizers.registry import SparseMomentum
from geartrain.ams.values.specs import DTypeName, TableSpec

BUCKETS = np.arange(4096)
NUM_IDS, DIM = 30_000, 64  # 7.7 MB of rows: above the threshold for three slices


@pytest.mark.parametrize("num_rows", [None, 100_000])
@pytest.mark.parametrize(
    ("dtype", "untouched"), [("float32", "freeze"), ("bfloat16", "freeze"), ("float32", "elapsed")]
)
def test_any_number_of_threads_gives_the_same_bits(
    num_rows: int | None, dtype: DTypeName, untouched: Untouched
) -> None:
    optimizer = SparseMomentum(lr=0.1, momentum=0.9, weight_decay=0.01, untouched=untouched)
    spec = TableSpec(name="t", dim=DIM, optimizer=optimizer, num_rows=num_rows, dtype=dtype)
    one, three = (RowTable(spec, BUCKETS, threads=threads) for threads in (1, 3))
    rng = np.random.default_rng(2)
    for _ in range(3):
        ids = rng.permutation(100_000)[:NUM_IDS]
        gradients = rng.normal(size=(NUM_IDS, DIM)).astype(np.float32)
        assert one.push(ids, gradients) == three.push(ids, gradients)
        pulled = [np.empty((NUM_IDS, DIM), spec.numpy_dtype) for _ in range(2)]
        wanted = rng.permutation(100_000)[:NUM_IDS]
        for table, out in zip((one, three), pulled, strict=True):
            table.pull(wanted, out)
        np.testing.assert_array_equal(pulled[0], pulled[1])
    assert one.num_present == three.num_present


def test_a_large_push_with_one_bad_number_changes_nothing() -> None:
    table = RowTable(TableSpec(name="t", dim=DIM, optimizer=SparseMomentum(lr=0.1)), BUCKETS, threads=3)
    gradients = np.ones((NUM_IDS, DIM), np.float32)
    gradients[-1, -1] = np.inf
    with pytest.raises(NonFinite, match=str(NUM_IDS - 1)):
        table.push(np.arange(NUM_IDS), gradients)
    assert table.num_present == 0


STARVED = """
import resource, threading
import numpy as np
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.specs import TableSpec
from geartrain.ams.tables.row_table import RowTable

table = RowTable(TableSpec(name="t", dim=64, optimizer=SGD(1.0), num_rows=30_000), np.arange(4096), threads=3)
ids, rows = np.arange(30_000), np.zeros((30_000, 64), np.float32)
for some in np.split(ids, 10):  # too small for threads, whose stacks would be used again
    table.assign(some, rows[some])
gradients = np.ones_like(rows)
pages = int(open("/proc/self/statm").read().split()[0])
spare = 1 << 20  # less than the stack of a thread, which has 2 MiB where its size is unlimited
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + spare,) * 2)
try:
    threading.Thread(target=print).start()
except RuntimeError:
    pass  # no thread can be started
else:
    raise SystemExit("threads can still be started")
table.push(ids, gradients)
table.pull(ids, rows)
assert rows.min() == rows.max() == -1
"""


@pytest.mark.exact_memory
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the size of the process is read from /proc")
def test_where_no_thread_can_be_started_the_request_is_done_all_the_same() -> None:
    done = subprocess.run([sys.executable, "-c", STARVED], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
