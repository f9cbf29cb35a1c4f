"""Margins that change while training goes on: what a margin learns, and what a saved head says of them."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.ams.values.errors import SpecMismatch
from geartrain.bridge.head.loss.margins.margin import MarginBatch
from tests.support import heads

CLASSES, DIM = 20, 4


@dataclass(frozen=True)
class Growing:
    """CosFace whose margin grows with the step and with what it has seen."""

    scale: float = 16.0

    def for_batch(self, batch: MarginBatch) -> gt.CosFace:
        seen = batch.recall("seen") + batch.joint_size
        batch.learn(seen=seen)
        return gt.CosFace(self.scale, 0.01 * batch.step + 0.001 * float(seen))


def make_head(margin: Any, cluster: Cluster | None = None, **settings: Any) -> gt.ClassHead:
    settings = {"num_classes": CLASSES, "dim": DIM, "optimizer": gt.SGD(0.5), **settings}
    return heads.make_head(cluster, margin=margin, **settings)


train = partial(heads.train, batch=partial(heads.make_batch, 6, CLASSES, DIM))


ADAPTIVE: list[Any] = [
    Growing(),
    gt.AdaFace(16),
    gt.CurricularFace(),
    gt.ElasticArcFace(std=0.1),
    gt.FilteredMargin(gt.AdaFace(16, 0.4), above=0.5),
]


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


def test_a_margin_that_is_set_counts_from_the_next_pass_on() -> None:
    head = make_head(gt.CosFace(4, 0.0))
    features, labels = torch.randn(6, DIM), torch.arange(6)
    for margin in (gt.CosFace(10, 0.2), gt.CosFace(16, 0.4)):
        head.margin = margin
        torch.testing.assert_close(head(features, labels), make_head(margin)(features, labels))


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
