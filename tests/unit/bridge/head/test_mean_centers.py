"""Centers made of mean features, of most classes at once and of some that come later; and what a loader may give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

import geartrain as gt
from geartrain.ams.values.errors import InvalidArgument, InvalidIds
from tests.support import heads
from tests.support.rank_processes import on_ranks
from tests.support.reference import FakeCluster

OLD, NEW, DIM, EACH = 40, 10, 16, 20
PLACES = ["pull", "hosted", "ranks"]
MARGINS = [None, gt.ArcFace()]


def made(cluster: Any, name: str = "classes", **settings: Any) -> gt.ClassHead:
    settings = {"num_classes": OLD + NEW, "num_live_classes": OLD, "dim": DIM, "rows": "pull", **settings}
    return heads.make_head(cluster, name, **settings)


def features_of(first: int, stop: int, shared: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Of an untrained backbone: one long direction that all have, and a little of their own."""
    own = torch.randn(OLD + NEW, DIM, generator=torch.Generator().manual_seed(7))
    labels = torch.arange(first, stop).repeat_interleave(EACH)
    noise = 0.1 * torch.randn(len(labels), DIM, generator=torch.Generator().manual_seed(seed))
    return shared + own[labels] + noise, labels


def accuracy(head: gt.ClassHead, batch: tuple[Tensor, Tensor]) -> float:
    return float((head.predict(batch[0], k=1)[1][:, 0] == batch[1]).double().mean())


@pytest.mark.parametrize("rows", PLACES)
@pytest.mark.parametrize("margin", MARGINS)
def test_a_saved_head_of_untrained_features_keeps_its_classes_when_others_come(
    cluster: Any, rows: str, margin: Any, tmp_path: Path
) -> None:
    head, old, test = made(cluster, rows=rows, margin=margin), features_of(0, OLD, 20.0), features_of(0, OLD, 20.0, 1)
    assert head.imprint([old], nn.Identity()) == OLD
    sums = torch.zeros(OLD + NEW, DIM, dtype=torch.float64)
    for features, labels in (old, features_of(OLD, OLD + NEW, 20.0)):
        sums.index_add_(0, labels, features.double())
    shared = normalize(normalize(sums[:OLD]).sum(0), dim=0)
    expected = normalize(sums - torch.outer(sums @ shared, shared)).float()
    assert accuracy(head, test) == 1
    gt.save(nn.ModuleList([head]), tmp_path / "model")
    with gt.local() as another:
        head = made(None if rows == "ranks" else another, rows=rows, margin=margin)
        gt.load(nn.ModuleList([head]), tmp_path / "model")
        features, labels = features_of(OLD, OLD + NEW, 20.0)
        head.add_classes(NEW, examples=[(features, labels - OLD)], backbone=nn.Identity())
        torch.testing.assert_close(head.weights(), expected, rtol=1e-4, atol=1e-5)
        assert accuracy(head, test) == 1
        assert accuracy(head, features_of(OLD, OLD + NEW, 20.0, 1)) == 1
        some = slice(3 * EACH, 5 * EACH)
        assert head.imprint([(old[0][some], old[1][some])], nn.Identity()) == 2
        torch.testing.assert_close(head.weights(), expected, rtol=1e-4, atol=1e-5)


def trained(cluster: Any, shared: float, **settings: Any) -> gt.ClassHead:
    """A head whose rows say the classes of long features, but lie at cosines of 0.6 to them, as trained ones do."""
    head = made(cluster, **settings)
    old = torch.zeros(OLD, DIM).index_add_(0, *reversed(features_of(0, OLD, 0.0)))  # type: ignore[arg-type]
    spread = torch.randn(OLD, DIM, generator=torch.Generator().manual_seed(3))
    rows = 0.6 * normalize(old) + 0.5 * normalize(spread) + 0.1 * shared / DIM**0.5
    width = head.table.spec.dim
    biases = torch.linspace(0.1, 0.3, OLD).unsqueeze(1) if width > DIM else torch.empty(OLD, 0)
    head.table.assign(torch.arange(OLD).numpy(), torch.cat([rows, biases], 1).numpy())
    return head


def loss_of_points(head: gt.ClassHead, add: Any, test: tuple[Tensor, Tensor]) -> float:
    before = accuracy(head, test)
    assert before > 0.5
    add()
    return before - accuracy(head, test)


@pytest.mark.parametrize("rows", PLACES)
@pytest.mark.parametrize("margin", MARGINS)
def test_trained_classes_lose_at_most_a_point_to_newcomers(cluster: Any, rows: str, margin: Any) -> None:
    test, (features, labels) = features_of(0, OLD, 0.5, 1), features_of(OLD, OLD + NEW, 0.5)
    head = trained(cluster, 0.5, rows=rows, margin=margin)

    def add() -> None:
        head.add_classes(NEW, examples=[(features, labels - OLD)], backbone=nn.Identity())

    assert loss_of_points(head, add, test) <= 0.01
    assert accuracy(head, features_of(OLD, OLD + NEW, 0.5, 1)) > 0.5
    same = trained(cluster, 0.5, name="imprinted", rows=rows, margin=margin, num_live_classes=OLD + NEW)
    same.table.assign(torch.arange(OLD, OLD + NEW).numpy(), torch.zeros(NEW, DIM).numpy())
    same.imprint([(features, labels)], nn.Identity())
    torch.testing.assert_close(same.weights(), head.weights(), rtol=1e-4, atol=1e-5)


def test_newcomers_of_a_trained_head_are_placed_as_written_out_in_float64(cluster: Any) -> None:
    features, labels = features_of(OLD, OLD + NEW, 0.5)
    sums = torch.zeros(NEW, DIM).double().index_add_(0, labels - OLD, features.double())
    units, spread = normalize(sums), float(features.norm(dim=1).sum() / sums.norm(dim=1).sum())
    for bias in (False, True):
        head = trained(cluster, 0.5, name=f"linear{bias}", bias=bias)
        there, mean = head.weights(torch.arange(OLD)).double(), head.weights(torch.arange(OLD)).double().mean(0)
        ids = head.add_classes(NEW, examples=[(features, labels - OLD)], backbone=nn.Identity())
        placed = head.weights(ids).double()
        own = placed - mean
        best = (units @ there.T).amax(1)
        longest = float(there.norm(dim=1).max())
        torch.testing.assert_close(own @ mean, torch.zeros(NEW).double(), rtol=0, atol=1e-6)
        reaches = own.norm(dim=1) < longest - 1e-6
        assert reaches.any()
        torch.testing.assert_close((placed * units).sum(1)[reaches], spread * best[reaches], rtol=1e-5, atol=0)
        expected = head.biases(torch.arange(OLD)).mean().expand(NEW)
        torch.testing.assert_close(head.biases(ids), expected if bias else torch.zeros(NEW))
    head = trained(cluster, 0.5, name="margin", margin=gt.ArcFace())
    there = normalize(head.weights(torch.arange(OLD)).double())
    ids = head.add_classes(NEW, examples=[(features, labels - OLD)], backbone=nn.Identity())
    placed = head.weights(ids).double()
    cosine = float((1.25 * spread * (units @ there.T).amax(1).mean()).clamp(0.8, 1))
    assert cosine < 1
    torch.testing.assert_close((placed * units).sum(1), torch.full((NEW,), cosine).double(), rtol=1e-5, atol=0)
    torch.testing.assert_close(placed.norm(dim=1), torch.ones(NEW).double(), rtol=1e-5, atol=0)
    assert bool((placed @ there.mean(0) < units @ there.mean(0)).all())


def test_a_newcomer_with_nothing_of_its_own_is_refused() -> None:
    head = made(FakeCluster())
    head.imprint([features_of(0, OLD, 20.0)], nn.Identity())
    assert head.backend.imprinted is not None
    assert head.backend.imprinted.shared_D is not None
    shared = head.backend.imprinted.shared_D.float().unsqueeze(0)
    with pytest.raises(InvalidArgument, match=r"new class 0 of 1 have nothing but what .* all classes share"):
        head.add_classes(1, examples=[(shared, torch.zeros(1, dtype=torch.int64))], backbone=nn.Identity())
    assert head.num_live_classes == OLD


@on_ranks(2)
def test_ranks_remember_and_place_the_same(rank: int) -> None:
    shared = 20.0
    head = made(None, rows="ranks", margin=gt.ArcFace())
    for first, stop in ((0, OLD), (OLD, OLD + NEW)):
        features, labels = features_of(first, stop, shared)
        own = [(features[rank::2], labels[rank::2] - first)]
        if first == 0:
            head.imprint(own, nn.Identity())
            head.backend.update.step += 1  # as if it had trained: newcomers are placed among the others
        else:
            head.add_classes(NEW, examples=own, backbone=nn.Identity())
    assert accuracy(head, features_of(0, OLD, shared, 1)) == 1
    assert head.backend.imprinted is not None
    assert head.backend.imprinted.shared_D is not None


def batches() -> tuple[list[Any], Tensor, Tensor]:
    """Batches as a step takes them, and what counts of them: the weighted sums [OLD, DIM] in float64, the labels."""
    features, labels = features_of(0, OLD, 0.5)
    labels = labels.clone()
    labels[3::7] = -100
    weights = torch.rand(len(labels), generator=torch.Generator().manual_seed(1))
    weights[::5] = 0
    features[labels < 0] = torch.nan
    features[::5] = torch.inf
    counts = (labels >= 0) & (weights > 0)
    sums = torch.zeros(OLD, DIM, dtype=torch.float64)
    sums.index_add_(0, labels[counts], (features[counts] * weights[counts].unsqueeze(1)).double())
    order = torch.arange(len(labels)).split(90)
    return [[features[part], labels[part], weights[part]] for part in order], sums, labels[counts]


def test_weights_weigh_the_mean_and_ignored_samples_do_not_count() -> None:
    given, sums, counted = batches()
    expected = normalize(sums).float()
    head, other = made(FakeCluster(), num_live_classes=None, num_classes=OLD), made(FakeCluster(), num_live_classes=1)
    seen: list[int] = []
    assert head.imprint(given, nn.Identity(), progress=seen.append) == OLD
    assert seen[-1] == len(counted)
    torch.testing.assert_close(head.weights(), expected, rtol=1e-4, atol=1e-5)
    ids = other.add_classes(OLD, examples=given, backbone=nn.Identity())
    torch.testing.assert_close(other.weights(ids), expected, rtol=1e-4, atol=1e-5)
    several = made(FakeCluster(), num_classes=OLD, num_live_classes=None, sub_centers=2, margin=gt.ArcFace())
    centers = torch.stack([-expected, expected], 1)
    several.table.assign(torch.arange(OLD).numpy(), centers.flatten(1).numpy())
    assert bool(several.dominant_centers(given, nn.Identity()).all())


def test_weights_decide_the_dominant_center() -> None:
    head = made(FakeCluster(), num_classes=OLD, num_live_classes=None, sub_centers=2, margin=gt.ArcFace())
    features, labels = torch.randn(3, DIM), torch.zeros(3, dtype=torch.int64)
    features[2] = -features[1]
    features[0] = features[1]
    head.table.assign(torch.arange(1).numpy(), torch.cat([features[1], features[2]]).unsqueeze(0).numpy())
    assert head.dominant_centers([(features, labels)], nn.Identity())[0] == 0
    assert head.dominant_centers([(features, labels, torch.tensor([1.0, 1.0, 3.0]))], nn.Identity())[0] == 1


WRONG_BATCHES: list[tuple[Any, type[Exception], str]] = [
    ({"image": torch.ones(1, DIM), "label": 0}, InvalidArgument, r"a dict with keys \['image', 'label'\]"),
    ((torch.ones(1, DIM),), InvalidArgument, "a tuple of Tensor; it must be"),
    (torch.ones(1, DIM), InvalidArgument, "a Tensor; it must be"),
    ((torch.ones(1, DIM).numpy(), torch.zeros(1)), InvalidArgument, "a tuple of ndarray, Tensor"),
    ((torch.ones(1, DIM), torch.zeros(1)), InvalidIds, "labels are torch.float32"),
    ((torch.ones(1, DIM), torch.tensor([-1])), InvalidIds, "label -1 at index 0"),
    ((torch.ones(1, DIM), torch.tensor([0]), torch.tensor([-1.0])), InvalidArgument, "weight -1.0 at index 0"),
]


@pytest.mark.parametrize(("batch", "error", "message"), WRONG_BATCHES)
def test_a_batch_of_another_form_is_named(batch: Any, error: type[Exception], message: str) -> None:
    head = made(FakeCluster(), sub_centers=2, margin=gt.ArcFace())
    before = head.weights()
    for take in (
        lambda: head.imprint([batch], nn.Identity()),
        lambda: head.add_classes(1, examples=[batch], backbone=nn.Identity()),
        lambda: head.dominant_centers([batch], nn.Identity()),
    ):
        with pytest.raises(error, match=message):
            take()
    assert torch.equal(head.weights(), before)
    mended = [(each["image"], torch.tensor([each["label"]])) for each in [WRONG_BATCHES[0][0]]]
    assert head.imprint(mended, nn.Identity()) == 1  # the remedy that the error names
