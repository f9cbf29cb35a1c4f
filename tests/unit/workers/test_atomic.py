"""Folders that are replaced whole: the old one goes when the new one is on the disk."""

from __future__ import annotations

import fcntl
import os
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from geartrain.ams.values.errors import RunHeld
from geartrain.cli.shared.signals import exiting_in_order
from geartrain.workers.atomic import previous_folder, replacing, replacing_folder, sole_user
from geartrain.workers.job import folder as folders


def test_the_old_folder_is_there_until_all_of_the_new_one_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, synced, sync = tmp_path / "model", list[str](), os.fsync

    def noted(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        assert (folder / "old").exists()
        assert not previous_folder(folder).exists()
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    with replacing_folder(folder) as staging:
        (staging / "old").touch()
    assert synced == []
    with replacing_folder(folder) as staging:
        (staging / "tables").mkdir()
        (staging / "tables" / "0").touch()
        (staging / "new").touch()
    assert sorted(synced) == ["0", "new"]
    assert sorted(path.name for path in folder.iterdir()) == ["new", "tables"]


def test_a_folder_that_its_last_user_removed_is_not_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, flock = tmp_path / "run", fcntl.flock
    folder.mkdir()

    def removed(*arguments: int) -> None:
        flock(*arguments)
        folder.rmdir()

    monkeypatch.setattr(fcntl, "flock", removed)
    with pytest.raises(BlockingIOError), sole_user(folder):
        pass


def test_one_that_is_refused_leaves_the_folder_of_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, create = tmp_path / "run", folders.create_folder
    with ExitStack() as first:

        def created(*arguments: Any) -> None:  # another process is a little faster
            create(*arguments)
            monkeypatch.undo()
            first.enter_context(folders.sole_trainer(folder))

        monkeypatch.setattr(folders, "create_folder", created)
        with pytest.raises(RunHeld), folders.sole_trainer(folder):
            pass
        assert folder.exists()


def test_sigterm_leaves_no_part(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended, exiting_in_order(), replacing_folder(tmp_path / "1"):
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM
    assert not [*tmp_path.iterdir()]


def test_an_error_names_the_place_and_not_its_part(tmp_path: Path) -> None:
    for written, error in ((tmp_path / "folder", IsADirectoryError), (Path("/proc/scores"), OSError)):
        (tmp_path / "folder").mkdir(exist_ok=True)
        with pytest.raises(error) as refused, replacing(written) as part:
            part.touch()
        assert refused.value.filename == str(written)
    with pytest.raises(OSError, match="/proc/1000000000'") as refused, replacing_folder(Path("/proc/1000000000")):
        pass
