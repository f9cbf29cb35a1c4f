"""Fields of a level are looked up once a node: the same vectors and gradients as once a sample."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.bridge.embedding.levels import Nodes

B, N = 12, 4


class Leveled(dict[str, Any]):
    """A batch with one level."""

    def __init__(self, columns: dict[str, Any], index: Tensor) -> None:
        super().__init__(columns)
        self.level_of = {name: "user" for name in columns if name.startswith("user")}
        self.nodes = {"user": Nodes(index, N)}


def both_batches() -> tuple[dict[str, Any], Leveled]:
    """The same samples, plain and with nodes."""
    random = np.random.default_rng(3)
    index = torch.from_numpy(random.integers(0, N, B))
    users, items = torch.from_numpy(random.integers(0, 50, N)), torch.from_numpy(random.integers(0, 9, B))
    lengths = torch.tensor([0, 3, 1, 2])
    values, offsets = (
        torch.from_numpy(random.integers(0, 9, 6)),
        torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]),
    )
    lists = [values[offsets[n] : offsets[n + 1]] for n in index.tolist()]
    ends = torch.tensor([0, *np.cumsum([len(item) for item in lists])])
    plain = {"user": users[index], "user_history": (torch.cat(lists), ends), "item": items}
    return plain, Leveled({"user": users, "user_history": (values, offsets), "item": items}, index)


def group(cluster: Cluster, name: str, pooling: Any, **settings: Any) -> gt.EmbeddingGroup:
    members = [
        gt.Field("user", dim=3),
        gt.Field("user_history", table="item", pooling=pooling),
        gt.Field("item", dim=2),
    ]
    return gt.EmbeddingGroup(cluster, name, members, optimizer=gt.SGD(1.0), **settings)


def rows_after(fields: gt.EmbeddingGroup, vectors: dict[str, Tensor], upstream: dict[str, Tensor]) -> list[Any]:
    rows = gt.RowOptimizer(fields)
    sum((_dense(vectors[name]) * upstream[name]).sum() for name in vectors).backward()
    rows.step()
    return [fields.table("user").pull(np.arange(50)), fields.table("item").pull(np.arange(9))]


def _dense(vectors: Tensor) -> Tensor:
    return vectors.values() if vectors.is_nested else vectors


@pytest.mark.parametrize("pooling", ["sum", "mean", "sqrtn", "max", None])
def test_a_batch_with_nodes_has_the_vectors_and_gradients_of_the_plain_one(pooling: Any) -> None:
    plain, leveled = both_batches()
    torch.manual_seed(0)
    found: list[list[Any]] = []
    for batch in (plain, leveled):
        with gt.local() as cluster:
            fields = group(cluster, "ctr", pooling)
            vectors = fields(batch)
            if not found:
                upstream = {name: torch.randn_like(_dense(own)) for name, own in vectors.items()}
            found.append([*map(_dense, vectors.values()), *rows_after(fields, vectors, upstream)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(torch.as_tensor(theirs), torch.as_tensor(ours))


def test_towers_and_first_layers_are_computed_once_a_node() -> None:
    plain, leveled = both_batches()
    torch.manual_seed(0)
    seen: list[int] = []

    class Tower(nn.Sequential):
        def forward(self, users: Tensor) -> dict[str, Tensor]:
            seen.append(len(users))
            return {"hidden": super().forward(users)}

    tower = Tower(nn.Linear(3, 5), nn.Tanh())
    first = gt.LevelLinear({"user": 3, "item": 2, "user_history": 2}, 4)
    linear = nn.Linear(7, 4)
    linear.load_state_dict(first.state_dict())
    results: list[list[Any]] = []
    for batch in (plain, leveled):
        with gt.local() as cluster:
            fields = group(cluster, "ctr", "mean", per_node=True)
            vectors = fields(batch)
            hidden = gt.per_level(tower, batch, "user", vectors["user"])["hidden"]
            mixed = first(vectors, batch)
            upstream = torch.linspace(-1, 1, B * 9).view(B, 9)
            (torch.cat([hidden, mixed], 1) * upstream).sum().backward()
            results.append([hidden, mixed, *(item.grad for item in (*tower.parameters(), *first.parameters()))])
            if batch is plain:
                joined = linear(torch.cat([vectors["user"], vectors["item"], vectors["user_history"]], 1))
                torch.testing.assert_close(mixed, joined)
            tower.zero_grad()
            first.zero_grad()
    assert seen == [B, N]
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(theirs, ours)
    with pytest.raises(gt.errors.InvalidArgument, match="no level 'item'; it has 'user'"):
        gt.per_level(tower, leveled, "item", torch.zeros(N, 3))
    with pytest.raises(gt.errors.InvalidArgument, match="there are 12 vectors for 4 nodes"):
        gt.per_level(tower, leveled, "user", torch.zeros(B, 3))
    with pytest.raises(gt.errors.InvalidArgument, match="no vectors of field 'item'"):
        first({"user": torch.zeros(N, 3)}, leveled)


def test_gradients_are_exact_in_float64() -> None:
    nodes = Nodes(torch.tensor([2, 0, 0, 3, 2]), 4)  # nobody has node 1
    values = torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(nodes.expand, values)
    empty = Nodes(torch.empty(0, dtype=torch.int64), 2)
    zeros = torch.zeros(2, 3, requires_grad=True)
    empty.expand(zeros).sum().backward()
    assert torch.equal(zeros.grad, torch.zeros(2, 3))


def test_ids_of_another_number_of_nodes_are_refused() -> None:
    batch = Leveled(
        {"user": torch.arange(3), "user_history": torch.arange(N), "item": torch.arange(B)},
        torch.zeros(B, dtype=torch.long),
    )
    with (
        gt.local() as cluster,
        pytest.raises(gt.errors.InvalidIds, match="field 'user' has ids of 3 nodes; its level has 4"),
    ):
        group(cluster, "ctr", "sum")(batch)


def test_a_prefetched_batch_is_given_to_its_samples() -> None:
    _, leveled = both_batches()
    with gt.local() as cluster:
        fields = group(cluster, "ctr", "sum")
        ((_, vectors),) = gt.prefetch([leveled], fields)
        assert {name: len(vector) for name, vector in vectors.items()} == dict.fromkeys(vectors, B)
