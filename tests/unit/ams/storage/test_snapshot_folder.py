"""Names, order, commits that are refused, and what pruning keeps."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from geartrain.ams.storage.snapshot.blocks import write_job_file
from geartrain.ams.storage.snapshot.folder import (
    Staging,
    latest,
    list_snapshots,
    new_staging,
    open_snapshot,
    prune,
)
from geartrain.ams.storage.snapshot.manifest import MANIFEST, FileEntry, Writer
from geartrain.ams.storage.snapshot.store import store_of
from geartrain.ams.values.errors import InvalidArgument, SnapshotDamaged, SnapshotFailed, SnapshotNotFound
from geartrain.ams.values.placement import even_placement

Take = Callable[..., Path]


def names(root: Path) -> list[str]:
    return [listed.name for listed in list_snapshots(root)]


def a_file(staging: Staging, name: str = "x") -> FileEntry:
    return write_job_file(staging.path, snapshot_id=staging.id, name=name, data=b"123")


def commit(staging: Staging, *files: FileEntry, **overrides: Any) -> Path:
    values: dict[str, Any] = {"step": 1, "created": 1.0, "num_shards": 1, "tables": [], **overrides}
    placement = even_placement(values["num_shards"])
    return staging.commit(files=files, **{"bucket_shards": placement, **values})


def test_a_manifest_comes_back_as_it_was_given(tmp_path: Path, take: Take) -> None:
    manifest = open_snapshot(take(tmp_path, "a", step=7, created=1.5)).manifest
    assert (manifest.step, manifest.created, manifest.num_shards, manifest.parent) == (7, 1.5, 2, None)
    assert manifest.tables[0] == {"name": "sku", "dim": 4, "seed": 2**64 - 1}
    assert manifest.job == {"big": 1e30, "cursor": [1, 2], "note": "\x1f"}
    assert {(entry.kind, entry.table, entry.shard, entry.index) for entry in manifest.files} == {
        *(("rows", table, shard, index) for table, index in (("sku", 0), ("sku", 1), ("a/b ü", 0)) for shard in (0, 1)),
        ("job", None, None, 0),
    }


def test_the_one_that_was_written_last_is_the_newest_whatever_its_step_and_the_clock(
    tmp_path: Path, take: Take
) -> None:
    for name, step, created in (("a", 90, 5.0), ("b", 100, 9.0), ("c", 50, 3.0), ("d", 50, 1.0), ("e", 60, 2.0)):
        take(tmp_path, name, step=step, created=created)
    assert names(tmp_path) == ["e", "d", "c", "b", "a"]
    assert latest(tmp_path).name == "e"
    assert prune(tmp_path, 3) == ["a", "b"]
    take(tmp_path, "f", step=1, created=0.0)
    assert names(tmp_path) == ["f", "e", "d", "c"]


def test_one_whose_age_is_unknown_might_be_the_newest(tmp_path: Path, take: Take) -> None:
    for step in (1, 2, 3):
        take(tmp_path, f"s{step}", step=step)
    (tmp_path / "s1" / MANIFEST).unlink()
    assert names(tmp_path) == ["s1", "s3", "s2"]
    with pytest.raises(SnapshotDamaged, match=r"'s1'.*manifest.json is damaged: it is missing.*allow_fallback"):
        latest(tmp_path)
    assert latest(tmp_path, allow_fallback=True).name == "s3"


def test_what_else_lies_in_a_root_is_no_snapshot(tmp_path: Path, take: Take) -> None:
    take(tmp_path, "a")
    for name in ("lost+found", "notes", ".hidden"):
        (tmp_path / name).mkdir()
    (tmp_path / "notes" / "readme.txt").write_text("x")
    (tmp_path / "file").write_text("x")
    new_staging(tmp_path, "b")
    assert names(tmp_path) == ["a"]


def test_where_there_is_none_it_says_so(tmp_path: Path) -> None:
    assert list_snapshots(tmp_path / "nowhere") == []
    with pytest.raises(SnapshotNotFound, match="nowhere"):
        latest(tmp_path / "nowhere")
    with pytest.raises(SnapshotNotFound, match="nowhere"):
        open_snapshot(tmp_path / "nowhere")
    assert prune(tmp_path / "nowhere", 1) == []


@pytest.mark.parametrize("look", ["size", "read"])
def test_a_snapshot_that_goes_between_two_looks_is_not_there(
    look: str, tmp_path: Path, take: Take, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = take(tmp_path, "a")
    store = type(store_of(path))
    real = getattr(store, look)

    def late(*args: Any) -> Any:
        path.rename(tmp_path / ".gone")
        return real(*args)

    monkeypatch.setattr(store, look, late)
    with pytest.raises(SnapshotNotFound, match="a is not the folder of a snapshot"):
        open_snapshot(path)


def test_a_root_that_is_a_file_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(SnapshotFailed, match="cannot be listed"):
        list_snapshots(tmp_path / "file")
    with pytest.raises(SnapshotFailed, match=r"was not begun: Not a directory\. A file is in its way: give a folder"):
        new_staging(tmp_path / "file", "a")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../a", ".hidden", "-x", "a b", "a\n", "x" * 101])
def test_a_name_cannot_leave_its_root(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidArgument, match="name is"):
        new_staging(tmp_path, name)
    assert not list(tmp_path.iterdir())


def test_a_name_in_use_is_refused_at_both_ends(tmp_path: Path, take: Take) -> None:
    late = new_staging(tmp_path, "a")
    take(tmp_path, "a", step=1)
    with pytest.raises(SnapshotFailed, match="already exists"):
        new_staging(tmp_path, "a")
    with pytest.raises(SnapshotFailed, match="already exists"):
        commit(late)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert open_snapshot(tmp_path / "a").verify() == []


def test_a_commit_checks_that_its_files_are_there_and_no_others(tmp_path: Path) -> None:
    staging = new_staging(tmp_path, "missing")
    entry = a_file(staging)
    (Path(staging.path) / entry.path).unlink()
    with pytest.raises(SnapshotFailed, match="job-x is missing"):
        commit(staging, entry)
    staging = new_staging(tmp_path, "short")
    entry = a_file(staging)
    (Path(staging.path) / entry.path).write_bytes(b"1")
    with pytest.raises(SnapshotFailed, match="job-x has 1 of 3 bytes"):
        commit(staging, entry)
    staging = new_staging(tmp_path, "unlisted")
    a_file(staging)
    with pytest.raises(SnapshotFailed, match="job-x is not listed"):
        commit(staging)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"step": -1}, "step.*-1"),
        ({"step": "1"}, "step.*'1'"),
        ({"created": float("nan")}, "created.*nan"),
        ({"num_shards": 0}, "num_shards.*0"),
        ({"job": {"a": object()}}, "job.a"),
        ({"job": {"a": float("inf")}}, "JSON"),
        ({"job": {"a": "\ud800"}}, "JSON"),
        ({"tables": [{1: 2}]}, "tables"),
    ],
)
def test_what_cannot_be_a_manifest_is_the_callers_mistake(
    tmp_path: Path, overrides: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidArgument, match=named):
        commit(new_staging(tmp_path, "a"), **overrides)
    assert not list(tmp_path.iterdir())


def test_a_file_listed_twice_or_of_a_shard_too_many_is_refused(tmp_path: Path, take: Take) -> None:
    staging = new_staging(tmp_path, "twice")
    entry = a_file(staging)
    with pytest.raises(InvalidArgument, match="'job-x' more than once"):
        commit(staging, entry, entry)
    files = open_snapshot(take(tmp_path, "a")).manifest.files
    with pytest.raises(InvalidArgument, match="is of shard 1; num_shards is 1"):
        commit(new_staging(tmp_path, "b"), *files, num_shards=1)


@pytest.mark.parametrize(
    "change",
    [
        {"path": "../x"},
        {"path": "manifest.json"},
        {"shard": 0},
        {"table": "u"},
        {"kind": "job"},
        {"index": 5},
        {"x": 1},
    ],
    ids=str,
)
def test_an_entry_whose_name_is_not_its_own_is_refused(tmp_path: Path, take: Take, change: dict[str, Any]) -> None:
    entry = open_snapshot(take(tmp_path, "a")).manifest.files[-1]
    assert FileEntry.model_validate(entry.model_dump()) == entry
    with pytest.raises(ValueError, match="validation error"):
        FileEntry.model_validate({**entry.model_dump(), **change})


def test_abandoning_leaves_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    staging = new_staging(tmp_path, "a")
    a_file(staging)
    staging.abandon()
    staging.abandon()
    assert not list(tmp_path.iterdir())
    with pytest.raises(SnapshotFailed, match="was not written"):
        commit(staging)


def test_what_a_killed_writer_left_is_no_part_of_the_snapshot(tmp_path: Path) -> None:
    staging = new_staging(tmp_path, "a")
    entry = a_file(staging)
    (Path(staging.path) / ".part-1-job-y").write_bytes(b"half")
    assert open_snapshot(commit(staging, entry)).verify() == []


def test_pruning_keeps_the_newest(tmp_path: Path, take: Take) -> None:
    for step in range(5):
        take(tmp_path, f"s{step}", step=step)
    assert prune(tmp_path, 2) == ["s0", "s1", "s2"]
    assert names(tmp_path) == ["s4", "s3"]
    assert prune(tmp_path, 2) == []
    with pytest.raises(InvalidArgument, match="keep is 0"):
        prune(tmp_path, 0)


def test_pruning_never_removes_the_only_sound_one(tmp_path: Path, take: Take) -> None:
    for step in range(5):
        take(tmp_path, f"s{step}", step=step)
    for step in (2, 3, 4):
        next((tmp_path / f"s{step}").glob("rows-*")).write_bytes(b"")
    assert prune(tmp_path, 2) == ["s0", "s2"]
    assert names(tmp_path) == ["s4", "s3", "s1"]
    assert prune(tmp_path, 1) == ["s3"]
    assert latest(tmp_path, allow_fallback=True).name == "s1"


def test_one_with_a_damaged_manifest_is_neither_counted_nor_removed(tmp_path: Path, take: Take) -> None:
    for step in range(4):
        take(tmp_path, f"s{step}", step=step)
    (tmp_path / "s0" / MANIFEST).write_bytes(b"{}")
    for file in (tmp_path / "s0").iterdir():
        os.utime(file, (0, 0))
    assert prune(tmp_path, 2) == ["s1"]
    assert names(tmp_path) == ["s0", "s3", "s2"]


def test_pruning_removes_stale_staging_folders_and_all_trash(tmp_path: Path, take: Take) -> None:
    take(tmp_path, "a")
    stale, fresh = new_staging(tmp_path, "b"), new_staging(tmp_path, "c")
    os.utime(stale.path, (1000.0, 1000.0))
    os.utime(fresh.path, (2000.0, 2000.0))
    shutil.copytree(tmp_path / "a", tmp_path / ".trash-x-0")
    assert prune(tmp_path, 1, stale_seconds=60, now=2050.0) == []
    assert {path.name for path in tmp_path.iterdir()} == {"a", Path(fresh.path).name}


def by(incarnation: int, stream: str = "job/rank0") -> Writer:
    return Writer(stream=stream, incarnation=incarnation)


def test_one_that_was_committed_after_its_successor_began_is_not_the_newest(tmp_path: Path, take: Take) -> None:
    take(tmp_path, "a", step=10, created=1.0, writer=by(1))
    take(tmp_path, "b", step=11, created=2.0, writer=by(2))
    take(tmp_path, "late", step=20, created=3.0, writer=by(1))
    assert names(tmp_path) == ["b", "a", "late"]
    assert latest(tmp_path).name == "b"
    assert prune(tmp_path, 2) == ["late"]


def test_one_that_the_job_went_back_behind_is_not_the_newest(tmp_path: Path, take: Take) -> None:
    take(tmp_path, "a", step=10, created=1.0, writer=by(1))
    take(tmp_path, "beyond", step=30, created=2.0, writer=by(1))
    take(tmp_path, "again", step=20, created=3.0, writer=by(2))
    assert names(tmp_path) == ["again", "a", "beyond"]


def test_one_of_a_superseded_process_is_told_without_a_clock(tmp_path: Path, take: Take) -> None:
    take(tmp_path, "a", step=10, created=50.0, writer=by(1))
    take(tmp_path, "b", step=20, created=90.0, writer=by(2))
    take(tmp_path, "late", step=15, created=60.0, writer=by(1))  # by a clock that is behind
    assert names(tmp_path) == ["b", "a", "late"]


def test_those_of_other_streams_and_of_nobody_are_sorted_as_they_were_written(tmp_path: Path, take: Take) -> None:
    take(tmp_path, "a", step=30, writer=by(1))
    take(tmp_path, "b", step=20, writer=by(2, "another/rank0"))
    take(tmp_path, "c", step=25)
    assert names(tmp_path) == ["c", "b", "a"]
