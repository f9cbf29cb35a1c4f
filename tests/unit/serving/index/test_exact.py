"""Exact means exact: answers against scores made in float64 from the same float32 numbers.

Legend: R rows, D width, N features, k answers.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from geartrain.ams.kernels import neighbours as ops
from geartrain.ams.values.errors import InvalidArgument, InvalidRows, ModelDamaged
from geartrain.serving.index import exact
from geartrain.serving.index.exact import EncodedRows
from geartrain.serving.index.nearest import NearestIndex
from geartrain.serving.index.registry import open_index, write_index

Floats = npt.NDArray[np.float32]
Positions = npt.NDArray[np.int64]

kinds = st.sampled_from(["ordinary", "near ties", "copies", "small integers", "huge", "tiny", "mixed", "zeros"])


def drawn(kind: str, num_rows: int, dim: int, generator: np.random.Generator) -> Floats:
    """Rows of a kind that is hard to tell apart."""
    rows = generator.standard_normal((num_rows, dim))
    match kind:
        case "near ties":
            rows = rows[:1] + 1e-6 * rows
        case "copies":
            rows = rows[generator.integers(0, 3, num_rows) % num_rows]
        case "small integers":
            rows = np.round(rows)
        case "huge":
            rows = rows * 1e37
        case "tiny":
            rows = rows * 1e-42
        case "mixed":
            rows = rows * 10.0 ** generator.integers(-44, 38, (num_rows, 1))
        case "zeros":
            rows = rows * (generator.random((num_rows, 1)) < 0.3)
    return np.clip(rows, -3e38, 3e38).astype(np.float32)


def expected(rows: Floats, features: Floats, k: int, biases: Floats | None = None) -> tuple[Floats, Positions]:
    """The k best by (score rounded to float32 falling, position rising), sums in the order of ``exact_dot.hpp``."""
    products = features.astype(np.float64)[:, None] * rows.astype(np.float64)
    sums = np.zeros((*products.shape[:2], 16))
    for start in range(0, rows.shape[1], 16):
        some = products[..., start : start + 16]
        sums[..., : some.shape[-1]] += some
    for width in (8, 4, 2, 1):
        sums = sums[..., :width] + sums[..., width:]
    scores = sums[..., 0] if biases is None else sums[..., 0] + biases
    with np.errstate(over="ignore"):
        rounded = scores.astype(np.float32) + np.float32(0)
    order = np.lexsort((np.broadcast_to(np.arange(len(rows)), rounded.shape), -rounded), axis=1)[:, :k]
    return np.take_along_axis(rounded, order, axis=1), order


@given(
    st.integers(1, 90),
    st.integers(1, 40),
    st.integers(1, 37),
    st.integers(1, 100),
    kinds,
    kinds,
    st.booleans(),
    st.integers(0, 99),
)
def test_the_answers_are_those_of_float64(
    num_rows: int, dim: int, num_features: int, k: int, of_rows: str, of_features: str, with_biases: bool, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    rows = drawn(of_rows, num_rows, dim, generator)
    features = drawn(of_features, num_features, dim, generator)
    biases = drawn(of_rows, num_rows, 1, generator)[:, 0] if with_biases else None
    scores, positions = EncodedRows.of(rows, biases).search(features, k, threads=1)
    true_scores, true_positions = expected(rows, features, k, biases)
    assert positions.tolist() == true_positions.tolist()
    assert scores.tobytes() == true_scores.tobytes()


def test_features_whose_scores_overflow_are_refused() -> None:
    centers = np.random.default_rng(0).standard_normal((100, 8)).astype(np.float32) * 3
    features = np.array([[1] * 8, [3e38] * 8], np.float32)
    index = NearestIndex(EncodedRows.of(centers), is_cosine=False, threads=1, facts={})
    with pytest.raises(InvalidArgument, match=r"features\[1\] has numbers as large as 3e\+38"):
        index.search(features, 3)
    centers /= np.linalg.norm(centers, axis=1, keepdims=True)
    index = NearestIndex(EncodedRows.of(centers), is_cosine=True, threads=1, facts={})
    (of_ones, of_huge), _ = index.search(features, 3)
    np.testing.assert_allclose(of_huge, of_ones, rtol=1e-6)


def test_with_thousands_of_ties_the_lowest_positions_come_first() -> None:
    generator = np.random.default_rng(0)
    rows = drawn("copies", 30_000, 20, generator)
    features = np.concatenate([rows[:2], np.zeros((1, 20), np.float32)])
    scores, positions = EncodedRows.of(rows).search(features, 7000, threads=2)
    true_scores, true_positions = expected(rows, features, 7000)
    assert (positions == true_positions).all()
    assert (scores == true_scores).all()


def test_rows_that_rise_all_the_way_are_found_by_every_thread() -> None:
    """Every row is the best one so far: nothing can be left out early."""
    rows = np.linspace(0, 1, 200_000, dtype=np.float32)[:, None] * np.ones((1, 24), np.float32)
    for threads in (1, 2, 5):
        _, positions = EncodedRows.of(rows, threads=threads).search(np.ones((20, 24), np.float32), 3, threads=threads)
        assert (positions == [199_999, 199_998, 199_997]).all()


def test_the_codes_of_rows_are_within_half_a_step() -> None:
    rows = drawn("ordinary", 40, 6, np.random.default_rng(0))
    panels = EncodedRows.of(rows).panels.reshape(3, -1, 16, 4)
    codes = panels[:, :2].transpose(0, 2, 1, 3).reshape(48, 8).astype(np.float64) - 128
    scales, left_out, lengths = panels[:, 2:].copy().view("<f4")[..., 0].transpose(1, 0, 2).reshape(3, 48)
    rests = rows - (codes * scales[:, None])[:40, :6]
    assert (np.abs(rests) <= 0.5001 * scales[:40, None]).all()
    assert (codes[:, 6:] == 0).all()
    assert (codes[40:] == 0).all()
    for told, true in ((left_out, np.linalg.norm(rests, axis=1)), (lengths, np.linalg.norm(rows, axis=1))):
        assert (told[:40] >= true).all()
        np.testing.assert_allclose(told[:40], true, rtol=1e-5)


def test_a_written_index_is_mapped_and_answers_alike(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    centers, features = drawn("ordinary", 1003, 12, generator), drawn("ordinary", 9, 12, generator)
    facts = write_index(tmp_path, centers, is_cosine=False)
    index = open_index(tmp_path, {"is_cosine": False, "index": facts}, centers)
    assert index.facts["kind"] == "exact"
    assert [path.name for path in tmp_path.iterdir()] == facts["files"]
    for ours, true in zip(index.search(features, 5), expected(centers, features, 5), strict=True):
        assert ours.tobytes() == true.tobytes()


@pytest.mark.parametrize("damage", ["truncated", "of another size", "missing", "no index at all"])
def test_a_damaged_index_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    centers = drawn("ordinary", 1003, 12, np.random.default_rng(0))
    facts = write_index(tmp_path, centers, is_cosine=False)
    file = tmp_path / "index.npy"
    match damage:
        case "truncated":
            file.write_bytes(file.read_bytes()[:-1])
        case "of another size":
            write_index(tmp_path, centers[:900], is_cosine=False)
        case "missing":
            file.unlink()
        case _:
            file.write_bytes(b"PK" * 900)
    with pytest.raises(ModelDamaged, match=r"index\.npy (cannot be read|is an index of another size)"):
        open_index(tmp_path, {"is_cosine": False, "index": facts}, centers)


def test_a_center_that_is_not_finite_is_named(tmp_path: Path) -> None:
    centers = drawn("ordinary", 70, 12, np.random.default_rng(0)).reshape(35, 2, 12)
    centers[31, 1, 4] = np.inf
    with pytest.raises(InvalidRows, match="the center at position 31 has a value that is not finite"):
        write_index(tmp_path, centers, is_cosine=False)


def test_the_room_on_the_disk_is_taken_before_mapped_memory_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk is an OSError there; when memory is written that has no room in its file, the process ends."""
    file = tmp_path / "index.npy"

    def checked(*_: object) -> None:
        assert file.stat().st_blocks * 512 >= file.stat().st_size > 1 << 20

    monkeypatch.setattr(exact, "encode", checked)
    exact.write_panels(file, drawn("ordinary", 20_000, 60, np.random.default_rng(0)), 1)


@pytest.mark.parametrize("wrong", ["features", "panels", "k"])
def test_the_kernel_refuses_arrays_that_do_not_fit(wrong: str) -> None:
    rows = EncodedRows.of(np.ones((20, 4), np.float32))
    given = {"features": np.ones((2, 4), np.float32), "panels": rows.panels, "k": 3}
    given[wrong] = {
        "features": np.ones((2, 5), np.float32),
        "panels": rows.panels[:1],
        "k": 21,
    }[wrong]
    shape = 2, given.pop("k")
    with pytest.raises(ValueError, match="must be"):
        ops.search_rows(
            rows.centers, given["panels"], None, 0.0, given["features"],
            np.empty(shape, np.float32), np.empty(shape, np.int64), threads=1,
        )  # fmt: skip
