"""Followers of an export: at every version they have the bytes of the trained table, whatever happened in between."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.factory import local
from geartrain.ams.client.snapshots.follower import FollowedTables, TableFollower
from geartrain.ams.observe.failpoints import armed
from geartrain.ams.server.freeze.freezes import Freezes
from geartrain.ams.storage.durable import disk
from geartrain.ams.storage.export.versions import compact_export, newest_version
from geartrain.ams.storage.snapshot.folder import Snapshot, list_snapshots, open_snapshot, prune
from geartrain.ams.storage.snapshot.manifest import FileEntry
from geartrain.ams.tables.row_table import RowTable
from geartrain.ams.values import errors
from geartrain.ams.values.admission.rules import MinCount
from geartrain.ams.values.expiry.rules import Unseen
from geartrain.ams.values.optimizers.registry import SGD, Adagrad, Adam, SparseMomentum

IDS = np.arange(600)
TABLES = ("dense", "hashed")


def make(cluster: Cluster, name: str, **settings: Any) -> None:
    num_rows = 600 if name == "dense" else None
    cluster.create_table(name, dim=3, optimizer=Adagrad(lr=0.1), num_rows=num_rows, **settings)


def write(cluster: Cluster, seed: int, *names: str, count: int = 20) -> None:
    random = np.random.default_rng(seed)
    for name in names or TABLES:
        ids = random.choice(500, count, replace=False)
        cluster.table(name).push(ids, random.standard_normal((count, 3)).astype(np.float32))


def remove(cluster: Cluster, seed: int, *names: str, count: int = 15) -> None:
    for name in names or TABLES:
        cluster.table(name).remove(np.random.default_rng(seed).choice(500, count, replace=False))


def contents(source: Any, name: str) -> tuple[bytes, ...]:
    """The rows of a table or of a copy of it, those that are not there included, and which are there."""
    if isinstance(source, FollowedTables):
        return source.pull(name, IDS).tobytes(), source.rows(name)[0].tobytes()
    table = source.table(name)
    return table.pull(IDS).tobytes(), IDS[table.present(IDS)].tobytes()


def num_rows(path: Any) -> int:
    return sum(entry.num_rows for entry in open_snapshot(path).manifest.files)


def test_a_base_is_read_only_where_deltas_do_not_lead_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    whole = Snapshot.read

    def reading(snapshot: Snapshot, entry: FileEntry) -> dict[str, np.ndarray]:
        read.append(snapshot.name)
        return whole(snapshot, entry)

    monkeypatch.setattr(Snapshot, "read", reading)
    with local(1) as cluster:
        make(cluster, "hashed")

        def export(seed: int) -> None:
            write(cluster, seed, "hashed")
            cluster.export("hashed", tmp_path).result(60)

        export(1)
        near, far = FollowedTables(tmp_path), FollowedTables(tmp_path)
        export(2)
        export(3)
        assert compact_export(tmp_path).name == "version-000000003-whole"
        export(4)
        read.clear()
        assert near.refresh() == 4
        assert read == ["version-000000002", "version-000000003", "version-000000004"]
        export(5)
        assert prune(tmp_path, 1) == ["version-000000003", "version-000000002", "version-000000001"]
        read.clear()
        assert (near.refresh(), far.refresh()) == (5, 5)
        assert read == ["version-000000005", *(f"version-00000000{name}" for name in ("3-whole", 4, 5))]
        assert contents(near, "hashed") == contents(far, "hashed") == contents(cluster, "hashed")


OPERATION = st.one_of(
    st.tuples(st.sampled_from(["write", "write", "remove"]), st.sampled_from(TABLES), st.integers(0, 99)),
    st.tuples(st.sampled_from(["export", "export", "other", "failed", "snapshot"]), st.just(""), st.integers(0, 5)),
    st.tuples(st.sampled_from(["compact", "prune", "refresh"]), st.just(""), st.just(0)),
    st.tuples(st.sampled_from(["recreate", "damaged"]), st.sampled_from(TABLES), st.just(0)),
    st.tuples(st.just("move"), st.just(""), st.integers(1, 3)),
)


@settings(deadline=None, max_examples=12)
@given(st.lists(OPERATION, max_size=14))
def test_no_version_is_wrong_whatever_comes_between(operations: list[tuple[str, str, int]]) -> None:
    root = Path(tempfile.mkdtemp())
    cluster, folder = local(2), root / "export"
    try:
        for name in TABLES:
            make(cluster, name)
            write(cluster, 0, name, count=100)
        cluster.export("*", folder).result(60)
        at_version = {1: [contents(cluster, name) for name in TABLES]}
        followers = [FollowedTables(folder) for _ in range(3)]  # that look always, sometimes, and at the end

        def look(follower: FollowedTables) -> None:
            follower.refresh()
            assert [contents(follower, name) for name in TABLES] == at_version[follower.version]

        for number, (operation, table, argument) in enumerate([*operations, ("write", "dense", 7), ("export", "", 9)]):
            match operation:
                case "write":
                    write(cluster, argument, table)
                case "remove":
                    remove(cluster, argument, table)
                case "export":
                    since = argument if argument in at_version else None
                    try:
                        version = cluster.export("*", folder, since=since).result(60)
                    except (errors.SnapshotNotFound, errors.SnapshotDamaged):  # it was pruned, or cut off from its base
                        assert since is not None
                        version = cluster.export("*", folder).result(60)
                    at_version[version] = [contents(cluster, name) for name in TABLES]
                case "other":  # an export of its own asks for what is new to it
                    cluster.export(TABLES[argument % 2], root / "other").result(60)
                    other = TableFollower(root / "other", TABLES[argument % 2])
                    assert other.pull(IDS).tobytes() == contents(cluster, TABLES[argument % 2])[0]
                    shutil.rmtree(root / "other", ignore_errors=argument < 3)
                case "failed":
                    with pytest.MonkeyPatch.context() as patch:
                        patch.setattr(disk, "write", _full)
                        with pytest.raises(errors.SnapshotFailed, match="No space left"):
                            cluster.export("*", folder).result(60)
                    look(followers[0])
                case "snapshot":
                    newest = next(iter(list_snapshots(root / "snapshots")), None)
                    parent = None if newest is None else newest.path
                    cluster.snapshot(root / "snapshots", f"s{number}", step=number, parent=parent).result(60)
                case "compact":
                    compact_export(folder)
                case "prune":
                    prune(folder, 2)
                case "refresh":
                    look(followers[1])
                case "recreate":
                    cluster.drop_table(table)
                    make(cluster, table)
                    write(cluster, 300, table)
                case "damaged":
                    newest_one = newest_version(folder)
                    assert newest_one is not None
                    if newest_one.manifest.step != max(follower.version for follower in followers):
                        continue
                    (Path(newest_one.path) / "manifest.json").write_text("{}")  # they are past it
                    version = cluster.export("*", folder).result(60)
                    at_version[version] = [contents(cluster, name) for name in TABLES]
                case "move":  # the job goes back, on another number of shards
                    path = cluster.snapshot(root / "moves", f"m{number}").result(60)
                    write(cluster, number)  # which is lost
                    cluster.close()
                    cluster = local(argument)
                    cluster.restore(path)
            look(followers[0])
        look(followers[1])
        look(followers[2])
        assert [contents(followers[2], name) for name in TABLES] == [contents(cluster, name) for name in TABLES]
    finally:
        cluster.close()
        shutil.rmtree(root)


def _full(*_: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("optimizer", [SGD(0.1), Adam(0.1), Adagrad(0.1)], ids=["sgd", "adam", "adagrad"])
def test_a_copy_has_the_bits_of_every_storage_type_and_optimizer(dtype: Any, optimizer: Any, tmp_path: Path) -> None:
    with local(2) as cluster:
        admission = MinCount(1)  # whatever a table has for its training, a copy has none of it
        table = cluster.create_table("t", dim=5, optimizer=optimizer, dtype=dtype, seed=3, admission=admission)
        for seed in range(3):
            random = np.random.default_rng(seed)
            table.push(random.choice(300, 100, replace=False), random.standard_normal((100, 5)).astype(np.float32))
            cluster.export("t", tmp_path).result(60)
            if seed == 0:
                follower = TableFollower(tmp_path)
        assert follower.refresh() == 3
        assert follower.spec.dtype == dtype
        pulled = follower.pull(IDS)
        assert pulled.dtype == (ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype))
        assert pulled.tobytes() == table.pull(IDS).tobytes()
        newest = newest_version(tmp_path)
        assert newest is not None
        assert {name for entry in newest.manifest.files for name in newest.read(entry)} == {"ids", "rows"}
        ids, rows = follower.rows()
        assert len(ids) == len(follower) == int(table.present(IDS).sum())
        assert rows.tobytes() == table.pull(ids).tobytes()


def test_rows_that_expire_or_are_evicted_go_from_followers_too(tmp_path: Path) -> None:
    random, ids = np.random.default_rng(0), np.arange(4000)
    with local(2) as cluster:
        table = cluster.create_table(
            "t", dim=8, optimizer=Adagrad(0.1), max_bytes=100_000, expiry=Unseen(steps=30, every=7)
        )
        cluster.export("t", tmp_path).result(60)
        follower = TableFollower(tmp_path)
        for step in range(60):
            some = random.choice(len(ids), 100, replace=False)
            table.push(some, random.standard_normal((100, 8)).astype(np.float32), step=step)
            if step % 10 == 9:
                assert cluster.export("t", tmp_path).result(60) == follower.refresh()
                assert follower.pull(ids).tobytes() == table.pull(ids).tobytes()
                assert follower.rows()[0].tolist() == ids[table.present(ids)].tolist()
        status = cluster.status().tables[0]
        assert min(status.expired, status.evicted) > 0, "the test shows nothing"
        assert (follower.spec.expiry, follower.spec.max_bytes) == (None, None)


def test_every_damaged_file_is_named_and_what_was_there_stays(tmp_path: Path) -> None:
    with local(2) as cluster:
        make(cluster, "hashed")
        write(cluster, 0, "hashed", count=300)
        cluster.export("hashed", tmp_path).result(60)
        follower = FollowedTables(tmp_path)
        before = contents(follower, "hashed")
        write(cluster, 1, "hashed")
        folder = Path(cluster.export("hashed", tmp_path).path)
        cluster.export("hashed", tmp_path / "done").result(60)  # after which the other is written, too
        live = contents(cluster, "hashed")
    for file in sorted(folder.iterdir()):
        whole = file.read_bytes()
        for content in (whole[:-1], whole[: len(whole) // 2] + b"\x7f" + whole[len(whole) // 2 + 1 :], None):
            file.unlink() if content is None else file.write_bytes(content)
            with pytest.raises(errors.SnapshotDamaged, match=file.name):
                follower.refresh()
            assert (follower.version, contents(follower, "hashed")) == (1, before)
            file.write_bytes(whole)
    assert follower.refresh() == 2
    assert contents(follower, "hashed") == live


def test_a_damaged_delta_is_passed_over_once_there_is_a_base_after_it(tmp_path: Path) -> None:
    with local(1) as cluster:
        make(cluster, "hashed")
        follower = None
        for seed in range(4):
            write(cluster, seed, "hashed")
            pending = cluster.export("hashed", tmp_path)
            pending.result(60)
            follower = follower or FollowedTables(tmp_path)
            if seed == 2:
                damaged = next(Path(pending.path).glob("*.safetensors"))
                damaged.write_bytes(damaged.read_bytes()[:-8])
        assert follower is not None
        with pytest.raises(errors.SnapshotDamaged, match=damaged.name):
            follower.refresh()
        assert follower.version == 2, "the version before it was whole"
        cluster.export("hashed", tmp_path, since=2).result(60)
        assert follower.refresh() == 5
        assert contents(follower, "hashed") == contents(cluster, "hashed")


def test_rows_are_listed_while_a_table_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with local(2) as cluster:
        make(cluster, "hashed")
        write(cluster, 0, "hashed", count=300)
        with pytest.MonkeyPatch.context() as patch:  # a shard that is not told of a version writes all rows in the next
            end = Freezes.thaw
            patch.setattr(Freezes, "thaw", lambda one, *args, **kept: None if one._shard else end(one, *args, **kept))
            cluster.export("hashed", tmp_path).result(60)
        follower, before = FollowedTables(tmp_path), contents(cluster, "hashed")
        write(cluster, 1, "hashed")
        cluster.export("hashed", tmp_path).result(60)
        listed: list[Any] = []
        lister = threading.Thread(target=lambda: listed.append(follower.rows("hashed")[0].tobytes()))
        read_frozen = RowTable.read_frozen

        def read(*args: Any) -> Any:
            if lister.ident is None:
                lister.start()
                lister.join(0.1)  # it has to wait
            return read_frozen(*args)

        monkeypatch.setattr(RowTable, "read_frozen", read)
        assert follower.refresh() == 2
        lister.join()
        assert listed[0] in (before[1], contents(cluster, "hashed")[1])


def test_an_export_waits_for_a_snapshot_and_is_ended_by_one(tmp_path: Path) -> None:
    with local(2) as cluster:
        make(cluster, "hashed")
        write(cluster, 0, "hashed")
        with armed(f"block.write.before=pause({tmp_path / 'go'})"):
            snapshot = cluster.snapshot(tmp_path / "s", "0")
            exported: list[int] = []
            waiting = threading.Thread(target=lambda: exported.append(cluster.export("*", tmp_path / "e").result(60)))
            waiting.start()
            waiting.join(0.3)
            assert waiting.is_alive(), "the export did not wait"
            (tmp_path / "go").touch()
            snapshot.result(60)
        waiting.join(60)
        assert exported == [1]
        with armed(f"block.write.before=pause({tmp_path / 'again'})") as passes:
            pending = cluster.export("*", tmp_path / "e", since=0)
            while not passes.fired["block.write.before"]:
                time.sleep(0.01)
            snapshot = cluster.snapshot(tmp_path / "s", "1")
            (tmp_path / "again").touch()
            snapshot.result(60)
            with pytest.raises(errors.SnapshotSuperseded):
                pending.result(60)
        assert [listed.name for listed in list_snapshots(tmp_path / "e")] == ["version-000000001"]
        assert cluster.export("*", tmp_path / "e").result(60) == 2


@pytest.mark.usefixtures("memory_urls")
@pytest.mark.parametrize("cluster", ["local-3", "tcp-2"], indirect=True)
def test_versions_lie_below_a_url(cluster: Cluster, tmp_path: Path) -> None:
    root = f"memory://bucket{tmp_path}/export"
    make(cluster, "hashed")
    write(cluster, 0, "hashed", count=300)
    cluster.export("hashed", root).result(60)
    follower = FollowedTables(root)
    for seed in (1, 2):
        write(cluster, seed, "hashed")
        cluster.export("hashed", root).result(60)
    compact_export(root)
    write(cluster, 3, "hashed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("geartrain.ams.storage.snapshot.blocks.failpoints.reach", _full_at_a_block)
        with pytest.raises(errors.SnapshotFailed):
            cluster.export("hashed", root).result(60)
    assert cluster.export("hashed", root).result(60) == follower.refresh()
    assert contents(follower, "hashed") == contents(cluster, "hashed")
    assert contents(FollowedTables(root), "hashed") == contents(cluster, "hashed")


def _full_at_a_block(name: str) -> None:
    if name == "block.write.after":
        raise OSError(28, "No space left on device")


def test_what_cannot_be_exported_or_followed_is_said(tmp_path: Path) -> None:
    with local(1) as cluster:
        make(cluster, "hashed")
        make(cluster, "dense")
        cluster.create_table("moving", dim=2, optimizer=SparseMomentum(0.1, untouched="elapsed"), num_rows=9)
        with pytest.raises(errors.TableNotFound, match="'item'; tables of this cluster: 'hashed'"):
            cluster.export("item", tmp_path / "e")
        with pytest.raises(errors.InvalidArgument, match="rows of table 'moving' move at every step"):
            cluster.export("*", tmp_path / "e")
        with pytest.raises(errors.SnapshotNotFound, match="holds no version yet"):
            TableFollower(tmp_path / "e")
        with pytest.raises(errors.SnapshotNotFound, match=r"version 7 is not in .*, which holds no version"):
            cluster.export("hashed", tmp_path / "e", since=7)
        write(cluster, 0)
        cluster.snapshot(tmp_path / "s", "0", tables=["hashed"]).result(60)
        with pytest.raises(errors.InvalidArgument, match="an export needs a folder of its own"):
            cluster.export("hashed", tmp_path / "s")
        cluster.export(TABLES, tmp_path / "e").result(60)
        with pytest.raises(errors.InvalidArgument, match="has tables 'hashed', 'dense'; say which"):
            TableFollower(tmp_path / "e")
        with pytest.raises(errors.TableNotFound, match="no table 'item' in version 1"):
            TableFollower(tmp_path / "e", "item")
        with pytest.raises(errors.InvalidIds, match="id -1"):
            TableFollower(tmp_path / "e", "dense").pull(np.array([-1]))
        with pytest.raises(errors.InvalidArgument, match="a version of an export"):
            cluster.restore(tmp_path / "e" / "version-000000001", replace=True)
