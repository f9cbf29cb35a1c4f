"""What a push says beside its rows, checked, and with what its table asks for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

from geartrain.ams.values.arguments import checked_time, integer, real_number
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.shard_messages import SyncGroup

_MOST = 2**32 - 1


class StepOptions(TypedDict, total=False):
    """Keywords that all pushes of a step may have in common."""

    lr: float | None
    """Replaces the table's learning rate."""
    scale: float
    """Multiplies the gradients."""
    optimizer_scalars: Mapping[str, float]
    """Replace other numbers of the table's optimizer, by name: ``{"momentum": 0.85}``; ``beta1``, ``beta2`` of Adam."""
    group: SyncGroup | None
    """Makes the push one rank's part of a synchronous one."""
    step: int | None
    """Of the worker, >= 0; the largest one of all pushes is the table's clock of steps. The table's admission and
    expiry go by it and by what else is said of a batch."""
    unix_seconds: float | None
    """When it is; the largest one of all pushes is the table's clock of seconds. Left out: time.time()."""


class PushOptions(StepOptions, total=False):
    """Keywords of a push."""

    occurrences: Any
    """How often each id was in the batch, integers [N]; left out: as often as it is among the ids."""
    pulled_at: Sequence[int] | None
    """What :func:`~geartrain.ams.client.table.pull_together` said of these rows: the table measures how stale they
    were."""
    sequence: int | None
    """Numbers the push, for example by the step, as the only write of that number to this table: sent again under the
    same number and stream name, by this process or one started in its place, it changes nothing and answers
    ``duplicate``; see :meth:`Cluster.acknowledge`."""


OPTIONS = PushOptions.__annotations__.keys() | StepOptions.__annotations__.keys()
BATCH_OPTIONS = frozenset({"occurrences", "step", "unix_seconds", "pulled_at"})
"""Those that say something of the batch."""


def clock_of(given: StepOptions) -> tuple[int | None, float | None]:
    """The step and the time that a push gives, checked. Raises InvalidArgument."""
    step, seconds = given.get("step"), given.get("unix_seconds")
    if step is not None:
        step = integer("step", step, 0, 2**63 - 1)
    if seconds is not None:
        seconds = real_number("unix_seconds", seconds)
        if not (math.isfinite(seconds) and seconds >= 0):
            raise InvalidArgument(f"unix_seconds is {seconds!r}; it must be finite and >= 0, as time.time() is")
        checked_time(seconds, "this process")
    return step, seconds


def checked_occurrences(given: Any, count: int) -> npt.NDArray[np.uint32] | None:
    """How often each of ``count`` ids was in a batch, as compiled code takes it. Raises InvalidArgument."""
    if given is None:
        return None
    array = np.asarray(given)
    if array.shape != (count,) or array.dtype.kind not in "iu":
        raise InvalidArgument(f"occurrences are {array.dtype} {list(array.shape)}; they must be integers [{count}]")
    if count and (array.min() < 0 or array.max() > _MOST):
        raise InvalidArgument(f"occurrences reach from {array.min()} to {array.max()}; they must lie in [0, {_MOST}]")
    return np.ascontiguousarray(array, np.uint32)
