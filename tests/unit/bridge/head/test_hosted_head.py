"""A head whose rows stay on the shards, in a user's hands."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from geartrain.ams.client import factory
from geartrain.ams.client.cluster import Cluster
from geartrain.ams.programs.selection import FullSoftmax, PartialFC
from geartrain.ams.server import hosting
from geartrain.ams.values.config import ClientConfig
from geartrain.ams.values.errors import InvalidArgument, InvalidIds, NonFinite
from geartrain.ams.values.optimizers.registry import SGD, SparseMomentum
from geartrain.ams.values.shard_messages import HostedInputs
from geartrain.ams.values.specs import Constant, Normal
from geartrain.bridge.head.class_head import ClassHead
from geartrain.bridge.head.loss.margins.angular import ArcFace, CosFace
from geartrain.bridge.head.selection.knn_selection import KNNSelection, KNNSoftmax
from geartrain.bridge.rows.optimizer import RowOptimizer
from geartrain.launch.hosting import local
from tests.support import heads

CLASSES, DIM = 5000, 8
SELECTIONS = [FullSoftmax(), PartialFC(0.1)]


head_of = partial(
    heads.make_head,
    rows="hosted",
    num_classes=CLASSES,
    dim=DIM,
    margin=CosFace(8, 0.1),
    optimizer=SparseMomentum(1.0, momentum=0.5),
    initializer=Normal(std=0.3),
)


def batch(size: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    return heads.make_batch(size, CLASSES, DIM)


def both(cluster: Cluster, **settings: Any) -> list[ClassHead]:
    # One seed and one initializer, yet initial values depend on the table's name.
    heads = [head_of(cluster, place, rows=place, **settings) for place in ("pull", "hosted")]
    heads[1].table.assign(np.arange(heads[0].num_classes), heads[0].weights())
    return heads


def same_rows(heads: list[ClassHead]) -> None:
    pulled, hosted = (head.weights().numpy() for head in heads)
    assert np.abs(pulled - heads[0].table.spec.initializer.mean).max() > 0  # type: ignore[union-attr]
    np.testing.assert_allclose(hosted, pulled, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("select", SELECTIONS)
def test_updates_chunk_by_chunk_equal_one_push(
    select: FullSoftmax | PartialFC, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosting, "HELD_BYTES", 0)
    for margin in (ArcFace(64), None):  # with and without a bound of the gradients
        with local(2) as cluster:
            heads = both(cluster, select=select, margin=margin)
            for head in heads:
                head(*batch()).backward()
                RowOptimizer(head).step()
            same_rows(heads)


def test_a_feature_gradient_that_leaves_its_type_updates_nothing(cluster: Any) -> None:
    head = head_of(cluster)
    rows, before = RowOptimizer(head), head.weights()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    features, labels = batch()
    narrow = features.detach().half().requires_grad_()
    scaler.scale(head(narrow, labels)).backward()
    assert narrow.grad is not None and not torch.isfinite(narrow.grad).all()
    scaler.step(rows)  # as that of the network is skipped
    assert head.step == 0 and torch.equal(head.weights(), before)
    rows.step()  # nothing is left of it
    assert head.step == 0 and torch.equal(head.weights(), before)


def test_a_loss_that_is_not_finite_updates_nothing(cluster: Any) -> None:
    head = head_of(cluster, margin=None, optimizer=SGD(1.0), initializer=Constant(1e3))
    rows, before = RowOptimizer(head), head.weights()
    features, labels = batch()
    head(features * 1e37, labels).backward()
    with pytest.raises(NonFinite, match="nothing was pushed"):
        rows.step()
    assert torch.equal(head.weights(), before)
    with pytest.raises(NonFinite, match="index 3"):
        features.data[3, 0] = torch.nan
        head(features, labels)
    with pytest.raises(InvalidIds, match=r"label \d+ at index 0 is outside \[0, 5000\)"):
        head(batch()[0], labels + CLASSES)


@pytest.mark.parametrize("select", SELECTIONS)
def test_a_batch_that_exceeds_a_message_is_computed_in_parts(select: FullSoftmax | PartialFC) -> None:
    config = ClientConfig(part_bytes=64 << 10)
    with local(2, config=config) as cluster:
        heads = both(cluster, select=select)
        losses, gradients = [], []
        for head in heads:
            features, labels = batch(1300)
            loss = head(features, labels)
            loss.backward()
            RowOptimizer(head).step()
            assert features.grad is not None
            losses.append(float(loss.detach()))
            gradients.append(features.grad.numpy())
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)
        np.testing.assert_allclose(gradients[1], gradients[0], rtol=1e-3, atol=1e-8)
        same_rows(heads)


def test_an_update_is_of_the_classes_that_the_loss_was_of(cluster: Any) -> None:
    heads = both(cluster, select=KNNSoftmax(active=0.01, k=8, rebuild="epoch", near=1.0))
    for head in heads:
        head(*batch()).backward()
        before = head.weights()
        moved = torch.from_numpy(np.random.default_rng(1).normal(size=(CLASSES, DIM)).astype(np.float32))
        head.table.assign(np.arange(CLASSES), moved.numpy())
        head.rebuild_graph()  # other neighbours now
        head.table.assign(np.arange(CLASSES), before.numpy())
        RowOptimizer(head).step()
    same_rows(heads)


def test_a_batch_of_many_labels_is_counted_once() -> None:
    config = ClientConfig(part_bytes=64 << 10)
    with local(2, config=config) as cluster:
        for head in both(cluster, select=KNNSoftmax(active=0.01, k=8, rebuild="epoch", near=1.0)):
            head(*batch(1300)).backward()
            RowOptimizer(head).step()
            assert isinstance(head.select, KNNSelection) and head.select.enlarged == 1


def test_shards_without_the_model_say_so() -> None:
    with factory.local(2) as cluster:
        head = head_of(cluster)
        with pytest.raises(InvalidArgument, match="no model 'class_head'"):
            head(*batch())


@pytest.mark.parametrize("margin", [CosFace(8), None])
@pytest.mark.parametrize(("classes", "k"), [(CLASSES, 5), (3, 3), (40, 40)])
def test_the_best_classes_are_those_of_pulled_rows(margin: CosFace | None, classes: int, k: int) -> None:
    config = ClientConfig(part_bytes=64 << 10)
    with local(3, config=config) as cluster:
        heads = both(cluster, num_classes=classes, margin=margin)
        for size in (0, 1, 2500):
            features = torch.randn(size, DIM, dtype=torch.float64 if size == 1 else torch.float32)
            (scores, ids), (hosted_scores, hosted_ids) = (head.predict(features, k) for head in heads)
            torch.testing.assert_close(hosted_scores, scores, rtol=1e-5, atol=1e-6)
            assert (hosted_ids.shape, hosted_ids.dtype) == (ids.shape, ids.dtype)
            assert (hosted_ids == ids).float().mean() > 0.999 if size > 1 else torch.equal(hosted_ids, ids)


@pytest.mark.parametrize(("k", "message"), [(0.0, "k is 0"), (2.5, "whole"), (float("nan"), "whole"), (1e9, "at most")])
def test_an_impossible_number_of_answers_is_refused_by_the_shard(k: float, message: str) -> None:
    with local(1) as cluster:
        calls = head_of(cluster).table.hosted("class_head")  # type: ignore[attr-defined]
        inputs = (HostedInputs(arrays={"features": np.ones((2, DIM), np.float32)}, settings={"k": k}),)
        with pytest.raises(InvalidArgument, match=message):
            calls.compute("top", lambda _: inputs)


def test_no_rows_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    with local(2) as cluster:
        head = head_of(cluster)
        for name in ("pull", "pull_into", "pull_into_async", "push", "prepare_push", "assign"):
            monkeypatch.setattr(type(head.table), name, None)
        head(*batch()).backward()
        RowOptimizer(head).step()
        head.predict(batch()[0], k=3)
        assert head.step == 1
