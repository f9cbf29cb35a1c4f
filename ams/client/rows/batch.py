"""What a push says of the batch that its gradients are of, checked, and with what its table asks for."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

from geartrain.ams.client.rows.row_parts import Batch
from geartrain.ams.values.arguments import checked_time, integer, real_number
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.specs import TableSpec

_MOST = 2**32 - 1


class BatchSettings(TypedDict, total=False):
    """Keywords of a push."""

    occurrences: Any
    """How often each id was in the batch, integers [N]; left out: as often as it is among the ids."""
    step: int | None
    """Of the worker, >= 0; the largest one of all pushes is the table's clock of steps."""
    unix_seconds: float | None
    """When it is; the largest one of all pushes is the table's clock of seconds. Left out: time.time()."""
    pulled_at: Sequence[int] | None
    """What :func:`~geartrain.ams.client.table.pull_together` said of these rows: the table measures how stale they
    were."""


def batch_of(spec: TableSpec, count: int, given: BatchSettings) -> Batch | None:
    """What a push of ``count`` ids says to a table of ``spec``; None: nothing. Raises InvalidArgument.

    Occurrences, step and time travel only where the table's admission or expiry asks for them.
    """
    if not given and not spec.asks_for_clock:
        return None
    occurrences = _occurrences(given.get("occurrences"), count)
    step, seconds, pulled_at = given.get("step"), given.get("unix_seconds"), given.get("pulled_at")
    if step is not None:
        step = integer("step", step, 0, 2**63 - 1)
    if seconds is not None:
        seconds = real_number("unix_seconds", seconds)
        if not (math.isfinite(seconds) and seconds >= 0):
            raise InvalidArgument(f"unix_seconds is {seconds!r}; it must be finite and >= 0, as time.time() is")
        checked_time(seconds, "this process")
    if not spec.asks_for_clock:
        step = seconds = None
    elif seconds is None:
        seconds = time.time()
    if not spec.counts_occurrences:
        occurrences = None
    if occurrences is None and step is None and seconds is None and pulled_at is None:
        return None
    return occurrences, step, seconds, pulled_at


def _occurrences(given: Any, count: int) -> npt.NDArray[np.uint32] | None:
    if given is None:
        return None
    array = np.asarray(given)
    if array.shape != (count,) or array.dtype.kind not in "iu":
        raise InvalidArgument(f"occurrences are {array.dtype} {list(array.shape)}; they must be integers [{count}]")
    if count and (array.min() < 0 or array.max() > _MOST):
        raise InvalidArgument(f"occurrences reach from {array.min()} to {array.max()}; they must lie in [0, {_MOST}]")
    return np.ascontiguousarray(array, np.uint32)
