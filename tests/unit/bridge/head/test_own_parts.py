"""A margin, a selection and a row backend that only this file knows, in every place of the rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.ams.programs.selection import ActiveClasses, Selection
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.specs import Ids
from geartrain.bridge.head.backends.pull.pull_backend import PullBackend
from geartrain.bridge.head.backends.registry import ROW_BACKENDS
from geartrain.bridge.head.loss.margins.margin import TargetLogits
from tests.support import heads

CLASSES, DIM, BATCH = 60, 5, 12
PLACES: list[dict[str, Any]] = [
    {"rows": "pull"},
    {"rows": "pull", "rows_cache_bytes": 0},
    {"rows": "hosted"},
    {"rows": "ranks"},
    {"rows": "ranks", "on_device": True},
]


@dataclass(frozen=True)
class Steep:
    """Target logit = scale · (cos θ − slope · (1 − cos θ))."""

    scale: float = 8.0
    slope: float = 0.5

    def target(self, cos_B: Tensor, norms_B: Tensor, labels_B: Tensor) -> tuple[Tensor, Tensor]:
        del norms_B, labels_B
        value_B = self.scale * (cos_B - self.slope * (1 - cos_B))
        return value_B, torch.full_like(cos_B, self.scale * (1 + self.slope))


@dataclass(frozen=True)
class Whole:
    """Target logit = scale · (cos θ − label / 100 − lean · ln |x|); cost · |x|² is added to the loss."""

    scale: float = 8.0
    lean: float = 0.2
    cost: float = 0.3

    def target(self, cos_B: Tensor, norms_B: Tensor, labels_B: Tensor) -> TargetLogits:
        return TargetLogits(
            self.scale * (cos_B - labels_B / 100 - self.lean * norms_B.log()),
            torch.full_like(cos_B, self.scale),
            -self.scale * self.lean / norms_B,
            self.cost * norms_B**2,
            2 * self.cost * norms_B,
        )


@dataclass(frozen=True)
class Strided(Selection):
    """The labels, and every third class from ``step`` on."""

    is_corrected: bool = False

    def budget(self, num_classes: int) -> int:
        return -(-num_classes // 3)

    def select(self, labels: Ids, num_classes: int, step: int) -> ActiveClasses:
        ids = np.union1d(labels, np.arange(step % 3, num_classes, 3))
        return ActiveClasses(len(ids), ids)

    def corrects(self, margin: object) -> bool:  # noqa: ARG002
        return self.is_corrected


def make_head(cluster: Any, place: dict[str, Any], **settings: Any) -> gt.ClassHead:
    settings = {"margin": Steep(), "select": Strided(), **settings, **place}
    return heads.make_head(cluster, "own", num_classes=CLASSES, dim=DIM, optimizer=gt.SGD(lr=0.5), **settings)


def plain_step(
    weight: Tensor, features: Tensor, labels: Tensor, active: Tensor, margin: Steep | Whole
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, feature gradient and rows after one SGD step, in float64 by autograd."""
    w, x = weight.clone().requires_grad_(), features.double().requires_grad_()
    cos = F.normalize(x) @ F.normalize(w).t()
    norms = x.norm(dim=1, keepdim=True)
    if isinstance(margin, Steep):
        target, penalty = cos - margin.slope * (1 - cos), torch.zeros(())
    else:
        target = cos - labels[:, None] / 100 - margin.lean * norms.log()
        penalty = margin.cost * norms.square().mean()
    logits = margin.scale * torch.where(F.one_hot(labels, CLASSES).bool(), target, cos)
    loss = F.cross_entropy(logits.masked_fill(~active, -torch.inf), labels) + penalty
    loss.backward()
    assert w.grad is not None and x.grad is not None
    return loss.detach(), x.grad, weight - 0.5 * w.grad


@pytest.mark.parametrize("margin", [Steep(), Whole()], ids=str)
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_margin_and_a_selection_of_ones_own_train_in_every_place(
    cluster: Cluster, place: dict[str, Any], margin: Steep | Whole
) -> None:
    generator = torch.Generator().manual_seed(1)
    head = make_head(cluster, place, margin=margin)
    rows = gt.RowOptimizer(head)
    weight = head.weights().double()
    retired = torch.tensor([7, 30, 31])
    for step in range(4):
        if step == 2:
            head.retire_classes(retired)
        live = torch.ones(CLASSES, dtype=torch.bool)
        live[retired] = step < 2
        ids = torch.nonzero(live).squeeze(1)
        labels = ids[torch.randint(len(ids), (BATCH,), generator=generator)]
        features = torch.randn(BATCH, DIM, generator=generator, requires_grad=True)
        active = torch.zeros(CLASSES, dtype=torch.bool)
        active[ids[step % 3 :: 3]] = True
        active[labels] = True
        loss = head(features, labels)
        loss.backward()
        rows.step()
        rows.zero_grad()
        expected, gradient, weight = plain_step(weight, features.detach(), labels, active, margin)
        torch.testing.assert_close(loss.detach().double(), expected, rtol=1e-5, atol=1e-5)
        assert features.grad is not None
        torch.testing.assert_close(features.grad.double(), gradient, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(head.weights().double(), weight, rtol=1e-4, atol=1e-5)
    assert head.predict(torch.randn(2, DIM), k=3)[1].shape == (2, 3)
    again = make_head(cluster, place, margin=margin, reuse=True) if place["rows"] != "ranks" else head
    again.load_state_dict(head.state_dict())
    assert again.step == 4


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_selection_of_ones_own_may_correct_its_logits_where_it_is_not_told_to_shards(place: dict[str, Any]) -> None:
    with gt.local() as cluster:
        head = make_head(cluster, place, margin=None, select=Strided(is_corrected=True))
        features, labels = torch.randn(BATCH, DIM), torch.arange(BATCH)
        if place["rows"] == "hosted":
            with pytest.raises(InvalidArgument, match=r"Strided.*PartialFC alone.*rows='pull'"):
                head(features, labels)
            return
        active = np.union1d(np.arange(BATCH), np.arange(0, CLASSES, 3))
        logits = features.double() @ head.weights().double().t()[:, active]
        weight = torch.where(torch.from_numpy(active < BATCH), 1.0, (CLASSES - BATCH) / (len(active) - BATCH))
        expected = F.cross_entropy(logits + weight.log(), torch.from_numpy(np.searchsorted(active, labels.numpy())))
        torch.testing.assert_close(head(features, labels).double(), expected, rtol=1e-5, atol=1e-5)


def test_a_row_backend_of_ones_own_is_one_name_more(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(PullBackend):
        summary = "rows travel, and passes are counted"
        passes = 0

        def start(self, *arguments: Any, **options: Any) -> Any:
            self.passes += 1
            return super().start(*arguments, **options)

    monkeypatch.setitem(ROW_BACKENDS, "counting", Counting)
    with gt.local() as cluster:
        head = make_head(cluster, {"rows": "counting"})
        head(torch.randn(2, DIM), torch.tensor([0, 1])).backward()
        gt.RowOptimizer(head).step()
        assert isinstance(head.backend, Counting) and head.backend.passes == head.step == 1
        with pytest.raises(InvalidArgument, match=r"'disk'.*'counting' .rows travel, and passes are counted"):
            make_head(cluster, {"rows": "disk"})


def test_what_a_margin_or_a_selection_lacks_is_said() -> None:
    class Nameless:
        scale = 8.0
        target = Steep().target

    class Odd(Steep):
        scale = float("inf")

    class Short(Steep):
        def target(self, cos_B: Tensor, norms_B: Tensor, labels_B: Tensor) -> tuple[Tensor, Tensor]:
            return super().target(cos_B[:1], norms_B, labels_B)

    class Narrow:
        scale = 8.0

        def target(self, cos_B: Tensor) -> tuple[Tensor, Tensor]:
            return cos_B, cos_B

    with gt.local() as cluster:
        for wrong in (object(), Steep, "ArcFace", Narrow()):
            with pytest.raises(InvalidArgument, match=r"has scale and target\(cos_B, norms_B, labels_B\)"):
                make_head(cluster, {}, margin=wrong)
        with pytest.raises(InvalidArgument, match=r"scale of the margin .* is inf"):
            make_head(cluster, {}, margin=Odd(float("inf")))
        with pytest.raises(InvalidArgument, match="derived from Selection"):
            make_head(cluster, {}, select=0.1)
        make_head(cluster, {}, margin=Nameless())
        with pytest.raises(InvalidArgument, match=r"logits_B of .*Short.* are torch.float32 \[1\].*float32 \[2\]"):
            make_head(cluster, {}, margin=Short(), reuse=True)(torch.randn(2, DIM), torch.tensor([0, 1]))
    with pytest.raises(InvalidArgument, match=r"no repr that names its settings.*frozen dataclass"):
        make_head(None, {"rows": "ranks"}, margin=Nameless())
