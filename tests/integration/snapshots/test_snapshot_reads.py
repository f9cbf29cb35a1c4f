"""How much of a snapshot is read when it is restored: each block once, by the shard that has its buckets."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.factory import local
from geartrain.ams.storage.snapshot import blocks
from geartrain.ams.storage.snapshot.compaction import compact
from geartrain.ams.storage.snapshot.folder import open_snapshot
from geartrain.ams.storage.snapshot.manifest import ROWS
from geartrain.ams.storage.snapshot.store import _LocalStore
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.placement import bucket_of, buckets_between

NUM_ROWS = 20_000
DIM = 64
TABLES = {"dense": np.arange(NUM_ROWS), "hashed": np.arange(NUM_ROWS) * 7919 + 3}


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each block of rows was read from the store; blocks are small."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1 << 16)
    read, counted = _LocalStore.read, Counter[str]()

    def counting(self: _LocalStore, folder: Path, name: str) -> bytes:
        counted[name] += name.startswith(ROWS)
        return read(self, folder, name)

    monkeypatch.setattr(_LocalStore, "read", counting)
    return counted


def fill(cluster: Cluster) -> None:
    for name, ids in TABLES.items():
        table = cluster.create_table(name, dim=DIM, optimizer=SGD(1.0), num_rows=NUM_ROWS if name == "dense" else None)
        table.assign(ids, np.repeat(ids[:, None] % 1021, DIM, axis=1).astype(np.float32))


def assert_whole(cluster: Cluster) -> None:
    for name, ids in TABLES.items():
        assert np.array_equal(cluster.table(name).pull(ids)[:, 1], (ids % 1021).astype(np.float32))


@pytest.mark.parametrize(("num_shards", "others", "most"), [(4, 4, 1.0), (4, 5, 1.2), (4, 3, 1.2), (10, 11, 1.2)])
def test_another_number_of_shards_reads_little_more_than_the_snapshot(
    tmp_path: Path, reads: Counter[str], num_shards: int, others: int, most: float
) -> None:
    with local(num_shards) as cluster:
        fill(cluster)
        path = cluster.snapshot(tmp_path, "a").result(60)
    size = {entry.path: entry.bytes for entry in open_snapshot(path).manifest.files if entry.kind == ROWS}
    reads.clear()
    with local(others) as cluster:
        cluster.restore(path)
        assert_whole(cluster)
    assert set(size) <= set(reads)
    times = sum(size[name] * count for name, count in reads.items() if count) / sum(size.values())
    assert times <= most, f"{times:.2f} times the size"


@pytest.mark.parametrize("how", ["written", "compacted"])
@pytest.mark.usefixtures("reads")
def test_a_block_says_of_which_buckets_its_rows_are(tmp_path: Path, how: str) -> None:
    with local(3) as cluster:
        fill(cluster)
        path = cluster.snapshot(tmp_path, "a").result(60)
        if how == "compacted":
            cluster.table("dense").push(np.arange(100), np.zeros((100, DIM), np.float32))
            cluster.snapshot(tmp_path, "b", parent="a").result(60)
            path = compact(tmp_path, "b")
    snapshot = open_snapshot(path)
    ranges: dict[tuple[str, int], set[tuple[int, int]]] = {}
    for entry in snapshot.manifest.files:
        if entry.kind == ROWS:
            assert entry.buckets is not None and entry.table is not None and entry.shard is not None
            first, last = entry.buckets
            buckets = bucket_of(snapshot.read(entry)["ids"], dense=entry.table == "dense")
            assert buckets_between(first, last)[buckets].all()
            assert (snapshot.manifest.bucket_shards[buckets] == entry.shard).all()
            ranges.setdefault((entry.table, entry.shard), set()).add((first, last))
    assert {len(found) for found in ranges.values()} == {8}
