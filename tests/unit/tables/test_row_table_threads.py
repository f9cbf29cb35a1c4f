"""A very large request may use several threads; nobody can tell from the rows."""

from __future__ import annotations

import numpy as np
import pytest

from geartrain.ams.errors import NonFinite
from geartrain.ams.specs import DTypeName, SparseMomentum, TableSpec, Untouched
from geartrain.ams.tables.row_table import RowTable

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
        wanted, positions = rng.permutation(100_000)[:NUM_IDS], rng.permutation(NUM_IDS)
        for table, out in zip((one, three), pulled, strict=True):
            table.pull(wanted, out, positions)
        np.testing.assert_array_equal(pulled[0], pulled[1])
    assert one.num_present == three.num_present


def test_a_large_push_with_one_bad_number_changes_nothing() -> None:
    table = RowTable(TableSpec(name="t", dim=DIM, optimizer=SparseMomentum(lr=0.1)), BUCKETS, threads=3)
    gradients = np.ones((NUM_IDS, DIM), np.float32)
    gradients[-1, -1] = np.inf
    with pytest.raises(NonFinite, match=str(NUM_IDS - 1)):
        table.push(np.arange(NUM_IDS), gradients)
    assert table.num_present == 0
