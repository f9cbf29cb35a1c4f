"""Fields whose bags are pooled beside the rows: ids and one vector a bag are sent, no rows.

Per batch, table and shard one request each way in the forward pass and one for the step. For N ids in B bags, U of them
distinct, of width D: 8·U + 4·N + 4·B bytes (4·N more of weights) are sent and 4·B·D received; the step sends all of it
again, with 4·B·D bytes of gradients (``docs/decisions/0015-hosted-models-keep-nothing.md``). A shard gets only bags
that have ids there. Pulled rows take 8·U up and 4·U·D down, and both up at the step.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from geartrain.ams.client.hosted_calls import HostedCalls
from geartrain.ams.kernels.embedding import FeatureIds
from geartrain.ams.programs.bag_pooling import NAME, POOL
from geartrain.ams.values.placement import split_by_shard
from geartrain.ams.values.shard_messages import HostedInputs
from geartrain.ams.values.specs import Ids
from geartrain.bridge.embedding.field import Field
from geartrain.bridge.embedding.vectors import merged_ids
from geartrain.bridge.rows.row_update import PushSettings

if TYPE_CHECKING:
    from geartrain.ams.client.table import Table

Floats = npt.NDArray[np.float32]
ShardInputs = list[list[HostedInputs]]
"""Inputs of an update, by shard."""


class _Part(NamedTuple):
    """Bags of one feature that have ids on one shard."""

    bags: npt.NDArray[np.intp] | None
    """Numbers of the bags [B']; None: all of them."""
    arrays: dict[str, npt.NDArray[Any]]
    """Arrays ``ids``, ``places``, ``counts``, ``weights`` of
    :class:`~geartrain.ams.programs.bag_pooling.BagPoolingModel`."""


class HostedLookup:
    """Hosted features of one batch."""

    def __init__(self, fields: Sequence[Field], features: Sequence[FeatureIds], tables: Sequence[Table]) -> None:
        """``tables`` are all tables of the group. Raises InvalidIds."""
        self._features = features
        self._tables = tables
        # Each by itself: a shard's part of a feature is independent.
        apart = [feature._replace(table=number) for number, feature in enumerate(features)]
        self._lookup = lookup = merged_ids(fields, apart, [tables[feature.table].spec.num_rows for feature in features])
        self._calls = {table: tables[table].hosted(NAME) for table in sorted({feature.table for feature in features})}
        self._factors = [_factors(feature, lookup.places_of(number)) for number, feature in enumerate(features)]
        self._parts = [
            _cut(item, ids, lookup.places_of(number), self._calls[item.table], tables[item.table])
            for number, (item, ids) in enumerate(zip(features, lookup.ids, strict=True))
        ]

    def with_ids(self, pulled: Sequence[Ids]) -> list[Ids]:
        """Return the ids of each table that are ``pulled``, or where none are those looked up here; some of these
        twice."""
        found = list(pulled)
        for feature, ids in zip(self._features, self._lookup.ids, strict=True):
            if not len(pulled[feature.table]):
                found[feature.table] = np.concatenate([found[feature.table], ids])
        return found

    def vectors(self) -> list[Floats]:
        """Return the vectors [B, D] of each feature."""
        vectors = [
            np.zeros((feature.num_vectors, self._tables[feature.table].spec.dim), np.float32)
            for feature in self._features
        ]
        for table, calls in self._calls.items():
            asked = self._of_table(table, calls)
            inputs = [(HostedInputs(arrays=_joined([part for _, part in own])),) if own else () for own in asked]
            for own, answer in zip(asked, calls.compute(POOL, inputs.__getitem__), strict=True):
                first = 0
                for number, part in own:
                    stop = first + len(part.arrays["counts"])
                    where: Any = slice(None) if part.bags is None else part.bags
                    vectors[number][where] += answer["sums"][first:stop]
                    first = stop
        for vector, factors_B in zip(vectors, self._factors, strict=True):
            if factors_B is not None:
                vector *= factors_B[:, None]
        return vectors

    def updates(self, upstream: Sequence[Floats | None]) -> dict[int, ShardInputs]:
        """Return the inputs of each table's push, from gradients [B, D] of the vectors; None: a feature was not
        used."""
        updates: dict[int, ShardInputs] = {}
        unused = {number for number, gradient in enumerate(upstream) if gradient is None}
        scaled = {
            number: np.ascontiguousarray(gradient) if factors_B is None else gradient * factors_B[:, None]
            for number, (gradient, factors_B) in enumerate(zip(upstream, self._factors, strict=True))
            if gradient is not None
        }
        for table, calls in self._calls.items():
            used = {number for number, feature in enumerate(self._features) if feature.table == table} - unused
            if used:
                updates[table] = [
                    [_update(part, scaled[number]) for number, part in own if number in used]
                    for own in self._of_table(table, calls)
                ]
        return updates

    def _of_table(self, table: int, calls: HostedCalls) -> list[list[tuple[int, _Part]]]:
        """Return for each shard the features of a table that have ids there: their numbers and parts."""
        own = [number for number, feature in enumerate(self._features) if feature.table == table]
        return [
            [(number, self._parts[number][shard]) for number in own if len(self._parts[number][shard].arrays["places"])]
            for shard in range(calls.view.num_shards)
        ]


class HostedUpdate:
    """Prepared update of one table; write logs learn which rows it changes."""

    def __init__(self, table: Table, inputs: ShardInputs, step: int, settings: PushSettings) -> None:
        """``step`` is the worker's, for a table that uses it. Raises as ``prepare_update``."""
        self._table = table
        if table.spec.asks_for_clock:  # read once: a retry sends the same
            clock = {"worker_step": float(step), "unix_seconds": time.time()}
            inputs = [[replace(it, settings=clock) for it in its] for its in inputs]
        self._inputs = inputs
        self._write = table.hosted(NAME).prepare_update(lambda shard: tuple(inputs[shard]), **settings)
        self._logged: int | None = None

    def send(self) -> None:
        """Send the update to the shards that have not answered."""
        log = self._table.write_log
        if self._logged is None:
            none = np.empty(0, np.int64)
            ids = np.concatenate([none, *(it.arrays["ids"] for its in self._inputs for it in its)])
            self._logged = log.start(self._table.spec.name, ids)
        self._write.send()
        self._finish()

    def abandon(self) -> None:
        """Abandon the update."""
        self._write.abandon()
        self._finish()

    def _finish(self) -> None:
        if self._logged is not None:
            self._table.write_log.finish(self._logged)


def row_inputs(
    ids: Ids, gradients: Floats, occurrences: npt.NDArray[np.uint32] | None, calls: HostedCalls, table: Table
) -> ShardInputs:
    """Return gradients of pulled rows in the form of an update of the same table, beside its bags."""
    inputs: ShardInputs = [[] for _ in range(calls.view.num_shards)]
    for shard, where in _routes(ids, calls, table):
        own: Any = slice(None) if where is None else where
        arrays: dict[str, npt.NDArray[Any]] = {"ids": ids[own], "gradients": gradients[own]}
        if occurrences is not None:
            arrays["occurrences"] = occurrences[own].astype(np.int64)
        inputs[shard].append(HostedInputs(arrays=arrays))
    return inputs


def _update(part: _Part, gradient: Floats) -> HostedInputs:
    return HostedInputs(arrays={**part.arrays, "vectors": gradient if part.bags is None else gradient[part.bags]})


def _routes(ids: Ids, calls: HostedCalls, table: Table) -> list[tuple[int, Ids | None]]:
    view = calls.view
    return split_by_shard(ids, view.bucket_shards, view.num_shards, dense=table.spec.num_rows is not None)


def _joined(parts: Sequence[_Part]) -> Mapping[str, npt.NDArray[Any]]:
    """Return the bags of several features as those of one."""
    if len(parts) == 1:
        return parts[0].arrays
    places, first = [], 0
    for part in parts:
        places.append(part.arrays["places"] + np.int32(first))
        first += len(part.arrays["ids"])
    joined = {name: np.concatenate([part.arrays[name] for part in parts]) for name in ("ids", "counts")}
    joined["places"] = np.concatenate(places)
    if any("weights" in part.arrays for part in parts):
        ones = (np.ones(len(part.arrays["places"]), np.float32) for part in parts)
        joined["weights"] = np.concatenate(
            [part.arrays.get("weights", item) for part, item in zip(parts, ones, strict=True)]
        )
    return joined


def _bag_of(feature: FeatureIds) -> npt.NDArray[np.intp]:
    """Return the bag of each id [N]."""
    counts = feature.bags if isinstance(feature.bags, int) else np.diff(feature.bags)
    return np.repeat(np.arange(feature.num_vectors), counts)


def _factors(feature: FeatureIds, places: npt.NDArray[np.int32]) -> Floats | None:
    """Return the factor of each bag's sum [B]: 1 / Σ w or 1 / √Σ w² over the ids except padding."""
    if feature.pooling == "sum":
        return None
    weights = (places >= 0).astype(np.float64)
    if feature.weights is not None:
        weights *= feature.weights
    if feature.pooling == "sqrtn":
        weights *= weights
    # Without ids it counts in integers.
    totals = np.bincount(_bag_of(feature), weights, feature.num_vectors).astype(np.float64, copy=False)
    if feature.pooling == "sqrtn":
        totals = np.sqrt(totals)
    return np.divide(1.0, totals, out=np.zeros_like(totals), where=totals != 0).astype(np.float32)


def _cut(feature: FeatureIds, ids: Ids, places: npt.NDArray[np.int32], calls: HostedCalls, table: Table) -> list[_Part]:
    """Return each shard's part of a feature."""
    num_shards = calls.view.num_shards
    shard_of = np.full(len(ids) + 1, -1, np.int32)  # the last one is for padding, whose place is -1
    place_there = np.zeros(len(ids) + 1, np.int32)
    ids_of: list[Ids] = [np.empty(0, np.int64)] * num_shards
    for shard, where in _routes(ids, calls, table):
        own: Any = slice(0, len(ids)) if where is None else where
        shard_of[own], ids_of[shard] = shard, ids[own]
        place_there[own] = np.arange(len(ids_of[shard]), dtype=np.int32)
    if num_shards == 1 and feature.padding_id is None:
        return [_part(feature, ids, places, None)]
    shard_of_N, place_there_N = shard_of[places], place_there[places]
    return [
        _part(feature, ids_of[shard], place_there_N, np.flatnonzero(shard_of_N == shard)) for shard in range(num_shards)
    ]


def _part(feature: FeatureIds, ids: Ids, places: npt.NDArray[np.int32], here: npt.NDArray[np.intp] | None) -> _Part:
    """``places`` [N] among a shard's ``ids``, which are at the positions ``here``, ascending; None: all."""
    size = feature.bags
    ends = np.arange(0, len(places) + 1, size) if isinstance(size, int) else size
    counts = np.diff(ends if here is None else np.searchsorted(here, ends)).astype(np.int32)
    bags = np.flatnonzero(counts)
    arrays: dict[str, npt.NDArray[Any]] = {
        "ids": ids,
        "places": places if here is None else places[here],
        "counts": counts[bags],
    }
    if feature.weights is not None:
        arrays["weights"] = feature.weights if here is None else feature.weights[here]
    return _Part(None if len(bags) == len(counts) else bags, arrays)
