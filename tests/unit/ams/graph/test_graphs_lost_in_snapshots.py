"""A graph service that fails in the middle of a snapshot costs it its graph, not the snapshot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import geartrain as gt
from geartrain.ams.graph.service.graphs import Graphs
from geartrain.ams.values.errors import (
    GeartrainError,
    GraphUnavailable,
    InternalError,
    SnapshotFailed,
    SnapshotNotFound,
    SnapshotRefused,
    StateDamaged,
    StateFailed,
)

ROWS = np.random.default_rng(5).standard_normal((300, 8)).astype(np.float32)


@pytest.mark.parametrize("error", [GraphUnavailable, StateDamaged])
@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.usefixtures("memory_urls")
def test_what_it_had_written_does_not_spoil_the_snapshot(
    error: type[GeartrainError], remote: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = f"memory://{tmp_path.name}-{error.__name__}" if remote else str(tmp_path)
    write = Graphs.write_snapshot

    def write_and_end(self: Graphs, *arguments: Any) -> Any:
        assert write(self, *arguments)
        raise error("the service ended here")

    with gt.local(2) as cluster:
        table = cluster.create_table("faces", dim=8, num_rows=300, optimizer=gt.SGD(0.1))
        table.assign(np.arange(300), ROWS)
        cluster.graph.build("faces", 4)
        monkeypatch.setattr(Graphs, "write_snapshot", write_and_end)
        path = cluster.snapshot(root, "s", files={"model": b"weights"}).result()
        assert cluster.restore(path, replace=True).verify() == []
        assert cluster.graph.describe().graphs == ()
        np.testing.assert_array_equal(cluster.table("faces").pull(np.arange(300)), ROWS)


def test_a_disk_that_cannot_take_its_blocks_is_the_snapshots_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: Any) -> Any:
        raise SnapshotFailed("no room")

    with gt.local() as cluster:
        cluster.create_table("faces", dim=8, num_rows=300, optimizer=gt.SGD(0.1)).assign(np.arange(300), ROWS)
        cluster.graph.build("faces", 4)
        monkeypatch.setattr(Graphs, "write_snapshot", no_room)
        with pytest.raises(SnapshotFailed, match="no room"):
            cluster.snapshot(tmp_path, "s").result()


@pytest.mark.parametrize("error", [StateFailed, SnapshotRefused, SnapshotNotFound, InternalError])
def test_a_service_that_cannot_take_them_costs_a_restore_its_graphs_not_the_rows(
    error: type[GeartrainError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_room(*_: Any) -> Any:
        raise error("no room")

    with gt.local() as cluster:
        cluster.create_table("faces", dim=8, num_rows=300, optimizer=gt.SGD(0.1)).assign(np.arange(300), ROWS)
        cluster.graph.build("faces", 4)
        path = cluster.snapshot(tmp_path, "s").result()
        monkeypatch.setattr(Graphs, "restore_snapshot", no_room)
        cluster.restore(path, replace=True)
        np.testing.assert_array_equal(cluster.table("faces").pull(np.arange(300)), ROWS)
    assert "were not restored: no room" in caplog.text
