"""What a push says beside its rows, checked, and with what its table asks for."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

from geartrain.ams.kernels import ops
from geartrain.ams.kernels._core import TableFacts
from geartrain.ams.values.arguments import checked_time, integer, real_number
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.shard_messages import SyncGroup
from geartrain.ams.values.specs import DTYPES, DTypeName, TableSpec

NO_CHECK, CHECK_PRODUCT, CHECK_FINITE = 0, 1, 2
"""What is looked for in the rows of a write: nothing; that the largest times ``scale`` is finite; that all are, too."""
_MOST = 2**32 - 1

PushBatch = tuple[npt.NDArray[np.uint32] | None, int | None, float | None, Sequence[int] | None]
"""Occurrences, step, unix seconds and pulled_at of each shard; -1: it is not known."""


class BatchSettings(TypedDict, total=False):
    """What a push says of its batch: what the table's admission and expiry go by."""

    occurrences: Any
    """How often each id was in the batch, integers [N]; left out: as often as it is among the ids."""
    step: int | None
    """Of the worker, >= 0; the largest one of all pushes is the table's clock of steps."""
    unix_seconds: float | None
    """When it is; the largest one of all pushes is the table's clock of seconds. Left out: time.time()."""
    pulled_at: Sequence[int] | None
    """What :func:`~geartrain.ams.client.table.pull_together` said of these rows: the table measures how stale they
    were."""


class PushOptions(BatchSettings, total=False):
    """Keywords of a push."""

    lr: float | None
    """Replaces the table's learning rate."""
    scale: float
    """Multiplies the gradients."""
    optimizer_scalars: Mapping[str, float]
    """Replace other numbers of the table's optimizer, by name: ``{"momentum": 0.85}``; ``beta1``, ``beta2`` of Adam."""
    group: SyncGroup | None
    """Makes the push one rank's part of a synchronous one."""
    sequence: int | None
    """Numbers the push, for example by the step, as the only write of that number to this table: sent again under the
    same number and stream name, by this process or one started in its place, it changes nothing and answers
    ``duplicate``; see :meth:`Cluster.acknowledge`."""


_OPTIONS = PushOptions.__annotations__.keys() | BatchSettings.__annotations__.keys()


def require_known(options: Mapping[str, Any]) -> None:
    """Raise TypeError for a keyword that no push has."""
    if unknown := options.keys() - _OPTIONS:
        raise TypeError(f"a push has no {sorted(unknown)[0]!r}; its options are {', '.join(sorted(_OPTIONS))}")


def table_facts(spec: TableSpec, wire_dtype: DTypeName | None) -> TableFacts:
    """Return what compiled code knows of a table; ``wire_dtype``: the type its rows travel in, None: as they are."""
    code = ops.DTYPE_CODES[spec.numpy_dtype]
    wire_code = code if wire_dtype is None else ops.DTYPE_CODES[DTYPES[wire_dtype]]
    return TableFacts(spec.name, spec.dim, code, spec.num_rows is not None, wire_code, spec.counts_occurrences)


def batch_of(spec: TableSpec, count: int, given: BatchSettings) -> PushBatch | None:
    """What a push of ``count`` ids says to a table of ``spec``; None: nothing. Raises InvalidArgument.

    Occurrences, step and time travel only where the table's admission or expiry asks for them.
    """
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
