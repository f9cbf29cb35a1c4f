"""Any 64-bit value becomes an id."""

from __future__ import annotations

from typing import Any

import numpy as np

from geartrain.ams.values.arrays import as_array
from geartrain.ams.values.errors import InvalidIds

ID_BITS = 2**63 - 1
"""The bits of a 64-bit value that its id has: all but the sign."""


def fold_ids(values: Any) -> Any:
    """Return an id for each integer: its 64 bits without the sign bit, int64 >= 0 of the same shape.

    That is ``value & (2**63 - 1)`` in two's complement: an id stays itself, -1 is 2^63 - 1, and folding twice is
    folding once. v and v + 2^63 have one id; that any two of n different hashes meet has a chance below n² / 2^64. A
    negative number that stands for no id becomes an id, too: leave it out before.

    A tensor gives a tensor on its device; a list, or an array of numpy's, an array. Raises InvalidIds for other values.
    """
    if hasattr(values, "long"):  # a tensor, without an import of torch
        if values.is_floating_point() or values.is_complex():
            raise InvalidIds(f"values are {values.dtype}; they must be integers of up to 64 bits")
        return values.long() & ID_BITS
    array = np.array(values, object) if isinstance(values, list | tuple) else as_array(values, InvalidIds, "values")
    if array.dtype == object:  # numpy has no type for both -1 and 2**63
        wrong = [one for one in array.flat if not isinstance(one, int | np.integer) or not -(2**63) <= one < 2**64]
        if wrong:
            raise InvalidIds(f"values hold {wrong[0]!r}; they must be integers of up to 64 bits")
        array = (array & ID_BITS).astype(np.int64)
    if array.dtype.kind not in "iu":
        raise InvalidIds(f"values have dtype {array.dtype}; they must be integers of up to 64 bits")
    return array.astype(np.int64) & ID_BITS
