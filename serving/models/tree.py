"""Served trees of items: items that a user will like, found by beam search without scoring every item.

Legend: N users, n nodes of a level for each, K items, L ids of the longest bag.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from geartrain.ams.storage.tensor_file import map_tensors
from geartrain.ams.values.arguments import integer
from geartrain.ams.values.errors import InvalidArgument, ModelDamaged
from geartrain.ams.values.specs import Ids
from geartrain.bridge.retrieval.item_tree import ItemTree, leaf_ids
from geartrain.serving.answers import Arrays, Question, TensorSpec
from geartrain.serving.models.click_network import ClickNetwork, Inputs
from geartrain.serving.models.request_samples import SampleReader, objects_of, require_keys
from geartrain.workers.ctr.samples.examples import read_examples
from geartrain.workers.ctr.samples.features import HISTORY, ids_by_feature, latest_ids

TREE, NODE = "tree.safetensors", "node"
_BEST, _MAX_BEAM = 10, 10_000
_SHOWN = 5
"""Number of items in an example."""
_AT_ONCE = 65_536
"""Nodes scored at once, which bounds memory: fewer users at a time where the beam is wide."""


class TreeModel:
    """Tree of items of a folder that ``geartrain export RUN --to DIR`` wrote. Thread-safe."""

    kind = "tree"

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        """Load the files. Raises ModelDamaged, InvalidArgument (onnxruntime cannot run the network)."""
        self.network = ClickNetwork(folder, config)
        try:
            self.tree = ItemTree(map_tensors(folder / TREE)["items"])
        except (OSError, KeyError, ValueError) as exc:
            raise ModelDamaged(f"{folder / TREE} is no tree of items: {exc}; export the model again") from exc
        self.history, self.beam = int(config["history"]), int(config["beam"])
        self.fields = tuple(config["fields"])
        self.shown = read_examples(folder)
        self.version, self.created = self.network.version, self.network.created
        sizes = {"score": "log-odds", "items": len(self.tree.items), "levels": self.tree.depth, "beam": self.beam}
        self.facts = {**self.network.facts, **sizes}
        self.operations = {"items": ItemsOperation(self)}

    def close(self) -> None:
        """Do nothing: it holds only memory."""

    def best(self, fields: Mapping[str, Ids], k: int, beam: int) -> tuple[Ids, npt.NDArray[np.float64]]:
        """Return the best items [N, k] that a beam finds for users with these fields, and their log-odds, best first.

        As :meth:`geartrain.TDM.retrieve`: one run of the network for each level with more nodes than the beam.
        """
        users = max(1, _AT_ONCE // (2 * beam))
        starts = range(0, len(next(iter(fields.values()))), users)
        found = [
            self._best({name: ids[start : start + users] for name, ids in fields.items()}, k, beam) for start in starts
        ]
        return np.concatenate([items for items, _ in found]), np.concatenate([logits for _, logits in found])

    def _best(self, fields: Mapping[str, Ids], k: int, beam: int) -> tuple[Ids, npt.NDArray[np.float64]]:
        of_users = [feature for feature in self.network.features if NODE not in feature.of]
        once = self.network.inputs(ids_by_feature(of_users, fields))
        tree = self.tree
        level = max(level for level in range(tree.depth + 1) if len(tree.slots_at(level)) <= beam)
        slots = np.broadcast_to(tree.slots_at(level), (len(next(iter(fields.values()))), len(tree.slots_at(level))))
        is_there, logits = np.ones(slots.shape, np.bool_), None
        while level < tree.depth:
            if logits is not None:
                slots = np.take_along_axis(slots, _largest(logits, beam), 1)
            level += 1
            slots, is_there = tree.children(level, slots)
            logits = self._scored(once, level, slots, is_there)
        if logits is None:
            logits = self._scored(once, level, slots, is_there)
        order = _largest(logits, k)
        return tree.items_at(np.take_along_axis(slots, order, 1)), np.take_along_axis(logits, order, 1)

    def _scored(self, once: Inputs, level: int, slots: Ids, is_there: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
        """Return the log-odds [N, n] of nodes; -inf of absent ones."""
        of_nodes = [feature for feature in self.network.features if NODE in feature.of]
        ids = {NODE: self.tree.ids_at(level, slots[is_there])[:, None]}
        each = {name: np.repeat(some, is_there.sum(1), 0) for name, some in once.items()}
        inputs = self.network.inputs(ids_by_feature(of_nodes, ids), each)
        logits = np.full(slots.shape, -np.inf)
        logits[is_there] = self.network.logits(inputs)
        return logits


def _largest(values: npt.NDArray[np.float64], count: int) -> Ids:
    """Return the places [N, count] of each row's largest values, largest first, the first of equal ones."""
    return np.argsort(-values, 1, kind="stable")[:, :count]


class ItemsOperation:
    """Operation: the items that a user will like most, by beam search."""

    name = "items"
    help = "The items that each user will most probably like, the best first."

    def __init__(self, model: TreeModel) -> None:
        self._model = model
        shown = _with_history(model.shown)
        self._named = {int(item): {"title": title} for item, title in shown.get("titles", {}).items()}
        self._reader = reader = SampleReader((*model.fields, HISTORY), 0, (), model.network.kinds, shown)
        names = reader.names
        self.inputs = [TensorSpec(name=name, dtype=reader.dtype(name), shape=(None, None)) for name in names]
        self.outputs = [
            TensorSpec(name="item", dtype="int64", shape=(None, None)),
            TensorSpec(name="score", dtype="float64", shape=(None, None)),
        ]
        properties = {"item": {"type": "integer"}, "title": {"type": "string"}, "score": {"type": "number"}}
        one = {"type": "object", "properties": properties}
        examples = [{"samples": [sample], "k": _SHOWN} for sample in reader.examples(names)]
        samples = {"type": "array", "minItems": 1, "items": reader.schema(names)}
        self.request = {
            "type": "object",
            "properties": {
                "samples": {**samples, "description": "history: items that the user liked, the oldest first."},
                "k": {"type": "integer", "minimum": 1, "default": _BEST},
                "beam": {"type": "integer", "minimum": 1, "default": model.beam, "description": "Nodes kept a level."},
            },
            "required": ["samples"],
            "example": examples[0],
            "examples": examples,
        }
        self.answer = {"type": "array", "items": {**one, "required": ["item", "score"]}, "description": "Log-odds."}

    def read(self, body: Mapping[str, Any]) -> Question:
        """Read ``{"samples": [{field: …, "history": [items]}…], "k": 10, "beam": 100}``. Raises InvalidArgument."""
        require_keys(body, ("samples", "k", "beam"))
        arrays = self._reader.read(objects_of(body, "samples"), self._reader.names, "sample")
        return self._question(arrays, body)

    def accept(self, arrays: Arrays, parameters: Mapping[str, Any]) -> Question:
        """Read values [N] or [N, L] of each field and of the history. Raises InvalidArgument."""
        return self._question(self._reader.ids_of(arrays, self._reader.names), parameters)

    def _question(self, arrays: dict[str, Ids], parameters: Mapping[str, Any]) -> Question:
        if (most := int(arrays[HISTORY].max())) >= 2**62:
            raise InvalidArgument(f"the history has item {most}; items lie in [0, 2^62)")
        arrays[HISTORY] = latest_ids(arrays[HISTORY], self._model.history)
        k = integer("k", parameters.get("k", _BEST), 1, _MAX_BEAM)
        beam = integer("beam", parameters.get("beam", max(k, self._model.beam)), k, _MAX_BEAM)
        return Question(arrays=arrays, parameters=(("beam", beam), ("k", min(k, len(self._model.tree.items)))))

    def run(self, question: Question) -> Arrays:
        """Return ``item`` and ``score`` (log-odds) [N, k], best first."""
        asked = dict(question.parameters)
        fields = {**question.arrays, HISTORY: leaf_ids(question.arrays[HISTORY])}  # padding, -1, stays
        items, scores = self._model.best(fields, asked["k"], asked["beam"])
        return {"item": items, "score": scores}

    def write(self, answered: Arrays) -> list[Any]:
        """Return ``[{"item": id, "title"?: name, "score": log-odds}…]`` of each user."""
        named = self._named
        return [
            [{"item": item, **named.get(item, {}), "score": score} for item, score in zip(items, scores, strict=True)]
            for items, scores in zip(answered["item"].tolist(), answered["score"].tolist(), strict=True)
        ]


def _with_history(shown: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return click samples as samples of users: the item of each becomes one that its user liked before."""
    if not (item := shown.get("item")):
        return shown
    return {
        **shown,
        "samples": [{**one, HISTORY: [one[item]]} for one in shown["samples"]],
        "item": HISTORY,
        "items": [{HISTORY: one[item]} for one in shown["items"]],
    }
