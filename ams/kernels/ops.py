"""Compiled kernels, typed. Arrays are checked here; ``tests/specification/ops.py`` is the specification.

Shapes: N ids of one call, U distinct ids, D width of a row. Ids are int64 [N]. Rows are float32, float16 or bfloat16
(ml_dtypes). Every function releases the GIL, keeps no state, and gives the same bits on every instruction set.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from geartrain.ams.kernels import _core
from geartrain.ams.kernels._core import ClassPass as ClassPass
from geartrain.ams.values.errors import InvalidArgument, InvalidIds, InvalidRows
from geartrain.ams.values.optimizers.spec import RowOptimizerSpec
from geartrain.ams.values.specs import DTYPES, Ids
from geartrain.ams.values.text import counted

NUM_BUCKETS = 4096
DTYPE_CODES: dict[np.dtype[Any], int] = {dtype: code for code, dtype in enumerate(DTYPES.values())}
"""Codes of storage types in the compiled module: float32 0, float16 1, bfloat16 2."""
_LABEL_FAULT = 1
_UINT16 = np.dtype(np.uint16)
_INT64 = np.dtype(np.int64)


def isa() -> str:
    """Return the instruction set in use: ``baseline``, ``avx2``, ``avx512``, ``amx`` (``GEARTRAIN_ISA`` forces one)."""
    return _core.isa


def lookahead() -> str:
    """Return the method of prefetching rows: ``bursts`` or ``window`` (``GEARTRAIN_LOOKAHEAD`` forces one)."""
    return _core.lookahead


has_bfloat16_class_pass = _core.has_bfloat16_class_pass
"""Whether products in bfloat16 are faster in :class:`ClassPass` than those in float32: on a CPU with AMX."""


@lru_cache(maxsize=64)
def compiled_optimizer(optimizer: RowOptimizerSpec) -> _core.Optimizer:
    """Return the compiled code of an optimizer. Stateless: tables may share it."""
    return _core.Optimizer(optimizer.name, optimizer.scalars())


def checked_ids(ids: Any, label: str = "ids") -> Ids:
    """Return ``ids`` if it is an int64 vector (made contiguous if it is not), else raise :class:`InvalidIds`."""
    if not isinstance(ids, np.ndarray) or ids.dtype != _INT64 or ids.ndim != 1:
        found = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, np.ndarray) else type(ids).__name__
        raise InvalidIds(f"{label} is {found}; it must be a numpy int64 vector [N]")
    return ids if ids.flags.c_contiguous and ids.flags.aligned else _native(ids)


def _native(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a copy in aligned, contiguous memory."""
    return np.array(array, dtype=array.dtype.newbyteorder("="), order="C")


def as_bits(rows: Any, label: str = "rows") -> tuple[npt.NDArray[Any], int]:
    """Return an array in the compiled module's form (half types as uint16) with its dtype code.

    An array that is not C-contiguous and aligned is copied. Raises :class:`InvalidRows` for another dtype.
    """
    code = DTYPE_CODES.get(rows.dtype) if isinstance(rows, np.ndarray) else None
    if code is None:
        found = rows.dtype if isinstance(rows, np.ndarray) else type(rows).__name__
        raise InvalidRows(f"{label} is {found}; it must be a numpy array of {', '.join(DTYPES)}")
    flags = rows.flags
    if not (flags.c_contiguous and flags.aligned):
        rows = _native(rows)
    return (rows if code == 0 else rows.view(_UINT16)), code


@overload
def merge_duplicates(ids: Ids, rows: None = None) -> tuple[Ids, Ids, None]: ...
@overload
def merge_duplicates(ids: Ids, rows: npt.NDArray[Any]) -> tuple[Ids, Ids, npt.NDArray[Any]]: ...
def merge_duplicates(ids: Ids, rows: npt.NDArray[Any] | None = None) -> tuple[Ids, Ids, npt.NDArray[Any] | None]:
    """Merge repeated ids, summing their rows in the caller's order.

    Args:
        ids: [N].
        rows: [N, D] or None.

    Returns:
        The distinct ids [U] in order of first appearance; for each id its index among them [N]; and the sums, float32
        [U, D] (None without ``rows``). With nothing to merge, ``ids`` and ``rows`` are returned unchanged.

    Raises:
        InvalidIds: ``ids`` is not an int64 vector.
        InvalidRows: ``rows`` is not a float array [N, D].
    """
    ids = checked_ids(ids)
    bits, code = (None, 0) if rows is None else as_bits(rows)
    if bits is not None and (bits.ndim != 2 or len(bits) != len(ids)):
        raise InvalidRows(f"rows has shape {list(bits.shape)}; it must be [{len(ids)}, D], one row per id")
    if _core.is_rising(ids):  # often true of our own clients
        return ids, np.arange(len(ids)), rows
    distinct, inverse = np.empty_like(ids), np.empty_like(ids)
    num_distinct = _core.merge_ids(ids, distinct, inverse)
    if num_distinct == len(ids):
        return ids, inverse, rows
    if bits is None:
        return distinct[:num_distinct], inverse, None
    sums = np.empty((num_distinct, bits.shape[1]), np.float32)
    _core.sum_rows(bits, code, inverse, sums)
    return distinct[:num_distinct], inverse, sums


def num_distinct(ids: Ids) -> int:
    """Return the number of distinct ids. One comparison each if they ascend."""
    return len(ids) if _core.is_rising(checked_ids(ids)) else len(merge_duplicates(ids)[0])


def require_distinct(ids: Ids) -> None:
    """Raise InvalidArgument if an id to assign occurs twice."""
    if not (count := len(ids) - num_distinct(ids)):
        return
    found, counts = np.unique(ids, return_counts=True)
    first = int(np.flatnonzero(np.isin(ids, found[counts > 1]))[0])
    both = np.flatnonzero(ids == ids[first])[:2]
    raise InvalidArgument(
        f"{len(ids)} ids to assign hold {counted(count, 'duplicate')}: id {int(ids[first])} is at positions "
        f"{both[0]} and {both[1]}; give each id once (a push would sum the gradients of equal ids). Nothing was written"
    )


def first_non_finite(values: npt.NDArray[Any]) -> int:
    """Return the flat (C-order) index of the first NaN or infinity, or -1. Any shape; float32, float16 or bfloat16."""
    bits, code = as_bits(values, "values")
    return _core.first_non_finite(bits, code)


def all_finite(values: npt.NDArray[Any]) -> bool:
    """Return whether no value is NaN or infinite. Any shape; float32, float16 or bfloat16."""
    return first_non_finite(values) < 0


def route(
    ids: Ids, bucket_to_shard: npt.NDArray[np.uint16], dense: bool, num_shards: int | None = None
) -> tuple[Ids, Ids]:
    """Group ids by the shard that owns them.

    Args:
        ids: [N], any int64 (the shard checks whether an id is legal).
        bucket_to_shard: uint16 [4096].
        dense: The bucket of an id is ``id % 4096`` if true, else ``splitmix64(id) >> 52``.
        num_shards: Length of the counts; None: the largest shard of the map plus one.

    Returns:
        The order [N] of the ids by which shard 0's come first, then shard 1's, …, each in the caller's
        order; and the number of ids of each shard [num_shards].
    """
    if bucket_to_shard.dtype != _UINT16 or bucket_to_shard.shape != (NUM_BUCKETS,):
        raise InvalidArgument(
            f"bucket_to_shard is {bucket_to_shard.dtype} {list(bucket_to_shard.shape)};"
            f" it must be uint16 [{NUM_BUCKETS}]"
        )
    ids = checked_ids(ids)
    largest = int(bucket_to_shard.max())
    if num_shards is None:
        num_shards = largest + 1
    if num_shards <= largest:
        raise InvalidArgument(f"bucket_to_shard names shard {largest}; with num_shards {num_shards} it must be lower")
    order, counts = np.empty_like(ids), np.empty(num_shards, np.int64)
    _core.route(ids, np.ascontiguousarray(bucket_to_shard), dense, order, counts)
    return order, counts


def sample_ids(num_ids: int, count: int, seed: int, step: int, first: int = 0) -> Ids:
    """Return places ``first`` … ``first + count - 1`` of the keyed permutation of [0, num_ids) under (seed, step).

    A Feistel network walked until it falls inside the range (Black and Rogaway, "Ciphers with arbitrary finite
    domains", CT-RSA 2002): O(count), no state, the same in every process; a larger ``count`` only appends.
    ``sample_permutation`` of ``tests/specification/ops.py`` is the definition. ``seed`` and ``step`` count modulo
    2**64. Raises :class:`InvalidArgument` unless 0 <= first and first + count <= num_ids <= 2**62.
    """
    if not 1 <= num_ids <= 2**62:
        raise InvalidArgument(f"num_ids is {num_ids}; it must lie in [1, 2**62]")
    if first < 0 or not 0 <= count <= num_ids - first:
        raise InvalidArgument(
            f"count is {count} from place {first} on; it must lie in [0, num_ids - first = {num_ids - first}]"
        )
    out = np.empty(count, np.int64)
    _core.sample_permutation(num_ids, first, seed % 2**64, step % 2**64, out)
    return out


def select_neighbours(
    offsets: npt.NDArray[np.int64],
    neighbours: npt.NDArray[Any],
    labels: Ids,
    budget: int,
    *,
    seed: int,
    step: int,
) -> Ids:
    """Return the active classes for ``labels`` [B] from lists of neighbours.

    ``select_neighbours`` of ``tests/specification/ops.py`` is the definition;
    ``NeighbourTable.select`` of ``ams/graph/building`` has the arguments. O(budget + B) time and memory, except
    for sorting the labels (and the answer, if the table has more than 64 classes for each chosen one).

    Raises:
        InvalidArgument: ``budget`` is below 1, or the table names a class that it does not have.
        InvalidIds: a label is no int64 or outside the table.
    """
    num_classes = len(offsets) - 1
    if budget < 1:
        raise InvalidArgument(f"budget is {budget}; it must be at least 1")
    labels = checked_ids(labels, "labels")
    out = np.empty(min(max(budget, len(labels)), num_classes), np.int64)
    budget = min(budget, num_classes)
    count, fault = _core.select_neighbours(offsets, neighbours, labels, budget, seed % 2**64, step % 2**64, out)
    if fault == _LABEL_FAULT:
        raise InvalidIds(
            f"label {labels[count]} at index {count} is outside the table of neighbours; labels lie in"
            f" [0, {num_classes})"
        )
    if fault:
        raise InvalidArgument(f"the table of neighbours names a class outside [0, {num_classes}); build it again")
    return out[:count]


def splitmix64(values: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Return the hashes of 64-bit integers [N] (signed ones as their two's complement), uint64 [N]."""
    x = values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def alloc_bytes(head: bytes, room: int) -> tuple[bytes, npt.NDArray[np.uint8]]:
    """Return bytes that begin with ``head``, and a view [room] of the rest for the caller to fill in place.

    Fill the view before other code gets the bytes; from then on they are immutable like all bytes.
    """
    return _core.alloc_bytes(head, room)
