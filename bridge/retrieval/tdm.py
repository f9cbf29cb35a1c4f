"""TDM: a click model scores the nodes of an item tree, level by level, and so finds the best items.

Legend: B samples, L levels below the root, M nodes of each sample, n nodes of a beam.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from geartrain.ams.values.arguments import integer
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.specs import Ids
from geartrain.bridge.embedding.group import EmbeddingGroup
from geartrain.bridge.embedding.levels import jagged_tensor
from geartrain.bridge.models.click_model import ClickModel
from geartrain.bridge.retrieval.item_tree import ItemTree, leaf_ids


class TDM(nn.Module):
    """A tree of items whose nodes a network scores: trained level by level, searched by a beam.

        fields = gt.EmbeddingGroup(cluster, "tdm", [gt.Field("user", dim=16), gt.Field("node", dim=16, pooling=None)],
                                   optimizer=gt.Adam(0.01))
        tdm = gt.TDM(gt.ItemTree(items), fields, gt.models.DeepFM({"user": 16, "node": 16}))
        loss = tdm({"user": users_B}, clicked_items_B)         # then backward() and step(), as of any module
        items_BK, logits_BK = tdm.retrieve({"user": users_B}, k=10, beam=50)
        tdm.rebuild()                                          # a better tree, by the embeddings learned; train on

    For a clicked item the network learns to tell every node above it from ``negatives`` other nodes of the same level,
    so that each level is a coarse ranking of the items below. The search keeps the ``beam`` best nodes of a level and
    scores their children: O(beam · log2 K) scores instead of K. Source: Zhu et al., "Learning Tree-based Deep Model for
    Recommender Systems" (2018), sections 3.2 and 3.3.

    The embeddings of nodes are rows of the fields ``node``; those of leaves have ids of their items
    (:func:`leaf_ids`), which a history may share: ``gt.Field("history", table="node")``. Not thread-safe.
    """

    def __init__(
        self,
        tree: ItemTree,
        fields: EmbeddingGroup,
        network: ClickModel,
        *,
        node: str | Sequence[str] = "node",
        negatives: int = 4,
    ) -> None:
        """Combine tree, fields and network.

        Args:
            tree: Tree of the items.
            fields: Fields of the network, those of nodes with ``pooling=None``.
            network: Scores the vectors of the fields; it gets a node's vectors under the names ``node``, as [N, dim].
            node: Name of the field of nodes, or names of several, such as a first-order weight beside it.
            negatives: Other nodes of each level for each clicked item, >= 1.

        Raises:
            InvalidArgument: A field of nodes is missing or pooled, or ``negatives`` is invalid.
        """
        super().__init__()
        self.tree = tree
        self.fields = fields
        self.network = network
        self._nodes = [node] if isinstance(node, str) else list(node)
        self.negatives = integer("negatives", negatives, 1)
        by_name = {field.name: field for field in fields.fields}
        for name in self._nodes:
            if name not in by_name or by_name[name].pooling is not None:
                raise InvalidArgument(
                    f"field {name!r} of nodes is {'pooled' if name in by_name else 'not among the fields'}; give the "
                    f"fields gt.Field({name!r}, dim=16, pooling=None)"
                )
        if not self._nodes:
            raise InvalidArgument("node is empty; name the field of nodes")

    def forward(self, batch: Mapping[str, Any], items: Any) -> Tensor:
        """Return the loss (0-dim) of the network over the nodes above the clicked ``items`` [B], and over other nodes.

        ``batch`` has the ids of all fields but nodes. Other nodes are drawn by torch's generator. Raises InvalidIds for
        an item that is not in the tree, and what the fields raise.
        """
        slots_B = self.tree.slots_of(items)
        rng = np.random.default_rng(int(torch.randint(2**62, ())))
        ids = []
        for level in range(1, self.tree.depth + 1):
            own_B = slots_B >> (self.tree.depth - level)
            others = self.tree.others(level, own_B, self.negatives, rng)
            ids.append(self.tree.ids_at(level, np.concatenate([own_B[:, None], others], 1)))
        nodes_BM = np.concatenate(ids, 1)
        is_own_M = np.tile(np.arange(1 + self.negatives) == 0, self.tree.depth)
        vectors = self._vectors(batch, nodes_BM)
        clicks = torch.from_numpy(np.tile(is_own_M, len(nodes_BM))).float().to(vectors[self._nodes[0]].device)
        loss: Tensor = self.network(vectors, clicks)
        return loss

    def scores(self, batch: Mapping[str, Any], items: Any) -> Tensor:
        """Return the logits [B, N] of all ``items`` [N] for each sample, without training."""
        ids_N = self.tree.node_ids(items)[:, -1]
        return self._scored(batch, np.broadcast_to(ids_N, (_num_samples(batch), len(ids_N))))

    def retrieve(self, batch: Mapping[str, Any], *, k: int = 10, beam: int = 50) -> tuple[Tensor, Tensor]:
        """Return the ``k`` best items [B, k] that a beam finds, int64, and their logits [B, k], the best first.

        Costs one pull for each level with more nodes than ``beam``. Exact if the beam is as wide as there are items.
        Raises InvalidArgument unless 1 <= k <= beam and k <= K.
        """
        k = integer("k", k, 1, len(self.tree.items))
        beam = integer("beam", beam, k)
        level = max(level for level in range(self.tree.depth + 1) if len(self.tree.slots_at(level)) <= beam)
        first = self.tree.slots_at(level)
        slots = np.broadcast_to(first, (_num_samples(batch), len(first)))
        if level == self.tree.depth:
            logits = self._scored(batch, self.tree.ids_at(level, slots))
            return self._best(slots, logits, k)
        while True:
            level += 1
            slots, is_there = self.tree.children(level, slots)
            logits = self._scored(batch, self.tree.ids_at(level, slots))
            logits = logits.masked_fill(torch.from_numpy(~is_there).to(logits.device), -torch.inf)
            if level == self.tree.depth:
                return self._best(slots, logits, k)
            keep = logits.topk(min(beam, slots.shape[1]), 1).indices.cpu().numpy()
            slots = np.take_along_axis(slots, keep, 1)

    def rebuild(self) -> None:
        """Rebuild the tree by the embeddings of the leaves (of the first field of nodes).

        Inner nodes start as the means of the nodes below, in every field of nodes. Call it between two steps; the
        optimizer continues.
        """
        items = self.tree.items
        vectors = self.fields.table(self._nodes[0]).pull(leaf_ids(items))
        self.tree = ItemTree.from_vectors(items, vectors)
        for name in self._nodes:
            table = self.fields.table(name)
            below = np.asarray(table.pull(leaf_ids(self.tree.items)), np.float32)
            leaf_slots = self.tree.slots_at(self.tree.depth)
            for level in range(1, self.tree.depth):
                slots, of_leaf = np.unique(leaf_slots >> (self.tree.depth - level), return_inverse=True)
                means = np.zeros((len(slots), below.shape[1]), np.float32)
                np.add.at(means, of_leaf, below)
                means /= np.bincount(of_leaf)[:, None]
                table.assign(self.tree.ids_at(level, slots), means)

    def get_extra_state(self) -> dict[str, Any]:
        """Return the items from left to right, which define the tree."""
        return {"items": torch.from_numpy(self.tree.items)}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restore the saved tree."""
        self.tree = ItemTree(state["items"])

    @torch.no_grad()
    def _scored(self, batch: Mapping[str, Any], nodes_BM: Ids) -> Tensor:
        """Return the logits [B, M] of nodes."""
        was_training = self.network.training
        self.network.eval()
        try:
            logits: Tensor = self.network(self._vectors(batch, nodes_BM))
        finally:
            self.network.train(was_training)
        return logits.view(nodes_BM.shape)

    def _vectors(self, batch: Mapping[str, Any], nodes_BM: Ids) -> dict[str, Tensor]:
        """Return the vectors of the fields for each node: looked up for each sample, then repeated."""
        num_nodes = nodes_BM.shape[1]
        found = self.fields({**batch, **dict.fromkeys(self._nodes, np.ascontiguousarray(nodes_BM))})
        return {
            name: vectors.flatten(0, 1) if name in self._nodes else _repeated(vectors, num_nodes)
            for name, vectors in found.items()
        }

    def _best(self, slots: Ids, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        best = logits.topk(k, 1)
        found = np.take_along_axis(slots, best.indices.cpu().numpy(), 1)
        return torch.from_numpy(self.tree.items_at(found)), best.values


def _repeated(vectors: Tensor, times: int) -> Tensor:
    """Return each sample's vectors ``times`` times in a row."""
    if not vectors.is_nested:
        return vectors.repeat_interleave(times, 0)
    values, lengths = vectors.values(), vectors.offsets().diff()  # type: ignore[attr-defined]
    all_lengths = lengths.repeat_interleave(times)
    offsets = torch.cat([lengths.new_zeros(1), all_lengths.cumsum(0)])
    starts = vectors.offsets()[:-1].repeat_interleave(times)  # type: ignore[attr-defined]
    places = torch.arange(int(offsets[-1]), device=values.device)
    places = places + (starts - offsets[:-1]).repeat_interleave(all_lengths)
    return jagged_tensor(values[places], offsets)


def _num_samples(batch: Mapping[str, Any]) -> int:
    for ids in batch.values():
        if isinstance(ids, tuple):
            return len(ids[1]) - 1
        if hasattr(ids, "shape"):
            return int(ids.shape[0])
    raise InvalidArgument("the batch has no ids; give those of at least one field beside the nodes")
