"""Building a table of neighbours: exact whatever the rows, the memory, the threads and the engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.ams.graph.building import acceptance
from geartrain.ams.graph.building.builder import build_neighbours
from geartrain.ams.graph.building.neighbours import NeighbourTable
from geartrain.ams.graph.building.recall import CoreProducts
from geartrain.ams.graph.building.rows import ArrayRows, Floats
from geartrain.ams.values.errors import Cancelled, InvalidArgument, InvalidRows, NonFinite
from tests.specification import ops as reference


def rows_of(kind: str, num_rows: int, dim: int, seed: int) -> Floats:
    random = np.random.default_rng(seed)
    rows = random.standard_normal((num_rows, dim)).astype(np.float32)
    if kind == "copies":
        rows = rows[random.integers(0, max(1, num_rows // 9), num_rows)]
    elif kind == "near":  # differences far below what float32 products tell apart
        rows = rows[:1] + np.float32(1e-6) * rows
    elif kind == "zeros":
        rows[random.random(num_rows) < 0.3] = 0
    elif kind == "scales":
        rows *= 10.0 ** random.integers(-30, 18, (num_rows, 1))
    elif kind == "whole":
        rows = np.rint(rows)
    return rows.astype(np.float32)


def lists_of(table: NeighbourTable) -> np.ndarray:
    return table.neighbours.reshape(table.num_classes, -1)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["random", "copies", "near", "zeros", "scales", "whole"]),
    num_rows=st.integers(1, 300),
    dim=st.integers(1, 40),
    k=st.integers(1, 40),
    share=st.sampled_from([0.0, 0.1, 0.3, 0.7, 1.0]),
    num_threads=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
def test_a_table_equals_the_reference(
    kind: str, num_rows: int, dim: int, k: int, share: float, num_threads: int, seed: int
) -> None:
    rows = rows_of(kind, num_rows, dim, seed)
    least = 64 * (12 * dim + 64 * (k + 10))  # from reading rows again and again to all in memory
    memory = least + int(share * num_rows * (4 * dim + 64 * (k + 10)))
    table = build_neighbours(ArrayRows(rows), k, memory_bytes=memory, num_threads=num_threads)
    np.testing.assert_array_equal(lists_of(table), reference.nearest_neighbours(rows, k))
    assert table.k == k and table.neighbours.dtype == np.int32


def test_the_table_is_that_of_a_float64_search_up_to_ties() -> None:
    rows = rows_of("random", 3000, 64, 0)
    wide = rows.astype(np.float64) / np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
    cosines = wide @ wide.T
    np.fill_diagonal(cosines, -np.inf)
    best = -np.sort(-cosines, axis=1)[:, :32]
    found = lists_of(build_neighbours(ArrayRows(rows), 32))
    np.testing.assert_allclose(np.take_along_axis(cosines, found, axis=1), best, rtol=0, atol=1e-7)
    assert all(len(set(row)) == 32 for row in found.tolist())


class ReadAgain(ArrayRows):
    """Counts how often rows are read."""

    reads = 0

    def read(self, start: int, stop: int) -> np.ndarray:
        self.reads += stop - start
        return super().read(start, stop)


def test_rows_that_do_not_fit_are_read_again_and_give_the_same_table() -> None:
    rows = rows_of("random", 2000, 48, 1)
    whole, parts = ReadAgain(rows), ReadAgain(rows)
    expected = lists_of(build_neighbours(whole, 8))
    np.testing.assert_array_equal(lists_of(build_neighbours(parts, 8, memory_bytes=300_000)), expected)
    assert whole.reads == 2000 and parts.reads > 3 * 2000


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("num_rows", [1, 150])
def test_a_row_that_is_not_finite_is_named(bad: float, num_rows: int) -> None:
    rows = np.ones((num_rows, 3), np.float32)
    rows[num_rows - 1, 1] = bad
    with pytest.raises(NonFinite, match=f"row of class {num_rows - 1} holds NaN or infinity"):
        build_neighbours(ArrayRows(rows), 2)


def test_arguments_out_of_range_are_refused() -> None:
    rows = ArrayRows(np.ones((200, 3), np.float32))
    with pytest.raises(InvalidArgument, match="k is 0"):
        build_neighbours(rows, 0)
    with pytest.raises(InvalidArgument, match="0 rows"):
        build_neighbours(ArrayRows(np.ones((0, 3), np.float32)), 1)
    with pytest.raises(InvalidArgument, match="dim 0"):
        build_neighbours(ArrayRows(np.ones((3, 0), np.float32)), 1)
    with pytest.raises(InvalidArgument, match="num_threads is 0"):
        build_neighbours(rows, 1, num_threads=0)
    with pytest.raises(InvalidArgument, match=r"memory_bytes is 1000; .* at least \d+"):
        build_neighbours(rows, 1, memory_bytes=1000)
    with pytest.raises(InvalidRows, match=r"must be \[C, D\]"):
        ArrayRows(np.ones(3, np.float32))


def test_progress_ends_at_all_pairs_and_a_build_can_be_cancelled() -> None:
    rows = ArrayRows(rows_of("random", 1000, 8, 3))
    seen: list[tuple[int, int]] = []
    build_neighbours(rows, 4, memory_bytes=200_000, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1] and len(seen) > 5
    with pytest.raises(Cancelled, match=rf"after {seen[2][0]} of {seen[2][1]} pairs"):
        build_neighbours(
            rows,
            4,
            memory_bytes=200_000,
            progress=lambda done, total: seen.append((done, total)),
            cancelled=lambda: seen[-1] == seen[2] and len(seen) > 3,
        )


class Doubtful(CoreProducts):
    """Claims to be far less exact than it is."""

    name = "doubtful"

    def __init__(self, spare: int) -> None:
        super().__init__(2)
        self.spare, self.bound = spare, 0.08

    def error_bound(self, dim: int) -> float:  # noqa: ARG002
        return self.bound

    def num_candidates(self, k: int) -> int:
        return k + self.spare


def test_only_rows_that_the_recall_leaves_uncertain_are_redone(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, redone = rows_of("random", 700, 24, 5), []
    keep = acceptance.Refiner._redo_in_float32

    def spy(self: Any, rows: Floats, first: int, places: np.ndarray, *rest: Any) -> np.ndarray:
        redone.append(len(places))
        return keep(self, rows, first, places, *rest)

    monkeypatch.setattr(acceptance.Refiner, "_redo_in_float32", spy)
    for spare in (2, 12, 700):
        found = build_neighbours(ArrayRows(rows), 6, products=Doubtful(spare))
        np.testing.assert_array_equal(lists_of(found), reference.nearest_neighbours(rows, 6))
    assert redone[0] > redone[1] > redone[2] == 0


@pytest.mark.parametrize("dim", [1, 3, 128, 515])
def test_no_product_of_the_core_exceeds_its_error_bound(dim: int) -> None:
    rows = rows_of("random", 200, dim, dim) + 1
    unit = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    engine = CoreProducts(2)
    recall = engine.start(0, 200, 200)
    block = engine.load(unit, 0)
    recall.compare_inside(block, block)
    arrays = recall.arrays()
    assert arrays["counts"].tolist() == [199] * 200
    true = unit.astype(np.float64) @ unit.astype(np.float64).T
    for i in range(200):
        found, ids = arrays["scores"][i, :199], arrays["ids"][i, :199]
        assert sorted(ids.tolist()) == [j for j in range(200) if j != i]
        assert np.max(np.abs(found - true[i, ids])) <= engine.error_bound(dim)
