"""Tables of neighbours on disk: they come back as they were, or the damage is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from geartrain.ams.graph.building.neighbours import NeighbourTable
from geartrain.ams.graph.service import store as graph_store
from geartrain.ams.graph.service.store import GraphStore, RowsVersion, graph_sizes
from geartrain.ams.storage.kv.lmdb_store import LmdbStore
from geartrain.ams.storage.kv.store import MemoryStore
from geartrain.ams.values.errors import StateDamaged, StateFailed


def table_of(num_classes: int, k: int, seed: int = 0) -> NeighbourTable:
    random = np.random.default_rng(seed)
    ids = random.integers(0, num_classes, num_classes * k).astype(np.int32)
    return NeighbourTable(np.arange(num_classes + 1, dtype=np.int64) * k, ids, k)


VERSION = RowsVersion(table="faces", table_version=7, fingerprint="ab")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_store, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(graph_store, "_WRITE_BYTES", 3000)


def test_a_table_survives_its_process_with_the_version_of_its_rows(tmp_path: Path) -> None:
    table = table_of(900, 5)
    kept = LmdbStore(tmp_path)
    GraphStore(kept).save(table, VERSION)
    kept.close()
    again = LmdbStore(tmp_path)
    found = GraphStore(again).load("faces")
    assert found is not None and found[1] == VERSION and found[0].k == 5
    np.testing.assert_array_equal(found[0].neighbours, table.neighbours)
    np.testing.assert_array_equal(found[0].offsets, table.offsets)
    assert found[0].neighbours.dtype == np.int32
    assert GraphStore(again).load("others") is None
    again.close()


def test_a_newer_table_takes_the_place_of_the_older_and_leaves_nothing() -> None:
    kept = MemoryStore()
    graphs = GraphStore(kept)
    graphs.save(table_of(2000, 7), VERSION)
    graphs.save(table_of(50, 3), RowsVersion(table="faces", table_version=8))
    graphs.save(table_of(30, 2), RowsVersion(table="other", table_version=1))
    found = graphs.load("faces")
    assert found is not None and found[1].table_version == 8 and len(found[0].neighbours) == 150
    assert len(kept.read_all()) == 2 + 2 + 1 - 1 + 2  # chunks and head of both
    graphs.remove("faces")
    assert graphs.load("faces") is None and graphs.load("other") is not None


class Failing(MemoryStore):
    """Takes a number of writes, then no more."""

    left = 10**9

    def write(self, changes: dict[str, bytes | None]) -> None:  # type: ignore[override]
        self.left -= 1
        if self.left < 0:
            raise StateFailed("the disk is full")
        super().write(changes)


def test_a_save_that_is_cut_short_leaves_the_older_table() -> None:
    newer = table_of(1500, 6, seed=1)
    for writes in range(20):
        kept = Failing()
        graphs = GraphStore(kept)
        graphs.save(table_of(700, 4), VERSION)
        kept.left = writes
        try:
            graphs.save(newer, RowsVersion(table="faces", table_version=8))
        except StateFailed:
            found = graphs.load("faces")
            assert found is not None and found[1] == VERSION and len(found[0].neighbours) == 2800
            kept.left = 10**9
            graphs.save(table_of(20, 2), RowsVersion(table="faces", table_version=9))
            assert len(kept.read_all()) == 3
        else:
            assert writes > 5
            return
    pytest.fail("the save never ended")


def test_the_graph_of_the_paper_shrinks_as_it_says() -> None:
    sizes = graph_sizes(100_000_000, 1000, [16] * 256)
    assert sizes.whole_bytes / 2**30 == pytest.approx(372 + 0.745, abs=1)
    assert max(sizes.shard_bytes) / 2**30 == pytest.approx(1.45, abs=0.02)
    assert str(sizes) == "graph 373.27 GiB, on 256 shards 1.46 GiB each at most"


def test_damage_of_any_value_is_found_and_named(tmp_path: Path) -> None:
    kept = LmdbStore(tmp_path)
    GraphStore(kept).save(table_of(500, 4), VERSION)
    neighbours = kept.read_all()["graph/faces/0/neighbours/000003"]
    kept.close()
    path = tmp_path / "state.lmdb"
    data = bytearray(path.read_bytes())
    at = data.index(neighbours[:500])
    data[at + 100] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(StateDamaged, match="graph/faces/0/neighbours/000003"):
        LmdbStore(tmp_path)


@pytest.mark.parametrize("change", ["gone", "cut", "other"])
def test_values_that_do_not_belong_together_are_found(change: str) -> None:
    kept = MemoryStore()
    graphs = GraphStore(kept)
    graphs.save(table_of(500, 4), VERSION)
    key = "graph/faces/0/neighbours/000001"
    value = kept.read_all()[key]
    kept.write({key: {"gone": None, "cut": value[:-1], "other": value[::-1]}[change]})
    with pytest.raises(StateDamaged, match="graph/faces/0/neighbours"):
        graphs.load("faces")
