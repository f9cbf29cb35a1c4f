"""The index of a model against scores made in float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from geartrain.ams.values.errors import InvalidArgument, ModelDamaged
from geartrain.serving.index.registry import open_index, write_index

Floats = npt.NDArray[np.float32]


def unit_rows(*shape: int, seed: int = 0) -> Floats:
    rows = np.random.default_rng(seed).standard_normal(shape)
    return (rows / np.linalg.norm(rows, axis=-1, keepdims=True)).astype(np.float32)


def test_of_several_centers_of_a_class_the_best_one_counts() -> None:
    centers, features = unit_rows(50, 3, 8), unit_rows(7, 8, seed=1)
    scores, positions = open_index(Path(), {"is_cosine": True}, centers).search(5 * features, 4)
    expected = (centers.astype(np.float64) @ features.astype(np.float64).T).max(axis=1).T
    assert positions.tolist() == np.argsort(-expected, axis=1, kind="stable")[:, :4].tolist()
    np.testing.assert_allclose(scores, -np.sort(-expected, axis=1)[:, :4], atol=1e-6)


def test_products_with_biases_are_ranked_as_such() -> None:
    centers, biases, features = 3 * unit_rows(50, 8), unit_rows(50, seed=2), 2 * unit_rows(7, 8, seed=1)
    scores, positions = open_index(Path(), {"is_cosine": False}, centers, biases).search(features, 60)
    expected = features.astype(np.float64) @ centers.astype(np.float64).T + biases
    assert positions.tolist() == np.argsort(-expected, axis=1, kind="stable").tolist()
    np.testing.assert_allclose(scores, -np.sort(-expected, axis=1), atol=1e-6)


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (np.zeros((2, 9), np.float32), r"features have shape \[2, 9\]; this model takes \[N, 8\]"),
        (np.full((2, 8), np.nan, np.float32), r"features\[0\] has a value that is not finite"),
    ],
)
def test_what_cannot_be_searched_for_is_refused_in_a_sentence(features: Floats, message: str) -> None:
    for is_cosine in (True, False):
        with pytest.raises(InvalidArgument, match=message):
            open_index(Path(), {"is_cosine": is_cosine}, unit_rows(5, 8)).search(features, 1)


def test_an_index_of_other_centers_is_refused(tmp_path: Path) -> None:
    facts = write_index(tmp_path, unit_rows(50, 8), is_cosine=True)
    open_index(tmp_path, {"is_cosine": True, "index": facts}, unit_rows(50, 8))
    with pytest.raises(ModelDamaged, match="was made of other centers than those beside it; export the model again"):
        open_index(tmp_path, {"is_cosine": True, "index": facts}, unit_rows(50, 8, seed=1))
