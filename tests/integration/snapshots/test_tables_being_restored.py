"""Nobody opens, reads or writes a table before all of its rows are back, whoever dies or is stopped on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.factory import connect
from geartrain.ams.client.scheduler_calls import SchedulerCalls
from geartrain.ams.client.snapshots import restore as snapshot_restore
from geartrain.ams.client.snapshots import snapshot
from geartrain.ams.client.table import Table
from geartrain.ams.observe.failpoints import armed
from geartrain.ams.scheduler.service import SchedulerServer
from geartrain.ams.server.freeze import restore
from geartrain.ams.storage.snapshot.folder import latest, list_snapshots, open_snapshot
from geartrain.ams.values.config import SchedulerConfig
from geartrain.ams.values.errors import (
    InternalError,
    SnapshotDamaged,
    SnapshotFailed,
    SnapshotNotFound,
    StaleClient,
    TableBeingRestored,
    TableExists,
    TableNotFound,
)
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.shard_messages import CallContext, Freeze, PublishTable, Restore
from geartrain.ams.values.specs import Constant, TableSpec
from tests.integration.conftest import ServedCluster

IDS, ONES = np.arange(64), np.ones((64, 2), np.float32)
SPEC = TableSpec(name="t", dim=2, num_rows=64, optimizer=SGD(1.0), initializer=Constant(0))


def make(cluster: Cluster, root: Path) -> Path:
    """Make a table of ones and a snapshot of it."""
    table = cluster.create_table("t", dim=2, num_rows=64, optimizer=SGD(1.0), initializer=Constant(0))
    table.push(IDS, -ONES)
    return Path(str(cluster.snapshot(root).result(60)))


def rows(cluster: Cluster) -> Any:
    return cluster.table("t").pull(IDS)


class _Died(BaseException):
    """The process ends here."""


@contextmanager
def held_up(ours: Cluster, path: Path, tmp_path: Path, place: str = "restore.block.before") -> Iterator[Future[Any]]:
    """A restore that waits in the middle until the block ends."""
    go = tmp_path / "go"
    with ThreadPoolExecutor(1) as pool, armed(f"{place}=pause({go})") as passes:
        try:
            restoring = pool.submit(ours.restore, path, replace=True)
            while not passes.fired[place]:
                assert not restoring.done(), restoring.exception()
            yield restoring
        finally:
            go.touch()
            with suppress(Exception):
                restoring.result(60)


@pytest.mark.parametrize("place", ["restore.create.after", "restore.block.before", "restore.publish.before"])
def test_others_neither_read_nor_write_what_is_being_restored(
    served: Callable[..., ServedCluster], tmp_path: Path, place: str
) -> None:
    address = served(2).address
    with connect(address) as ours, connect(address) as theirs:
        path = make(ours, tmp_path)
        opened = theirs.table("t")
        by_name = Table(SPEC, theirs._calls, theirs._stream)  # as a client of somebody's own may send it
        ours.table("t").push(IDS, -ONES)
        with held_up(ours, path, tmp_path, place) as restoring:
            for table in (opened, by_name):
                for use in (
                    lambda one: one.pull(IDS),
                    lambda one: one.push(IDS, ONES),
                    lambda one: one.assign(IDS, ONES),
                ):
                    with pytest.raises(TableBeingRestored, match="'t' is being restored from a snapshot"):
                        use(table)
            for reuse in (False, True):
                with pytest.raises(TableBeingRestored):
                    theirs.create_table(
                        "t", dim=2, num_rows=64, optimizer=SGD(1.0), initializer=Constant(0), reuse=reuse
                    )
            with pytest.raises(TableBeingRestored):
                theirs.table("t")
            with pytest.raises((SnapshotFailed, TableNotFound)):
                theirs.snapshot(tmp_path, "half", tables=["t"])
            status = theirs.status()
            assert (status.tables, status.incomplete_tables, status.restoring_tables) == ((), ("t",), ("t",))
        restoring.result(60)
        assert (rows(theirs) == 1).all()
        assert theirs.status().restoring_tables == ()
        theirs.table("t").push(IDS, -ONES)


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("place", ["restore.create.after", "restore.publish.before"])
def test_what_a_dead_process_was_restoring_is_restored_by_another(
    served: Callable[..., ServedCluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, replace: bool
) -> None:
    address = served(2).address
    with connect(address) as ours:
        path = make(ours, tmp_path)
        with connect(address) as dying:

            def dies(name: str) -> None:
                if name == place:
                    raise _Died

            monkeypatch.setattr(snapshot_restore.failpoints, "reach", dies)
            monkeypatch.setattr(SchedulerCalls, "drop_table", lambda *_: None)  # a dead process removes nothing
            with pytest.raises(_Died):
                dying.restore(path, replace=True)
            monkeypatch.undo()
        assert ours.status().tables == ()
        assert ours.status().incomplete_tables == ("t",)
        with pytest.raises(TableBeingRestored):
            ours.table("t")
        ours.restore(path, replace=replace)
        assert (rows(ours) == 1).all()
        assert ours.status().incomplete_tables == ()


@pytest.mark.parametrize("opened_by", [0, 1])
def test_what_a_dead_process_was_restoring_is_in_nobodys_snapshot(
    served: Callable[..., ServedCluster], tmp_path: Path, opened_by: int
) -> None:
    address = served(2).address
    with connect(address) as ours, connect(address) as theirs:
        path = make(ours, tmp_path / "theirs")
        other = ours.create_table("other", dim=2, num_rows=64, optimizer=SGD(1.0), initializer=Constant(0))
        other.push(IDS, -ONES)
        made = theirs._scheduler.create_table(SPEC, for_restore=True, replace=True)  # and then it dies,
        request = Restore(folder=str(path), tables=("t",), incarnations=(made.incarnation,))
        theirs._calls.on_all_shards(request)
        for shard in range(opened_by):  # or here
            theirs._calls.deliver([(shard, PublishTable(table="t", incarnation=made.incarnation))], CallContext())
        taken = ours.snapshot(tmp_path / "ours").result(60)
        assert [table["name"] for table in open_snapshot(taken).manifest.tables] == ["other"]
        assert open_snapshot(taken).verify() == []
        with pytest.raises((SnapshotFailed, TableNotFound)):
            ours.snapshot(tmp_path / "ours", tables=["t", "other"])
        ours.restore(path)
        taken = ours.snapshot(tmp_path / "ours").result(60)
        assert len(open_snapshot(taken).manifest.tables) == 2


def test_what_is_opened_while_a_snapshot_begins_is_in_it_as_a_whole_or_not_at_all(
    served: Callable[..., ServedCluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = served(2).address
    with connect(address) as ours, connect(address) as theirs:
        path = make(ours, tmp_path / "theirs")
        theirs.create_table("other", dim=2, num_rows=64, optimizer=SGD(1.0))
        with held_up(ours, path, tmp_path, "restore.publish.before") as restoring, armed(""):
            begun = theirs._calls.on_all_shards

            def then_open(request: Any, *arguments: Any, **settings: Any) -> Any:
                outcomes = begun(request, *arguments, **settings)
                if isinstance(request, Freeze):
                    (tmp_path / "go").touch()
                    restoring.result(60)
                return outcomes

            monkeypatch.setattr(theirs._calls, "on_all_shards", then_open)
            taken = open_snapshot(theirs.snapshot(tmp_path / "ours").result(60))
        assert [table["name"] for table in taken.manifest.tables] == ["other"]
        assert {entry.table for entry in taken.manifest.files} <= {None, "other"}


def test_a_restore_that_cannot_be_published_leaves_none_of_its_tables(
    served: Callable[..., ServedCluster], tmp_path: Path
) -> None:
    address = served(2).address
    with connect(address) as ours, connect(address) as theirs:
        make(ours, tmp_path / "other")
        ours.create_table("u", dim=2, num_rows=64, optimizer=SGD(1.0))
        path = Path(str(ours.snapshot(tmp_path / "both").result(60)))
        with held_up(ours, path, tmp_path, "restore.publish.before") as restoring, armed(""):
            theirs.restore(path, tables=["t"])
        with pytest.raises(TableNotFound, match="another restore took its place"):
            restoring.result(60)
        status = theirs.status()
        assert ([table.name for table in status.tables], status.incomplete_tables) == (["t"], ())
        assert (rows(theirs) == 1).all()


def test_a_restore_that_fails_leaves_no_table_and_no_acknowledged_write(
    served: Callable[..., ServedCluster], tmp_path: Path
) -> None:
    with connect(served(2).address) as cluster:
        path = make(cluster, tmp_path)
        cluster.drop_table("t")
        block = max(path.glob("rows-*"))
        block.write_bytes(block.read_bytes()[:-1])
        with pytest.raises(SnapshotDamaged):
            cluster.restore(path)
        assert (cluster.status().tables, cluster.status().incomplete_tables) == ((), ())
        cluster.create_table("t", dim=2, num_rows=64, optimizer=SGD(1.0))


def test_a_table_that_is_there_is_not_replaced_unless_that_is_asked(cluster: Cluster, tmp_path: Path) -> None:
    path = make(cluster, tmp_path)
    cluster.table("t").push(IDS, -ONES)
    with pytest.raises(TableExists, match="replace=True"):
        cluster.restore(path)
    assert (rows(cluster) == 2).all()


def test_a_repeated_request_to_restore_joins_the_first(served: Callable[..., ServedCluster], tmp_path: Path) -> None:
    with connect(served(1).address) as cluster:
        path = make(cluster, tmp_path)
        cluster.drop_table("t")
        made = cluster._scheduler.create_table(SPEC, for_restore=True)
        request = Restore(folder=str(path), tables=("t",), incarnations=(made.incarnation,))
        go = tmp_path / "go"
        with ThreadPoolExecutor(2) as pool, armed(f"restore.block.before=pause({go})") as passes:
            first = pool.submit(cluster._calls.on_all_shards, request)
            while not passes.fired["restore.block.before"]:
                assert not first.done()
            again = pool.submit(cluster._calls.on_all_shards, request)
            go.touch()
            assert first.result(60)[0].created == again.result(60)[0].created == 64
            assert cluster._calls.on_all_shards(request)[0].created == 64
            assert passes.fired["restore.block.before"] == 1, "the rows were read more than once"


@pytest.mark.parametrize("with_data", [True, False])
@pytest.mark.parametrize("cut_off_at", ["shards", "publish"])
def test_a_scheduler_restarted_meanwhile_opens_nothing_early(tmp_path: Path, with_data: bool, cut_off_at: str) -> None:
    settings: dict[str, Any] = {"num_shards": 2, "lease_seconds": 5}
    if with_data:
        settings["data"] = str(tmp_path / "state")
    served = ServedCluster.__new__(ServedCluster)
    served.num_shards, served.server_settings = 2, {}
    served.scheduler = SchedulerServer(SchedulerConfig(listen="127.0.0.1:0", **settings))
    served.address = served.scheduler.start()
    served.servers = [served.start_server(shard) for shard in range(2)]
    try:
        with connect(served.address) as cluster:
            path = make(cluster, tmp_path / "snapshots")
            made = cluster._scheduler.create_table(SPEC, for_restore=True, replace=True)
            request = Restore(folder=str(path), tables=("t",), incarnations=(made.incarnation,))
            assert [reply.created for reply in cluster._calls.on_all_shards(request)] == [32, 32]  # type: ignore[union-attr]
            if cut_off_at == "publish":  # one shard has opened it
                one = PublishTable(table="t", incarnation=made.incarnation)
                cluster._calls.deliver([(0, one)], CallContext())
            served.scheduler.stop(0)
            served.scheduler = SchedulerServer(SchedulerConfig(listen=served.address, **settings))
            served.scheduler.start()
            while not (view := cluster._scheduler.describe()).ready:
                assert not view.tables
            assert (view.tables, view.incomplete_tables, view.restoring_tables) == ((), ("t",), ("t",))
            with pytest.raises(TableBeingRestored):
                cluster.table("t")
            for _ in range(2):
                cluster._scheduler.publish_tables([made])
            assert (rows(cluster) == 1).all()
    finally:
        served.stop()


def test_a_publication_that_is_cut_off_opens_none_of_the_tables(
    served: Callable[..., ServedCluster], tmp_path: Path
) -> None:
    with connect(served(2).address) as cluster:
        make(cluster, tmp_path / "other")
        cluster.create_table("u", dim=2, num_rows=64, optimizer=SGD(1.0))
        path = cluster.snapshot(tmp_path / "both").result(60)
        with armed("table.publish.after=error"), pytest.raises(InternalError):
            cluster.restore(path, replace=True)
        assert cluster.status().tables == ()
        assert set(cluster.status().incomplete_tables) == {"t", "u"}
        cluster.restore(path)
        assert (rows(cluster) == 1).all()


def test_live_rows_stay_until_every_shard_has_found_the_snapshot(
    served: Callable[..., ServedCluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect(served(2).address) as cluster:
        path = make(cluster, tmp_path)
        cluster.table("t").push(IDS, -ONES)

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
            new.table("t").push(IDS, -ONES)

        if stopped_at == "before the rows are read":
            moment = "restore.create.after"
            monkeypatch.setattr(
                snapshot_restore.failpoints, "reach", lambda name: overtaken() if name == moment else None
            )
        else:
            on_all_shards = snapshot_restore.ShardCalls.on_all_shards

            def answered(*args: Any, **keywords: Any) -> Any:
                outcomes = on_all_shards(*args, **keywords)
                overtaken()
                return outcomes

            monkeypatch.setattr(snapshot_restore.ShardCalls, "on_all_shards", answered)
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
        old.create_table("t", dim=2, num_rows=64, optimizer=SGD(1.0)).push(IDS, ONES)
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
    assert [snapshot.name for snapshot in list_snapshots(root)] == ["first"]
    writer = latest(root).manifest.writer
    assert writer is not None
    assert (writer.stream, writer.incarnation) == ("job/rank0", 1)
