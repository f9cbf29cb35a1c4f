"""A model with embeddings, saved and loaded with its rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import geartrain as gt
from geartrain.ams.client.cluster import Cluster


class Model(nn.Module):
    """Two fields and a layer behind them."""

    def __init__(self, cluster: Cluster, dim: int = 3) -> None:
        super().__init__()
        members = [gt.Field("user", dim=dim), gt.Field("item", dim=2, optimizer=gt.SGD(0.1))]
        self.fields = gt.EmbeddingGroup(cluster, "ctr", members, optimizer=gt.Adagrad(0.5))
        self.dense = nn.Linear(dim + 2, 1)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """One number a sample."""
        return self.dense(torch.cat(list(self.fields(batch).values()), dim=1))


def train(model: Model, steps: int) -> list[float]:
    optimizer = gt.joint(torch.optim.SGD(model.dense.parameters(), lr=0.1), model.fields)
    losses = []
    for step in range(steps):
        batch = {"user": torch.tensor([1, 2, 3]) + step, "item": torch.tensor([5, 5, 6])}
        loss = (model(batch) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def test_a_loaded_model_goes_on_as_the_saved_one_does(tmp_path: Path) -> None:
    with gt.local(num_shards=2) as cluster:
        model = Model(cluster)
        train(model, 3)
        gt.save(model, tmp_path / "model")
        expected = train(model, 3)
        steps = [part.row_update.step for part in model.fields]
    with gt.local(num_shards=1) as cluster:
        model = Model(cluster)
        gt.load(model, tmp_path / "model")
        assert train(model, 3) == expected
        assert [part.row_update.step for part in model.fields] == steps == [6, 6]


def test_a_state_of_other_rows_or_other_fields_is_refused() -> None:
    with gt.local() as first, gt.local() as second:
        model = Model(first)
        train(model, 2)
        state = model.state_dict()
        with pytest.raises(gt.errors.SpecMismatch, match="of other rows than table 'ctr/user'"):
            Model(second).load_state_dict(state)
        second.drop_table("ctr/user")
        second.drop_table("ctr/item")
        with pytest.raises(gt.errors.SpecMismatch, match="tables and dims"):
            Model(second, dim=4).fields.load_state_dict(model.fields.state_dict())


def test_a_state_is_loaded_though_rows_expired_between_it_and_its_snapshot(tmp_path: Path) -> None:
    def group(cluster: Cluster, reuse: bool = False) -> gt.EmbeddingGroup:
        fields = [gt.Field("user", dim=2, expiry=gt.Unseen(steps=100), initializer=gt.Constant(0.5))]
        return gt.EmbeddingGroup(cluster, "ctr", fields, reuse=reuse)

    with gt.local() as cluster:
        fields = group(cluster)
        rows = gt.RowOptimizer(fields)
        for user in (1, 2, 70):
            fields({"user": torch.tensor([user])})["user"].sum().backward()
            rows.step()
            rows.zero_grad()
        state = fields.state_dict()
        assert cluster.table("ctr/user").expire(gt.Unseen(steps=1, every=1)).expired == 1
        path = cluster.snapshot(tmp_path / "snapshots").result()
    for removed in ((), (2, 70)):
        with gt.local() as other:
            other.restore(path)
            other.table("ctr/user").remove(list(removed))
            if not removed:
                group(other, reuse=True).load_state_dict(state)
                continue
            with pytest.raises(gt.errors.SpecMismatch, match="of other rows than table 'ctr/user'"):
                group(other, reuse=True).load_state_dict(state)


def test_rows_restored_between_forward_and_backward_are_not_trained(tmp_path: Path) -> None:
    with gt.local() as cluster:
        model = Model(cluster)
        gt.save(model, tmp_path / "model")
        loss = model.fields({"user": torch.tensor([1]), "item": torch.tensor([1])})["user"].sum()
        gt.load(model, tmp_path / "model")
        with pytest.raises(gt.errors.InvalidArgument, match="look the ids up again"):
            loss.backward()
