"""How many elements of a gradient travel, which, and the state left behind, compiled and in tensor operations."""

from __future__ import annotations

import contextlib
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from geartrain.ams.values.errors import InvalidArgument, NonFinite
from geartrain.bridge.collectives.communicator import Communicator
from geartrain.bridge.parallel.topk.bucket import (
    WELL,
    BucketLayout,
    BucketWork,
    SgdSettings,
    is_state_error,
    tensor_of,
)
from geartrain.bridge.parallel.topk.compaction import CompiledCompaction, TensorCompaction
from geartrain.bridge.parallel.topk.selection import counts
from geartrain.bridge.parallel.topk.state import GradientState
from tests.specification.gradients import largest
from tests.support.no_answers import NoAnswers


def test_counts_leave_a_tensor_dense_where_packing_saves_nothing() -> None:
    assert counts([1000, 1001, 2, 3, 1, 0, 10], 0.999) == [1, 2, 2, 1, 1, 0, 1]
    assert counts([1000, 1000], 0.5) == [1000, 1000] and counts([1000], 0.51) == [490]
    assert counts([1000], 0.75, ranks=4) == [1000] and counts([1000], 0.76, ranks=4) == [240]
    assert counts([7, 100], 0.0) == [7, 100]
    with pytest.raises(InvalidArgument, match="2147483648 elements"):
        counts([2**31], 0.9)


class TakingTensors(TensorCompaction):
    """Tensors of a CPU stand in for those of a device; what is not finite is an error, as of compiled code."""

    def __init__(self, numels: list[int], ks: list[int]) -> None:
        super().__init__(numels, ks, torch.device("cpu"))

    def compact(self, *tensors: list[Tensor], momentum: float, nesterov: bool = False) -> tuple[Tensor, Tensor]:
        indices, values, are_finite = self.start(*tensors, momentum=momentum, nesterov=nesterov)
        if not are_finite.all():
            raise NonFinite("as said")
        return indices, values


Compaction = type[CompiledCompaction] | type[TakingTensors]
COMPACTIONS = (CompiledCompaction, TakingTensors)


def state_of(sizes: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    return [torch.zeros(size) for size in sizes], [torch.zeros(size) for size in sizes]


@pytest.mark.parametrize("compaction", COMPACTIONS)
@pytest.mark.parametrize("nesterov", [False, True])
def test_the_compactor_accumulates_as_deep_gradient_compression_does(compaction: Compaction, nesterov: bool) -> None:
    sizes, ks, momentum = [400, 30, 1000, 7], [4, 1, 30, 7], 0.9
    random = np.random.default_rng(0)
    compactor = compaction(sizes, ks)
    velocities, residuals = state_of(sizes)
    exact_u = [np.zeros(size) for size in sizes]
    exact_v = [np.zeros(size) for size in sizes]
    for _ in range(5):
        gradients = [random.standard_normal(size).astype(np.float32) for size in sizes]
        indices, values = compactor.compact(
            [torch.from_numpy(gradient) for gradient in gradients],
            velocities,
            residuals,
            momentum=momentum,
            nesterov=nesterov,
        )
        at = 0
        for u, v, g, k in zip(exact_u, exact_v, gradients, ks, strict=True):
            u[:] = momentum * u + g
            v += g + momentum * u if nesterov else u
            chosen = largest(v, k)
            assert indices[at : at + k].tolist() == chosen.tolist()
            np.testing.assert_allclose(values[at : at + k], v[chosen], rtol=1e-5)
            u[chosen] = v[chosen] = 0
            at += k
        for ours, exact in zip(velocities + residuals, exact_u + exact_v, strict=True):
            np.testing.assert_allclose(ours, exact, rtol=1e-5, atol=1e-6)
            assert torch.equal(ours == 0, torch.from_numpy(exact) == 0)


@pytest.mark.parametrize("compaction", COMPACTIONS)
def test_without_momentum_what_is_sent_and_what_is_left_is_the_sum_of_the_gradients(compaction: Compaction) -> None:
    sizes, ks = [1000, 64], [10, 1]
    compactor = compaction(sizes, ks)
    velocities, residuals = state_of(sizes)
    sent = torch.zeros(1064)
    total = torch.zeros(1064)
    starts = torch.tensor([0] * 10 + [1000])
    for step in range(6):
        gradients = [
            torch.randint(-8, 9, (size,), generator=torch.Generator().manual_seed(step)).float() for size in sizes
        ]
        indices, values = compactor.compact(gradients, velocities, residuals, momentum=0.0)
        sent[indices + starts] += values
        total += torch.cat(gradients)
    assert torch.equal(sent + torch.cat(residuals), total)


@pytest.mark.parametrize("compaction", COMPACTIONS)
def test_half_precision_gradients_are_accumulated_in_float32(compaction: Compaction) -> None:
    gradient = torch.linspace(-1, 1, 300).reshape(3, 100)
    for dtype in (torch.bfloat16, torch.float16):
        compactor = compaction([300], [3])
        narrow, wide = state_of([300]), state_of([300])
        ours = compactor.compact([gradient.to(dtype)], *narrow, momentum=0.9)
        theirs = compactor.compact([gradient.to(dtype).float()], *wide, momentum=0.9)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        assert torch.equal(narrow[1][0], wide[1][0])


@pytest.mark.parametrize("compaction", COMPACTIONS)
@pytest.mark.parametrize("role", [0, 1, 2])
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_what_is_not_finite_is_refused(compaction: Compaction, role: int, bad: float) -> None:
    sizes = [50, 9000]
    tensors = [[torch.randn(size) for size in sizes] for _ in range(3)]
    tensors[role][1][8123] = bad
    with pytest.raises(NonFinite):
        compaction(sizes, [1, 9]).compact(*tensors, momentum=0.9)
    with pytest.raises(NonFinite):  # a residual that would exceed float32
        compaction([64], [1]).compact(*([torch.full((64,), 3e38)] for _ in range(3)), momentum=0.9)


@pytest.mark.parametrize("bad", [None, "gradient", "momentum", "dense"])
def test_a_device_says_of_its_bucket_what_the_host_does(bad: str | None) -> None:
    found = []
    for on_device in (False, True):
        generator = torch.Generator().manual_seed(3)
        parameters = {name: nn.Parameter(torch.zeros(size)) for name, size in (("b", 8), ("w", 900), ("v", 500))}
        layout = BucketLayout(list(parameters), list(parameters.values()), [8, 9, 5])
        if on_device:
            layout.compaction = TensorCompaction([900, 500], [9, 5], torch.device("cpu"))
        state = GradientState(parameters, {"w", "v"}, decays=False)
        buffer = torch.randn(1408, generator=generator)
        if bad == "momentum":
            state.momentum["v"][7] = math.inf
        elif bad is not None:
            buffer[3 if bad == "dense" else 1000] = math.nan  # of the last tensor
        work = BucketWork(
            layout, buffer, state, Communicator(), update=SgdSettings(0.9, True, 0.0), may_be_unused=False
        )
        with NoAnswers() if on_device else contextlib.nullcontext():
            work.start(WELL, None, keep=False)
        assert work.failure is None
        found.append(work.receive().tolist())
        if bad is None:
            work.apply()
            found[-1] += buffer.tolist()
    assert found[0] == found[1]
    if bad == "momentum":
        assert is_state_error(found[0][0]) and tensor_of(found[0][0]) == 2
    else:
        assert found[0][:2] == {None: [WELL, WELL], "gradient": [3, WELL], "dense": [WELL, 1]}[bad]
