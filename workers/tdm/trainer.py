"""``geartrain worker tdm``: trains a tree of items on users' clicks, and measures the recall of its search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from geartrain.ams.values.optimizers.registry import Adam
from geartrain.ams.values.specs import Ids
from geartrain.bridge.checkpoint.saving import save
from geartrain.bridge.embedding.field import Field
from geartrain.bridge.embedding.group import EmbeddingGroup
from geartrain.bridge.models.deepfm import DeepFM
from geartrain.bridge.retrieval.item_tree import ItemTree
from geartrain.bridge.retrieval.tdm import TDM
from geartrain.workers.ctr.samples.click_samples import PADDING, ClickSamples, require_free
from geartrain.workers.ctr.trainer import EmbeddingTrainer
from geartrain.workers.job.state import JobState
from geartrain.workers.job.trainer import Attempt
from geartrain.workers.tdm.clicked_items import HISTORY, recall, split_clicks
from geartrain.workers.tdm.recipe import CUTS, TdmRecipe

NODE, NODE_WEIGHT = "node", "node_weight"
_USERS_AT_ONCE = 256


class TreeTrainer(EmbeddingTrainer):
    """Trains a network over a tree of items; rebuilds the tree from the learned embeddings, and continues."""

    job = "tdm"
    recipe_class = TdmRecipe

    def __init__(self, attempt: Attempt, data: tuple[str, ClickSamples]) -> None:
        source, samples = data
        recipe: TdmRecipe = attempt.options.recipe
        self._liked = liked = split_clicks(samples, recipe)
        require_free(liked.user_fields, (HISTORY, NODE, NODE_WEIGHT))
        self._recalls: list[dict[str, Any]] = []
        torch.manual_seed(recipe.seed)
        network = DeepFM(dims_of(liked.user_fields, recipe.dim), recipe.hidden, dropout=recipe.dropout)
        members = [Field(name, recipe.dim, pooling="mean", padding_id=PADDING) for name in liked.user_fields]
        members += [
            Field(NODE, recipe.dim, pooling=None),
            Field(NODE_WEIGHT, 1, pooling=None),
            Field(HISTORY, table=NODE, pooling="mean"),
        ]
        assert attempt.cluster is not None
        fields = EmbeddingGroup(
            attempt.cluster,
            attempt.progress.table,
            members,
            optimizer=Adam(recipe.row_lr, weight_decay=recipe.row_weight_decay),
            seed=recipe.seed,
            reuse=attempt.state is not None,
        )
        first = ItemTree(initial_item_order(samples, liked.items))
        self._tdm = TDM(first, fields, network, node=[NODE, NODE_WEIGHT], negatives=recipe.negatives)
        super().__init__(attempt, source, len(liked.train), network, fields, recipe, liked.train)

    def modules(self) -> dict[str, Any]:
        """Return the tree with network and embeddings."""
        return {"tdm": self._tdm}

    def data(self) -> dict[str, Any]:
        """Return where the samples are, the user fields, the samples' schema, and the recall of all trees so far."""
        schema = self._liked.train.schema.to_json()
        return {
            **super().data(),
            "fields": list(self._liked.user_fields),
            "schema": schema,
            "recalls": self._recalls,
        }

    def restore(self, state: JobState) -> None:
        """Restore a state whose rows are in place already."""
        super().restore(state)
        self._recalls = list(state.data["recalls"])

    def start(self, stop: Callable[[], bool]) -> None:
        """Print the size of the tree and of the data."""
        del stop
        liked, depth = self._liked, self._tdm.tree.depth
        counts = f"{len(liked.train):,} clicks on {len(liked.items):,} items"
        self.attempt.print_line(f"Training a tree of {depth} levels on {counts}; recall of {len(liked.users):,} users")

    def loss(self, step: int) -> Tensor:
        """Return the loss of the batch of ``step``."""
        train = self._liked.train
        indices = self.order.indices(step).numpy()
        items = train.fields[train.schema.item[0]][indices]
        loss: Tensor = self._tdm(self._liked.ids(train, indices), items)
        return loss

    def between(self) -> None:
        """At the end of a tree's steps, measure its recall and build the next tree."""
        step, steps = self.progress.part
        if step % (steps // (1 + self.recipe.rebuilds)) == 0:
            self._measure()
            self._tdm.rebuild()

    def trained(self) -> None:
        """Measure the recall of the last tree."""
        self._measure()

    def _measure(self) -> None:
        """Measure the recall of the present tree, unless an earlier process of this run did so."""
        step = self.progress.step
        if self._recalls and self._recalls[-1]["step"] == step:
            return
        found = self._recalls_of(self._beam_search(self.recipe.beam))
        self._recalls.append({"tree": len(self._recalls), "step": step, **found})
        self.events.scalars("held_out", found, step)
        self.metric = f"recall@{CUTS[0]}", found[f"recall_{CUTS[0]}"]
        self.attempt.print_line(f"Tree {len(self._recalls)}: {_shown(found)}")

    def _recalls_of(self, lists: Ids) -> dict[str, float]:
        return {f"recall_{cut}": recall(lists, self._liked, cut) for cut in CUTS}

    def _beam_search(self, beam: int) -> Ids:
        """Return each user's items [U, beam] by beam search, of which :func:`.recall` leaves out seen ones."""
        beam = min(beam, len(self._liked.items))
        lists = [
            self._tdm.retrieve(self._liked.ids(self._liked.users, part), k=beam, beam=beam)[0].numpy()
            for part in self._parts()
        ]
        return np.concatenate(lists)

    def _exhaustive_search(self) -> Ids:
        """Return each user's list [U, K] of all items, sorted by score."""
        items = self._liked.items
        scores = [self._tdm.scores(self._liked.ids(self._liked.users, part), items) for part in self._parts()]
        order: Ids = torch.cat(scores).argsort(1, descending=True).numpy()
        return items[order]

    def _parts(self) -> list[Ids]:
        everyone = np.arange(len(self._liked.users))
        return np.split(everyone, range(_USERS_AT_ONCE, len(everyone), _USERS_AT_ONCE))

    def report(self) -> dict[str, Any]:
        """Compare beam search with scoring all items and with the most popular ones; save the model."""
        out, liked, recipe = self.attempt.options.out, self._liked, self.recipe
        popular = np.broadcast_to(liked.popular(), (len(liked.users), len(liked.items)))
        rivals = {"every item scored": self._exhaustive_search(), "the most popular": popular}
        others = {rival: self._recalls_of(lists) for rival, lists in rivals.items()}
        for rival, found in others.items():
            self.attempt.print_line(f"{rival[0].upper()}{rival[1:]}: {_shown(found)}")
        narrower = max(max(CUTS), recipe.beam // 2)
        beams = {
            beam: {"nodes_scored": nodes_scored(self._tdm.tree, beam), **self._recalls_of(self._beam_search(beam))}
            for beam in sorted({narrower, recipe.beam})
        }
        save(self._tdm, out / "model", state={"kinds": liked.train.schema.to_json()["kinds"]})
        for beam, found in beams.items():
            scored = f"{found['nodes_scored']:,} nodes scored, of {len(liked.items):,} items"
            self.attempt.print_line(f"Beam {beam}, {scored}: {_shown(found)}")
        return {
            "held_out": {"trees": self._recalls, "beams": beams, "users": len(liked.users), **others},
            "items": len(liked.items),
        }

    def conclude(self) -> str:
        """Return the contents of the run folder, as text."""
        return "Model, snapshots and report"


def dims_of(user_fields: Sequence[str], dim: int) -> dict[str, int]:
    """Return the widths of the network's inputs."""
    return dict.fromkeys((*user_fields, HISTORY, NODE), dim) | {NODE_WEIGHT: 1}


def nodes_scored(tree: ItemTree, beam: int) -> int:
    """Return the largest number of nodes that a search scores: children of ``beam`` nodes, on each wider level."""
    sizes = [len(tree.slots_at(level)) for level in range(1, tree.depth + 1)]
    return sum(min(2 * beam, size) for size in sizes if size > beam) or len(tree.items)


def _shown(found: dict[str, Any]) -> str:
    return ", ".join(f"recall@{cut} {found[f'recall_{cut}']:.4f}" for cut in CUTS)


def initial_item_order(samples: ClickSamples, items: Ids) -> Ids:
    """Return the items sorted by their other fields, so that similar ones are neighbours in the first tree."""
    own, *others = samples.schema.item
    _, first = np.unique(samples.fields[own], return_index=True)
    keys = [samples.fields[name][first] for name in reversed(others)]
    keys = [key if key.ndim == 1 else np.sort(key, 1)[:, -1] for key in keys]
    return items[np.lexsort(keys)] if keys else items
