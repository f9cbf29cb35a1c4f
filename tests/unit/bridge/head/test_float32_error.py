"""How far float32 is from float64 where logits are large: no further than PyTorch's own, wherever the rows are."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

import geartrain as gt
from geartrain.bridge.collectives.cross_entropy import LocalLabels, split_cross_entropy
from geartrain.bridge.kernels import sample_terms
from geartrain.bridge.kernels.launch import interpreted
from tests.support.heads import PLACES, make_head
from tests.support.rank_processes import on_ranks
from tests.support.reference import plain_logits

CLASSES, DIM, BATCH = 1000, 128, 64
RATE = 2.0**20
"""Of the rows: what they were is nothing beside their step, which tells the gradient."""
EVERYWHERE: dict[str, dict[str, Any]] = {
    **PLACES,
    "tensor operations": {"rows": "ranks", "late": True},
    "kernels' references": {"rows": "ranks", "fused": True},
}
CASES: list[tuple[Any, float]] = [
    (None, 1),
    (None, 100),
    (None, 640),
    (gt.ArcFace(scale=64, margin=0.5), 64),
    (gt.CosFace(scale=64, margin=0.35), 64),
]


def competing(margin: Any, largest: float) -> tuple[Tensor, Tensor, Tensor]:
    """Features, rows, labels: each class has another that is like it, so that a loss is small beside the logits."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(CLASSES, DIM, generator=generator)
    noise = torch.randn(CLASSES // 2, DIM, generator=generator)
    rows[CLASSES // 2 :] = rows[: CLASSES // 2] + (0.1 if margin is None else 0.6) * noise
    labels = torch.randint(CLASSES, (BATCH,), generator=generator)
    features = rows[labels] + 0.3 * torch.randn(BATCH, DIM, generator=generator)
    return features * (largest / (features @ rows.t()).abs().max() if margin is None else 1.0), rows, labels


def plainly(margin: Any, features: Tensor, rows: Tensor, labels: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Losses, gradients of features and of rows of their mean, in float64 by PyTorch's operations in ``dtype``."""
    x, w = features.to(dtype, copy=True).requires_grad_(), rows.to(dtype, copy=True).requires_grad_()
    losses = F.cross_entropy(
        plain_logits(x, w, labels, None if margin is None else margin.combined), labels, reduction="none"
    )
    return [losses.detach().double(), *(made.double() for made in torch.autograd.grad(losses.mean(), [x, w]))]


def error(made: Tensor, exact: Tensor) -> float:
    return float((made.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("place", EVERYWHERE)
def test_large_logits_cost_no_more_than_the_rounding_of_pytorch(place: str) -> None:
    with gt.local(num_shards=2) if EVERYWHERE[place]["rows"] != "ranks" else nullcontext() as cluster:
        for number, (margin, largest) in enumerate(CASES):
            features, rows, labels = competing(margin, largest)
            head = make_head(
                cluster,
                f"head{number}",
                num_classes=CLASSES,
                dim=DIM,
                margin=margin,
                select=gt.FullSoftmax(),
                optimizer=gt.SGD(RATE),
                reduction="none",
                **EVERYWHERE[place],
            )
            head.backend.table.assign(torch.arange(CLASSES).numpy(), rows.numpy())
            optimizer, x = gt.RowOptimizer(head), features.clone().requires_grad_()
            losses = head(x, labels)
            losses.mean().backward()
            optimizer.step()
            made = [losses.detach(), x.grad, (rows.double() - head.weights().double()) / RATE]
            exact, theirs = (plainly(margin, features, rows, labels, dtype) for dtype in (torch.float64, torch.float32))
            for least, mine, other, true in zip((6e-8, 6e-8, 1e-6), made, theirs, exact, strict=True):
                assert mine is not None
                assert error(mine, true) <= 2 * max(error(other, true), least), (margin, largest)


@on_ranks(2)
def test_ranks_round_no_more_than_pytorch(rank: int) -> None:
    for margin, largest in CASES:
        features, rows, labels = competing(margin, largest)
        head = make_head(
            num_classes=CLASSES, dim=DIM, margin=margin, select=gt.FullSoftmax(), process_group=dist.group.WORLD
        )
        head.backend.table.assign(torch.arange(CLASSES).numpy(), rows.numpy())
        own = slice(rank * BATCH // 2, (rank + 1) * BATCH // 2)
        x = features[own].clone().requires_grad_()
        head(x, labels[own]).backward()
        exact, theirs = (plainly(margin, features, rows, labels, dtype)[1] for dtype in (torch.float64, torch.float32))
        assert x.grad is not None
        assert error(x.grad / 2, exact[own]) <= 2 * max(error(theirs[own], exact[own]), 6e-8), (margin, largest)


@pytest.mark.parametrize(("margin", "largest"), CASES, ids=str)
def test_cross_entropy_of_logits_in_a_layer_of_ones_own_rounds_as_pytorch(margin: Any, largest: float) -> None:
    features, rows, labels = competing(margin, largest)
    if margin is not None:
        features, rows = F.normalize(features), F.normalize(rows)
    logits = features @ rows.t()

    def gradient(dtype: torch.dtype, *, ours: bool) -> Tensor:
        """Of the features, from that of the same logits."""
        z = logits.to(dtype, copy=True).requires_grad_()
        ones = torch.ones(BATCH, dtype=dtype)
        if ours and margin is None:
            labels_here = LocalLabels(places_B=labels, counts_B=ones.bool(), weights_B=ones)
            loss = split_cross_entropy(z, labels_here, None).mean()
        elif ours:
            combined = margin.combined
            loss = gt.margin_cross_entropy(z, labels, combined.m1, combined.m2, combined.m3, combined.scale)
        else:
            target = z.gather(1, labels[:, None])
            changed = target if margin is None else margin.target(target)[0] / margin.scale
            loss = F.cross_entropy(z.scatter(1, labels[:, None], changed) * getattr(margin, "scale", 1), labels)
        (found,) = torch.autograd.grad(loss, z)
        return found.double() @ rows.double()

    exact = gradient(torch.float64, ours=False)
    mine, theirs = gradient(torch.float32, ours=True), gradient(torch.float32, ours=False)
    assert error(mine, exact) <= 2 * max(error(theirs, exact), 6e-8)


def test_the_kernel_of_losses_sums_probabilities_to_one_at_large_logits() -> None:
    target_B = torch.linspace(620, 660, 200)
    shift_B = torch.full_like(target_B, 640 * 1.5)
    sums_B = torch.rand(200, dtype=torch.float64) + 1
    with interpreted():
        made = sample_terms.losses(target_B, sums_B, shift_B, shift_B, 0.0, None, None)
    others_B = made.coefficients_B.double() * sums_B
    torch.testing.assert_close(others_B, -made.target_weight_B.double(), rtol=3e-7, atol=0)
    both = torch.stack([shift_B.double() + sums_B.log2(), (target_B * torch.tensor(1.4426950408889634)).double()])
    expected_B = torch.logsumexp(both * 0.6931471805599453, 0) - both[1] * 0.6931471805599453
    torch.testing.assert_close(made.losses_B.double(), expected_B, rtol=3e-7, atol=1e-12)
