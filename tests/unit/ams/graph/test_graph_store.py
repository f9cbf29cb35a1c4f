"""Tables of neighbours on disk: they come back as they were, or the damage is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from geartrain.ams.graph.building.neighbours import NeighbourTable
from geartrain.ams.graph.service.store import GraphStore, RowsVersion, graph_sizes
from geartrain.ams.storage.durable import disk
from geartrain.ams.values.errors import StateDamaged, StateFailed


def table_of(num_classes: int, k: int) -> NeighbourTable:
    ids = np.random.default_rng(0).integers(0, num_classes, num_classes * k).astype(np.int32)
    return NeighbourTable(np.arange(num_classes + 1, dtype=np.int64) * k, ids, k)


VERSION = RowsVersion(table="faces of ä/b", table_version=7, fingerprint="ab")


def test_a_newer_table_takes_the_place_of_the_older_and_leaves_nothing(tmp_path: Path) -> None:
    table, other = table_of(900, 5), RowsVersion(table="other", table_version=1)
    GraphStore(tmp_path).save(table_of(50, 3), RowsVersion(table=VERSION.table, table_version=8))
    GraphStore(tmp_path).save(table, VERSION)
    GraphStore(tmp_path).save(table_of(30, 2), other)
    graphs = GraphStore(tmp_path)
    found = graphs.load(VERSION.table)
    assert found is not None and found[1] == VERSION and found[0].k == 5 and found[0].neighbours.dtype == np.int32
    np.testing.assert_array_equal(found[0].neighbours, table.neighbours)
    np.testing.assert_array_equal(found[0].offsets, table.offsets)
    assert graphs.tables() == [VERSION.table, "other"] and graphs.load("nowhere") is None
    graphs.remove(VERSION.table)
    graphs.remove(VERSION.table)
    assert graphs.tables() == ["other"] and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("call", ["write", "sync", "rename"])
def test_a_save_that_is_cut_short_leaves_the_older_table(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = GraphStore(tmp_path)
    graphs.save(table_of(700, 4), VERSION)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(StateFailed, match="No space left on device; free space"):
        patch.setattr(disk, call, full)
        graphs.save(table_of(1500, 6), RowsVersion(table=VERSION.table, table_version=8))
    found = graphs.load(VERSION.table)
    assert found is not None and found[1] == VERSION and len(found[0].neighbours) == 2800
    assert len(list(tmp_path.iterdir())) == 1


def test_the_graph_of_the_paper_shrinks_as_it_says() -> None:
    sizes = graph_sizes(100_000_000, 1000, [16] * 256)
    assert sizes.whole_bytes / 2**30 == pytest.approx(372 + 0.745, abs=1)
    assert max(sizes.shard_bytes) / 2**30 == pytest.approx(1.45, abs=0.02)
    assert str(sizes) == "graph 373.3 GiB, on 256 shards 1.5 GiB each at most"


@pytest.mark.parametrize("place", [0, 10, 20, 4000, -1, None])
def test_damage_of_any_byte_is_found_and_named(tmp_path: Path, place: int | None) -> None:
    graphs = GraphStore(tmp_path)
    graphs.save(table_of(500, 4), VERSION)
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    if place is None:
        del data[-1]
    else:
        data[place] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(StateDamaged, match=f"'faces of ä/b': {path} is damaged .*; build it again"):
        graphs.load(VERSION.table)
    assert graphs.tables() in ([VERSION.table], [])
