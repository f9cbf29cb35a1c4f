"""The largest of many gradients against their specification, bit for bit, whatever the estimates and the threads."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.ams.kernels.gradients import Floats, Indices, accumulate_and_take
from geartrain.ams.values.errors import NonFinite
from tests.specification import gradients as reference

LARGE = 1_200_000
"""Elements of a tensor that is cut into pieces, for two threads."""
level = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1.5, 1e-42, -1e-42, 1e37])
vectors = st.lists(level | st.floats(-4, 4, width=32), max_size=90)


def take_largest(values: list[Floats], ks: list[int], estimates: Floats, *, threads: int = 1) -> tuple[Indices, Floats]:
    """The selection alone: nothing is added to what has gathered."""
    return accumulate_and_take([], [], values, ks, estimates, momentum=0.0, threads=threads)


@st.composite
def tensors(draw: st.DrawFn) -> tuple[Floats, int, float]:
    """Values [N], k, and an estimate of the k-th magnitude that may be anything."""
    values = np.array(draw(vectors), np.float32)
    return values, draw(st.integers(0, len(values))), draw(level.map(abs) | st.sampled_from([np.inf, np.nan, 2.0]))


def expected(values: list[Floats], ks: list[int]) -> np.ndarray:
    return np.concatenate([reference.largest(value, k) for value, k in zip(values, ks, strict=True)])


@settings(max_examples=150, deadline=None)
@given(st.lists(tensors(), min_size=1, max_size=4))
def test_selection_is_exact_whatever_the_estimate(cases: list[tuple[Floats, int, float]]) -> None:
    values, ks = [case[0] for case in cases], [case[1] for case in cases]
    estimates = np.array([case[2] for case in cases], np.float32)
    for _ in range(2):
        indices, taken = take_largest(values, ks, estimates)
        assert indices.tolist() == expected(values, ks).tolist()
        places = np.split(indices, np.cumsum(ks)[:-1])
        assert taken.tobytes() == b"".join(value[at].tobytes() for value, at in zip(values, places, strict=True))


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    sizes=st.lists(st.integers(0, 200) | st.just(2049) | st.just(9000), min_size=1, max_size=4),
    decimals=st.integers(0, 3),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    scale=st.sampled_from([1.0, 0.25, 1 / 3, 1e-41]),
    nesterov=st.booleans(),
)
def test_accumulation_gives_the_bits_of_the_specification(
    seed: int, sizes: list[int], decimals: int, dtype: str, scale: float, nesterov: bool
) -> None:
    random = np.random.default_rng(seed)
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    ks = [int(random.integers(0, size + 1)) for size in sizes]
    ours, theirs = ([[np.zeros(size, np.float32) for size in sizes] for _ in range(2)] for _ in range(2))
    estimates = np.zeros(len(sizes), np.float32)
    for _ in range(3):
        gradients = [random.standard_normal(size).round(decimals).astype(kind) for size in sizes]
        indices, values = accumulate_and_take(
            gradients, *ours, ks, estimates, momentum=0.9, scale=scale, nesterov=nesterov
        )
        parts = [
            reference.accumulate_and_take(g.astype(np.float32), u, v, k, momentum=0.9, scale=scale, nesterov=nesterov)
            for g, u, v, k in zip(gradients, *theirs, ks, strict=True)
        ]
        assert indices.tolist() == np.concatenate([part[0] for part in parts]).tolist()
        assert values.tobytes() == b"".join(part[1].tobytes() for part in parts)
        for mine, right in zip(ours[0] + ours[1], theirs[0] + theirs[1], strict=True):
            assert mine.tobytes() == right.tobytes()


def rising(size: int) -> Floats:
    return np.arange(size, dtype=np.float32)


def tied(size: int) -> Floats:
    return (rising(size) % 7).astype(np.float32)


def mostly_zero(size: int) -> Floats:
    values = np.zeros(size, np.float32)
    values[:: size // 50] = rising(len(values[:: size // 50])) - 20
    return values


@pytest.mark.parametrize("make", [rising, tied, mostly_zero])
@pytest.mark.parametrize("k", [1, 700, 300_000])
def test_a_tensor_in_pieces_is_selected_from_as_a_whole(make: type, k: int) -> None:
    values, other = make(LARGE), make(LARGE)[::-1].copy()
    right = expected([values, other], [k, k])
    for estimates in (np.zeros(2, np.float32), np.full(2, 3, np.float32), np.full(2, 1e30, np.float32)):
        for threads in (1, 2):
            indices, _ = take_largest([values, other], [k, k], estimates.copy(), threads=threads)
            assert np.array_equal(indices, right)


def test_accumulation_does_not_depend_on_the_number_of_threads() -> None:
    random = np.random.default_rng(0)
    gradient = random.standard_normal(LARGE, np.float32)
    answers = []
    for threads in (1, 2, 3):
        state = [np.zeros(LARGE, np.float32)], [np.zeros(LARGE, np.float32)]
        estimates = np.zeros(1, np.float32)
        for _ in range(2):
            taken = accumulate_and_take([gradient], *state, [1200], estimates, momentum=0.9, threads=threads)
        answers.append(b"".join(item.tobytes() for item in (*taken, state[0][0], state[1][0])))
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("role", [0, 1, 2])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_what_is_not_finite_is_refused_and_stays(role: int, bad: float, momentum: float) -> None:
    lists = [[np.ones(size, np.float32) for size in (10, 5000, 3)] for _ in range(3)]
    lists[role][1][4321] = bad
    estimates = np.zeros(3, np.float32)
    for _ in range(2):
        with pytest.raises(NonFinite, match="tensor 1"):
            accumulate_and_take(*lists, [1, 5, 1], estimates, momentum=momentum)
    assert not np.isfinite(lists[2][1][4321])
    assert np.isfinite(estimates).all()  # so that the next look, at finite tensors, is quick again
    with pytest.raises(NonFinite, match="tensor 1"):
        take_largest(lists[2], [1, 5, 1], np.zeros(3, np.float32))


def test_a_sum_beyond_float32_is_refused() -> None:
    lists = [[np.full(5, 3e38, np.float32)] for _ in range(3)]
    with pytest.raises(NonFinite, match="tensor 0"):
        accumulate_and_take(*lists, [1], np.zeros(1, np.float32), momentum=0.9)


def test_arrays_that_contradict_each_other_are_refused() -> None:
    good, none = np.zeros(4, np.float32), np.zeros(1, np.float32)
    with pytest.raises(ValueError, match="0 <= k <= numel"):
        take_largest([good], [5], none)
    with pytest.raises(ValueError, match="as long as its residual"):
        accumulate_and_take([np.zeros(3, np.float32)], [good], [good], [1], none, momentum=0.9)
    with pytest.raises(ValueError, match="as long as its residual"):
        accumulate_and_take([good], [np.zeros(3, np.float32)], [good], [1], none, momentum=0.9)
    with pytest.raises(ValueError, match="estimates"):
        take_largest([good], [1], np.zeros(2, np.float32))
    with pytest.raises(ValueError, match="lists differ"):
        take_largest([good, good], [1], none)
    with pytest.raises(RuntimeError):
        take_largest([good.astype(np.float64)], [1], none)
