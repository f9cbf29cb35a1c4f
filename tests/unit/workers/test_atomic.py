"""Folders that are replaced whole: the old one goes when the new one is on the disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from geartrain.workers.atomic import previous_folder, replacing_folder


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
