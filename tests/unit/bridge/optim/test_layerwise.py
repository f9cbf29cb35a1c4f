"""LARS and LAMB against their formulas in float64, alone and where ranks hold parts of the weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import geartrain as gt
from tests.support.rank_processes import on_ranks

Array = npt.NDArray[np.float64]
STEPS = 4
SHAPES = [(5, 3), (4, 2, 3), (6,)]
LARS_NUMBERS = {"lr": 3.0, "momentum": 0.9, "weight_decay": 0.01, "trust_coefficient": 0.02, "eps": 1e-8}
LAMB_NUMBERS = {"lr": 0.05, "betas": (0.8, 0.95), "weight_decay": 0.02, "eps": 1e-6}


def ratio_of(numerator: float, divisor: float, norms: tuple[float, float]) -> float:
    return numerator / divisor if min(norms) > 0 else 1.0


def lars_twin(weight: Array, grads: list[Array], *, adapted: bool, nesterov: bool = False) -> Array:
    """Plain LARS over the gradients of all steps."""
    lr, momentum, decay, trust, eps = LARS_NUMBERS.values()
    velocity = np.zeros_like(weight)
    for grad in grads:
        step = grad
        if adapted:
            norms = float(np.linalg.norm(weight)), float(np.linalg.norm(grad))
            step = (grad + decay * weight) * ratio_of(trust * norms[0], norms[1] + decay * norms[0] + eps, norms)
        velocity = momentum * velocity + step
        weight = weight - lr * (step + momentum * velocity if nesterov else velocity)
    return weight


def lamb_twin(weight: Array, grads: list[Array], *, adapted: bool) -> Array:
    """Plain LAMB over the gradients of all steps."""
    lr, (beta1, beta2), decay, eps = LAMB_NUMBERS.values()  # type: ignore[misc]
    first = second = np.zeros_like(weight)
    for count, grad in enumerate(grads, start=1):
        first, second = beta1 * first + (1 - beta1) * grad, beta2 * second + (1 - beta2) * grad**2
        step = first / (1 - beta1**count) / (np.sqrt(second / (1 - beta2**count)) + eps)
        ratio = 1.0
        if adapted:
            step = step + decay * weight
            norms = float(np.linalg.norm(weight)), float(np.linalg.norm(step))
            ratio = ratio_of(norms[0], norms[1], norms)
        weight = weight - lr * ratio * step
    return weight


KINDS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any], Callable[..., Array]]] = {
    "lars": (gt.LARS, LARS_NUMBERS, lars_twin),
    "lamb": (gt.LAMB, LAMB_NUMBERS, lamb_twin),
}


def draws(shapes: list[tuple[int, ...]]) -> tuple[list[Array], list[list[Array]]]:
    """First values of parameters, and the gradients of each in every step."""
    random = np.random.default_rng(0)
    return [random.normal(size=shape) for shape in shapes], [
        [random.normal(size=shape) for _ in range(STEPS)] for shape in shapes
    ]


def trained(
    optimizer: Callable[..., torch.optim.Optimizer], values: list[Array], grads: list[list[Array]], **numbers: Any
) -> list[Array]:
    params = [nn.Parameter(torch.from_numpy(value.copy())) for value in values]
    one = optimizer(params, **numbers)
    for step in range(STEPS):
        for param, own in zip(params, grads, strict=True):
            param.grad = torch.from_numpy(own[step].copy())
        one.step()
    return [param.detach().numpy() for param in params]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("adapt", [None, True, False])
def test_a_step_is_that_of_the_formula(kind: str, adapt: bool | None) -> None:
    optimizer, numbers, twin = KINDS[kind]
    values, grads = draws(SHAPES)
    found = trained(optimizer, values, grads, **numbers, adapt=adapt)
    for weight, value, own in zip(found, values, grads, strict=True):
        adapted = value.ndim > 1 if adapt is None else adapt
        np.testing.assert_allclose(weight, twin(value, own, adapted=adapted), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_of_zeros_and_a_gradient_of_zeros_have_the_ratio_1(kind: str) -> None:
    optimizer, numbers, twin = KINDS[kind]
    values, grads = draws([(3, 2), (3, 2)])
    values[0][:] = 0
    grads[1][0][:] = 0
    found = trained(optimizer, values, grads, **numbers)
    for weight, value, own in zip(found, values, grads, strict=True):
        np.testing.assert_allclose(weight, twin(value, own, adapted=True), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_maximize_goes_the_other_way_and_groups_have_numbers_of_their_own(kind: str) -> None:
    optimizer, numbers, twin = KINDS[kind]
    values, grads = draws([(3, 2), (3, 2)])
    first, second = (nn.Parameter(torch.from_numpy(value.copy())) for value in values)
    one = optimizer([{"params": [first]}, {"params": [second], "adapt": False}], **numbers, maximize=True)
    for step in range(STEPS):
        first.grad, second.grad = (torch.from_numpy(-own[step]) for own in grads)
        one.step()
    np.testing.assert_allclose(first.detach(), twin(values[0], grads[0], adapted=True), rtol=1e-12)
    np.testing.assert_allclose(second.detach(), twin(values[1], grads[1], adapted=False), rtol=1e-12)


def test_nesterov_looks_ahead() -> None:
    values, grads = draws(SHAPES)
    found = trained(gt.LARS, values, grads, **LARS_NUMBERS, nesterov=True)
    expected = lars_twin(values[0], grads[0], adapted=True, nesterov=True)
    np.testing.assert_allclose(found[0], expected, rtol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_state_goes_on_bit_by_bit(kind: str) -> None:
    optimizer, numbers, _ = KINDS[kind]
    torch.manual_seed(0)
    model, inputs = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)), torch.randn(8, 4)

    def steps(module: nn.Module, one: torch.optim.Optimizer, count: int) -> None:
        for _ in range(count):
            one.zero_grad()
            module(inputs).square().sum().backward()
            one.step()

    first = optimizer(model.parameters(), **numbers)
    steps(model, first, 2)
    resumed = copy.deepcopy(model)
    second = optimizer(resumed.parameters(), **{**numbers, "lr": 0.5})
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    steps(model, first, 2)
    steps(resumed, second, 2)
    for own, other in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(own, other)


def test_a_closure_is_called_once_with_gradients() -> None:
    param = nn.Parameter(torch.ones(2, 2))
    one, calls = gt.LARS([param], lr=1.0), []

    def closure() -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        loss = param.sum()
        loss.backward()
        return loss

    assert one.step(closure).item() == 4.0
    assert calls == [True]
    assert float(param.detach().max()) < 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_a_sparse_gradient_is_refused_before_anything_moves(kind: str) -> None:
    dense, rows = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    one = KINDS[kind][0]([dense, rows], lr=1.0)
    dense.grad, rows.grad = torch.ones(2, 2), torch.ones(2, 2).to_sparse()
    with pytest.raises(gt.errors.InvalidArgument, match=r"gradient \[2, 2\] is sparse; .* optimizer of its own"):
        one.step()
    assert torch.equal(dense, torch.ones(2, 2))
    assert not one.state


@pytest.mark.parametrize(
    ("optimizer", "numbers", "message"),
    [
        (gt.LARS, {"lr": -1.0}, r"lr is -1\.0; it must be >= 0"),
        (gt.LARS, {"lr": math.nan}, "lr is nan"),
        (gt.LARS, {"lr": 1.0, "momentum": 1.0}, r"momentum is 1\.0; it must be in \[0, 1\)"),
        (gt.LARS, {"lr": 1.0, "momentum": 0.0, "nesterov": True}, "nesterov is True and momentum is 0"),
        (gt.LARS, {"lr": 1.0, "adapt": 1}, "adapt is 1; it must be True or False"),
        (gt.LAMB, {"lr": 1.0, "betas": (0.9, 1.0)}, r"betas is 1\.0"),
        (gt.LAMB, {"lr": 1.0, "betas": 0.9}, r"betas is 0\.9; it must be two numbers"),
        (gt.LAMB, {"lr": 1.0, "weight_decay": math.inf}, "weight_decay is inf"),
    ],
)
def test_a_number_out_of_range_is_named(optimizer: Callable[..., Any], numbers: dict[str, Any], message: str) -> None:
    with pytest.raises(gt.errors.InvalidArgument, match=message):
        optimizer([nn.Parameter(torch.ones(2))], **numbers)
    with pytest.raises(gt.errors.InvalidArgument, match=message):
        optimizer([{"params": [nn.Parameter(torch.ones(2))], **numbers}], lr=1.0)


@on_ranks(2)
def test_norms_are_those_of_whole_weights_where_ranks_hold_parts(ranks: int) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    values, grads = draws(SHAPES)
    for optimizer, numbers, twin in KINDS.values():
        params = [
            nn.Parameter(distribute_tensor(torch.from_numpy(values[0].copy()), mesh, [Shard(0)])),  # 5 rows: 3 and 2
            nn.Parameter(distribute_tensor(torch.from_numpy(values[1].copy()), mesh, [Shard(1)])),
            nn.Parameter(torch.from_numpy(values[2].copy())),
        ]
        one = optimizer(params, **numbers)
        for step in range(STEPS):
            for param, own in zip(params, grads, strict=True):
                grad = torch.from_numpy(own[step].copy())
                # The second gradient is laid out in another way than its parameter.
                param.grad = distribute_tensor(grad, mesh, [Shard(0)]) if isinstance(param, DTensor) else grad
            one.step()
        for param, value, own in zip(params, values, grads, strict=True):
            whole = param.full_tensor() if isinstance(param, DTensor) else param
            expected = twin(value, own, adapted=value.ndim > 1)
            np.testing.assert_allclose(whole.detach().numpy(), expected, rtol=1e-12, atol=1e-14)


@on_ranks(4)
def test_norms_are_those_of_whole_weights_under_fsdp2_over_tensor_parallelism() -> None:
    """Rows that are divided twice have a placement of torch's own that is no ``Shard``."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    values, grads = draws([(4, 3)])
    own = 2 * mesh.get_local_rank("tensor") + mesh.get_local_rank("data")
    for optimizer, numbers, twin in KINDS.values():
        model = nn.Linear(3, 4, bias=False)
        model.weight = nn.Parameter(distribute_tensor(torch.from_numpy(values[0].copy()), mesh["tensor"], [Shard(0)]))
        fully_shard(model, mesh=mesh["data"])
        one = optimizer(model.parameters(), **numbers)
        weight: Any = model.weight
        for grad in grads[0]:
            local = torch.from_numpy(grad[own : own + 1].copy())
            weight.grad = DTensor.from_local(local, weight.device_mesh, weight.placements)
            one.step()
        expected = twin(values[0], grads[0], adapted=True)[own : own + 1]
        np.testing.assert_allclose(weight.to_local().detach().numpy(), expected, rtol=1e-12, atol=1e-14)
