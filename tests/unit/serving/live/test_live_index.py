"""An index that is older than the versions it serves: taken while it finds enough, built anew when it does not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from geartrain.serving.index import choice
from geartrain.serving.index.registry import open_index
from geartrain.serving.live import build_index
from geartrain.serving.live import index as live
from geartrain.serving.live.index import LiveIndex
from geartrain.workers.models.saved_model import CENTERS, read_config, seal_model, write_arrays

pytest.importorskip("faiss")

Floats = npt.NDArray[np.float32]


def rows_of(count: int, seed: int = 0) -> Floats:
    rows = np.random.default_rng(seed).standard_normal((count, 16))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def written(index: LiveIndex, folder: Path, centers: Floats, ids: npt.NDArray[np.int64]) -> dict[str, Any]:
    """A version as the follower writes it."""
    folder.mkdir()
    write_arrays(folder / CENTERS, {"centers": centers, "ids": ids})
    facts = index.write(folder, centers, None, ids, is_cosine=True)
    assert facts is not None
    seal_model(folder, [str(label) for label in ids], {"kind": "pictures", "is_cosine": True, "index": facts})
    index.start(folder)
    return facts


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Few classes count as many, and are built by this process, which alone knows that; of which versions."""
    built = list[Path]()
    monkeypatch.setattr(choice, "EXACT_IS_ENOUGH", 0)
    monkeypatch.setattr(choice, "_WORTHWHILE", 0.0)
    monkeypatch.setattr(live, "EXACT_IS_ENOUGH", 0)

    def run(_: str, __: str, *arguments: str, is_ending: Callable[[], bool]) -> None:
        assert not is_ending()
        built.append(Path(arguments[0]))
        build_index.main(arguments)

    monkeypatch.setattr(live, "run_child", run)
    return built


def test_it_is_taken_for_later_versions_until_it_finds_too_little(
    small: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, ids = LiveIndex(tmp_path, 0.9), np.arange(0, 1000, 2)
    assert written(index, tmp_path / "1", rows_of(500), ids)["kind"] == "exact"
    index.wait()
    ids = np.union1d(ids[10:], [3, 2000])
    facts = written(index, tmp_path / "2", rows_of(492), ids)
    index.wait()
    assert (facts["kind"], facts["younger"], len(small)) == ("ivf", 492, 2)  # all rows are others
    ids = np.union1d(ids[:-1], [5, 3000])
    centers = rows_of(493, seed=1)
    centers[~np.isin(ids, [5, 3000])] = rows_of(492)[:-1]
    facts = written(index, tmp_path / "3", centers, ids)
    assert (facts["kind"], facts["younger"], len(small)) == ("ivf", 2, 2)
    assert facts["recall_at_1"] >= 0.9
    served = open_index(tmp_path / "3", read_config(tmp_path / "3"), centers)
    newcomers = np.flatnonzero(np.isin(ids, [5, 3000]))
    assert served.search(centers[newcomers], 1)[1][:, 0].tolist() == newcomers.tolist()
    monkeypatch.setattr(choice, "_EFFORTS", (1,))
    index = LiveIndex(tmp_path, 0.9999)
    facts = written(index, tmp_path / "4", centers, ids)
    index.wait()
    assert (facts["kind"], len(small)) == ("exact", 3)
    assert facts["passed_over"][0]["recall_at_1"] < 0.9999
    assert not (tmp_path / "4" / "index.faiss").exists()


def test_a_process_builds_it_and_what_is_no_use_is_built_again_only_for_more_classes_or_less_recall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, run = list[str](), live.run_child

    def noted(*arguments: str, is_ending: Callable[[], bool]) -> None:
        built.append(Path(arguments[2]).name)
        run(*arguments, is_ending=is_ending)

    monkeypatch.setattr(live, "run_child", noted)
    monkeypatch.setattr(live, "EXACT_IS_ENOUGH", 0)  # the process finds that these are few
    for number, (count, recall) in enumerate([(100, 0.9), (110, 0.9), (130, 0.9), (130, 0.95), (130, 0.8), (130, 0.8)]):
        index = LiveIndex(tmp_path, recall)
        assert written(index, tmp_path / str(number), rows_of(count), np.arange(count))["kind"] == "exact"
        index.wait()
    assert built == ["0", "2", "4"]


@pytest.mark.usefixtures("small")
def test_a_damaged_one_is_told_of_and_built_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    index, ids = LiveIndex(tmp_path, 0.9), np.arange(500)
    written(index, tmp_path / "1", rows_of(500), ids)
    index.wait()
    (tmp_path / ".index" / "index.faiss").write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        assert written(index, tmp_path / "2", rows_of(500), ids)["kind"] == "exact"
    assert "cannot use the index of an older version, building another" in caplog.text
    index.wait()
    assert written(index, tmp_path / "3", rows_of(500), ids)["kind"] == "ivf"


def test_without_a_wish_for_less_than_all_there_is_no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "EXACT_IS_ENOUGH", 0)
    assert LiveIndex(tmp_path, 1.0).write(tmp_path, rows_of(50), None, np.arange(50), is_cosine=True) is None
    assert not list(tmp_path.iterdir())
