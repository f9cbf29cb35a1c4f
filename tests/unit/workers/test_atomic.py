"""Folders that are replaced whole: the old one goes when the new one is on the disk."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from geartrain.cli.shared.signals import exiting_in_order
from geartrain.workers.atomic import previous_folder, replacing, replacing_folder, sole_user


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


def test_what_ended_processes_left_is_removed_and_what_others_write_is_not(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left, locked, other = (
        tmp_path / f".{name}.part" for name in (f"1.{ended.pid}", f"1.0{ended.pid}", f"1.{os.getppid()}")
    )
    for folder in (left, locked, other):
        folder.mkdir()
        (folder / "model.onnx").touch()
    with sole_user(locked), replacing_folder(tmp_path / "1") as staging:
        (staging / "model.onnx").touch()
    assert sorted(tmp_path.iterdir()) == sorted([locked, other, tmp_path / "1"])


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
