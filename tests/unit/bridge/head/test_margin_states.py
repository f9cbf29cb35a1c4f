"""Margins that change while training goes on: schedules, what a margin learns, and what a saved head says of them."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import geartrain as gt
from geartrain.ams.values.errors import InvalidArgument, SpecMismatch
from tests.support import heads

CLASSES, DIM = 20, 4


@dataclass(frozen=True)
class Growing:
    """CosFace whose margin grows with the step and with what it has seen."""

    scale: float = 16.0

    def begin(self, batch: gt.MarginBatch) -> gt.CosFace:
        seen = batch.recall("seen") + batch.joint_size
        batch.learn(seen=seen)
        return gt.CosFace(self.scale, 0.01 * batch.step + 0.001 * float(seen))


def make_head(margin: Any, cluster: gt.Cluster | None = None, **settings: Any) -> gt.ClassHead:
    settings = {"num_classes": CLASSES, "dim": DIM, "optimizer": gt.SGD(0.5), **settings}
    return heads.make_head(cluster, margin=margin, **settings)


train = partial(heads.train, batch=partial(heads.make_batch, 6, CLASSES, DIM))


ADAPTIVE: list[Any] = [
    Growing(),
    gt.AdaFace(16),
    gt.CurricularFace(),
    gt.ElasticArcFace(std=0.1),
    gt.ScheduledMargin((0, gt.ArcFace(16, 0.0)), (6, gt.ArcFace(32, 0.5))),
    gt.ScheduledMargin((0, gt.AdaFace(16, 0.0)), (6, gt.AdaFace(32, 0.4))),
    gt.FilteredMargin(gt.AdaFace(16, 0.4), above=0.5),
]


@dataclass(frozen=True)
class Flagged:
    """A margin of somebody's own with a setting that is no number."""

    scale: float = 8.0
    flag: bool = False

    def target(self, cos_B: torch.Tensor, norms_B: torch.Tensor, labels_B: torch.Tensor) -> tuple[torch.Tensor, ...]:
        del norms_B, labels_B
        return self.scale * cos_B, torch.full_like(cos_B, self.scale)


@pytest.mark.parametrize("margin", ADAPTIVE, ids=str)
def test_a_restored_head_goes_on_as_it_would_have(margin: Any, tmp_path: Path) -> None:
    with gt.local() as cluster, gt.local() as elsewhere:
        head = make_head(margin, cluster)
        train(head, range(3))
        files = {"head": gt.state_to_bytes(head.state_dict())}
        snapshot = cluster.snapshot(tmp_path, step=3, files=files).result(30)
        expected = train(head, range(3, 7))
        elsewhere.restore(snapshot)
        again = make_head(margin, elsewhere, reuse=True)
        again.load_state_dict(gt.state_from_bytes(files["head"]))
        assert train(again, range(3, 7)) == expected


@pytest.mark.parametrize("margin", ADAPTIVE[:4], ids=str)
def test_nothing_is_learned_outside_training(margin: Any) -> None:
    head = make_head(margin)
    train(head, range(2))
    before = head.get_extra_state()["margin_learned"]
    head.eval()
    features, labels = torch.randn(6, DIM), torch.arange(6)
    assert torch.equal(head(features, labels), head(features, labels))
    assert head.get_extra_state()["margin_learned"] == before


@given(
    steps=st.lists(st.integers(0, 1000), min_size=1, max_size=4, unique=True).map(sorted),
    at=st.integers(0, 1200),
    data=st.data(),
)
def test_a_schedule_goes_straight_from_point_to_point(steps: list[int], at: int, data: st.DataObject) -> None:
    numbers = st.lists(st.floats(0.1, 3.0), min_size=len(steps), max_size=len(steps))
    scales, margins = data.draw(numbers), data.draw(numbers)
    points = [(s, gt.ArcFace(scale, m)) for s, scale, m in zip(steps, scales, margins, strict=True)]
    found = gt.ScheduledMargin(*points).at(at)
    assert isinstance(found, gt.ArcFace) and found.scale is not None
    if at in steps:
        assert found == points[steps.index(at)][1]
    later = next((number for number, step in enumerate(steps) if step > at), len(steps))
    low, high = max(0, later - 1), min(later, len(steps) - 1)
    share = (at - steps[low]) / (steps[high] - steps[low]) if low < high else 0.0
    assert found.scale == pytest.approx(scales[low] + share * (scales[high] - scales[low]))
    assert found.margin == pytest.approx(margins[low] + share * (margins[high] - margins[low]))


def test_a_schedule_follows_the_updates_and_takes_the_scale_of_the_classes() -> None:
    head = make_head(gt.ScheduledMargin((0, gt.CosFace(scale=4.0, margin=0.0)), (4, gt.CosFace(margin=0.4))))
    assert isinstance(head.margin, gt.ScheduledMargin) and head.margin.points[1][1].scale == 16.0
    assert "ScheduledMargin((0, CosFace(scale=4.0, margin=0.0)), (4, CosFace(scale=16.0, margin=0.4)))" in repr(head)
    features, labels = torch.randn(6, DIM), torch.arange(6)
    for step, margin in ((0, gt.CosFace(4, 0.0)), (2, gt.CosFace(10, 0.2)), (9, gt.CosFace(16, 0.4))):
        plain = make_head(margin)
        head.row_update.step = step
        torch.testing.assert_close(head(features, labels), plain(features, labels))


@pytest.mark.parametrize(
    ("points", "named"),
    [
        ((), r"points are \(\)"),
        ((gt.ArcFace(),), r"points are \(ArcFace"),
        (((-1, gt.ArcFace()),), "points are"),
        (((0.5, gt.ArcFace()),), "points are"),
        (((5, gt.ArcFace()), (5, gt.ArcFace(margin=0.1))), r"\[5, 5\]; they must rise"),
        (((0, gt.ArcFace()), (5, gt.CosFace())), "must be of one kind"),
        (((0, None), (5, None)), "must be of one kind"),
        (((0, Flagged()), (5, Flagged(flag=True))), r"flag is \[False, True\]"),
        (((0, gt.ElasticArcFace(8)), (5, gt.ElasticArcFace(8, seed=1))), r"seed is 0.2; it must be an integer"),
    ],
)
def test_an_impossible_schedule_is_refused(points: Any, named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        gt.ScheduledMargin(*points)


def test_a_margin_that_was_set_comes_back_with_a_warning() -> None:
    head = make_head(gt.ArcFace(16, 0.0))
    head.margin = gt.ArcFace(24, 0.3)
    state = head.state_dict()
    other = make_head(gt.ArcFace(16, 0.0))
    with pytest.warns(UserWarning, match=r"goes on with .*0\.3.*set head\.margin after loading"):
        other.load_state_dict(state)
    assert other.margin == gt.ArcFace(24, 0.3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.load_state_dict(state)


@pytest.mark.parametrize(
    ("saved", "other"),
    [
        (gt.ArcFace(16, 0.1), None),
        (None, gt.ArcFace(16, 0.1)),
        (gt.ArcFace(16, 0.1), gt.CosFace(16, 0.1)),
        (gt.FilteredMargin(gt.ArcFace(16), 0.4), gt.FilteredMargin(gt.ArcFace(16), 0.5)),
        (ADAPTIVE[4], gt.ScheduledMargin((0, gt.ArcFace(16, 0.0)), (7, gt.ArcFace(32, 0.5)))),
    ],
    ids=str,
)
def test_a_state_of_a_head_with_another_margin_is_refused(saved: Any, other: Any) -> None:
    state = make_head(saved).state_dict()
    head = make_head(other)
    with pytest.raises(SpecMismatch, match=r"saved head has margin .*set head\.margin to it, before"):
        head.load_state_dict(state)
    assert head.margin == other and head.step == 0
    head.margin = saved
    head.load_state_dict(state)
