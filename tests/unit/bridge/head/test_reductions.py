"""Sample weights, ignored and smoothed labels, reductions: the plain formula in float64, in every place of the rows."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

import geartrain as gt
from geartrain.ams.values.errors import InvalidArgument, InvalidIds
from geartrain.bridge.head.loss.margins.angular import ArcFace, CosFace
from geartrain.bridge.head.loss.margins.margin import Margin
from tests.support import heads
from tests.support.reference import UNIT_SGD, FakeCluster, merged_gradient, plain_logits, sampled_weights

CLASSES, DIM, BATCH = 60, 5, 12
MARGINS: list[Margin | None] = [None, ArcFace(scale=16, margin=0.3), CosFace(scale=100, margin=0.2)]
NUMBERS = count()  # of heads: two of one cluster share no name
SELECTIONS = [gt.FullSoftmax(), gt.PartialFC(0.3, seed=5), gt.PartialFC(0.3, seed=5, corrected=True)]
PLACES: list[dict[str, Any]] = [
    {"rows": "pull"},
    {"rows": "pull", "rows_cache_bytes": 0},
    {"rows": "hosted"},
    {"rows": "ranks"},
    {"rows": "ranks", "on_device": True},
]


@dataclass(frozen=True)
class Question:
    """A batch, and what is asked of it."""

    reduction: str = "mean"
    weights: str = "none"
    num_ignored: int = 0
    margin: Margin | None = None
    select: Any = SELECTIONS[0]
    seed: int = 0
    dtype: torch.dtype = torch.float32
    smoothing: float = 0.0

    @property
    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    def batch(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Features, labels, weights."""
        generator = self.generator
        features = torch.randn(BATCH, DIM, generator=generator, dtype=torch.float64).to(self.dtype)
        labels = torch.randint(CLASSES, (BATCH,), generator=generator)
        labels[torch.randperm(BATCH, generator=generator)[: self.num_ignored]] = -100
        weight = {
            "none": None,
            "some": torch.rand(BATCH, generator=generator) * 3 * (torch.rand(BATCH, generator=generator) > 0.3),
            "zero": torch.zeros(BATCH),
            "extreme": torch.logspace(-30, 20, BATCH),
        }[self.weights]
        return features, labels, weight

    def upstream(self) -> Tensor:
        """Of the loss or the losses; of either sign, and 0."""
        signed = torch.randn(BATCH, generator=self.generator, dtype=torch.float64)
        signed[3] = 0
        return signed if self.reduction == "none" else torch.tensor(-2.5, dtype=torch.float64)

    def expected(self, rows: Tensor, step: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Loss or losses, feature gradient [B, D] and row gradient [C, D] for this upstream, by autograd."""
        features, labels, weight = self.batch()
        x, w = features.double().requires_grad_(), rows.double().requires_grad_()
        counted = labels != -100
        active = self.select.select(labels[counted].numpy(), CLASSES, step).ids
        targets = torch.from_numpy(np.searchsorted(active, labels[counted].numpy()))
        general = None if self.margin is None else self.margin.combined
        corrections = sampled_weights(self.select, self.margin, active, labels[counted], CLASSES)
        logits = plain_logits(x[counted], w[torch.from_numpy(active)], targets, general, corrections)
        losses = torch.zeros(BATCH, dtype=torch.float64)
        losses[counted] = F.cross_entropy(logits, targets, reduction="none")
        if self.smoothing:  # over the logits without margin and correction
            cosines = F.normalize(x) @ F.normalize(w).t() * getattr(self.margin, "scale", 0)
            plain = (x @ w.t() if self.margin is None else cosines)[counted][:, torch.from_numpy(active)]
            shares = torch.ones(len(active), dtype=torch.float64) if corrections is None else corrections
            mean = plain @ (shares / shares.sum())
            losses[counted] += self.smoothing * (logits.gather(1, targets[:, None])[:, 0] - mean)
        counts = counted.double() if weight is None else weight.double() * counted
        losses = losses * counts
        if self.reduction == "sum":
            losses = losses.sum()
        elif self.reduction == "mean":
            losses = losses.sum() / max(float(counts.sum()), 1e-300)
        losses.backward(self.upstream())
        assert x.grad is not None
        return losses.detach(), x.grad, torch.zeros_like(w) if w.grad is None else w.grad

    def head(self, cluster: Any, place: dict[str, Any], **more: Any) -> gt.ClassHead:
        return heads.make_head(
            cluster,
            f"head{next(NUMBERS)}",
            num_classes=CLASSES,
            dim=DIM,
            select=self.select,
            margin=self.margin,
            reduction=self.reduction,
            label_smoothing=self.smoothing,
            optimizer=UNIT_SGD,
            initializer=gt.Normal(std=0.5),
            **place,
            **more,
        )

    def ask(self, head: gt.ClassHead) -> tuple[Tensor, Tensor]:
        """Loss or losses and feature gradient; row gradients are queued."""
        features, labels, weight = self.batch()
        features.requires_grad_()
        loss = head(features, labels, weight)
        loss.backward(self.upstream().to(loss))
        assert features.grad is not None
        return loss.detach(), features.grad


def close(mine: Tensor, theirs: Tensor, tolerance: float) -> None:
    assert mine.shape == theirs.shape
    scale = float(theirs.abs().max()) + 1e-30
    assert float((mine.double() - theirs).abs().max()) <= tolerance * scale, (mine, theirs)


@settings(deadline=None, max_examples=40)
@given(
    reduction=st.sampled_from(["mean", "sum", "none"]),
    weights=st.sampled_from(["none", "some", "zero", "extreme"]),
    num_ignored=st.sampled_from([0, 1, 5, BATCH]),
    margin=st.sampled_from(MARGINS),
    select=st.sampled_from(SELECTIONS),
    holds=st.booleans(),
    keep=st.sampled_from([0, 1 << 20]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 100),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
)
def test_every_combination_equals_the_plain_formula(holds: bool, keep: int, **asked: Any) -> None:
    question = Question(**asked)
    cluster = FakeCluster(question.seed)
    place = {"rows": "pull", "rows_cache_bytes": (1 << 40) if holds else 0, "logits_cache_bytes": keep}
    head = question.head(cluster, place)
    (table,) = cluster.tables.values()
    loss, gradient, row_gradient = question.expected(torch.from_numpy(table.rows.copy()))
    optimizer = gt.RowOptimizer(head)
    mine, mine_gradient = question.ask(head)
    optimizer.step()
    tolerance = 1e-5 if question.dtype == torch.float64 else 2e-4
    close(mine, loss, tolerance)
    close(mine_gradient, gradient, tolerance)
    close(torch.from_numpy(merged_gradient(table)), row_gradient, 2e-4)


QUESTIONS = [
    Question("none", "none", 0, MARGINS[1], SELECTIONS[0]),
    Question("none", "some", 3, MARGINS[2], SELECTIONS[1]),
    Question("mean", "some", 1, None, SELECTIONS[2]),
    Question("sum", "extreme", 0, MARGINS[1], SELECTIONS[1]),
    Question("mean", "none", BATCH, MARGINS[1], SELECTIONS[1]),
    Question("mean", "none", 4, None, SELECTIONS[0], smoothing=0.2),
    Question("none", "some", 3, MARGINS[1], SELECTIONS[1], smoothing=0.1),
    Question("sum", "none", 0, None, SELECTIONS[2], smoothing=0.3),
    Question("mean", "none", BATCH, None, SELECTIONS[0], smoothing=0.3),
]


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_every_place_of_the_rows_equals_the_plain_formula(place: dict[str, Any]) -> None:
    """Two micro-batches a step: their row gradients add up."""
    with gt.local(num_shards=2) if place["rows"] != "ranks" else nullcontext() as cluster:
        for question in QUESTIONS:
            head = question.head(cluster, place)
            optimizer = gt.RowOptimizer(head)
            before = head.weights()
            loss, gradient, row_gradient = question.expected(before)
            for _ in range(2):
                mine, mine_gradient = question.ask(head)
                close(mine, loss, 2e-4)
                close(mine_gradient, gradient, 2e-4)
            optimizer.step()
            close(before - head.weights(), 2 * row_gradient, 5e-4)


def test_it_is_torchs_cross_entropy() -> None:
    """Without a margin, over all classes."""
    head = Question(margin=None, smoothing=0.15).head(FakeCluster(), PLACES[0])
    features, labels, _ = Question(num_ignored=3, dtype=torch.float64).batch()
    logits = features @ head.weights().double().t()
    theirs = F.cross_entropy(logits, labels, label_smoothing=0.15)
    torch.testing.assert_close(head(features, labels).detach(), theirs, rtol=1e-12, atol=0)


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_weights_weigh_the_losses_that_torch_has_of_each_sample(place: dict[str, Any]) -> None:
    """Smoothed ones too. Weights of classes are something else there: torch weighs the smoothed part class by class."""
    features, labels, _ = Question(num_ignored=3).batch()
    of_class = torch.linspace(0.1, 3, CLASSES, dtype=torch.float64)
    weight = of_class[labels.clamp(min=0)]
    with gt.local(num_shards=2) if place["rows"] != "ranks" else nullcontext() as cluster:
        for smoothing in (0.0, 0.2):
            head = Question(smoothing=smoothing).head(cluster, place)
            x, rows = features.double().requires_grad_(), head.weights().double()
            losses = F.cross_entropy(x @ rows.t(), labels, reduction="none", label_smoothing=smoothing)
            theirs = (losses * weight).sum() / weight[labels != -100].sum()
            mine = head(mine_x := features.clone().requires_grad_(), labels, weight)
            (gradient,) = torch.autograd.grad(theirs, x)
            (mine_gradient,) = torch.autograd.grad(mine, mine_x)
            close(mine.detach(), theirs.detach(), 2e-6)
            close(mine_gradient, gradient, 2e-6)
            by_class = F.cross_entropy(x @ rows.t(), labels, weight=of_class, label_smoothing=smoothing)
            assert bool(torch.isclose(by_class, theirs)) == (smoothing == 0)


@pytest.mark.parametrize("place", PLACES[1:4], ids=str)
def test_a_loss_without_gradients_has_the_same_value(place: dict[str, Any]) -> None:
    question = QUESTIONS[1]
    with gt.local() if place["rows"] != "ranks" else nullcontext() as cluster:
        head = question.head(cluster, place)
        features, labels, weight = question.batch()
        with torch.no_grad():
            asked = head(features, labels, weight)
        close(asked, question.expected(head.weights())[0], 2e-4)
        close(head.eval()(features, labels, weight), question.expected(head.weights())[0], 2e-4)


def test_a_loss_scale_goes_through_single_losses() -> None:
    head = Question("none").head(FakeCluster(), PLACES[0])
    features, labels, _ = Question().batch()
    rows = gt.RowOptimizer(head)
    head(features, labels).mean().backward()
    norm = gt.clip_grad_norm_([], rows, max_norm=1e9)
    rows.zero_grad()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    scaler.scale(head(features, labels).mean()).backward()
    scaler.unscale_(rows)
    torch.testing.assert_close(gt.clip_grad_norm_([], rows, max_norm=1e9), norm, rtol=1e-5, atol=0)


@pytest.mark.parametrize("size", [1e-300, 1e-46, 1e38, 1e300])
def test_a_mean_is_the_same_whatever_its_weights_are_multiplied_by(size: float) -> None:
    """Also beyond the range of the losses' float32."""
    features, labels, _ = Question().batch()
    weight, found = torch.arange(1.0, BATCH + 1, dtype=torch.float64), []
    for multiplied in (weight, weight * size):
        cluster = FakeCluster()
        head = Question().head(cluster, PLACES[0])
        rows, x = gt.RowOptimizer(head), features.clone().requires_grad_()
        loss = head(x, labels, multiplied)
        loss.backward()
        rows.step()
        (table,) = cluster.tables.values()
        found.append((loss.detach(), x.grad, torch.from_numpy(merged_gradient(table))))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.ones(BATCH - 1), rf"weight is .*\[{BATCH - 1}\]; it must be a tensor \[{BATCH}\]"),
        (torch.ones(BATCH) - 2 * F.one_hot(torch.tensor(4), BATCH), r"weight -1.0 at index 4 must be finite and >= 0"),
        (torch.full((BATCH,), torch.inf), r"weight inf at index 0"),
        (torch.full((BATCH,), torch.nan), r"weight nan at index 0"),
        ([1.0] * BATCH, r"weight is .*one per sample"),
        (torch.ones(BATCH, requires_grad=True), r"detach\(\).*reduction='none'"),
    ],
)
def test_weights_that_are_none_are_refused(weight: Any, message: str) -> None:
    head = Question().head(FakeCluster(), PLACES[0])
    features, labels, _ = Question().batch()
    with pytest.raises(InvalidArgument, match=message):
        head(features, labels, weight)


def test_settings_that_are_none_are_refused() -> None:
    features, labels, _ = Question().batch()
    for settings_, message in (
        ({"reduction": "max"}, "'max'; it must be one of mean"),
        ({"ignore_index": 0.5}, "0.5"),
        ({"label_smoothing": 1.1}, r"1.1; it must lie in \[0, 1\]"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            heads.make_head(FakeCluster(), "head", num_classes=CLASSES, dim=DIM, **settings_)
    head = gt.ClassHead(FakeCluster(), "head", num_classes=CLASSES, dim=DIM, config=gt.HeadConfig(ignore_index=None))
    with pytest.raises(InvalidIds, match="label -100 at index 2"):
        head(features, labels.index_fill(0, torch.tensor(2), -100))
    for name in ("reduction", "ignore_index", "label_smoothing"):
        with pytest.raises(InvalidArgument, match="make the head anew"):
            setattr(head, name, None)
    zero = gt.ClassHead(FakeCluster(), "head", num_classes=CLASSES, dim=DIM, config=gt.HeadConfig(ignore_index=0))
    assert float(zero(features, torch.zeros_like(labels)).detach()) == 0.0
