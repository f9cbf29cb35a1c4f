"""Served click models: the probability of a click, and the best of many candidates.

Legend: N samples or contexts, C candidates of the context with most, M candidates in all, L ids of the longest bag.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from geartrain.ams.values.arguments import integer
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.specs import Ids
from geartrain.ams.values.text import quoted
from geartrain.serving.answers import Arrays, Question, TensorSpec, require_same_items
from geartrain.serving.models.click_network import ClickNetwork, probabilities
from geartrain.serving.models.request_samples import (
    SampleReader,
    objects_of,
    require_keys,
    with_histories,
)
from geartrain.workers.ctr.samples.click_samples import PADDING
from geartrain.workers.ctr.samples.examples import read_examples
from geartrain.workers.ctr.samples.features import (
    HISTORY,
    HISTORY_ITEMS,
    HISTORY_OUTCOMES,
    SampleFeature,
    ids_by_feature,
)
from geartrain.workers.ctr.samples.kinds import INTEGER, FieldKind, width_of

MAX_CANDIDATES = 10_000
_AT_ONCE = 65_536
"""Candidates scored at once, which bounds memory."""
_BEST = 10
_COUNTS = "num_candidates"


class ClicksModel:
    """Click model of a folder that ``geartrain export RUN --to DIR`` wrote. Thread-safe."""

    kind = "clicks"

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        """Load the files. Raises ModelDamaged, InvalidArgument (onnxruntime cannot run the network)."""
        self.network = ClickNetwork(folder, config)
        self.items: tuple[str, ...] = tuple(config["items"])
        crossed = {name for feature in self.network.features for name in feature.of[:-1]}
        history, kinds = int(config["history"]), self.network.kinds
        if history:
            kinds[HISTORY_ITEMS] = replace(kinds[self.items[0]], is_list=True, fill=None)
            kinds[HISTORY_OUTCOMES] = FieldKind(item=INTEGER, is_list=True)
        self.reader = SampleReader(config["fields"], history, crossed, kinds, read_examples(folder))
        self.version, self.created = self.network.version, self.network.created
        self.facts = {**{name: config[name] for name in ("model", "items")}, **self.network.facts}
        self.operations = {"click": ClickOperation(self), "rank": RankOperation(self)}

    def close(self) -> None:
        """Do nothing: it holds only memory."""


class ClickOperation:
    """Operation: the probability of a click for each sample, and the contribution of each field."""

    name = "click"
    help = "The probability that each sample is clicked."

    def __init__(self, model: ClicksModel) -> None:
        self._model = model
        reader = model.reader
        arrays = reader.array_names(reader.names)
        self.inputs = [TensorSpec(name=name, dtype=reader.dtype(name), shape=(None, None)) for name in arrays]
        self.outputs = [TensorSpec(name="probability", dtype="float64", shape=(None,))]
        samples = {"type": "array", "minItems": 1, "items": reader.schema(reader.names)}
        self.request = {
            "type": "object",
            "properties": {
                "samples": samples,
                "explain": {
                    "type": "boolean",
                    "description": "Also what each field contributed to the log-odds of a click, the base from which "
                    "these add up to them, and the fields with an id that training never saw.",
                },
            },
            "required": ["samples"],
            "example": {"samples": reader.examples(reader.names)[:1], "explain": True},
            "examples": [{"samples": [one], "explain": True} for one in reader.examples(reader.names)],
        }
        numbers = {"type": "object", "additionalProperties": {"type": "number"}}
        self.answer = {
            "type": "object",
            "properties": {
                "probability": {"type": "number"},
                "base": {"type": "number", "description": "Log-odds of a sample with nothing in any field."},
                "contributions": numbers,
                "unseen": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["probability"],
        }

    def read(self, body: Mapping[str, Any]) -> Question:
        """Read ``{"samples": [{field: value | list}…], "explain": false}``. Raises InvalidArgument."""
        require_keys(body, ("samples", "explain"))
        reader = self._model.reader
        arrays = reader.read(objects_of(body, "samples"), reader.names, "sample")
        return Question(arrays=arrays, parameters=_explained(body.get("explain", False)))

    def accept(self, arrays: Arrays, parameters: Mapping[str, Any]) -> Question:
        """Read values [N] or [N, L] of each field. Raises InvalidArgument."""
        reader = self._model.reader
        checked = reader.ids_of(arrays, reader.names)
        return Question(arrays=checked, parameters=_explained(parameters.get("explain", False)))

    def run(self, question: Question) -> Arrays:
        """Return ``probability`` [N]; with ``explain`` also ``base`` [N], ``contributions`` and ``unseen`` [N,
        fields]."""
        model = self._model
        fields = with_histories(question.arrays, model.reader.history)
        ids = ids_by_feature(model.network.features, fields)
        inputs = model.network.inputs(ids)
        if not dict(question.parameters).get("explain"):
            return {"probability": probabilities(model.network.logits(inputs))}
        base, parts = model.network.contributions(inputs, model.reader.names)
        return {
            "probability": probabilities(base + parts.sum(1)),
            "base": base,
            "contributions": parts,
            "unseen": model.network.unseen(ids, model.reader.names),
        }

    def write(self, answered: Arrays) -> list[Any]:
        """Return ``{"probability": p}`` of each; explained, also base and contributions (log-odds), and unseen
        fields."""
        names, found = self._model.reader.names, [{"probability": value} for value in answered["probability"].tolist()]
        if "base" not in answered:
            return found
        explained = zip(*(answered[name].tolist() for name in ("base", "contributions", "unseen")), strict=True)
        return [
            {
                **one,
                "base": base,
                "contributions": dict(zip(names, parts, strict=True)),
                "unseen": [name for name, is_unseen in zip(names, unseen, strict=True) if is_unseen],
            }
            for one, (base, parts, unseen) in zip(found, explained, strict=True)
        ]


def _explained(asked: object) -> tuple[tuple[str, Any], ...]:
    if not isinstance(asked, bool):
        raise InvalidArgument(f"explain is {quoted(asked)}; it must be true or false")
    return (("explain", True),) if asked else ()


class RankOperation:
    """Operation: the best of many candidates in one context, whose vectors are looked up once."""

    name = "rank"
    help = "The candidates that are most probably clicked in a context, the best first."

    def __init__(self, model: ClicksModel) -> None:
        self._model = model
        reader = model.reader
        self._of_context = [name for name in reader.names if name not in model.items]
        names = [*reader.array_names(self._of_context), *model.items]
        self.inputs = [
            TensorSpec(name=name, dtype=reader.dtype(name), shape=(None,) * (3 if name in model.items else 2))
            for name in names
        ]
        self.outputs = [
            TensorSpec(name="candidate", dtype="int64", shape=(None, None)),
            TensorSpec(name="probability", dtype="float64", shape=(None, None)),
        ]
        candidates = reader.candidates(model.items)
        examples = [{"context": one, "candidates": candidates, "k": 1} for one in reader.examples(self._of_context)]
        self.request = {
            "type": "object",
            "properties": {
                "context": {**reader.schema(reader.names), "required": []},
                "candidates": {
                    "type": "array",
                    "minItems": 1,
                    "items": {**reader.schema(reader.fields), "required": []},
                },
                "k": {"type": "integer", "minimum": 1, "default": _BEST},
            },
            "required": ["context", "candidates"],
            "example": examples[0],
            "examples": examples,
        }
        best = {"candidate": {"type": "integer"}, "probability": {"type": "number"}}
        self.answer = {"type": "array", "items": {"type": "object", "properties": best, "required": list(best)}}

    def read(self, body: Mapping[str, Any]) -> Question:
        """Read ``{"context": {field: …}, "candidates": [{field: …}…], "k": 10}``: every field is in the context or in
        each candidate. Raises InvalidArgument.
        """
        require_keys(body, ("context", "candidates", "k"))
        context, candidates = body.get("context"), objects_of(body, "candidates", MAX_CANDIDATES)
        if not isinstance(context, dict):
            raise InvalidArgument(f"context is {quoted(context)}; it must be an object of fields")
        reader = self._model.reader
        varying = [name for name in reader.names if name not in context]
        if both := [name for name in candidates[0] if name in context]:
            raise InvalidArgument(
                f"field {quoted(both[0])} is in the context and in candidate 0; give it in one of them"
            )
        if reader.history and HISTORY in varying:
            raise InvalidArgument(f"the context has no field {HISTORY!r}; give an empty list if there is nothing")
        arrays = reader.read([context], [name for name in reader.names if name in context], "context")
        of_candidates = reader.read(candidates, varying, "candidate")
        for name, ids in of_candidates.items():
            padded = np.full((1, width_of(len(ids)), ids.shape[1]), PADDING, np.int64)
            padded[0, : len(ids)] = ids
            arrays[_candidate(name)] = padded
        return self._question(arrays, np.array([len(candidates)]), body.get("k", _BEST))

    def accept(self, arrays: Arrays, parameters: Mapping[str, Any]) -> Question:
        """Read values [N] or [N, L] of the context, [N, C] or [N, C, L] of the candidates: the fields of items.

        After the last candidate of a row all of them are -1, of texts "". Raises InvalidArgument.
        """
        reader, items = self._model.reader, self._model.items
        if not items:
            raise InvalidArgument("no field of the model is of an item; rank by JSON, which says what a candidate has")
        checked = reader.ids_of(arrays, self._of_context)
        given = {name: arrays[name] for name in items if name in arrays}
        if len({array.shape[:2] for array in given.values()}) > 1:
            raise InvalidArgument(
                f"the arrays {', '.join(map(repr, items))} have different numbers of candidates; give each as many"
            )
        is_there = _are_there(given.values())
        for name, array in given.items() if is_there.ndim == 2 else ():
            mask = is_there.reshape(is_there.shape + (1,) * (array.ndim - 2))
            given[name] = np.where(mask, array, array[:, :1])  # a missing candidate's value need not be valid
        of_candidates = reader.ids_of(given, items, ndim=3)
        require_same_items({**checked, **of_candidates})
        checked.update({_candidate(name): ids for name, ids in of_candidates.items()})
        counts, most = np.maximum(is_there.sum(1), 1), is_there.shape[1]
        if most > MAX_CANDIDATES:
            raise InvalidArgument(f"there are {most:,} candidates; at most {MAX_CANDIDATES:,} are ranked at once")
        if len(wrong := np.argwhere(is_there != (np.arange(most) < counts[:, None]))):
            raise InvalidArgument(
                f"candidate {wrong[0].tolist()} is missing; each row has one at least, and behind its last one -1 (of "
                f'texts "") in all of {", ".join(map(repr, items))}'
            )
        return self._question(checked, counts, parameters.get("k", _BEST))

    def _question(self, arrays: dict[str, Ids], counts: Ids, k: object) -> Question:
        best = min(integer("k", k, 1), int(counts.max()))
        return Question(arrays={**arrays, _COUNTS: counts}, parameters=(("k", best),))

    def run(self, question: Question) -> Arrays:
        """Return ``candidate`` and ``probability`` [N, k], best first; -1 and NaN where there are fewer candidates."""
        counts, k, parts, start = question.arrays[_COUNTS], int(dict(question.parameters)["k"]), list[Arrays](), 0
        while start < len(counts):
            end = start + max(1, int(np.searchsorted(counts[start:].cumsum(), _AT_ONCE, "right")))
            parts.append(self._ranked({name: array[start:end] for name, array in question.arrays.items()}, k))
            start = end
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _ranked(self, arrays: Arrays, k: int) -> Arrays:
        model, counts = self._model, arrays[_COUNTS]
        given = {name: ids for name, ids in arrays.items() if name != _COUNTS}
        of_context_ids = {name: ids for name, ids in given.items() if not name.startswith(_CANDIDATE)}
        context = with_histories(of_context_ids, model.reader.history)
        there = None
        varying = {}
        for name, ids in given.items():
            if name.startswith(_CANDIDATE):
                there = np.flatnonzero(np.arange(ids.shape[1]) < counts[:, None]) if there is None else there
                varying[name.removeprefix(_CANDIDATE)] = ids.reshape(-1, ids.shape[2]).take(there, 0)
        of_context: list[SampleFeature] = []
        others: list[SampleFeature] = []
        for feature in model.network.features:
            (of_context if context.keys() >= set(feature.of) else others).append(feature)
        shared = {name for feature in others for name in feature.of if name in context}
        each = {**{name: np.repeat(context[name], counts, 0) for name in shared}, **varying}
        inputs = None
        if of_context:
            once = model.network.inputs(ids_by_feature(of_context, context))
            inputs = {name: np.repeat(array, counts, 0) for name, array in once.items()}
        if others:
            inputs = model.network.inputs(ids_by_feature(others, each), inputs)
        assert inputs is not None
        return best_of(model.network.logits(inputs), counts, k)

    def write(self, answered: Arrays) -> list[Any]:
        """Return ``[{"candidate": place in the request, "probability": p}…]`` of each context."""
        return [
            [{"candidate": at, "probability": value} for at, value in zip(places, values, strict=True) if at >= 0]
            for places, values in zip(answered["candidate"].tolist(), answered["probability"].tolist(), strict=True)
        ]


def _are_there(fields: Iterable[npt.NDArray[Any]]) -> npt.NDArray[np.bool_]:
    """Return which candidates [N, C] have a value in one of the fields [N, C] or [N, C, L]."""
    each = [
        (array != (b"" if array.dtype.kind == "O" else PADDING)).any(tuple(range(2, array.ndim))) for array in fields
    ]
    found: npt.NDArray[np.bool_] = np.logical_or.reduce(each)
    return found


_CANDIDATE = "candidate/"


def _candidate(name: str) -> str:
    return f"{_CANDIDATE}{name}"


def best_of(logits_M: npt.NDArray[np.float64], counts: Ids, k: int) -> Arrays:
    """Return the places [N, k] of each context's best candidates, the first of equal ones, and their probabilities."""
    ends = np.cumsum(counts)
    places = np.full((len(counts), k), -1, np.int64)
    found = np.full((len(counts), k), np.nan)
    for at, (end, count) in enumerate(zip(ends.tolist(), counts.tolist(), strict=True)):
        own = logits_M[end - count : end]
        order = np.argsort(-own, kind="stable")[:k]
        places[at, : len(order)], found[at, : len(order)] = order, probabilities(own[order])
    return {"candidate": places, "probability": found}
