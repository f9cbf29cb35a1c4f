"""Merging, pooling and summing by C++ against plain numpy in float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.ams.kernels import _core
from geartrain.ams.kernels.embedding import POOLINGS, BadId, FeatureIds, Lookup
from geartrain.ams.values.specs import DTYPES
from tests.specification.embedding import bag_matrix, pooled, row_gradients


@st.composite
def features(draw: st.DrawFn) -> tuple[list[FeatureIds], list[int]]:
    dims = draw(st.lists(st.sampled_from([1, 3, 8, 18]), min_size=1, max_size=3))
    made = []
    for _ in range(draw(st.integers(1, 5))):
        lengths = draw(st.lists(st.integers(0, 4), max_size=6))
        if draw(st.booleans()):
            bags = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
            count = int(bags[-1])
        else:
            bags = draw(st.integers(1, 3))
            count = bags * len(lengths)
        ids = np.array(draw(st.lists(st.integers(0, 12), min_size=count, max_size=count)), np.int64)
        weights = None
        if draw(st.booleans()):
            weights = np.array(
                draw(st.lists(st.sampled_from([0.25, 0.5, 1.0, 2.0]), min_size=count, max_size=count)), np.float32
            )
        pooling = draw(st.sampled_from(POOLINGS))
        weights = None if pooling == "max" else weights
        padding = draw(st.sampled_from([None, 0, 3, -1]))
        made.append(FeatureIds(draw(st.integers(0, len(dims) - 1)), ids, bags, weights, pooling, padding))
    return made, dims


@settings(max_examples=150, deadline=None)
@given(features(), st.integers(1, 3), st.sampled_from(list(DTYPES)), st.integers(0, 2**32 - 1))
def test_vectors_and_gradients_are_those_of_the_reference(
    given_features: tuple[list[FeatureIds], list[int]], threads: int, dtype: str, seed: int
) -> None:
    made, dims = given_features
    rng = np.random.default_rng(seed)
    lookup = Lookup(made, [None] * len(dims), threads)
    ids = lookup.ids
    rows = [rng.standard_normal((len(own), dim)).astype(DTYPES[dtype]) for own, dim in zip(ids, dims, strict=True)]
    row_of = [
        dict(zip(own.tolist(), table.astype(np.float64), strict=True)) for own, table in zip(ids, rows, strict=True)
    ]
    expected = [pooled(item, row_of[item.table], dims[item.table]) for item in made]
    out = lookup.pool(rows, keep_maxima=True)
    for mine, theirs in zip(out, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)

    upstream = [rng.standard_normal(item.shape).astype(np.float32) if rng.random() < 0.8 else None for item in out]
    squares, gradients = lookup.sum_gradients(upstream, dims)
    sums = [{item: np.zeros(dim) for item in own.tolist()} for own, dim in zip(ids, dims, strict=True)]
    for feature, vectors in zip(made, upstream, strict=True):
        if vectors is not None:
            for name, gradient in row_gradients(feature, row_of[feature.table], vectors.astype(np.float64)).items():
                sums[feature.table][name] += gradient
    for own, mine, theirs in zip(ids, gradients, sums, strict=True):
        np.testing.assert_allclose(mine, [theirs[item] for item in own.tolist()] or mine, rtol=1e-5, atol=1e-5)
    assert squares == pytest.approx(sum(float((gradient.astype(np.float64) ** 2).sum()) for gradient in gradients))
    assert all(len(set(own.tolist())) == len(own) for own in ids)


def test_many_ids_have_the_same_bits_on_any_number_of_threads() -> None:
    rng = np.random.default_rng(0)
    made = [FeatureIds(n % 3, rng.zipf(1.2, 40_000) % 5000, 1 + n % 2, None, "mean", None) for n in range(6)]
    results = []
    for threads in (1, 4):
        lookup = Lookup(made, [None] * 3, threads)
        ids = lookup.ids
        rows = [np.sin(own[:, None] * np.arange(1, 17)).astype(np.float32) for own in ids]
        out = lookup.pool(rows, keep_maxima=False)
        squares, gradients = lookup.sum_gradients(out, [16] * 3)
        results.append([*ids, *out, *gradients, np.array(squares)])
    assert all(np.array_equal(item, other) for item, other in zip(*results, strict=True))


def test_an_infinite_gradient_shows_in_the_squares() -> None:
    lookup = Lookup([FeatureIds(0, np.array([3, 4]), 1, None, "sum", None)], [None], 1)
    gradients = np.ones((2, 2), np.float32)
    for value in (np.inf, np.nan):
        gradients[1, 0] = value
        assert not np.isfinite(lookup.sum_gradients([gradients], [2])[0])


@pytest.mark.parametrize(("ids", "rows", "place"), [([1, -2, 3], None, 1), ([1, 5, 9], 9, 2)])
def test_an_id_out_of_range_is_named_by_feature_and_place(ids: list[int], rows: int | None, place: int) -> None:
    good = FeatureIds(0, np.array([1]), 1, None, "sum", None)
    with pytest.raises(BadId) as raised:
        Lookup([good, FeatureIds(0, np.array(ids), 1, None, "sum", None)], [rows], 1)
    assert raised.value.args == (1, place)
    assert len(Lookup([FeatureIds(0, np.array([-1, -1]), 2, None, "sum", -1)], [rows], 1).ids[0]) == 0


@pytest.mark.parametrize(
    ("bags", "message"),
    [(np.array([0, 2]), "must go"), (np.array([0, 4, 3]), "decrease"), (2, "multiple"), (np.array([1, 3]), "go")],
)
def test_bags_that_contradict_the_ids_are_refused(bags: np.ndarray | int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Lookup([FeatureIds(0, np.arange(3), bags, None, "sum", None)], [None], 1)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=6), st.integers(1, 7), st.booleans(), st.integers(1, 9))
def test_bags_of_places_are_summed_and_spread_as_a_matrix_would(
    counts: list[int], num_rows: int, is_weighted: bool, dim: int
) -> None:
    random = np.random.default_rng(sum(counts))
    count = sum(counts)
    places = random.integers(0, num_rows, count).astype(np.int32)
    bags = np.array(counts, np.int32)
    weights = random.normal(size=count).astype(np.float32) if is_weighted else None
    rows = random.normal(size=(num_rows, dim)).astype(np.float32)
    vectors = random.normal(size=(len(bags), dim)).astype(np.float32)
    matrix = bag_matrix(places, bags, weights, num_rows)
    sums, gradients = np.full((len(bags), dim), np.nan, np.float32), np.full((num_rows, dim), np.nan, np.float32)
    _core.pool_bags(rows, places, bags, weights, sums)
    _core.spread_bags(vectors, places, bags, weights, gradients)
    np.testing.assert_allclose(sums, matrix @ rows, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(gradients, matrix.T @ vectors, rtol=1e-5, atol=1e-5)
