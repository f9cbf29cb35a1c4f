"""Pull, push and assign against the dict of :mod:`tests.specification.ops`, bit by bit."""

import itertools
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from geartrain.ams.kernels import ops
from geartrain.ams.tables.compiled_store import table_hash
from geartrain.ams.tables.row_table import RowTable
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.specs import Normal, TableSpec
from tests.specification import ops as reference
from tests.specification.row_table import ReferenceTable

ALL_BUCKETS = np.arange(4096)


def make(
    *, dim: int = 5, num_rows: int | None = None, owned: np.ndarray = ALL_BUCKETS
) -> tuple[RowTable, ReferenceTable]:
    spec = TableSpec(name="t", dim=dim, optimizer=SGD(0.1), num_rows=num_rows, seed=3)
    return RowTable(spec, owned), ReferenceTable(dim, SGD(0.1), Normal(), 3, table_hash("t"))


def pulled(table: RowTable, ids: np.ndarray) -> np.ndarray:
    out = np.full((len(ids), table.spec.dim), 77, table.spec.numpy_dtype)
    table.pull(ids, out)
    return out


def assert_same_bits(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert ours.dtype == theirs.dtype
    unsigned = f"u{ours.dtype.itemsize}"
    np.testing.assert_array_equal(ours.view(unsigned), theirs.view(unsigned))


def test_pull_creates_nothing_and_says_what_is_there() -> None:
    for num_rows in (None, 100):
        table, theirs = make(num_rows=num_rows)
        table.assign(np.array([7, 3]), np.ones((2, 5), np.float32))
        out, present = np.zeros((6, 5), np.float32), np.zeros(6, bool)
        table.pull(np.array([3, 50, 50, 7]), out, present=present)
        assert present.tolist() == [True, False, False, True, False, False]
        assert_same_bits(out[[1, 2]], theirs.pull(np.array([50, 50])))
        assert out[[0, 3]].min() == 1 and not out[[4, 5]].any()
        assert table.num_present == 2


def owned_ids(owned: np.ndarray, dense: bool) -> Iterator[int]:
    keep = set(owned.tolist())
    return (i for i in itertools.count() if int(reference.bucket_of(np.array([i]), dense)[0]) in keep)


@pytest.mark.parametrize("num_rows", [None, 10_000])
def test_a_shard_of_some_buckets_keeps_every_row_apart(num_rows: int | None) -> None:
    owned = np.array([0, 5, 6, 900, 4095])
    ours, theirs = make(num_rows=num_rows, owned=owned)
    ids = np.array(list(itertools.islice(owned_ids(owned, num_rows is not None), 11)))
    values = np.random.default_rng(0).standard_normal((len(ids), 5)).astype(np.float32)
    assert ours.assign(ids, values) == theirs.assign(ids, values) == len(ids)
    assert_same_bits(pulled(ours, ids), values)


def test_repeated_ids_of_a_push_corrupt_nothing() -> None:
    table, theirs = make()
    assert table.push(np.array([4, 8, 4]), np.ones((3, 5), np.float32)) == 2
    theirs.push(np.array([4, 8, 4]), np.ones((3, 5), np.float32), 0.1)
    assert_same_bits(pulled(table, np.array([4, 8])), theirs.pull(np.array([4, 8])))


def test_read_only_and_strided_arrays_are_accepted() -> None:
    table, theirs = make()
    ids = np.frombuffer(np.arange(6).tobytes(), np.int64)
    gradients = np.random.default_rng(0).standard_normal((5, 6)).astype(np.float32).T
    unaligned = np.frombuffer(b"x" + np.ascontiguousarray(gradients).tobytes(), np.float32, 30, 1).reshape(6, 5)
    for values in (gradients, unaligned):
        table.push(ids, values)
        theirs.push(ids, values, 0.1)
    table.push(np.arange(12)[::2][:2], gradients[:2])
    theirs.push(np.array([0, 2]), gradients[:2], 0.1)
    assert_same_bits(pulled(table, np.arange(6)), theirs.pull(np.arange(6)))


def test_another_thread_runs_while_a_pull_works() -> None:
    """Where switches happen on request only, a second thread runs before the pull ends if the pull lets go."""
    table, _ = make(dim=1024)
    ids, out = np.arange(20_000), np.empty((20_000, 1024), np.float32)
    pull_ended, seen, gate = [False], list[bool](), threading.Semaphore(0)

    def look() -> None:
        gate.acquire()
        seen.append(pull_ended[0])

    second = threading.Thread(target=look)
    second.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)
    try:
        gate.release()
        table.pull(ids, out)
        pull_ended[0] = True
    finally:
        sys.setswitchinterval(interval)
    second.join()
    assert seen == [False]


def test_threads_that_break_the_single_writer_rule_corrupt_no_memory() -> None:
    table, theirs = make(dim=8)
    gradients = np.ones((500, 8), np.float32)
    parts = [np.arange(i * 500, (i + 1) * 500) for i in range(8)]
    threads = [threading.Thread(target=table.push, args=(part, gradients)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for part in parts:
        theirs.push(part, gradients, 0.1)
    everything = np.arange(4000)
    assert_same_bits(pulled(table, everything), theirs.pull(everything))
    assert ops.all_finite(pulled(table, everything))


@pytest.mark.parametrize("offset", [0, 4, 16, 32])
def test_a_pull_larger_than_the_caches_writes_every_row(offset: int) -> None:
    """Such a pull writes past the caches where the output is aligned; the first and last bytes of a row are apart."""
    table, theirs = make(dim=116)
    count = 24 * 2**20 // (116 * 4) + 100
    ids = np.arange(count)
    rows = np.random.default_rng(0).standard_normal((count - 1, 116)).astype(np.float32)
    table.assign(ids[1:], rows)
    memory = np.zeros(count * 116 + 32, np.float32)
    first = (-memory.ctypes.data % 64 + offset) // 4
    out = memory[first : first + count * 116].reshape(count, 116)
    table.pull(ids, out)
    assert_same_bits(out[1:], rows)
    assert_same_bits(out[:1], theirs.pull(ids[:1]))
