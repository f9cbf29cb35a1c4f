"""What a slow gear is told by name, and what is said of names that do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from geartrain.ams.errors import ConfigError
from geartrain.workers.gear_objects import load_function, load_object, open_samples


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_module_of_the_current_folder_is_found(here: Path) -> None:
    (here / "memory_of_mine.py").write_text("def build(): return 3\nclass Deep:\n    samples = staticmethod(build)\n")
    assert load_function("memory_of_mine:build", "module")() == 3
    source, _ = open_samples("memory_of_mine:Deep.samples", None)  # no store, whatever it begins with
    assert source() == 3


@pytest.mark.parametrize("place", ["./image.py:build", "image.py:build", "/models/image.py:build", ".image:build"])
def test_a_file_is_no_module(here: Path, place: str) -> None:
    (here / "image.py").write_text("def build(): return 3\n")
    with pytest.raises(ConfigError, match=r"must be the name of a module, not a file: 'image:build'"):
        load_object(place, "module")


def test_what_the_module_raises_is_told(here: Path) -> None:
    (here / "typo_in_mine.py").write_text("def build(:\n")
    (here / "raises_in_mine.py").write_text("raise RuntimeError('no weights')\n")
    with pytest.raises(ConfigError, match=r"module 'typo_in_mine:build' cannot be loaded: SyntaxError"):
        load_object("typo_in_mine:build", "module")
    with pytest.raises(ConfigError, match="RuntimeError: no weights"):
        load_object("raises_in_mine:build", "module")
    with pytest.raises(ConfigError, match=r"No module named 'nowhere'; is its folder on PYTHONPATH"):
        load_object("nowhere:build", "module")


@pytest.mark.parametrize("place", ["memory", "image", ":build", "image:"])
def test_half_a_name_is_refused(place: str) -> None:
    with pytest.raises(ConfigError, match="must be 'module:name'"):
        open_samples(place, None)
