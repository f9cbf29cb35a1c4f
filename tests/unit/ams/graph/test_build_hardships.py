"""Builds under hardship: rows that change, little memory, copies of one row, and what is told meanwhile."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from geartrain.ams.graph.building import builder
from geartrain.ams.graph.building.builder import build_neighbours
from geartrain.ams.graph.building.neighbours import NeighbourTable
from geartrain.ams.graph.building.recall import CoreProducts
from geartrain.ams.graph.building.rows import ArrayRows
from geartrain.ams.kernels import neighbours as ops
from geartrain.ams.values.errors import Cancelled
from tests.specification import ops as reference

MEMORY = 110_000


def random_rows(num_rows: int, dim: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((num_rows, dim)).astype(np.float32)


def lists_of(table: NeighbourTable) -> np.ndarray:
    return table.neighbours.reshape(table.num_classes, -1)


class Training(ArrayRows):
    """Rows that are others after so many were read."""

    def __init__(self, rows: np.ndarray, sound: int, later: np.ndarray | None = None) -> None:
        super().__init__(rows)
        self.left, self.later = sound, later

    def read(self, start: int, stop: int) -> np.ndarray:
        self.left -= stop - start
        if self.left >= 0:
            return super().read(start, stop)
        return random_rows(stop - start, self.dim, start) if self.later is None else self.later[start:stop]


@pytest.mark.parametrize("sound", [0, 1500, 1700, 5000])
@pytest.mark.parametrize("later", ["random", "copies", "zeros"])
def test_rows_that_change_while_they_are_read_give_lists_that_can_be_used(sound: int, later: str) -> None:
    others = {"random": None, "copies": np.ones((1500, 16), np.float32), "zeros": np.zeros((1500, 16), np.float32)}
    found = lists_of(build_neighbours(Training(random_rows(1500, 16), sound, others[later]), 5, memory_bytes=MEMORY))
    assert found.shape == (1500, 5) and found.min() >= 0 and found.max() < 1500
    assert all(len({i, *row}) == 6 for i, row in enumerate(found.tolist()))


def test_what_was_built_of_changed_rows_is_not_taken_for_the_rows_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(builder, "SAVE_SECONDS", 0.0)
    rows, later = random_rows(600, 16), random_rows(600, 16, 1)
    build_neighbours(Training(rows, 1000, later), 5, memory_bytes=70_000, resume=tmp_path)
    assert "changed while a graph was built" in caplog.text
    found = build_neighbours(ArrayRows(rows), 5, memory_bytes=70_000, resume=tmp_path)
    np.testing.assert_array_equal(lists_of(found), reference.nearest_neighbours(rows, 5))


@pytest.mark.parametrize("kind", ["random", "copies"])
@pytest.mark.parametrize("memory", [2_000_000, 4_000_000])
def test_little_memory_is_held_to(kind: str, memory: int) -> None:
    rows = random_rows(5000, 256)
    if kind == "copies":
        rows[:] = rows[0]
    tracemalloc.start()
    try:
        table = build_neighbours(ArrayRows(rows), 8, memory_bytes=memory, num_threads=1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= memory + table.num_bytes


def test_copies_of_one_row_are_one_work(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    exact_best = ops.exact_best

    def spy(rows: np.ndarray, *arguments: Any, **settings: Any) -> None:
        made.append(len(rows))
        exact_best(rows, *arguments, **settings)

    monkeypatch.setattr(ops, "exact_best", spy)
    rows = random_rows(3, 8)[np.random.default_rng(1).integers(0, 3, 2000)]
    found = build_neighbours(ArrayRows(rows), 40)
    np.testing.assert_array_equal(lists_of(found), reference.nearest_neighbours(rows, 40))
    assert sum(made) == 3


def test_rows_that_are_redone_can_be_cancelled_between_two_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "_BLOCK_ROWS", 25)
    rows, made, exact_best = np.ones((250, 4), np.float32), [0], ops.exact_best

    def spy(*arguments: Any, **settings: Any) -> None:
        made[0] += 1
        exact_best(*arguments, **settings)

    monkeypatch.setattr(ops, "exact_best", spy)
    with pytest.raises(Cancelled):
        build_neighbours(ArrayRows(rows), 4, cancelled=lambda: made[0] == 3)
    assert made == [3]


def test_a_width_that_float32_products_cannot_bound_is_redone_exactly() -> None:
    assert CoreProducts(1).error_bound(2**24) == np.inf
