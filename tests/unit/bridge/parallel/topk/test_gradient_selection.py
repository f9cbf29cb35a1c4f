"""Selection of the largest of many gradients: every method against a plain definition, and the state left behind."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from geartrain.ams.values.errors import InvalidArgument, NonFinite
from geartrain.bridge.parallel.topk.methods import METHODS, select_by_sampling
from geartrain.bridge.parallel.topk.selection import GradientCompactor, counts

EXACT = [name for name in METHODS if name != "sampling"]
few = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 1e-42, -1e-42, 3e38])
some_values = st.lists(few | st.floats(-4, 4, width=32), min_size=1, max_size=300)


def k_largest(values: np.ndarray, k: int) -> np.ndarray:
    """The definition: by magnitude falling, then by index rising; the result rises."""
    return np.sort(np.lexsort((np.arange(len(values)), -np.abs(values)))[:k])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(some_values, st.floats(0, 1)), min_size=1, max_size=6))
def test_exact_methods_select_what_the_definition_says(cases: list[tuple[list[float], float]]) -> None:
    tensors = [torch.tensor(values, dtype=torch.float32) for values, _ in cases]
    ks = [max(1, math.ceil(part * len(values))) for values, part in cases]
    expected = [k_largest(tensor.numpy(), k) for tensor, k in zip(tensors, ks, strict=True)]
    for name in EXACT:
        selected = METHODS[name](tensors, ks)
        assert selected.indices.dtype == torch.int32 and selected.counts == ks
        assert selected.indices.tolist() == np.concatenate(expected).tolist(), name
        picked = torch.cat([tensor[at] for tensor, at in zip(tensors, expected, strict=True)])
        assert torch.equal(selected.values, picked), name


def test_tensors_of_many_sizes_are_selected_in_at_once() -> None:
    generator = torch.Generator().manual_seed(0)
    numels = [70_000, 1, 4096, 4097, 69_000, 12, 300_000, 52_500, 640, 640]
    ks = counts(numels, 0.99)
    tensors = [torch.randn(numel, generator=generator).round(decimals=2) for numel in numels]
    loop, grouped = METHODS["loop"](tensors, ks), METHODS["grouped"](tensors, ks)
    assert torch.equal(loop.indices, grouped.indices) and torch.equal(loop.values, grouped.values)


def test_sampling_selects_at_most_k_and_all_of_them_above_its_threshold() -> None:
    tensor = torch.randn(50_000, generator=torch.Generator().manual_seed(1))
    for seed in range(8):
        selected = select_by_sampling([tensor], [500], seed=seed)
        (count,) = selected.counts
        assert 0.3 * 500 < count <= 500
        assert selected.indices.tolist() == k_largest(tensor.numpy(), count).tolist()


def test_counts_leave_a_tensor_dense_where_packing_saves_nothing() -> None:
    assert counts([1000, 1001, 2, 3, 1, 0, 10], 0.999) == [1, 2, 2, 1, 1, 0, 1]
    assert counts([1000, 1000], 0.5) == [1000, 1000] and counts([1000], 0.51) == [490]
    assert counts([1000], 0.75, ranks=4) == [1000] and counts([1000], 0.76, ranks=4) == [240]
    assert counts([7, 100], 0.0) == [7, 100]
    for bad in (-0.1, 1.0, math.nan):
        with pytest.raises(InvalidArgument, match="sparsity"):
            counts([10], bad)
    with pytest.raises(InvalidArgument, match="2147483648 elements"):
        counts([2**31], 0.9)


def state_of(sizes: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    return [torch.zeros(size) for size in sizes], [torch.zeros(size) for size in sizes]


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_compactor_accumulates_as_deep_gradient_compression_does(nesterov: bool) -> None:
    sizes, ks, momentum, scale = [400, 30, 1000, 7], [4, 1, 30, 7], 0.9, 0.5
    random = np.random.default_rng(0)
    compactor = GradientCompactor(sizes, ks)
    velocities, residuals = state_of(sizes)
    exact_u = [np.zeros(size) for size in sizes]
    exact_v = [np.zeros(size) for size in sizes]
    for _ in range(5):
        gradients = [random.standard_normal(size).astype(np.float32) for size in sizes]
        indices, values = compactor.accumulate_and_select(
            [torch.from_numpy(one) for one in gradients],
            velocities,
            residuals,
            momentum=momentum,
            scale=scale,
            nesterov=nesterov,
        )
        at = 0
        for u, v, g, k in zip(exact_u, exact_v, gradients, ks, strict=True):
            u[:] = momentum * u + scale * g
            v += scale * g + momentum * u if nesterov else u
            chosen = k_largest(v, k)
            assert indices[at : at + k].tolist() == chosen.tolist()
            np.testing.assert_allclose(values[at : at + k], v[chosen], rtol=1e-5)
            u[chosen] = v[chosen] = 0
            at += k
        for ours, exact in zip(velocities + residuals, exact_u + exact_v, strict=True):
            np.testing.assert_allclose(ours, exact, rtol=1e-5, atol=1e-6)
            assert torch.equal(ours == 0, torch.from_numpy(exact) == 0)


def test_without_momentum_what_is_sent_and_what_is_left_is_the_sum_of_the_gradients() -> None:
    sizes, ks = [1000, 64], [10, 1]
    compactor = GradientCompactor(sizes, ks)
    velocities, residuals = state_of(sizes)
    sent = torch.zeros(1064)
    total = torch.zeros(1064)
    starts = torch.tensor([0] * 10 + [1000])
    for step in range(6):
        gradients = [
            torch.randint(-8, 9, (size,), generator=torch.Generator().manual_seed(step)).float() for size in sizes
        ]
        indices, values = compactor.accumulate_and_select(gradients, velocities, residuals, momentum=0.0)
        sent[indices + starts] += values
        total += torch.cat(gradients)
    assert torch.equal(sent + torch.cat(residuals), total)


def test_half_precision_gradients_are_accumulated_in_float32() -> None:
    gradient = torch.linspace(-1, 1, 300).reshape(3, 100)
    for dtype in (torch.bfloat16, torch.float16):
        compactor = GradientCompactor([300], [3])
        narrow, wide = state_of([300]), state_of([300])
        ours = compactor.accumulate_and_select([gradient.to(dtype)], *narrow, momentum=0.9)
        theirs = compactor.accumulate_and_select([gradient.to(dtype).float()], *wide, momentum=0.9)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        assert torch.equal(narrow[1][0], wide[1][0])


@pytest.mark.parametrize("role", [0, 1, 2])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_named_and_changes_nothing(role: int, bad: float) -> None:
    sizes = [50, 9000]
    tensors = [[torch.randn(size) for size in sizes] for _ in range(3)]
    tensors[role][1][8123] = bad
    before = [tensor.clone() for one in tensors for tensor in one]
    compactor = GradientCompactor(sizes, [1, 9], names=["first.bias", "first.weight"])
    with pytest.raises(NonFinite, match=f"{['gradient', 'velocity', 'residual'][role]} of first.weight .* 1 of 9000"):
        compactor.accumulate_and_select(*tensors, momentum=0.9)
    after = [tensor for one in tensors for tensor in one]
    assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(after, before, strict=True))


def test_a_residual_that_would_exceed_float32_changes_nothing() -> None:
    tensors = [[torch.full((64,), 3e38)] for _ in range(3)]
    with pytest.raises(NonFinite, match=r"accumulated residual of tensor 0 .* 64 of 64"):
        GradientCompactor([64], [1]).accumulate_and_select(*tensors, momentum=0.9)
    assert all(float(one[0].min()) == float(one[0].max()) == float(torch.tensor(3e38)) for one in tensors)


def test_tensors_that_do_not_fit_are_refused_by_name() -> None:
    compactor = GradientCompactor([4], [1], names=["bias"])
    good = torch.zeros(4)
    for gradients, velocities, words in (
        ([torch.zeros(5)], [good], "gradient of bias has 5 elements"),
        ([good, good], [good], "2 gradient tensors"),
        ([good.double()], [good], "gradient of bias is torch.float64"),
        ([good], [good.bfloat16()], "velocity of bias is torch.bfloat16"),
        ([good], [torch.zeros(8)[::2]], "not contiguous"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            compactor.accumulate_and_select(gradients, velocities, [good], momentum=0.9)
    with pytest.raises(InvalidArgument, match="5 of the 4 elements of tensor 0"):
        GradientCompactor([4], [5])
    with pytest.raises(InvalidArgument, match="0 of the 4 elements"):
        GradientCompactor([4], [0])
    with pytest.raises(InvalidArgument, match="2 numels, 1 ks"):
        GradientCompactor([4, 4], [1])
