"""TDM: which nodes a level is trained with, a beam that finds what looking at all would, and a tree made anew."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.bridge.retrieval.item_tree import leaf_ids

ITEMS = np.arange(11) * 7


class NodeOnly(gt.models.ClickModel):
    """The first number of a node's vector, with what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[Mapping[str, Tensor], Tensor | None]] = []

    def forward(self, vectors: Mapping[str, Tensor], clicks: Tensor | None = None) -> Tensor:
        self.asked.append((vectors, clicks))
        return super().forward(vectors, clicks)

    def logits(self, vectors: Mapping[str, Tensor]) -> Tensor:
        return vectors["node"][:, 0] + vectors["user"][:, 0]


def embedded(cluster: Cluster, *more: gt.Field, rate: float = 0.05) -> gt.EmbeddingGroup:
    members = [
        gt.Field("user", dim=8, initializer=gt.Normal(std=0.3)),
        gt.Field("node", dim=8, pooling=None, initializer=gt.Normal(std=0.3)),
    ]
    return gt.EmbeddingGroup(cluster, "tdm", [*members, *more], optimizer=gt.Adam(rate))


def test_each_level_is_trained_with_the_node_above_the_item_and_others_of_that_level() -> None:
    tree, network = gt.ItemTree(ITEMS), NodeOnly()
    with gt.local() as cluster:
        fields = embedded(cluster, gt.Field("history", table="node", pooling=None))
        tdm = gt.TDM(tree, fields, network, negatives=3)
        history = (leaf_ids([7, 14, 70]), np.array([0, 1, 1, 3]))
        loss = tdm({"user": torch.tensor([1, 2, 3]), "history": history}, torch.tensor([14, 0, 70]))
        vectors, clicks = network.asked[0]
        assert clicks is not None
        of_all = {item: fields.table("node").pull(np.array([item]))[0].tolist() for item in tree.node_ids(ITEMS).flat}
        asked = vectors["node"].detach().view(3, tree.depth, 4, 8).tolist()
        levels = [set(tree.node_ids(ITEMS)[:, level].tolist()) for level in range(tree.depth)]
        for row, item in enumerate((14, 0, 70)):
            for level, own in enumerate(tree.node_ids([item])[0].tolist()):
                drawn = [next(name for name, v in of_all.items() if v == node) for node in asked[row][level]]
                assert drawn[0] == own
                assert own not in drawn[1:] and set(drawn) <= levels[level]
        assert clicks.view(3, tree.depth, 4).sum((0, 1)).tolist() == [3 * tree.depth, 0, 0, 0]
        logits = vectors["node"][:, 0] + vectors["user"][:, 0]
        expected = torch.where(clicks > 0, -logits.sigmoid().log(), -(1 - logits.sigmoid()).log()).mean()
        torch.testing.assert_close(loss, expected)
        nodes = 4 * tree.depth
        assert vectors["history"].offsets().diff().tolist() == [1] * nodes + [0] * nodes + [2] * nodes
        seen = torch.from_numpy(fields.table("node").pull(history[0]))
        again = torch.cat([seen[:1].repeat(nodes, 1), seen[1:].repeat(nodes, 1)])
        torch.testing.assert_close(vectors["history"].values().detach(), again)


@pytest.mark.parametrize("count", [2, 3, 9, 11, 17, 33, 64])
def test_a_beam_finds_the_best_where_a_node_is_as_good_as_the_best_below(cluster: Cluster, count: int) -> None:
    rng = np.random.default_rng(count)
    tree = gt.ItemTree(rng.permutation(500)[:count])
    best = rng.normal(size=count).astype(np.float32)  # of each item
    fields = embedded(cluster)
    nodes = tree.node_ids(tree.items)
    for level in range(tree.depth):
        for node in np.unique(nodes[:, level]):
            row = np.full((1, 8), best[nodes[:, level] == node].max(), np.float32)
            fields.table("node").assign(np.array([node]), row)
    tdm = gt.TDM(tree, fields, NodeOnly())
    k = min(3, count)
    expected = tree.items[np.argsort(-best)[:k]]
    for beam in (k, k + 1, count):
        items, logits = tdm.retrieve({"user": torch.tensor([4, 5])}, k=k, beam=beam)
        assert items.tolist() == [expected.tolist()] * 2
        assert (logits.diff(dim=1) <= 0).all()
        assert tdm.retrieve({"user": torch.empty(0, dtype=torch.int64)}, k=k, beam=beam)[0].shape == (0, k)
    torch.testing.assert_close(tdm.scores({"user": torch.tensor([4, 5])}, expected), logits)
    with pytest.raises(gt.errors.InvalidArgument, match="beam is"):
        tdm.retrieve({"user": torch.tensor([4])}, k=2, beam=1)


def test_a_tree_learns_is_made_anew_and_is_saved(tmp_path: Path) -> None:
    """Users of a kind click items of that kind; the first tree mixes the kinds."""
    rng = np.random.default_rng(0)
    items = rng.permutation(64)
    with gt.local() as cluster:
        torch.manual_seed(0)
        network = gt.models.DeepFM({"user": 8, "node": 8}, (16,))
        tdm = gt.TDM(gt.ItemTree(items), embedded(cluster), network)
        optimizer = gt.joint(torch.optim.Adam(network.parameters(), lr=0.01), tdm.fields)

        def train(steps: int) -> None:
            for _ in range(steps):
                users = rng.integers(0, 40, 64)
                loss = tdm({"user": users}, rng.integers(0, 16, 64) * 4 + users % 4)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

        def found(beam: int) -> float:
            users = np.arange(40)
            best, _ = tdm.retrieve({"user": users}, k=8, beam=beam)
            return float((best.numpy() % 4 == users[:, None] % 4).mean())

        train(120)
        wide, narrow = found(64), found(8)
        assert wide > 0.95
        tdm.rebuild()
        halves = tdm.tree.items.reshape(4, 16) % 4
        assert (halves == halves[:, :1]).mean() > 0.9
        train(40)
        assert found(8) >= max(narrow, 0.95)
        everyone = {"user": np.arange(40)}
        before = tdm.retrieve(everyone, k=5, beam=20)
        gt.save(tdm, tmp_path / "tdm")
        cluster.drop_table("tdm/user")
        cluster.drop_table("tdm/node")
        again = gt.TDM(gt.ItemTree(items), embedded(cluster), gt.models.DeepFM({"user": 8, "node": 8}, (16,)))
        gt.load(again, tmp_path / "tdm")
        after = again.retrieve(everyone, k=5, beam=20)
    torch.testing.assert_close(before, after)


def test_a_field_of_nodes_that_cannot_be_is_named() -> None:
    with gt.local() as cluster:
        fields: Any = embedded(cluster)
        with pytest.raises(gt.errors.InvalidArgument, match="field 'user' of nodes is pooled"):
            gt.TDM(gt.ItemTree(ITEMS), fields, NodeOnly(), node="user")
        with pytest.raises(gt.errors.InvalidArgument, match="field 'leaf' of nodes is not among the fields"):
            gt.TDM(gt.ItemTree(ITEMS), fields, NodeOnly(), node=["node", "leaf"])
        with pytest.raises(gt.errors.InvalidIds, match="item 3 is not in the tree"):
            gt.TDM(gt.ItemTree(ITEMS), fields, NodeOnly())({"user": [1]}, [3])
