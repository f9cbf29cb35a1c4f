"""Sparsified gradients against a plain reference, through what a loop may do, and when something goes wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import geartrain as gt
from geartrain.ams.values.errors import InvalidArgument, NonFinite, SpecMismatch, SyncError
from geartrain.bridge.parallel.topk import selection
from geartrain.bridge.parallel.topk.hook import TopKGradients
from geartrain.bridge.parallel.topk.selection import sparsity_at
from tests.support.rank_processes import on_ranks

SIZE, DENSE, K = 20, 3, 4
SPARSITY = 1 - K / SIZE
LR = 0.5


class Tensors(nn.Module):
    """Parameters whose gradients are what the loop says: a sparse one, and one that is small."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.linspace(-1, 1, SIZE, dtype=dtype))
        self.small = nn.Parameter(torch.ones(DENSE, dtype=dtype))

    def forward(self, large: Tensor, small: Tensor) -> Tensor:
        return (self.large * large).sum() + (self.small * small).sum()


Made = tuple[DistributedDataParallel, torch.optim.Optimizer, TopKGradients]


def made(
    *, scaler: Any = None, dtype: torch.dtype = torch.float32, ddp: dict[str, Any] | None = None, **settings: Any
) -> Made:
    selection.SMALL = DENSE
    # One bucket for each parameter, once DDP has made them anew.
    model = DistributedDataParallel(Tensors(dtype), bucket_cap_mb=1e-5, **(ddp or {}))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    topk = TopKGradients(**{"sparsity": SPARSITY, "momentum": 0.9, **settings})
    return model, optimizer, topk.attach(model, optimizer, grad_scaler=scaler)


def gradients(step: int, rank: int) -> tuple[Tensor, Tensor]:
    random = np.random.default_rng([step, rank])
    return tuple(torch.from_numpy(random.normal(size=size)).float() for size in (SIZE, DENSE))  # type: ignore[return-value]


def step_of(parts: Made, step: int, rank: int, *, scale: float = 1.0, **changed: Tensor) -> None:
    model, optimizer, _ = parts
    optimizer.zero_grad()
    large, small = gradients(step, rank)
    (model(changed.get("large", large), changed.get("small", small)) * scale).backward()
    optimizer.step()


def pending(parts: Made) -> tuple[Tensor, Tensor]:
    """This rank's momentum and residual of the sparse parameter, without merging."""
    state = parts[2]._attached.state  # type: ignore[attr-defined]
    return state.momentum["large"].clone(), state.residual["large"].clone()


class Reference:
    """Deep gradient compression of one tensor over R ranks in float64, element by element."""

    def __init__(self, ranks: int, *, momentum: float, nesterov: bool, weight_decay: float) -> None:
        self.u, self.v = np.zeros((ranks, SIZE)), np.zeros((ranks, SIZE))
        self.decay = np.zeros(SIZE)
        self.m, self.nesterov, self.w = momentum, nesterov, weight_decay

    def applied(self, gradients_RN: np.ndarray, weights: np.ndarray) -> np.ndarray:
        mean = np.zeros(SIZE)
        for u, v, gradient in zip(self.u, self.v, gradients_RN, strict=True):
            u[:] = self.m * u + gradient
            v += gradient + self.m * u if self.nesterov else u
            sent = np.argsort(-np.abs(v), kind="stable")[:K]
            mean[sent] += v[sent] / len(self.u)
            u[sent] = v[sent] = 0
        own = self.w * weights
        self.decay = self.m * self.decay + own
        return mean + (own + self.m * self.decay if self.nesterov else self.decay)


@on_ranks(2)
def test_parameters_follow_deep_gradient_compression(rank: int, ranks: int) -> None:
    for nesterov, weight_decay, ddp in (
        (False, 0.0, {}),
        (True, 0.1, {"gradient_as_bucket_view": True}),
        (False, 0.1, {"find_unused_parameters": True}),
    ):
        parts = made(nesterov=nesterov, weight_decay=weight_decay, ddp=ddp)
        reference = Reference(ranks, momentum=0.9, nesterov=nesterov, weight_decay=weight_decay)
        weights = np.linspace(-1, 1, SIZE)
        for step in range(12):
            step_of(parts, step, rank)
            joint = np.stack([gradients(step, other)[0].double().numpy() for other in range(ranks)])
            weights -= LR * reference.applied(joint, weights)
            found = parts[0].module.large.detach().double().numpy()
            np.testing.assert_allclose(found, weights, rtol=1e-4, atol=1e-5)
        # One bucket for each: all-gathers carry the large one, all-reduces the small one.
        calls, bytes_ = parts[2].traffic.calls, parts[2].traffic.bytes
        assert calls["all-reduce"] == 12
        assert bytes_["all-reduce"] == 12 * DENSE * 4
        assert calls["all-gather"] >= 12  # and what was said of the settings


@on_ranks(2)
def test_16_bit_parameters_train_with_float32_residuals(rank: int) -> None:
    halves, whole = made(dtype=torch.bfloat16), made()
    for step in range(3):
        step_of(halves, step, rank)
        step_of(whole, step, rank)
    assert pending(halves)[1].dtype == torch.float32
    torch.testing.assert_close(halves[0].module.large.float(), whole[0].module.large, rtol=0.05, atol=0.1)


@on_ranks(2)
def test_an_unused_parameter_keeps_its_residual(rank: int) -> None:
    """A parameter that takes part on no rank keeps what waits for it."""

    class Optional(Tensors):
        def forward(self, large: Tensor | None, small: Tensor) -> Tensor:
            return (self.small * small).sum() + (0 if large is None else (self.large * large).sum())

    selection.SMALL = DENSE
    model = DistributedDataParallel(Optional(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    parts = model, optimizer, TopKGradients(sparsity=SPARSITY).attach(model, optimizer)
    step_of(parts, 0, rank)
    before = pending(parts)
    optimizer.zero_grad()
    model(None, gradients(1, rank)[1]).backward()
    optimizer.step()
    assert model.module.large.grad is None
    assert all(torch.equal(item, other) for item, other in zip(pending(parts), before, strict=True))


@on_ranks(2)
def test_a_rank_clips_the_norm_of_its_whole_gradient(rank: int, ranks: int) -> None:
    clipped, plain = made(clip=2.0), made()
    for step in range(3):
        step_of(clipped, step, rank)
        large, small = gradients(step, rank)
        norm = float(torch.cat([large, small]).norm())
        factor = min(1.0, 2.0 * ranks**0.5 / norm)
        assert factor < 1
        step_of(plain, step, rank, large=large * factor, small=small * factor)
    torch.testing.assert_close(clipped[0].module.large, plain[0].module.large)
    torch.testing.assert_close(clipped[0].module.small, plain[0].module.small)


@on_ranks(2)
def test_a_parallel_model_has_its_replicated_part_sparsified(rank: int, ranks: int) -> None:
    """The replicated part of a parallel model, by the model's own names; dense, it trains as the whole does."""
    torch.manual_seed(4)
    plain = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 7))
    inputs, labels = torch.randn(8, 6), torch.randint(7, (8,))
    parallel = gt.parallelize(
        copy.deepcopy(plain), gt.mesh(), {"0": gt.Replicate(), "1": gt.Split()}, loss=nn.CrossEntropyLoss()
    )
    sparse = torch.optim.SGD(parallel.module[0].parameters(), lr=LR)
    head = torch.optim.SGD(parallel.module[1].parameters(), lr=LR, momentum=0.9)
    topk = TopKGradients(sparsity=0.0, momentum=0.9).attach(parallel, sparse)
    whole = torch.optim.SGD(plain.parameters(), lr=LR, momentum=0.9)
    for _ in range(3):
        for item in (sparse, head, whole):
            item.zero_grad()
        nn.functional.cross_entropy(plain(inputs), labels).backward()
        parallel(inputs[rank::ranks], labels[rank::ranks]).backward()
        for item in (sparse, head, whole):
            item.step()
    torch.testing.assert_close(parallel.module[0].weight, plain[0].weight)
    torch.testing.assert_close(parallel.module[1].weight.full_tensor(), plain[1].weight)
    topk.merge()
    assert set(topk.state_dict()["momentum"]) == {"0.weight", "0.bias"}


@on_ranks(2)
def test_a_grad_scaler_skips_the_step_on_every_rank(rank: int) -> None:
    """An overflow on one rank: no rank steps, nothing that waits has changed, and the scale is not in it."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    parts, unscaled = made(scaler=scaler), made()
    model, optimizer, topk = parts

    def scaled_step(step: int, *, bad: bool = False) -> None:
        optimizer.zero_grad()
        large, small = gradients(step, rank)
        if bad and rank == 1:
            large[7] = torch.inf
        scaler.scale(model(large, small)).backward()
        scaler.step(optimizer)
        scaler.update()

    for step in range(3):
        scaled_step(step)
        step_of(unscaled, step, rank)
    before = [*pending(parts), *(parameter.detach().clone() for parameter in model.parameters())]
    scaled_step(3, bad=True)
    assert scaler.get_scale() == 512.0
    assert topk.skipped_steps == 1
    after = [*pending(parts), *model.parameters()]
    assert all(torch.equal(item, other) for item, other in zip(before, after, strict=True))
    scaled_step(4)
    step_of(unscaled, 4, rank)
    assert topk.steps == 4
    torch.testing.assert_close(model.module.large, unscaled[0].module.large)
    torch.testing.assert_close(pending(parts)[1], pending(unscaled)[1])


@on_ranks(2)
def test_what_is_wrong_on_one_rank_is_raised_on_every_rank(rank: int) -> None:
    for name, where in (("large", " on rank 1"), ("small", "")):
        parts = made()
        step_of(parts, 0, rank)
        changed = {name: torch.full((SIZE if name == "large" else DENSE,), torch.nan)} if rank == 1 else {}
        weights = [parameter.detach().clone() for parameter in parts[0].parameters()]
        parts[2].merge()
        saved = {
            key: value if key == "steps" else {name: item.clone() for name, item in value.items()}
            for key, value in parts[2].state_dict().items()
        }
        with pytest.raises(NonFinite, match=f"parameter '{name}' holds NaN or infinity{where};"):
            step_of(parts, 1, rank, **changed)
        assert all(
            torch.equal(parameter, other) for parameter, other in zip(parts[0].parameters(), weights, strict=True)
        )
        with pytest.raises(InvalidArgument, match=r"call load_state_dict\(\) on every rank"):
            parts[2].merge()
        parts[2].load_state_dict(saved)
        step_of(parts, 1, rank)  # the model itself can go on
    parts = made()
    step_of(parts, 0, rank)
    model, optimizer, _ = parts
    model(*gradients(1, rank)).backward()
    with pytest.raises(InvalidArgument, match=r"before optimizer\.step\(\) had applied the last ones"):
        if rank == 0:
            optimizer.step()
        model(*gradients(2, rank)).backward()
    with pytest.raises(SpecMismatch, match=r"sparsity is 0\.8 on rank 0, 0\.9 on rank 1"):
        made(sparsity=[0.8, 0.9][rank])
    with pytest.raises(InvalidArgument if rank == 1 else SyncError, match=r"momentum=0\.9|rank 1 failed"):
        model = DistributedDataParallel(Tensors())
        TopKGradients().attach(model, torch.optim.SGD(model.parameters(), lr=LR, momentum=[0, 0.9][rank]))


@on_ranks(1)
def test_what_cannot_be_sparsified_is_refused() -> None:
    model = DistributedDataParallel(Tensors())
    parameters = list(model.parameters())
    refused: list[tuple[str, Callable[[], Any]]] = [
        ("must be a torch.nn.parallel.Distrib", lambda: TopKGradients().attach(Tensors(), torch.optim.SGD(parameters))),
        ("betas", lambda: TopKGradients().attach(model, torch.optim.AdamW(parameters))),
        ("weight_decay=0.1", lambda: TopKGradients().attach(model, torch.optim.SGD(parameters, weight_decay=0.1))),
        ("does not train parameter 'small'", lambda: TopKGradients().attach(model, torch.optim.SGD(parameters[:1]))),
        ("must be a torch.optim.Optimizer", lambda: TopKGradients().attach(model, parameters)),
        ("float64", lambda: TopKGradients().attach(DistributedDataParallel(Tensors(torch.float64)), None)),
        ("attached to no model", lambda: TopKGradients().merge()),
        ("sparsity is 1", lambda: TopKGradients(sparsity=1)),
        ("momentum is -0.1", lambda: TopKGradients(momentum=-0.1)),
        ("warmup_steps is 1.5", lambda: TopKGradients(warmup_steps=1.5)),  # type: ignore[arg-type]
        ("clip is 0", lambda: TopKGradients(clip=0)),
        ("weight_decay is nan", lambda: TopKGradients(weight_decay=float("nan"))),
        ("nesterov=True needs", lambda: TopKGradients(nesterov=True, momentum=0)),
    ]
    for said, call in refused:
        with pytest.raises(InvalidArgument, match=said):
            call()
    topk = TopKGradients().attach(model, torch.optim.SGD(parameters))
    with pytest.raises(InvalidArgument, match="attached to a model already"):
        topk.attach(model, torch.optim.SGD(parameters))
    with pytest.raises(InvalidArgument, match="refuses a communication hook"):
        TopKGradients().attach(model, torch.optim.SGD(parameters))


def test_the_sparsity_rises_in_equal_parts_of_the_warm_up() -> None:
    levels = [0.75] * 2 + [0.9375] * 2 + [1 - 0.25**3] * 2 + [1 - 0.25**4] * 2 + [0.999] * 2
    assert [sparsity_at(step, 0.999, 8) for step in range(10)] == levels
    assert [sparsity_at(step, 0.9, 3) for step in range(4)] == [0.75] * 3 + [0.9]
    assert sparsity_at(0, 0.5, 10) == 0.5
    assert sparsity_at(0, 0.999, 0) == 0.999
