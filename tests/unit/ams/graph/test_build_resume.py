"""A build that was ended goes on from what it saved, and takes nothing of another build."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from geartrain.ams.graph.building import builder
from geartrain.ams.graph.building.builder import build_neighbours
from geartrain.ams.graph.building.rows import ArrayRows
from geartrain.ams.storage import durable
from geartrain.ams.values.errors import Cancelled, ConfigError, StateFailed

MEMORY = 220_000
ROWS = np.random.default_rng(7).standard_normal((1500, 16)).astype(np.float32)


@pytest.fixture(autouse=True)
def save_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "SAVE_SECONDS", 0.0)


def build(folder: Path | None, rows: np.ndarray = ROWS, k: int = 5, stop_after: int | None = None) -> tuple[list, list]:
    """The lists, and the progress of every step."""
    seen: list[int] = []
    table = build_neighbours(
        ArrayRows(rows),
        k,
        memory_bytes=MEMORY,
        resume=folder,
        progress=lambda done, _: seen.append(done),
        cancelled=lambda: stop_after is not None and len(seen) >= stop_after,
    )
    return table.neighbours.tolist(), seen


def computed(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Collects a mark for each comparison that is made."""
    marks: list[object] = []
    compare = builder._Build._compare

    def spy(self: object, *args: object) -> None:
        marks.append(args)
        compare(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(builder._Build, "_compare", spy)
    return marks


@pytest.mark.parametrize("stop_after", [1, 7, 20, 33])
def test_a_cancelled_build_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_after: int
) -> None:
    marks = computed(monkeypatch)
    expected, steps = build(None)
    total = len(marks)
    assert total == len(steps) > stop_after
    marks.clear()
    with pytest.raises(Cancelled):
        build(tmp_path, stop_after=stop_after)
    found, _ = build(tmp_path)
    assert found == expected
    # With a folder, a state is in memory twice: parts are smaller and there may be more steps.
    whole_marks = len(marks)
    marks.clear()
    build(tmp_path / "other")
    assert whole_marks == len(marks)


def test_a_finished_build_is_found_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = build(tmp_path)
    marks = computed(monkeypatch)
    assert build(tmp_path)[0] == expected and marks == []
    assert {path.suffix for path in tmp_path.iterdir()} == {".done"}


def test_nothing_of_other_rows_or_another_k_is_taken(tmp_path: Path) -> None:
    build(tmp_path)
    other = ROWS.copy()
    other[700, 3] += np.float32(0.5)
    assert build(tmp_path, rows=other)[0] == build(None, rows=other)[0]
    assert build(tmp_path, rows=other, k=4)[0] == build(None, rows=other, k=4)[0]


@pytest.mark.parametrize("where", [0, 3, 40, -1])
def test_a_damaged_part_is_built_anew(tmp_path: Path, where: int) -> None:
    expected, _ = build(tmp_path)
    for path in tmp_path.iterdir():
        data = bytearray(path.read_bytes())
        data[where] ^= 0x10
        path.write_bytes(bytes(data))
    assert build(tmp_path)[0] == expected
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes()[:11])
    assert build(tmp_path)[0] == expected


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="file"):
        build(tmp_path / "file" / "folder")

    def full(self: object, file: object, data: object) -> None:  # noqa: ARG001
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(durable.Disk, "write", full)
    with pytest.raises(StateFailed, match="No space left"):
        build(tmp_path / "folder")
