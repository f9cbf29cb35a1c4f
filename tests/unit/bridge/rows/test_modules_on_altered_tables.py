"""Modules on tables whose settings were altered: each trains by the optimizer that it was given."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.ams.values.specs import Constant, Uniform

IDS = torch.arange(6)


def group(cluster: Cluster, optimizer: Any, *, reuse: bool = False, **settings: Any) -> gt.EmbeddingGroup:
    fields = [gt.Field(name, dim=3, initializer=Constant(0.0), **settings) for name in ("user", "item")]
    return gt.EmbeddingGroup(cluster, "ctr", fields, optimizer=optimizer, reuse=reuse)


def train(module: gt.EmbeddingGroup, steps: int = 1) -> None:
    rows = gt.RowOptimizer(module)
    for _ in range(steps):
        vectors = module({"user": IDS, "item": IDS})
        (vectors["user"].sum() + 3 * vectors["item"].sum()).backward()
        rows.step()
        rows.zero_grad()


def adagrad(gradient: float, steps: list[tuple[float, float]]) -> torch.Tensor:
    """A number that torch.optim.Adagrad moves in float64, by (lr, eps) of each step."""
    weight = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    twin = torch.optim.Adagrad([weight], lr=1.0)
    for lr, eps in steps:
        twin.param_groups[0].update(lr=lr, eps=eps)
        weight.grad = torch.full_like(weight, gradient)
        twin.step()
    return weight.detach()


@pytest.mark.parametrize("altered", ["neither", "user", "item"])
def test_a_group_trains_by_its_own_numbers_whichever_table_was_altered(cluster: Cluster, altered: str) -> None:
    module = group(cluster, gt.Adagrad(0.5, eps=0.25))
    train(module)
    if altered != "neither":
        cluster.alter_table(f"ctr/{altered}", optimizer=gt.Adagrad(9.0, eps=7.0))
    train(module)
    again = group(cluster, gt.Adagrad(0.125, eps=2.0), reuse=True)
    train(again)
    steps = [(0.5, 0.25), (0.5, 0.25), (0.125, 2.0)]
    for name, gradient in (("user", 1.0), ("item", 3.0)):
        rows = torch.from_numpy(again.table(name).pull(IDS.numpy())).double()
        torch.testing.assert_close(rows, adagrad(gradient, steps).expand(6, 3), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rows", ["pull", "hosted"])
def test_a_head_made_anew_trains_by_the_optimizer_it_is_given(cluster: Cluster, rows: str) -> None:
    moved = []
    for name, first, reuse in (("other", 0.25, False), ("same", 1.0, False), ("same", 0.25, True)):
        settings: dict[str, Any] = {"num_classes": 5, "dim": 3, "margin": None, "rows": rows, "reuse": reuse}
        head = gt.ClassHead(cluster, name, optimizer=gt.SGD(first), **settings)
        if (name, reuse) == ("same", False):
            continue
        before = head.weights()
        head(torch.ones(2, 3), torch.tensor([0, 1])).backward()
        gt.RowOptimizer(head).step()
        moved.append((before, head.weights() - before))
    for before, step in moved:
        weights = before.double().requires_grad_()
        loss = nn.functional.cross_entropy(torch.ones(2, 3, dtype=torch.float64) @ weights.T, torch.tensor([0, 1]))
        (gradient,) = torch.autograd.grad(loss, weights)
        torch.testing.assert_close(step.double(), -0.25 * gradient, rtol=1e-4, atol=1e-6)


def test_a_dense_module_attached_again_trains_by_the_rate_it_is_given(cluster: Cluster) -> None:
    gt.attach(nn.Linear(2, 1), cluster, name="net", optimizer=gt.SGD(1.0))
    module = nn.Linear(2, 1)
    dense = gt.attach(module, cluster, name="net", optimizer=gt.SGD(0.25), reuse=True)
    before = module.weight.detach().clone()
    module(torch.ones(1, 2)).sum().backward()
    dense.step()
    torch.testing.assert_close(module.weight.detach(), before - 0.25)


def test_a_saved_model_goes_into_one_with_other_settings_which_it_keeps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with gt.local(2) as cluster:
        module = group(cluster, gt.Adagrad(0.5), max_bytes=100_000)
        train(module, 2)
        gt.save(module, tmp_path / "model")
        saved = module.table("user").pull(IDS.numpy())
    for strict in (True, False):
        with gt.local(1) as cluster, caplog.at_level(logging.WARNING):
            caplog.clear()
            larger = group(cluster, gt.Adagrad(0.25), max_bytes=400_000, expiry=gt.Unseen(steps=1_000))
            gt.load(larger, tmp_path / "model", strict=strict)
            assert "expiry is Unseen(" in caplog.text and "max_bytes is 400000, not 100000" in caplog.text
            assert (larger.table("user").pull(IDS.numpy()) == saved).all()
            spec = cluster.table("ctr/user").spec
            assert (spec.max_bytes, spec.expiry) == (400_000, gt.Unseen(steps=1_000))
            train(larger)


def test_a_device_cache_forgets_the_initial_values_of_before(cluster: Cluster) -> None:
    fields = [gt.Field("user", dim=3, initializer=Constant(0.0))]
    module = gt.EmbeddingGroup(cluster, "ctr", fields, optimizer=gt.SGD(1.0), device_cache_bytes=1 << 20)
    for _ in range(2):
        assert (module({"user": IDS})["user"] == 0).all()
    cluster.alter_table("ctr/user", initializer=Uniform(5, 6))
    pulled = torch.from_numpy(module.table("user").pull(IDS.numpy()))  # by which this process has learned of it
    found = module({"user": IDS})["user"].detach()
    assert (found == pulled).all() and (found >= 5).all()
