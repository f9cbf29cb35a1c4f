"""Hash tables stay fast for the ids of one shard and for ids chosen to collide, and show nothing of their key."""

import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import pytest

from geartrain.ams.kernels import ops
from geartrain.ams.kernels.position_lru import PositionLru
from geartrain.ams.tables.row_table import RowTable
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.specs import TableSpec

COUNT = 30_000


def ids_with_hashes(hashes: np.ndarray) -> np.ndarray:
    """Invert splitmix64; of the ids those that are not negative."""
    x = hashes.astype(np.uint64)
    x = (x ^ (x >> np.uint64(31)) ^ (x >> np.uint64(62))) * np.uint64(pow(0x94D049BB133111EB, -1, 2**64))
    x = (x ^ (x >> np.uint64(27)) ^ (x >> np.uint64(54))) * np.uint64(pow(0xBF58476D1CE4E5B9, -1, 2**64))
    ids = ((x ^ (x >> np.uint64(30)) ^ (x >> np.uint64(60))) - np.uint64(0x9E3779B97F4A7C15)).astype(np.int64)
    return ids[ids >= 0][:COUNT]


CHOSEN = {
    "of one bucket": np.random.default_rng(0).integers(0, 2**52, 3 * COUNT).astype(np.uint64) | np.uint64(77 << 52),
    "of one place": np.arange(3 * COUNT).astype(np.uint64) | np.uint64(0x123456789 << 28),
    "of one place of every bucket": (np.arange(3 * COUNT) % 4096).astype(np.uint64) << np.uint64(52)
    | (np.arange(3 * COUNT) // 4096).astype(np.uint64),
}


def merge(ids: np.ndarray) -> None:
    assert len(ops.merge_duplicates(ids)[0]) == len(ids)


def fill_a_table(ids: np.ndarray) -> None:
    table = RowTable(TableSpec(name="t", dim=1, optimizer=SGD(0.1)), np.arange(4096))
    assert table.assign(ids, np.ones((len(ids), 1), np.float32)) == len(ids)
    table.pull(ids, np.empty((len(ids), 1), np.float32))


def fill_a_position_lru(ids: np.ndarray) -> None:
    index = PositionLru(len(ids))
    index.place(ids)
    index.find(ids, touch=True)


def best_seconds(work: Callable[[np.ndarray], None], ids: np.ndarray) -> float:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        work(ids)
        times.append(time.perf_counter() - start)
    return min(times)


@pytest.mark.parametrize("chosen", CHOSEN)
@pytest.mark.parametrize("work", [merge, fill_a_table, fill_a_position_lru])
def test_ids_that_collide_by_placement_or_by_choice_cost_no_more_than_others(
    work: Callable[[np.ndarray], None], chosen: str
) -> None:
    """A table whose bits they share takes hundreds of times as long."""
    ids = ids_with_hashes(CHOSEN[chosen])
    others = np.random.default_rng(1).permutation(ids_with_hashes(np.arange(3 * COUNT) * np.int64(0x5851F42D4C957F2D)))
    assert len(np.unique(ids)) == len(others) == COUNT
    assert best_seconds(work, ids) < 10 * best_seconds(work, others)


def test_what_is_seen_of_a_table_does_not_depend_on_the_key_of_its_process() -> None:
    script = """
import numpy as np
from geartrain.ams.kernels import _core, ops
from geartrain.ams.kernels.position_lru import PositionLru
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.specs import TableSpec
from geartrain.ams.tables.row_table import RowTable

ids = np.random.default_rng(0).integers(0, 2**62, 3000) // 3 * 3
ids = np.concatenate([ids, ids[::-2]])
distinct, inverse, _ = ops.merge_duplicates(ids)
table = RowTable(TableSpec(name="t", dim=2, optimizer=SGD(0.1)), np.arange(4096))
for begin in range(0, len(distinct), 100):
    part = distinct[begin : begin + 100]
    table.push(part, np.ones((len(part), 2), np.float32))
table.freeze()
frozen = table.read_frozen(5000)
index = PositionLru(500)
positions = index.place(distinct[:500])[0]
offsets, labels = np.arange(100_001), np.arange(100)
active = ops.select_neighbours(offsets, np.arange(100_000)[::-1].copy(), labels, 300, seed=1, step=2)
seen = [distinct, inverse, frozen.ids, frozen.rows, positions, index.oldest(500)[0], active]
print(_core.hash_seed, hash(b"".join(array.tobytes() for array in seen)), table.memory_bytes)
"""
    answers = [
        subprocess.run(
            [sys.executable, "-c", script], env={"PYTHONHASHSEED": "0"}, capture_output=True, text=True, check=True
        ).stdout.split()
        for _ in range(2)
    ]
    keys, *seen = zip(*answers, strict=True)
    assert keys[0] != keys[1]
    assert all(item == other for item, other in seen)
