"""Pooling of embeddings as a hosted model: weighted sums of rows over bags, computed beside the rows.

The client sends the rows of each bag, adds the sums of the shards, and divides them where the pooling is a mean. An
update has one gradient a bag, which is spread to the rows of the bag; a row in several bags, micro-batches or ranks is
updated once, by the sum. Runs in a shard process: numpy and compiled loops, never torch; float32.

Cost on a shard, for N places in bags and U distinct rows of width D: U reads of rows, N·D multiply-adds for
:meth:`~BagPoolingModel.compute`, as many and one merge of U ids for :meth:`~BagPoolingModel.gradients`; memory 4·U·D.
Legend: B bags that have rows here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from geartrain.ams.kernels import _core, ops
from geartrain.ams.programs.hosted import HELD_BYTES, Float32, Gradients, HostedRows, chunk_bounds
from geartrain.ams.values.errors import InvalidArgument, InvalidRows
from geartrain.ams.values.shard_messages import Arrays, BatchFacts, HostedInputs
from geartrain.ams.values.specs import Ids

NAME = "bag_pooling"
POOL, SQUARED_NORM = "pool", "squared_norm"

_CHUNK_ROWS = 4096
_Places = npt.NDArray[np.int32]


class BagPoolingModel:
    """Hosted pooling of bags, a :class:`geartrain.ams.programs.hosted.HostedModel`. Holds no state.

    Inputs, by name: ``ids`` int64 [U], distinct; ``places`` int32 [N], indices into ``ids``, bag after bag; ``counts``
    int32 [B], the number of places of each bag; ``weights`` float32 [N] (absent: 1 each). An update also takes
    ``vectors`` float32 [B, D], the gradients of the sums; or, instead of bags, ``gradients`` float32 [U, D], of the
    rows, and ``occurrences`` int64 [U], their numbers in the batch (absent: one each). Settings of an update, for
    tables that ask: ``worker_step`` and ``unix_seconds``, of which the largest of all inputs count.
    """

    def compute(self, rows: HostedRows, operation: str, inputs: Sequence[HostedInputs]) -> Arrays:
        """Compute ``pool`` of one batch, ``sums`` float32 [B, D]; or ``squared_norm`` float64 [1] of an update."""
        if operation == POOL:
            if len(inputs) > 1:
                raise InvalidArgument(f"{operation!r} takes the inputs of one batch; it was given {len(inputs)}")
            return {"sums": _sums(rows, inputs[0])} if inputs else {}
        if operation == SQUARED_NORM:
            _, gradients, _ = _joint(rows, inputs)
            return {"squared_norm": np.array([float(np.square(gradients, dtype=np.float64).sum())])}
        raise InvalidArgument(f"{NAME} has no operation {operation!r}; it has {POOL!r} and {SQUARED_NORM!r}")

    def gradients(self, rows: HostedRows, inputs: Sequence[HostedInputs]) -> Gradients:
        """Return the row gradients of one step: of all its bags, micro-batches and ranks."""
        ids, gradients, occurrences = _joint(rows, inputs)
        spec = rows.spec
        is_asked = spec.counts_occurrences or spec.asks_for_clock
        # Gradients that are held at once need neither chunks nor a bound.
        size = len(ids) if is_asked or gradients.nbytes <= HELD_BYTES else _CHUNK_ROWS
        chunks = [slice(*bounds) for bounds in chunk_bounds(len(ids), max(1, size))]
        return Gradients(
            chunks=chunks,
            ids=lambda chunk: ids[chunk],
            make=lambda chunk: gradients[chunk],
            num_rows=len(ids),
            largest=float(np.abs(gradients).max(initial=0.0)) if len(chunks) > 1 else math.inf,
            batch=_facts(inputs, occurrences) if is_asked else None,
        )


def _facts(inputs: Sequence[HostedInputs], occurrences: npt.NDArray[np.uint32] | None) -> BatchFacts:
    steps = [batch.settings["worker_step"] for batch in inputs if "worker_step" in batch.settings]
    times = [batch.settings["unix_seconds"] for batch in inputs if "unix_seconds" in batch.settings]
    if not all(math.isfinite(told) and 0 <= told < 2**63 for told in (*steps, *times)):
        raise InvalidArgument(f"worker_step and unix_seconds of {NAME} are {steps} and {times}; they must be >= 0")
    return BatchFacts(
        occurrences=occurrences,
        step=int(max(steps)) if steps else None,
        unix_seconds=max(times) if times else None,
    )


def _sums(rows: HostedRows, batch: HostedInputs) -> Float32:
    ids = _array(batch.arrays, "ids", np.int64, 1)
    places, counts, weights = _bags(batch.arrays)
    sums = np.empty((len(counts), rows.spec.dim), np.float32)
    try:
        _core.pool_bags(rows.read(ids), places, counts, weights, sums)
    except ValueError as exc:
        raise InvalidArgument(f"bags of table {rows.spec.name!r}: {exc}") from exc
    return sums


def _joint(rows: HostedRows, inputs: Sequence[HostedInputs]) -> tuple[Ids, Float32, npt.NDArray[np.uint32] | None]:
    """Return distinct ids, the sums of their gradients over the inputs and, if the table asks, their occurrences."""
    parts = [_row_gradients(rows, batch) for batch in inputs]
    counts = [_occurrences(batch) for batch in inputs] if rows.spec.counts_occurrences else []
    if len(parts) == 1 and ops.num_distinct(parts[0][0]) == len(parts[0][0]):
        return (*parts[0], _as_uint32(counts[0]) if counts else None)
    none = np.empty(0, np.int64), np.empty((0, rows.spec.dim), np.float32)
    ids, gradients = (np.concatenate(column) for column in zip(none, *parts, strict=True))
    distinct, places, sums = ops.merge_duplicates(ids, gradients)
    if not rows.spec.counts_occurrences:
        return distinct, sums, None
    every = np.concatenate([np.empty(0, np.int64), *counts])
    return distinct, sums, _as_uint32(np.bincount(places, every, len(distinct)).astype(np.int64))


def _as_uint32(counts: Ids) -> npt.NDArray[np.uint32]:
    return np.minimum(counts, 2**32 - 1).astype(np.uint32, order="C")


def _occurrences(batch: HostedInputs) -> Ids:
    """Return the occurrences of each id [U] in a batch of checked inputs."""
    num_ids = len(batch.arrays["ids"])
    if "gradients" not in batch.arrays:
        return np.bincount(batch.arrays["places"], minlength=num_ids).astype(np.int64, copy=False)
    if "occurrences" not in batch.arrays:
        return np.ones(num_ids, np.int64)
    occurrences = _array(batch.arrays, "occurrences", np.int64, 1)
    if len(occurrences) != num_ids:
        raise InvalidRows(f"occurrences of {NAME} are {len(occurrences)}; they must be {num_ids}, as many as ids")
    return occurrences


def _row_gradients(rows: HostedRows, batch: HostedInputs) -> tuple[Ids, Float32]:
    ids, width = _array(batch.arrays, "ids", np.int64, 1), rows.spec.dim
    if "gradients" in batch.arrays:
        gradients = _array(batch.arrays, "gradients", np.float32, 2)
        if gradients.shape != (len(ids), width):
            raise InvalidRows(
                f"gradients of table {rows.spec.name!r} have shape {list(gradients.shape)}; they must be "
                f"[{len(ids)}, {width}]"
            )
    else:
        places, counts, weights = _bags(batch.arrays)
        vectors = _array(batch.arrays, "vectors", np.float32, 2)
        gradients = np.empty((len(ids), width), np.float32)
        try:
            _core.spread_bags(vectors, places, counts, weights, gradients)
        except ValueError as exc:
            raise InvalidArgument(f"bags of table {rows.spec.name!r}: {exc}") from exc
    return ids, gradients if batch.weight == 1.0 else gradients * np.float32(batch.weight)


def _bags(arrays: Arrays) -> tuple[_Places, _Places, Float32 | None]:
    places, counts = (_array(arrays, name, np.int32, 1) for name in ("places", "counts"))
    return places, counts, _array(arrays, "weights", np.float32, 1) if "weights" in arrays else None


def _array(arrays: Arrays, name: str, dtype: type, ndim: int) -> npt.NDArray[Any]:
    array = arrays.get(name)
    if array is None or array.dtype != dtype or array.ndim != ndim:
        found = "nothing" if array is None else f"{array.dtype} {list(array.shape)}"
        raise InvalidRows(f"{name} of {NAME} is {found}; it must be {np.dtype(dtype)} of {ndim} dimensions")
    return np.ascontiguousarray(array)
