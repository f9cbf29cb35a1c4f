"""Indexes of faiss beside the exact one: what is chosen, what is found, what is never answered."""

from __future__ import annotations

import builtins
import errno
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from geartrain.ams.values.errors import ConfigError, InvalidArgument, ModelDamaged
from geartrain.serving.index import choice, shortcut
from geartrain.serving.index.choice import choose_index, sample_queries
from geartrain.serving.index.exact import EncodedRows
from geartrain.serving.index.nearest import NearestIndex
from geartrain.serving.index.registry import open_index, write_index, write_older
from geartrain.workers.models.saved_model import write_arrays

pytest.importorskip("faiss")

Floats = npt.NDArray[np.float32]
COSINE = {"is_cosine": True}


def clustered(num_rows: int, *shape: int, seed: int = 0) -> Floats:
    generator = np.random.default_rng(seed)
    near = generator.standard_normal((num_rows // 20 + 1, *shape))[generator.integers(0, num_rows // 20 + 1, num_rows)]
    rows = near + 0.5 * generator.standard_normal((num_rows, *shape))
    return (rows / np.linalg.norm(rows, axis=-1, keepdims=True)).astype(np.float32)


@pytest.fixture(scope="module")
def centers() -> Floats:
    return clustered(3000, 24)


@pytest.fixture(scope="module", params=["flat", "ivf", "hnsw"])
def opened(request: pytest.FixtureRequest, centers: Floats, tmp_path_factory: pytest.TempPathFactory) -> NearestIndex:
    """An index of each kind of faiss, written and mapped."""
    folder = tmp_path_factory.mktemp(request.param)
    facts = write_index(folder, centers, is_cosine=True, asked_recall=0.9, kind=request.param)
    assert facts["kind"] == request.param
    assert facts["recall_at_1"] >= 0.9
    return open_index(folder, {**COSINE, "index": facts}, centers)


def agreement(index: NearestIndex, other: NearestIndex, features: Floats, k: int = 5) -> float:
    """The share of answers that are the other's; scores of the same classes are equal to the bit."""
    (scores, found), (true_scores, true) = index.search(features, k), other.search(features, k)
    assert found.shape == true.shape
    assert (np.diff(scores, axis=1) <= 0).all()
    same = found == true
    assert (scores == true_scores)[same].all()
    return float(same.mean())


def test_an_index_of_faiss_answers_as_the_exact_one_but_for_few(opened: NearestIndex, centers: Floats) -> None:
    exact = open_index(Path(), COSINE, centers)
    assert agreement(opened, exact, sample_queries(centers, 200)) >= 0.75
    assert agreement(opened, exact, centers[:200], k=1) >= 0.9


def test_more_answers_than_a_shortcut_has_are_all_there(opened: NearestIndex, centers: Floats) -> None:
    assert agreement(opened, open_index(Path(), COSINE, centers), centers[:3], k=2999) == 1


@pytest.mark.parametrize("kind", ["flat", "ivf", "hnsw"])
@pytest.mark.parametrize(("sub_centers", "with_biases"), [(1, False), (3, False), (1, True)])
def test_an_index_serves_rows_of_later_moments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, sub_centers: int, with_biases: bool
) -> None:
    """Classes moved, some are gone, others came, some of them under ids that were free again: scores are of now, none
    that is gone is answered, newcomers are."""
    monkeypatch.setattr(choice, "_WORTHWHILE", 0.0)
    generator = np.random.default_rng(0)
    shape = (1000, 16) if sub_centers == 1 else (1000, sub_centers, 16)
    before, held = clustered(1000, *shape[1:]), np.arange(0, 3000, 3)
    built, later = tmp_path / "built", tmp_path / "later"
    built.mkdir()
    later.mkdir()
    biases = generator.standard_normal(1000).astype(np.float32) / 9 if with_biases else None
    arrays = {"centers": before, "ids": held}
    write_arrays(tmp_path / "before", arrays if biases is None else {**arrays, "biases": biases})
    write_older(built, tmp_path / "before", is_cosine=False, asked_recall=0.9, kind=kind)

    ids = np.union1d(held[:800], np.array([1, 4, 5000, 5001]))
    rows = generator.standard_normal((len(ids), *shape[1:])).astype(np.float32)
    rows[np.isin(ids, held)] = before[:800] + np.float32(0.05) * generator.standard_normal((800, *shape[1:]))
    reused = np.isin(ids, [30, 33, 36])
    rows[reused] = generator.standard_normal((3, *shape[1:]))
    now = None if biases is None else generator.standard_normal(len(ids)).astype(np.float32) / 9
    facts = write_index(later, rows, now, is_cosine=False, asked_recall=0.8, ids=ids, older=built)
    assert facts["kind"] == kind
    (built / "index.faiss").unlink()
    index = open_index(later, {"is_cosine": False, "index": facts}, rows, now)
    exact = open_index(Path(), {"is_cosine": False}, rows, now)
    assert index.num_classes == 804
    assert agreement(index, exact, sample_queries(rows), k=1) >= 0.8
    newcomers = np.flatnonzero(~np.isin(ids, held) | reused)
    assert facts["younger"] >= len(newcomers)
    features = rows[newcomers] if sub_centers == 1 else rows[newcomers, 1]
    assert index.search(9 * features, 1)[1][:, 0].tolist() == newcomers.tolist()
    assert agreement(index, exact, features, k=804) == 1  # all that there are


def test_places_beyond_the_rows_are_no_index_of_theirs(centers: Floats, tmp_path: Path) -> None:
    facts = write_index(tmp_path, centers, **COSINE, asked_recall=0.5, kind="ivf")
    write_arrays(tmp_path / "index_places.safetensors", {"places": np.arange(1, 3001)})
    with pytest.raises(ModelDamaged, match=r"index_places\.safetensors is of another model"):
        open_index(tmp_path, {**COSINE, "index": facts}, centers)


def test_a_disk_without_links_gets_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, centers: Floats) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "no links")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    monkeypatch.setattr(choice, "_WORTHWHILE", 0.0)
    (tmp_path / "built").mkdir()
    write_arrays(tmp_path / "before", {"centers": centers})
    write_older(tmp_path / "built", tmp_path / "before", **COSINE, asked_recall=0.5, kind="ivf")
    facts = write_index(tmp_path, centers, **COSINE, asked_recall=0.5, older=tmp_path / "built")
    assert (facts["kind"], facts["younger"]) == ("ivf", 0)


def test_an_index_without_a_class_that_is_still_there_leaves_exact_search(centers: Floats, tmp_path: Path) -> None:
    (tmp_path / "built").mkdir()
    write_arrays(tmp_path / "before", {"centers": centers})
    write_older(tmp_path / "built", tmp_path / "before", **COSINE, asked_recall=0.9, kind="ivf")
    ids = np.arange(5000, 5100)
    facts = write_index(tmp_path, centers[:100], **COSINE, asked_recall=0.9, ids=ids, older=tmp_path / "built")
    index = open_index(tmp_path, {**COSINE, "index": facts}, centers[:100])
    assert agreement(index, open_index(Path(), COSINE, centers[:100]), centers[:50]) == 1


def test_several_centers_and_biases_are_searched_by_faiss_too(tmp_path: Path) -> None:
    several = clustered(900, 3, 16)
    biases = clustered(900, 1, seed=1)[:, 0]
    for rows, of_rows, config in ((several, None, COSINE), (several[:, 0], biases, {"is_cosine": False})):
        facts = write_index(tmp_path, rows, of_rows, is_cosine=config["is_cosine"], asked_recall=0.95, kind="ivf")
        index = open_index(tmp_path, {**config, "index": facts}, rows, of_rows)
        exact = open_index(Path(), config, rows, of_rows)
        assert agreement(index, exact, sample_queries(rows), k=1) == facts["recall_at_1"] >= 0.95


def test_a_class_that_was_found_by_any_of_its_centers_is_scored_by_the_best_of_all() -> None:
    rows, features = clustered(50, 3, 16), clustered(7, 1, 16, seed=3)[:, 0]
    biases = clustered(50, 1, seed=1)[:, 0]
    found = np.stack([np.random.default_rng(n).choice(50, 20, replace=False) * 3 + n % 3 for n in range(7)])
    true = np.einsum("nd,ckd->nck", features.astype(np.float64), rows.astype(np.float64)).max(-1) + biases
    scores, classes = EncodedRows.of(rows, biases).best_among(features, found.astype(np.int32), 4, threads=1)
    np.testing.assert_allclose(scores, np.take_along_axis(true, classes, 1), rtol=1e-6)
    of_found = np.sort(np.take_along_axis(true, found // 3, 1), axis=1)[:, :-5:-1]
    np.testing.assert_allclose(scores, of_found, rtol=1e-6)


class TestChoice:
    """:func:`choose_index` of many rows."""

    @pytest.fixture(autouse=True)
    def many_rows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(choice, "EXACT_IS_ENOUGH", 1000)
        monkeypatch.setattr(choice, "_WORTHWHILE", 0.0)

    def chosen(self, centers: Floats, **asked: Any) -> dict[str, Any]:
        facts, _ = choose_index(EncodedRows.of(centers), is_cosine=True, **asked)
        assert facts["recall_at_1"] >= facts["asked_recall"]
        return facts

    def test_the_first_with_enough_recall_is_taken(self, centers: Floats) -> None:
        facts = self.chosen(centers, asked_recall=0.9)
        assert (facts["kind"], facts["asked_recall"], facts["recall_queries"]) == ("ivf", 0.9, 1000)

    def test_too_little_recall_leads_to_the_next_and_at_last_to_exact_search(
        self, centers: Floats, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(choice, "_EFFORTS", (1,))
        facts = self.chosen(centers, asked_recall=0.9999)
        assert facts["kind"] == "exact"
        assert [tried["kind"] for tried in facts["passed_over"]] == ["ivf", "hnsw"]
        assert all(tried["recall_at_1"] < 0.9999 for tried in facts["passed_over"])

    def test_what_is_no_faster_than_exact_search_is_passed_over(
        self, centers: Floats, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(choice, "_WORTHWHILE", 1e9)
        assert self.chosen(centers, asked_recall=0.5)["kind"] == "exact"

    def test_recall_of_1_or_few_rows_mean_exact_search(self, centers: Floats, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.chosen(centers)["kind"] == "exact"
        monkeypatch.setattr(choice, "EXACT_IS_ENOUGH", 10**6)
        assert self.chosen(centers, asked_recall=0.9)["kind"] == "exact"

    def test_without_faiss_it_is_exact_unless_faiss_was_asked_for(
        self, centers: Floats, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = builtins.__import__

        def without_faiss(name: str, *rest: Any) -> Any:
            if name == "faiss":
                raise ImportError("No module named 'faiss'")
            return real(name, *rest)

        monkeypatch.setattr(builtins, "__import__", without_faiss)
        assert self.chosen(centers, asked_recall=0.9)["kind"] == "exact"
        with pytest.raises(ConfigError, match=r"pip install 'geartrain\[serve\]'"):
            self.chosen(centers, kind="hnsw")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"asked_recall": 0}, "asked_recall is 0; it must be above 0 and at most 1"),
        ({"kind": "lsh"}, "kind is 'lsh'; it must be one of exact, ivf, hnsw, flat"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        choose_index(EncodedRows.of(np.eye(3, dtype=np.float32)), is_cosine=True, **asked)


def test_an_index_of_faiss_that_cannot_be_written_is_an_error_of_its_file(centers: Floats, tmp_path: Path) -> None:
    """As on a full disk: faiss raises RuntimeError, which the command line does not know."""
    flat = shortcut.build("flat", EncodedRows.of(centers), 1)
    with pytest.raises(OSError, match="cannot be written") as refused:
        shortcut.write(flat, tmp_path / "missing" / "index.faiss")
    assert refused.value.filename == str(tmp_path / "missing" / "index.faiss")


@pytest.mark.parametrize("damage", ["truncated", "of other rows", "no index"])
def test_a_damaged_index_of_faiss_is_refused_by_name(centers: Floats, tmp_path: Path, damage: str) -> None:
    facts = write_index(tmp_path, centers, is_cosine=True, asked_recall=0.5, kind="ivf")
    file = tmp_path / "index.faiss"
    match damage:
        case "truncated":
            file.write_bytes(file.read_bytes()[:-1])
        case "of other rows":
            (tmp_path / "other").mkdir()
            write_index(tmp_path / "other", centers[:2000], is_cosine=True, asked_recall=0.5, kind="ivf")
            (tmp_path / "other" / "index.faiss").replace(file)
            facts["bytes"] = file.stat().st_size
        case _:
            file.write_bytes(b"PK" * (facts["bytes"] // 2 + 1))
            facts["bytes"] = file.stat().st_size
    with pytest.raises(ModelDamaged, match=r"index\.faiss (cannot be read|is an index of 2000 rows of 24 numbers)"):
        open_index(tmp_path, {**COSINE, "index": facts}, centers)
