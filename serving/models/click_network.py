"""Network of a click model with the rows it reads, shared by click models and trees of items.

Legend: N samples, L ids of the longest bag or events of the longest history, D width of a vector.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from geartrain.ams.values.errors import ModelDamaged
from geartrain.ams.values.specs import Ids
from geartrain.serving.models.networks import open_network
from geartrain.serving.vectors import FeatureVectors, Floats, MappedTables
from geartrain.workers.ctr.samples.features import HISTORY, HISTORY_ITEMS, SampleFeature
from geartrain.workers.ctr.samples.kinds import PADDING, kinds_from_json

NETWORK = "network.onnx"
Inputs = Mapping[str, npt.NDArray[Any]]


class ClickNetwork:
    """Features, tables and network of a folder, as in its config.json. Thread-safe."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        """Load the files. Raises ModelDamaged, InvalidArgument (onnxruntime cannot run the network)."""
        self.version, self.created = int(config["version"]), float(config["created"])
        self.kinds = kinds_from_json(config["kinds"])
        self.features = tuple(SampleFeature.from_json(said) for said in config["features"])
        self.tables = MappedTables({said["table"]: (folder / said["file"], said["spec"]) for said in config["tables"]})
        self.facts: dict[str, Any] = {
            **{name: config[name] for name in ("fields", "history", "parity", "training")},
            "tables": {
                name: {"dim": spec.dim, "rows": self.tables.num_rows[name]} for name, spec in self.tables.specs.items()
            },
        }
        self._vectors = FeatureVectors(self.tables, self.features)
        self._longest: int | None = config.get("longest")
        pooled = [feature for feature in self.features if feature.pooling is not None]
        ends = np.cumsum([feature.dim for feature in pooled]).tolist()
        self._columns = {feature.name: slice(end - feature.dim, end) for feature, end in zip(pooled, ends, strict=True)}
        self._width = int(ends[-1])
        self._sequences = {feature.name for feature in self.features if feature.pooling is None}
        self._session = open_network(folder / NETWORK, 1)  # requests run in parallel
        taken = {given.name: given.shape for given in self._session.get_inputs()}
        if taken.get("vectors", [0])[-1] != self._width:
            raise ModelDamaged(
                f"{folder / NETWORK} takes {taken}, and the tables beside it give {self._width} numbers: they are of "
                "two models; export the model again"
            )

    def inputs(self, ids: Mapping[str, Ids], shared: Inputs | None = None) -> dict[str, npt.NDArray[Any]]:
        """Return the network's inputs for the ids [N, L] of features.

        ``shared`` are inputs of the same samples, to which other features are added.
        """
        inputs = {} if shared is None else dict(shared)
        if "vectors" not in inputs:
            inputs["vectors"] = np.empty((len(next(iter(ids.values()))), self._width), np.float32)
        pooled = {name: inputs["vectors"][:, self._columns[name]] for name in ids if name in self._columns}
        for name, found in self._vectors(ids, pooled).items():
            inputs[name] = self._sized(found)
        for name in ids.keys() & self._sequences:  # all are of the same events
            inputs["lengths"] = (ids[name] != PADDING).sum(1).astype(np.int64)
        return inputs

    def _sized(self, values_NLD: Floats) -> Floats:
        have = values_NLD.shape[1]
        if self._longest is None or have == self._longest:
            return values_NLD
        missing = max(0, self._longest - have)
        return np.ascontiguousarray(np.pad(values_NLD, ((0, 0), (0, missing), (0, 0)))[:, : self._longest])

    def without(self, inputs: Inputs, field: str) -> dict[str, npt.NDArray[Any]]:
        """Return the inputs with a field emptied in all samples."""
        fields = {HISTORY, HISTORY_ITEMS} if field == HISTORY else {field}
        found = {**inputs, "vectors": inputs["vectors"].copy()}
        for feature in self.features:
            if not fields.intersection(feature.of):
                continue
            if feature.name in self._columns:
                found["vectors"][:, self._columns[feature.name]] = 0
            else:
                found[feature.name] = np.zeros_like(inputs[feature.name])
                found["lengths"] = np.zeros_like(inputs["lengths"])
        return found

    def contributions(
        self, inputs: Inputs, fields: Sequence[str]
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Return the log-odds [N] of samples with all fields empty, and what each of F fields adds to them [N, F].

        Fields are removed one after the other, in both directions, and the two changes of each are averaged. Together
        with the first result they add up to the samples' log-odds; they are Shapley values where no more than two
        fields interact. Costs 2·(F + 1) runs.
        """
        parts = np.zeros((len(inputs["vectors"]), len(fields)))
        for order in (range(len(fields)), reversed(range(len(fields)))):
            left, before = inputs, self.logits(inputs)
            for at in order:
                left = self.without(left, fields[at])
                now = self.logits(left)
                parts[:, at] += (before - now) / 2
                before = now
        return before, parts

    def unseen(self, ids: Mapping[str, Ids], fields: Sequence[str]) -> npt.NDArray[np.bool_]:
        """Return in which fields [N, F] a sample has an id without a trained row; ``ids`` [N, L] are of features."""
        found = np.zeros((len(next(iter(ids.values()))), len(fields)), np.bool_)
        for feature in self.features:
            field = HISTORY if feature.of == (HISTORY_ITEMS,) else feature.of[0]
            if len(feature.of) == 1 and field in fields:
                own = ids[feature.name]
                is_there = self.tables.have(feature.table, np.ascontiguousarray(own).reshape(-1)).reshape(own.shape)
                found[:, fields.index(field)] |= (~is_there & (own != PADDING)).any(1)
        return found

    def logits(self, inputs: Inputs) -> npt.NDArray[np.float64]:
        """Return the log-odds of a click [N]."""
        (found,) = self._session.run(["logits"], dict(inputs))
        logits: npt.NDArray[np.float64] = found.astype(np.float64)
        return logits


def probabilities(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the probabilities of log-odds, without overflow."""
    small = np.exp(-np.abs(logits))
    found: npt.NDArray[np.float64] = np.where(logits >= 0, 1, small) / (1 + small)
    return found
