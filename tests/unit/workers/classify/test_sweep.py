"""The learning rate of a run that is given none."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

import geartrain as gt
from geartrain.workers.classify import sweep
from geartrain.workers.classify.sweep import Trial, best_rate, find_rate, trial_steps
from geartrain.workers.classify.trainer import ImageTrainer
from geartrain.workers.data.images import ImageSet
from geartrain.workers.job.ranks import JobRanks
from geartrain.workers.job.state import JobProgress
from geartrain.workers.models.backbones import StrokeNet
from geartrain.workers.models.discriminants import fit_projection
from geartrain.workers.recipes.recipe import Recipe, head_of

CPU = torch.device("cpu")


def noisy(each: int, seed: int) -> ImageSet:
    """Three smooth patterns under noise."""
    generator = torch.Generator().manual_seed(0)
    patterns = functional.interpolate(torch.rand(3, 1, 8, 8, generator=generator) * 255, size=32)
    images = patterns.repeat(each, 1, 1, 1)
    images = images + 80 * torch.randn(images.shape, generator=torch.Generator().manual_seed(seed))
    return ImageSet(images.clamp(0, 255).to(torch.uint8), torch.arange(3).repeat(each))


def trials_of(
    rates: tuple[float, ...], monkeypatch: pytest.MonkeyPatch, stop_after: int = 1000, sub_centers: int = 1
) -> list[Trial]:
    monkeypatch.setitem(sweep.RATES, "sgd", rates)
    torch.manual_seed(0)
    net = StrokeNet(dim=8, width=8)
    train, validation = noisy(20, 1), noisy(10, 2)
    fit_projection(net, train.batches(64, CPU), 3)
    before = [parameter.clone() for parameter in net.parameters()]
    rows = torch.eye(3, 8) if sub_centers == 1 else torch.randn(3, sub_centers, 8)
    kept = rows.clone()
    recipe = Recipe(steps=112, batch_size=12, dim=8, width=8, sample_rate=1.0, sub_centers=sub_centers)
    asked = iter(range(10**6))
    with gt.local() as cluster:
        start = ImageTrainer(
            backbone=net,
            head=head_of(recipe, cluster, "job", 3),
            recipe=recipe,
            images=train,
            progress=JobProgress(step=0, stage_start=0, stage_steps=recipe.steps, table="job"),
            ranks=JobRanks(),
            device=CPU,
        )
        state = torch.get_rng_state()
        found = find_rate(start, rows, validation, stop=lambda: next(asked) >= stop_after, say=lambda _: None)
    assert torch.equal(state, torch.get_rng_state()) and torch.equal(rows, kept)
    assert all(torch.equal(now, then) for now, then in zip(net.parameters(), before, strict=True))
    return found


def test_a_rate_that_learns_beats_one_that_does_not_and_one_that_ruins(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = trials_of((1e-7, 0.05, 1e4), monkeypatch)
    assert [trial.lr for trial in trials] == [1e-7, 0.05, 1e4]
    assert best_rate(trials) == 0.05


def test_trials_end_when_the_run_is_told_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = trials_of((1e-3, 1e-2, 1e-1), monkeypatch, stop_after=12, sub_centers=2)
    assert [trial.lr for trial in trials] == [1e-3]


def test_trials_are_short() -> None:
    assert [trial_steps(steps) for steps in (1, 140, 300, 100_000)] == [1, 10, 21, 60]
    assert all(2 * len(rates) * trial_steps(steps) < steps for rates in sweep.RATES.values() for steps in (140, 300))
    assert best_rate([Trial(lr=1.0, loss=math.inf)]) is None
