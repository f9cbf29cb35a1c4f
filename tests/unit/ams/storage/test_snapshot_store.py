"""Snapshots below an fsspec URL: the manifest commits, and damage is named as on a disk."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from geartrain.ams.storage.snapshot import store
from geartrain.ams.storage.snapshot.blocks import write_job_file
from geartrain.ams.storage.snapshot.folder import latest, list_snapshots, new_staging, open_snapshot, prune
from geartrain.ams.storage.snapshot.manifest import MANIFEST
from geartrain.ams.storage.snapshot.store import parse_place, place
from geartrain.ams.values.errors import InvalidArgument, SnapshotDamaged, SnapshotFailed, SnapshotNotFound
from tests.unit.ams.storage.conftest import take_snapshot

Take = Callable[..., Any]
_NUMBERS = itertools.count()


@pytest.fixture
def memory(memory_urls: None) -> Iterator[MemoryFileSystem]:  # noqa: ARG001
    system = fsspec.filesystem("memory")
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = [""]


@pytest.fixture
def root(memory: MemoryFileSystem) -> str:  # noqa: ARG001
    return f"memory://bucket/{next(_NUMBERS)}"


def names(root: str) -> list[str]:
    return [listed.name for listed in list_snapshots(root)]


def test_a_snapshot_is_written_listed_read_and_pruned(root: str, take: Take, memory: MemoryFileSystem) -> None:
    assert (names(root), prune(root, 1)) == ([], [])
    for step in (1, 2, 3):
        path = take(root, f"s{step}", step=step)
        assert path == f"{root}/s{step}"
    with pytest.raises(SnapshotFailed, match="already exists"):
        take(root, "s1")
    with pytest.raises(SnapshotNotFound, match="s9"):
        open_snapshot(f"{root}/s9")
    assert names(f"{root}/") == ["s3", "s2", "s1"]
    snapshot = latest(root)
    assert (snapshot.name, snapshot.verify()) == ("s3", [])
    assert snapshot.read(next(e for e in snapshot.manifest.files if e.kind == "rows"))["rows"].shape == (8, 4)
    assert prune(root, 1) == ["s1", "s2"]
    assert names(root) == ["s3"]
    assert not memory.exists(f"{root}/s1")


def test_every_damage_below_a_url_is_named(root: str, take: Take, memory: MemoryFileSystem) -> None:
    take(root, "b", step=0)
    snapshot = open_snapshot(take(root, "a"))
    where = f"{root}/a/{snapshot.manifest.id}"
    for entry in snapshot.manifest.files:
        path = f"{where}/{entry.path}"
        whole = memory.cat_file(path)
        for damaged in (whole[:-1], whole + b"x", b"", bytes([whole[0] ^ 1]) + whole[1:], None):
            memory.rm_file(path)
            if damaged is not None:
                memory.pipe_file(path, damaged)
            (found,) = snapshot.verify()
            assert path in str(found)
            with pytest.raises(SnapshotDamaged):
                latest(root)
            assert latest(root, allow_fallback=True).name == "b"
        memory.pipe_file(path, whole)
    memory.pipe_file(f"{where}/rows-extra", b"x")
    assert "rows-extra is damaged" in str(snapshot.verify()[0])
    memory.rm_file(f"{where}/rows-extra")
    assert snapshot.verify() == []
    memory.pipe_file(f"{root}/a/{MANIFEST}", b"{}")
    assert names(root) == ["a", "b"]
    with pytest.raises(SnapshotDamaged, match=f"{root}/a/{MANIFEST}"):
        open_snapshot(f"{root}/a")


@pytest.mark.parametrize("look", ["names", "size", "read"])
def test_a_snapshot_that_is_pruned_between_two_looks_is_not_there(
    root: str, take: Take, look: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = take(root, "a")
    kind = type(store.store_of(path))
    real = getattr(kind, look)

    def late(self: Any, *args: Any) -> Any:
        self.hide(path)  # as prune does it first: its other files are there still
        monkeypatch.setattr(kind, look, real)
        return real(self, *args)

    monkeypatch.setattr(kind, look, late)
    with pytest.raises(SnapshotNotFound, match="a is not the folder of a snapshot"):
        open_snapshot(path)
    assert names(root) == []


class Died(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("error", [OSError("no such bucket"), RuntimeError("a library's own error"), Died()], ids=repr)
@pytest.mark.parametrize("arrives", [False, True])
def test_a_write_that_fails_anywhere_leaves_no_snapshot(
    root: str, take: Take, error: BaseException, arrives: bool
) -> None:
    take(root, "old", step=1)
    calls = len(open_snapshot(f"{root}/old").manifest.files) + 2
    whole, numbers = MemoryFileSystem.pipe_file, itertools.count()
    for at in range(calls):
        numbers = itertools.count()

        def failing(*args: Any, **keywords: Any) -> None:
            fails = next(numbers) == at  # noqa: B023
            if arrives or not fails:
                whole(*args, **keywords)
            if fails:
                raise error

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MemoryFileSystem, "pipe_file", failing)
            with pytest.raises(Died if isinstance(error, Died) else SnapshotFailed):
                take(root, "new", step=2)
        is_committed = isinstance(error, Died) and arrives and at == calls - 1
        assert names(root) == (["new", "old"] if is_committed else ["old"]), at
        assert latest(root).verify() == []
    if not isinstance(error, Died):
        take(root, "new", step=2)
        assert latest(root).name == "new"


@pytest.mark.parametrize("error", [OSError("connection lost"), Died()], ids=repr)
def test_where_half_a_file_can_be_seen_a_write_that_is_cut_off_leaves_no_snapshot(
    root: str, take: Take, memory: MemoryFileSystem, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def renamed(self: MemoryFileSystem, source: str, target: str) -> None:
        self.store[self._strip_protocol(target)] = self.store.pop(self._strip_protocol(source))

    monkeypatch.setattr(MemoryFileSystem, "mv", renamed)
    monkeypatch.setattr(store, "_SHOWS_HALVES", ("memory",))
    take(root, "old", step=1)
    calls = len(open_snapshot(f"{root}/old").manifest.files) + 2
    whole = MemoryFileSystem.pipe_file
    for at in range(calls):
        numbers = itertools.count()

        def half(self: MemoryFileSystem, path: str, value: bytes) -> None:
            if next(numbers) == at:  # noqa: B023
                whole(self, path, value[: len(value) // 2])
                raise error
            whole(self, path, value)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MemoryFileSystem, "pipe_file", half)
            with pytest.raises(Died if isinstance(error, Died) else SnapshotFailed):
                take(root, "new", step=2)
        assert names(root) == ["old"], at
        assert latest(root).verify() == []
    take(root, "new", step=2)
    assert (latest(root).name, latest(root).verify()) == ("new", [])
    prune(root, 1)
    assert not any(path.startswith(f"{memory._strip_protocol(root)}/old") for path in memory.store)


def test_a_late_write_of_an_attempt_that_was_given_up_spoils_nothing(root: str, take: Take) -> None:
    given_up = new_staging(root, "a")
    given_up.abandon()
    path = take(root, "a")
    write_job_file(given_up.path, snapshot_id=given_up.id, name="backbone.safetensors", data=b"late")
    assert open_snapshot(path).verify() == []
    with pytest.raises(InvalidArgument, match="not the staging folder of snapshot"):
        write_job_file(given_up.path, snapshot_id="0" * 32, name="x", data=b"")


def test_what_was_never_committed_is_removed_once_it_is_stale(root: str, take: Take, memory: MemoryFileSystem) -> None:
    take(root, "a")
    unfinished = new_staging(root, "b")
    write_job_file(unfinished.path, snapshot_id=unfinished.id, name="x", data=b"1")
    memory.pipe_file(f"{root}/notes/readme", b"not ours")
    written = datetime.timestamp(memory.modified(f"{unfinished.path}/job-x"))
    prune(root, 1, stale_seconds=60, now=written + 59)
    assert memory.exists(f"{root}/b")
    prune(root, 1, stale_seconds=60, now=written + 61)
    assert sorted(path.rpartition("/")[2] for path in memory.ls(root, detail=False)) == ["a", "notes"]


def test_what_was_copied_to_a_disk_is_a_snapshot_there(root: str, tmp_path: Path, memory: MemoryFileSystem) -> None:
    snapshot = open_snapshot(take_snapshot(root, "a"))  # type: ignore[arg-type]
    memory.get(f"{root}/a/{snapshot.manifest.id}", str(tmp_path / "a"), recursive=True)
    assert open_snapshot(tmp_path / "a").manifest == snapshot.manifest
    assert open_snapshot(tmp_path / "a").verify() == []


def test_a_file_url_is_the_local_disk(tmp_path: Path, take: Take) -> None:
    assert place(f"file://{tmp_path}/x/") == tmp_path / "x"
    assert place("a/b") == Path("a/b").absolute()
    path = take(f"file://{tmp_path}", "a")
    assert path == tmp_path / "a"
    assert names(f"file://{tmp_path}") == ["a"]


NO_PLACES = (
    *("nosuch://x/y", "s3nosuch://b", "S3://b/x", "ftp://127.0.0.1/x", "http://127.0.0.1/x", "memory://x", "zip://x"),
    *("reference://::file:///x.json", "simplecache::s3://b/x", "s3://b/x::file:///etc", "file:///tmp::s3://b", "a\0b"),
    *("s3://b/x?versionId=1", "s3://b/x#y", "s3://b/../c", "s3://b/./c", "s3://b//c", "s3://", "s3:///x"),
    *("s3://key:secret@b/x", "s3://b\\c/x", "hdfs://", "hdfs://host:port/x", "hdfs://[::1]:8020/x", "s3://b/x\n"),
)


@pytest.mark.parametrize("url", NO_PLACES)
def test_a_url_of_another_kind_or_with_options_is_a_typed_error(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*_: object, **__: object) -> None:
        raise AssertionError("a file system was opened")

    monkeypatch.setattr(fsspec.spec._Cached, "__call__", opened)
    with pytest.raises(InvalidArgument) as caught:
        list_snapshots(url)
    if "secret" in url or "?" in url:
        assert "secret" not in str(caught.value) and "versionId" not in str(caught.value)
    else:
        assert repr(url) in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        *(
            "s3://bucket/runs/1",
            "s3a://b",
            "gs://b/x y/é",
            "gcs://b/x",
            "az://c/x",
            "abfss://c@a.dfs.core.windows.net/x",
        ),
        *("hdfs://name:8020/x", "hdfs://user@10.0.0.1:8020/x", "hdfs:///x"),
    ],
)
def test_urls_of_object_stores_and_hdfs_are_places(url: str) -> None:
    assert parse_place(f"{url}/") == url


def test_what_a_file_system_does_not_offer_is_a_typed_error(
    root: str, take: Take, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        take(root, f"s{step}", step=step)

    def missing(*_: object, **__: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(MemoryFileSystem, "rm_file", missing)
    with pytest.raises(SnapshotFailed, match="NotImplementedError"):
        prune(root, 1)
    assert names(root) == ["s2", "s1"]


def test_a_url_whose_package_is_missing_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    with pytest.raises(InvalidArgument, match=r"s3://b/x.*\(Install s3fs.*pip install 'geartrain\[s3\]'"):
        list_snapshots("s3://b/x")
