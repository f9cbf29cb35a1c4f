"""A process that was stopped in a snapshot or a restore, and resumed beside its successor, changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.factory import connect
from geartrain.ams.client.scheduler_calls import SchedulerCalls
from geartrain.ams.client.snapshots import restore as snapshots
from geartrain.ams.client.snapshots import snapshot
from geartrain.ams.observe.failpoints import armed
from geartrain.ams.server.freeze import restore
from geartrain.ams.storage.snapshot.folder import latest, list_snapshots
from geartrain.ams.values.errors import SnapshotNotFound, StaleClient
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.specs import Constant
from tests.integration.conftest import ServedCluster

IDS = np.arange(64)


def make(cluster: Cluster, root: Path) -> Path:
    """Make a table of ones and a snapshot of it."""
    table = cluster.create_table("t", dim=2, num_rows=64, optimizer=SGD(1.0), initializer=Constant(0))
    table.push(IDS, -np.ones((64, 2), np.float32))
    return Path(str(cluster.snapshot(root).result(60)))


def test_live_rows_stay_until_every_shard_has_found_the_snapshot(
    served: Callable[..., ServedCluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect(served(2).address) as cluster:
        path = make(cluster, tmp_path)
        cluster.table("t").push(IDS, -np.ones((64, 2), np.float32))

        def elsewhere(folder: str) -> NoReturn:
            raise SnapshotNotFound(f"{folder} is not the folder of a snapshot")  # on the machine of the servers

        monkeypatch.setattr(restore, "open_snapshot", elsewhere)
        with pytest.raises(SnapshotNotFound, match="is not the folder"):
            cluster.restore(path, replace=True)
        assert (cluster.table("t").pull(IDS) == 2).all()


@pytest.mark.parametrize("stopped_at", ["before the tables are dropped", "before the rows are read"])
def test_a_stopped_restore_leaves_its_successors_table(
    served: Callable[..., ServedCluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped_at: str
) -> None:
    address = served(2).address
    with ExitStack() as stack, connect(address, stream="job/rank0", incarnation=1) as old:
        path = make(old, tmp_path)
        successor: list[Cluster] = []

        def overtaken() -> None:
            monkeypatch.undo()
            new = stack.enter_context(connect(address, stream="job/rank0", incarnation=2))
            successor.append(new)
            new.fence("job", 2)
            new.restore(path, replace=True)
            new.table("t").push(IDS, -np.ones((64, 2), np.float32))

        if stopped_at == "before the rows are read":
            moment = "restore.create.after"
            monkeypatch.setattr(snapshots.failpoints, "reach", lambda name: overtaken() if name == moment else None)
        else:
            on_all_shards = snapshots.ShardCalls.on_all_shards

            def answered(*args: Any, **keywords: Any) -> Any:
                outcomes = on_all_shards(*args, **keywords)
                overtaken()
                return outcomes

            monkeypatch.setattr(snapshots.ShardCalls, "on_all_shards", answered)
        with pytest.raises(StaleClient, match="superseded by"):
            old.restore(path, replace=True)
        table = successor[0].table("t")
        assert (table.pull(IDS) == 2).all()
        for change in (lambda: old.drop_table("t"), lambda: old.create_table("u", dim=2, optimizer=SGD(1.0))):
            with pytest.raises(StaleClient, match="superseded by"):
                change()
        assert (table.pull(IDS) == 2).all()


@pytest.mark.parametrize("who_knows", ["the shards", "the scheduler"])
def test_a_superseded_process_commits_no_snapshot(
    served: Callable[..., ServedCluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who_knows: str
) -> None:
    address, root, go = served(2).address, tmp_path / "snapshots", tmp_path / "go"
    if who_knows == "the scheduler":
        monkeypatch.setattr(snapshot._Hold, "_renewed", lambda _: [])
    else:
        monkeypatch.setattr(SchedulerCalls, "check_caller", lambda _: None)
    with connect(address, stream="job/rank0", incarnation=1) as old:
        old.create_table("t", dim=2, num_rows=64, optimizer=SGD(1.0)).push(np.arange(64), np.ones((64, 2), np.float32))
        old.snapshot(root, "first").result(60)
        with armed(f"block.write.after=pause({go})") as passes:
            pending = old.snapshot(root, "second", step=1)
            while not passes.fired["block.write.after"]:
                assert not pending.done()
            with connect(address, stream="job/rank0", incarnation=2) as new:
                new.fence("job", 2)
                go.touch()
                with pytest.raises(StaleClient, match="superseded by"):
                    pending.result(60)
    assert [one.name for one in list_snapshots(root)] == ["first"]
    writer = latest(root).manifest.writer
    assert writer is not None
    assert (writer.stream, writer.incarnation) == ("job/rank0", 1)
