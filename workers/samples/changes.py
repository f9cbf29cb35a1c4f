"""Where a column's value differs from that of the row before."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from geartrain.workers.samples.columns import whole_array

Mask = npt.NDArray[np.bool_]


def changes(column: Any) -> Mask:
    """Of each row [N] whether its value is another than the row's before; of the first one True.

    Lists differ by length or by any value, floats by any bit. ``column`` is as samples have it.
    """
    array = whole_array(column)
    found = np.ones(len(array), np.bool_)
    if pa.types.is_fixed_size_list(array.type):
        codes = _codes(array.flatten()).reshape(len(array), -1)
        found[1:] = (codes[1:] != codes[:-1]).any(axis=1)
    elif pa.types.is_large_list(array.type):
        offsets = array.offsets.to_numpy().astype(np.int64)
        found[1:] = _lists_differ(_codes(array.flatten()), offsets - offsets[0])
    else:
        codes = _codes(array)
        found[1:] = codes[1:] != codes[:-1]
    return found


def _codes(array: Any) -> npt.NDArray[Any]:
    """Numbers that are equal where values are."""
    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        codes: npt.NDArray[Any] = array.dictionary_encode().indices.to_numpy()
        return codes
    values: npt.NDArray[Any] = array.to_numpy(zero_copy_only=False)
    return values.view(f"i{values.itemsize}") if values.dtype.kind == "f" else values


def _lists_differ(codes: npt.NDArray[Any], offsets: npt.NDArray[np.int64]) -> Mask:
    lengths = np.diff(offsets)
    differs: Mask = lengths[1:] != lengths[:-1]
    rows = np.flatnonzero(~differs) + 1  # those whose values have a counterpart each
    counts = lengths[rows]
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    own = np.repeat(offsets[rows], counts) + within
    before = np.repeat(offsets[rows - 1], counts) + within
    differs[np.unique(np.repeat(rows, counts)[codes[own] != codes[before]]) - 1] = True
    return differs
