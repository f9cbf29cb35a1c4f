"""Fields whose vectors a slow gear computes, beside fields with rows, as one model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from tests.unit.bridge.embedding.test_embedding_group import bags, torch_vectors

DIM, IMAGES = 4, 20
PIXELS = torch.randn(IMAGES, 6, generator=torch.Generator().manual_seed(0))


def network() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(6, DIM)


@pytest.fixture
def image(cluster: Cluster) -> Iterator[gt.SlowGear]:
    """Ordinary back-propagation, step by step."""
    settings: dict[str, Any] = {"expire_seconds": 0, "gradients_per_id": 1, "mode": "sync"}
    settings |= {"optimizer": gt.SGD(0.5), "config": gt.SlowGearConfig(reduction="sum", train_mode="never")}
    made = gt.SlowGear(cluster, "image", dim=DIM, build=network, samples=PIXELS, **settings)
    yield made
    made.close()


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("pooling", ["sum", "mean", "sqrtn", "max"])
def test_vectors_and_gradients_are_those_of_an_embedding_of_the_features(
    cluster: Cluster, image: gt.SlowGear, pooling: Any, is_weighted: bool
) -> None:
    if pooling == "max" and is_weighted:
        pytest.skip("a maximum takes no weights")
    fields = gt.EmbeddingGroup(
        cluster, "g", [gt.Field("user", 3), gt.Field("seen", features=image, pooling=pooling)], optimizer=gt.SGD(0.5)
    )
    ids, offsets = bags(0)
    weights = (torch.rand(len(ids)) + 0.5).requires_grad_() if is_weighted else None
    wide = None if weights is None else weights.detach().double().requires_grad_()
    twin = network()
    expected = torch_vectors(twin(PIXELS).double(), ids, offsets, pooling, wide)
    given = (ids, offsets) if weights is None else (ids, offsets, weights)
    mine = fields({"user": torch.arange(6), "seen": given})["seen"]
    torch.testing.assert_close(mine.double(), expected, rtol=1e-5, atol=1e-6)
    upstream = torch.randn(mine.shape)
    mine.backward(upstream)
    expected.backward(upstream.double())
    if weights is not None and wide is not None:
        assert weights.grad is not None and wide.grad is not None
        torch.testing.assert_close(weights.grad.double(), wide.grad, rtol=1e-4, atol=1e-5)


def test_one_step_trains_rows_and_the_network_behind_the_features(cluster: Cluster, image: gt.SlowGear) -> None:
    """CrossMedia's fields: the image of the item and those of a history, of one network."""
    members = [
        gt.Field("item", 3),
        gt.Field("image", features=image),
        gt.Field("history_images", features=image, pooling=None, padding_id=-1),
    ]
    fields = gt.EmbeddingGroup(cluster, "g", members, optimizer=gt.SGD(0.5))
    history = torch.tensor([2, 7, -1, 7]), torch.tensor([0, 2, 4])
    batch = {"item": torch.tensor([5, 6]), "image": torch.tensor([2, 3]), "history_images": history}
    twin, rows = network(), fields.table("item").pull(torch.tensor([5, 6])).requires_grad_()

    def loss_of(item: Tensor, of_image: Tensor, of_history: Tensor) -> Tensor:
        return item.square().sum() + (of_image.sum(0) * of_history.sum(0)).sum()

    optimizer = gt.RowOptimizer(fields)
    vectors = fields(batch)
    assert vectors["history_images"].is_nested and vectors["history_images"].values()[2].eq(0).all()
    loss_of(vectors["item"], vectors["image"], vectors["history_images"].values()).backward()
    optimizer.step()
    loss_of(rows, twin(PIXELS[[2, 3]]), twin(PIXELS[[2, 7, 7]])).backward()  # padding is zero
    assert rows.grad is not None
    torch.testing.assert_close(fields.table("item").pull(torch.tensor([5, 6])), (rows - 0.5 * rows.grad).detach())
    account = image.account()
    assert account.received == account.applied == 3  # once for each distinct id, of both fields
    optimizer.zero_grad()
    torch.optim.SGD(twin.parameters(), 0.5).step()
    torch.testing.assert_close(fields(batch)["image"].detach(), twin(PIXELS[[2, 3]]).detach(), rtol=1e-4, atol=1e-5)


def test_features_come_with_a_loop_that_runs_ahead(cluster: Cluster, image: gt.SlowGear) -> None:
    fields = gt.EmbeddingGroup(
        cluster, "g", [gt.Field("image", features=image), gt.Field("item", 3)], optimizer=gt.SGD(0.5)
    )
    rows = gt.RowOptimizer(fields)
    data = [{"item": torch.tensor([step]), "image": torch.tensor([step])} for step in range(4)]
    for _, vectors in gt.prefetch(data, fields, depth=2, staleness=2):
        sum(vector.sum() for vector in vectors.values()).backward()
        rows.step()
        rows.zero_grad()
    assert image.account().applied == 4
    with gt.local() as other:  # of the same first values
        first = gt.EmbeddingGroup(other, "g", [gt.Field("item", 3)], optimizer=gt.SGD(0.5)).table("item")
        expected = first.pull(np.arange(4)) - 0.5
    np.testing.assert_allclose(fields.table("item").pull(np.arange(4)), expected, rtol=1e-5, atol=1e-6)


def test_what_features_cannot_be_is_named(cluster: Cluster, image: gt.SlowGear) -> None:
    with pytest.raises(gt.errors.InvalidArgument, match="features of field 'a' are"):
        gt.Field("a", features=nn.Linear(2, 2))
    with pytest.raises(gt.errors.InvalidArgument, match="field 'a' has features and dim=3; its vectors, 4 wide"):
        gt.Field("a", 3, features=image)
    with pytest.raises(gt.errors.InvalidArgument, match="field 'a' has features and table='b'"):
        gt.Field("a", table="b", features=image)
    with pytest.raises(gt.errors.InvalidArgument, match="field 'a' has features and where='hosted'"):
        gt.Field("a", where="hosted", features=image)
    with pytest.raises(gt.errors.InvalidArgument, match="none of the fields 'a' has a table"):
        gt.EmbeddingGroup(cluster, "g", [gt.Field("a", features=image)], optimizer=gt.SGD(1.0))
    fields = gt.EmbeddingGroup(
        cluster, "g", [gt.Field("item", 3), gt.Field("a", features=image)], optimizer=gt.SGD(1.0)
    )
    with pytest.raises(gt.errors.InvalidArgument, match="there is no field 'a' with a table"):
        fields.table("a")
