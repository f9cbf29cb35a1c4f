"""Folders as users write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from geartrain.ams.storage.snapshot.store import parse_place
from geartrain.ams.values.arguments import path_name


def test_the_users_folder_is_meant_by_a_tilde(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert path_name("path", "~/m", "a folder") == str(tmp_path / "m")
    assert path_name("path", Path("~/m"), "a folder") == tmp_path / "m"
    assert path_name("path", "a/~b", "a folder") == "a/~b"
    assert parse_place("~/runs") == tmp_path / "runs"
