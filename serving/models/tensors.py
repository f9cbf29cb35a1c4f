"""Tensor models: user networks, queried with the inputs of their forward.

Legend: N items, C classes, D width of a feature, k answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.text import quoted
from geartrain.serving.answers import Arrays, Question, TensorSpec, require_same_items
from geartrain.serving.models.own_code import function_of
from geartrain.serving.models.pictures import (
    ClassModel,
    Floats,
    GivesFeatures,
    NamesClasses,
    Nearest,
    fields_of,
    listed,
    only,
    request_of,
)
from geartrain.workers.models.saved_model import TYPES

ITEMS = "items"


class TensorModel(ClassModel):
    """Tensor model with onnxruntime and an index of class centers."""

    kind = "tensors"

    def __init__(self, folder: Path, config: Mapping[str, Any], *, threads: int | None = None) -> None:
        own = config["preprocessing"]
        self._make = None if own is None else function_of(own, str(folder))
        super().__init__(folder, config, threads=threads)
        self.inputs = tuple(map(_spec_of, self._session.get_inputs()))
        self.asked = self.inputs if own is None else (TensorSpec(name=ITEMS, dtype="object", shape=(None,)),)
        """Inputs of a request: tensors, or items that user code converts to tensors."""
        self.field = "inputs" if own is None else ITEMS
        """Field of a JSON body with the inputs."""
        takes = {spec.name: [spec.dtype, *spec.shape] for spec in self.inputs}
        self.facts = {**self.facts, "preprocessing": own, "inputs": takes}
        self.operations = {
            operation.name: operation for operation in (ClassifyTensors(self), EmbedTensors(self), Nearest(self))
        }

    def read(self, body: Mapping[str, Any]) -> Arrays:
        """Return the tensors of a JSON body: from nested lists by name, or from items. Raises InvalidArgument."""
        if self._make is not None:
            return self.made(listed(body, ITEMS))
        given = body.get("inputs")
        if not isinstance(given, dict):
            raise InvalidArgument(f"inputs is {quoted(given)}; give an object of {self._wanted()}")
        arrays = {}
        for spec in self.inputs:
            value = given.get(spec.name)
            try:
                arrays[spec.name] = array = np.array(value)
            except ValueError as exc:
                raise InvalidArgument(f"{spec.name} has rows of several lengths; pad them to one ({exc})") from exc
            whole = np.dtype(spec.dtype).kind not in "iu" or array.dtype.kind in "iu"
            if array.dtype.kind not in "biuf" or not whole or (spec.dtype == "bool") != (array.dtype.kind == "b"):
                raise InvalidArgument(f"{spec.name} is {quoted(value)}; give nested lists of {spec.dtype}")
            with np.errstate(over="ignore"):
                arrays[spec.name] = array.astype(spec.dtype)
            if whole and array.dtype.kind in "iu" and (arrays[spec.name] != array).any():
                raise InvalidArgument(f"{spec.name} has a number that is no {spec.dtype}")
        return self.checked({**{name: np.empty(0) for name in given}, **arrays})

    def made(self, items: list[Any]) -> Arrays:
        """Return the tensors that user code makes of items. Raises InvalidArgument."""
        assert self._make is not None
        try:
            found = self._make(items)
            if not isinstance(found, Mapping):
                several = found if isinstance(found, tuple) else (found,)
                found = dict(zip((spec.name for spec in self.inputs), several, strict=False))
            made = {name: np.asarray(array) for name, array in found.items()}
        except (Exception, SystemExit) as exc:  # user code may raise anything
            raise InvalidArgument(f"the preprocessing refuses these items: {type(exc).__name__}: {exc}") from exc
        arrays = self.checked(made)
        if (num_rows := len(next(iter(arrays.values())))) != len(items):
            raise InvalidArgument(f"the preprocessing made {num_rows} rows of {len(items)} items; it makes one of each")
        return arrays

    def accepted(self, arrays: Arrays) -> Arrays:
        """Return the tensors of arrays from gRPC. Raises InvalidArgument."""
        if self._make is None:
            return self.checked(arrays)
        items = only(arrays, ITEMS, 1, {})
        return self.made([item.decode(errors="replace") if isinstance(item, bytes) else item for item in items])

    def features(self, arrays: Arrays) -> Floats:
        """Return the features [N, D]. Raises InvalidArgument where the network refuses values."""
        try:
            features_ND = super().features(arrays)
        except Exception as exc:  # errors of onnxruntime share no other base
            raise InvalidArgument(f"the network refuses these inputs: {str(exc)[:300]}") from exc
        if not np.isfinite(features_ND).all():
            raise InvalidArgument("the network makes features of these inputs that are not finite")
        return features_ND

    def checked(self, arrays: Arrays) -> Arrays:
        """Return ``arrays``. Raises InvalidArgument unless the network accepts them."""
        wanted = {spec.name: spec for spec in self.inputs}
        if set(arrays) != set(wanted):
            raise InvalidArgument(f"the inputs are {', '.join(map(quoted, arrays)) or 'none'}; give {self._wanted()}")
        for name, array in arrays.items():
            spec = wanted[name]
            fits = len(array.shape) == len(spec.shape) and all(
                size is None or size == found for size, found in zip(spec.shape, array.shape, strict=True)
            )
            if array.dtype != spec.dtype or not fits or not array.size:
                found = f"{array.dtype} {list(array.shape)}"
                raise InvalidArgument(f"{quoted(name)} is {found}; this model takes {self._wanted()}, none of size 0")
        require_same_items(arrays)
        return arrays

    def _wanted(self) -> str:
        shapes = (", ".join("any" if size is None else str(size) for size in spec.shape[1:]) for spec in self.inputs)
        specs = zip(self.inputs, shapes, strict=True)
        return " and ".join(f"{quoted(spec.name)} {spec.dtype} [N{sizes and ', '}{sizes}]" for spec, sizes in specs)


class _OfTensors:
    """Reads questions with the network's inputs."""

    _model: TensorModel
    _ranks = False

    def read(self, body: Mapping[str, Any]) -> Question:
        given = fields_of(body, self._model.field, *["k"] * self._ranks)
        return self._question(self._model.read(given), given)

    def accept(self, arrays: Arrays, parameters: Mapping[str, Any]) -> Question:
        given = fields_of(parameters, *["k"] * self._ranks)
        return self._question(self._model.accepted(arrays), given)

    def _question(self, arrays: Arrays, given: Mapping[str, Any]) -> Question:
        """Return a question of checked arrays; those of equal sizes are batched."""
        sizes = tuple((name, array.shape[1:]) for name, array in sorted(arrays.items()))
        ranked = (("k", self._model.k_of(given)),) if self._ranks else ()
        return Question(arrays=arrays, parameters=(*ranked, ("sizes", sizes)))


class ClassifyTensors(_OfTensors, NamesClasses):
    """Operation: classes of items."""

    help = "The classes that fit each item best, with their scores."
    _ranks = True

    def __init__(self, model: TensorModel) -> None:
        super().__init__(model)
        self._model, self.inputs = model, model.asked
        self.request = _request(model, ranked=True)


class EmbedTensors(_OfTensors, GivesFeatures):
    """Operation: features of items."""

    help = "The features of each item, as the network gives them."

    def __init__(self, model: TensorModel) -> None:
        super().__init__(model)
        self._model, self.inputs = model, model.asked
        self.request = _request(model, ranked=False)


def _spec_of(taken: Any) -> TensorSpec:
    kind = str(taken.type).removeprefix("tensor(").removesuffix(")")
    if kind not in TYPES:
        raise InvalidArgument(f"the network takes {taken.name!r} of type {taken.type}, which no request can bring")
    sizes = (size if isinstance(size, int) else None for size in taken.shape[1:])
    return TensorSpec(name=taken.name, dtype=TYPES[kind], shape=(None, *sizes))


def _request(model: TensorModel, *, ranked: bool) -> dict[str, Any]:
    """Return the JSON schema of a body, with an example of zeros."""
    zeros = {spec.name: np.zeros([size or 1 for size in spec.shape], spec.dtype).tolist() for spec in model.inputs}
    if model.field == ITEMS:
        item = {"description": f"As {model.facts['preprocessing']} takes it."}
        return request_of({ITEMS: item}, ["text"], model if ranked else None)
    body = request_of({"inputs": {}}, [], model if ranked else None)
    nested = {spec.name: {"type": "array"} for spec in model.inputs}
    body["properties"]["inputs"] = {
        "type": "object",
        "properties": nested,
        "required": [spec.name for spec in model.inputs],
        "additionalProperties": False,
    }
    body["example"]["inputs"] = zeros
    return body
