"""What a head says of its last forward pass, in every place of the rows; and that one which learns nothing says so."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import geartrain as gt
from geartrain.bridge.head.loss import statistics
from tests.support.reference import FakeCluster
from tests.unit.bridge.head.test_reductions import MARGINS, PLACES, SELECTIONS, Question, close

QUESTIONS = [
    Question(margin=MARGINS[1], select=SELECTIONS[0]),
    Question(margin=MARGINS[2], select=SELECTIONS[1], num_ignored=2, reduction="none"),
    Question(margin=None, select=SELECTIONS[2], weights="some", smoothing=0.1),
    Question(margin=None, select=SELECTIONS[0], dtype=torch.float64),
    Question(margin=gt.ArcFace(scale=16), select=gt.PartialFC(0.3, seed=5, corrected=True)),
]


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_statistics_are_those_of_the_plain_cosines(place: dict[str, Any]) -> None:
    with gt.local(num_shards=2) if place["rows"] != "ranks" else nullcontext() as cluster:
        for question in QUESTIONS:
            head = question.head(cluster, place)
            assert head.stats is None
            question.ask(head)
            check(head, question)
            with torch.no_grad():
                head.eval()(*question.batch())
            check(head, question)


@pytest.mark.parametrize("place", [PLACES[0], PLACES[3]], ids=str)
def test_a_margin_that_changes_other_logits_changes_no_statistics(place: dict[str, Any]) -> None:
    question = Question(margin=gt.CurricularFace(scale=16))
    with gt.local(num_shards=2) if place["rows"] != "ranks" else nullcontext() as cluster:
        head = question.head(cluster, place)
        question.ask(head)
        check(head, question)


def check(head: gt.ClassHead, question: Question) -> None:
    features, labels, _ = question.batch()
    counted = labels != -100
    x, w, labels = features[counted].double(), head.weights().double(), labels[counted]
    active = torch.from_numpy(question.select.select(labels.numpy(), len(w), 0).ids)
    cosines = x @ w.t() if question.margin is None else F.normalize(x) @ F.normalize(w).t()
    targets = cosines.gather(1, labels[:, None])[:, 0]
    others = cosines.scatter(1, labels[:, None], -torch.inf)[:, active].amax(1)
    stats = head.stats
    assert stats is not None and stats.highest_others is not None
    assert repr(stats).startswith(f"StepStatistics(loss={stats.loss:.4g}, accuracy=") and "tensor" not in repr(stats)
    close(stats.targets, targets, 1e-5)
    close(stats.highest_others, others, 1e-5)
    assert stats.num_active == len(active)
    assert stats.accuracy == pytest.approx(float((targets > others).double().mean()))
    assert stats.target == pytest.approx(float(targets.mean()), abs=1e-5)
    assert stats.highest_other == pytest.approx(float(others.mean()), abs=1e-5)
    assert len(stats.losses) == len(x) and stats.loss == pytest.approx(float(stats.losses.mean()))


def test_the_largest_other_is_looked_for_now_and_then_where_it_costs_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: passes of steps between say None."""
    head = Question(margin=MARGINS[1]).head(FakeCluster(), PLACES[0])
    monkeypatch.setattr(statistics, "LOOKS_EVERY", 16)
    features, labels, _ = Question().batch()
    head.row_update.step = 3
    call = head.backend.start(features, labels, None, in_training=True, want_rows=False)
    call.rows.batch.looks_for_highest = False
    call.run(want_gradient=False)
    assert call.statistics.accuracy is None and call.statistics.highest_other is None
    assert np.isfinite(call.statistics.target)


def train(seed: int, lr: float, passes: int = 110) -> list[str]:
    """Warnings of a head over a layer that is trained, on noisy features of 30 classes."""
    torch.manual_seed(seed)
    head = gt.ClassHead(
        FakeCluster(seed), "head", num_classes=30, dim=16, margin=gt.ArcFace(scale=16), optimizer=gt.SGD(lr=0.2)
    )
    rows = gt.RowOptimizer(head)
    rows.param_groups[0]["lr"] = lr
    centers = torch.randn(30, 16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(passes):
            labels = torch.randint(30, (32,))
            head(centers[labels] + torch.randn(32, 16), labels).backward()
            rows.step()
            rows.zero_grad()
    return [str(item.message) for item in caught]


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "_MIN_PASSES", 100)


@pytest.mark.usefixtures("soon")
def test_a_head_that_learns_nothing_says_so_once() -> None:
    (sentence,) = train(0, lr=0.0, passes=220)
    for part in ("'head'", "scale=16", "learning rate 0)", "100 training passes", "accuracy over 30 active", "Try"):
        assert part in sentence


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("seed", range(3))
def test_a_head_that_learns_says_nothing(seed: int) -> None:
    assert train(seed, lr=0.2) == []


def test_a_head_of_many_classes_is_given_time() -> None:
    watch = statistics.LearningWatch()
    seen = statistics.StepStatistics(
        losses=torch.zeros(2), targets=torch.zeros(2), highest_others=torch.ones(2), num_active=10
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(900):
            watch.observe(seen, 1000, lambda: "head")
    with pytest.warns(UserWarning, match="after 1000 training passes the class head head has learned nothing"):
        for _ in range(200):
            watch.observe(seen, 1000, lambda: "head")


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("num_classes", [1, 2, 3])
def test_a_head_of_few_classes_that_was_good_from_the_start_says_nothing(num_classes: int) -> None:
    watch = statistics.LearningWatch()
    seen = statistics.StepStatistics(
        losses=torch.zeros(8), targets=torch.ones(8), highest_others=-torch.ones(8), num_active=num_classes
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(110):
            watch.observe(seen, num_classes, lambda: "head")
    assert watch.has_ended
