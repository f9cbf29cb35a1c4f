"""A disk that fails, and a process that dies, at every call that changes the disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from geartrain.ams.storage.durable import Disk, disk
from geartrain.ams.storage.snapshot.folder import latest, list_snapshots, open_snapshot, prune
from geartrain.ams.storage.snapshot.manifest import MANIFEST
from geartrain.ams.values.errors import SnapshotFailed

Take = Callable[..., Path]
CALLS = ("create_folder", "write", "sync", "rename", "remove_folder")


class Died(BaseException):
    """The process ends here: no handler runs that a killed process would not run."""


class Fault:
    """Counts the calls to ``disk`` and lets one of them, or all from one on, fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Callable[[], BaseException], at: int | None) -> None:
        self.calls: list[tuple[str, Path | None]] = []
        self.error, self.at, self.for_good, self.after = error, at, False, False
        for name in CALLS:
            monkeypatch.setattr(disk, name, self._counted(name))

    def _counted(self, name: str) -> Callable[..., None]:
        def call(*args: Any) -> None:
            number = len(self.calls)
            self.calls.append((name, next((arg for arg in args if isinstance(arg, Path)), None)))
            fails = self.at is not None and (number >= self.at if self.for_good else number == self.at)
            if not fails:
                getattr(Disk, name)(disk, *args)
                return
            if name == "write":
                Disk.write(disk, args[0], args[1][: len(args[1]) // 2])
            elif self.after:
                getattr(Disk, name)(disk, *args)
            raise self.error()

        return call


def calls_of_a_take(root: Path, take: Take) -> int:
    with pytest.MonkeyPatch.context() as patch:
        fault = Fault(patch, Died, None)
        take(root, "counted", step=2)
    return len(fault.calls)


def os_error(number: int) -> Callable[[], OSError]:
    return lambda: OSError(number, os.strerror(number))


@pytest.mark.parametrize("mode", ["once", "for good", "once, but done"])
def test_a_failing_disk_leaves_the_previous_snapshot_and_nothing_else(tmp_path: Path, take: Take, mode: str) -> None:
    root = tmp_path / "root"
    take(root, "previous", step=1)
    for at in range(calls_of_a_take(tmp_path, take)):
        number = (errno.ENOSPC, errno.EIO, errno.EACCES)[at % 3]  # what is done about one is done about any
        with pytest.MonkeyPatch.context() as patch:
            fault = Fault(patch, os_error(number), at)
            fault.for_good, fault.after = mode == "for good", mode == "once, but done"
            with pytest.raises(SnapshotFailed, match=os.strerror(number)) as raised:
                take(root, "failed", step=2)
            assert isinstance(raised.value.__cause__, OSError)
        assert [listed.name for listed in list_snapshots(root)] == ["previous"], (at, fault.calls[at])
        assert open_snapshot(root / "previous").verify() == []
        for block in root.glob(".staging-*/[!.]*"):
            assert block.stat().st_size in {e.bytes for e in open_snapshot(root / "previous").manifest.files}
    take(root, "failed", step=2)  # the name is free, and the disk well again
    assert latest(root).name == "failed"


def test_a_failing_disk_where_there_was_no_root_leaves_no_snapshot(tmp_path: Path, take: Take) -> None:
    for at in range(calls_of_a_take(tmp_path / "new" / "root", take)):
        root = tmp_path / str(at)
        with pytest.MonkeyPatch.context() as patch:
            Fault(patch, os_error(errno.EIO), at)
            with pytest.raises(SnapshotFailed):
                take(root / "deep", "failed")
        assert list_snapshots(root / "deep") == []


def test_a_process_that_dies_anywhere_leaves_only_whole_snapshots(tmp_path: Path, take: Take) -> None:
    seen = set()
    for at in range(calls_of_a_take(tmp_path, take)):
        root = tmp_path / str(at)
        take(root, "previous", step=1)
        with pytest.MonkeyPatch.context() as patch:
            fault = Fault(patch, Died, at)
            with pytest.raises(Died):
                take(root, "dying", step=2)
        seen.add(fault.calls[at][0])
        names = [listed.name for listed in list_snapshots(root)]
        assert names in (["previous"], ["dying", "previous"]), fault.calls[at]
        for listed in list_snapshots(root):
            assert listed.snapshot is not None
            assert listed.snapshot.verify() == []
        take(root, "next", step=3)
        prune(root, 1, stale_seconds=-60)
        assert [path.name for path in root.iterdir()] == ["next"]
    assert seen == {"create_folder", "write", "sync", "rename"}


@pytest.mark.parametrize("after", [False, True])
def test_a_process_that_dies_while_it_prunes_leaves_only_whole_snapshots(
    tmp_path: Path, take: Take, after: bool
) -> None:
    at, ended = 0, False
    while not ended:
        root = tmp_path / str(at)
        for step in (1, 2, 3):
            take(root, f"s{step}", step=step)
        with pytest.MonkeyPatch.context() as patch:
            fault = Fault(patch, Died, at)
            fault.after = after
            try:
                prune(root, 1)
                ended = True
            except Died:
                pass
        for listed in list_snapshots(root):
            assert listed.snapshot is not None
            assert listed.snapshot.verify() == []
        assert latest(root).name == "s3"
        at += 1
    assert at > 6


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES], ids=errno.errorcode.get)
def test_what_cannot_be_pruned_is_a_typed_error(tmp_path: Path, take: Take, number: int) -> None:
    for at in range(6):
        root = tmp_path / str(at)
        for step in (1, 2, 3):
            take(root, f"s{step}", step=step)
        with pytest.MonkeyPatch.context() as patch:
            Fault(patch, os_error(number), at)
            with pytest.raises(SnapshotFailed, match="was not pruned to 1 snapshot"):
                prune(root, 1)
        assert all(listed.snapshot and not listed.snapshot.verify() for listed in list_snapshots(root))
        prune(root, 1)
        assert [path.name for path in root.iterdir()] == ["s3"]


def test_files_are_synced_before_the_manifest_and_the_rename_comes_last(
    tmp_path: Path, take: Take, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    fault = Fault(monkeypatch, Died, None)
    final = take(root, "a")
    blocks = {path.name for path in final.iterdir()} - {MANIFEST}
    staging = next(path for name, path in fault.calls if name == "create_folder")
    assert staging is not None
    order = [(name, path) for name, path in fault.calls if name in ("sync", "rename") and path is not None]
    synced = [path.name for name, path in order if name == "sync" and path.parent == staging]
    assert set(synced[:-1]) == blocks
    assert synced[-1] == MANIFEST
    assert order[-3:] == [("sync", staging), ("rename", staging), ("sync", root)]
    assert order.index(("sync", staging / MANIFEST)) == len(order) - 5
    assert order[-4][0] == "rename"  # of the manifest's part to its name
    for number, (name, path) in enumerate(order[:-3]):
        if name == "rename":  # a file takes its name only after it was synced
            assert path is not None
            assert order[number - 1][0] == "sync"
            assert path.name.endswith(f"-{order[number - 1][1].name}")


def test_a_block_takes_its_name_only_when_it_is_whole(tmp_path: Path, take: Take) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fault = Fault(patch, Died, None)
        take(tmp_path / "a", "a")
        writes = [number for number, (name, _) in enumerate(fault.calls) if name == "write"]
    for at in writes:
        root = tmp_path / f"dying-{at}"
        with pytest.MonkeyPatch.context() as patch:
            Fault(patch, Died, at)
            with pytest.raises(Died):
                take(root, "a")
        (staging,) = root.iterdir()
        hidden = [path for path in staging.iterdir() if path.name.startswith(".")]
        assert len(hidden) == 1
        assert hidden[0].stat().st_size > 0
        assert not (staging / MANIFEST).exists()
