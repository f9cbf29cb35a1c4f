"""Options of a push: checks, and defaults from the table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

from geartrain.ams.values.arguments import check_time, integer, real_number
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.shard_messages import SyncGroup

_MOST = 2**32 - 1


class StepOptions(TypedDict, total=False):
    """Keywords that all pushes of a step may share."""

    lr: float | None
    """Replaces the table's learning rate."""
    scale: float
    """Multiplies the gradients."""
    optimizer_scalars: Mapping[str, float]
    """Override other numbers of the table's optimizer, by name: ``{"momentum": 0.85}``; ``beta1``, ``beta2`` of
    Adam."""
    group: SyncGroup | None
    """Makes the push one rank's part of a synchronous one."""
    step: int | None
    """Step of the worker, >= 0; the largest one of all pushes is the table's step clock, by which its admission and
    expiry go."""
    unix_seconds: float | None
    """Present time; the largest one of all pushes is the table's clock of seconds. Default: time.time()."""


class PushOptions(StepOptions, total=False):
    """Keywords of a push."""

    occurrences: Any
    """Occurrences of each id in the batch, integers [N]; default: as often as it is among the ids."""
    pulled_at: Sequence[int] | None
    """Table writes that :func:`~geartrain.ams.client.table.pull_together` returned with these rows, for the table's
    measure of their staleness."""
    sequence: int | None
    """Number of the push, for example the step, unique among the writes to this table. Sent again under the same number
    and stream name, by this process or its replacement, it changes nothing and returns ``duplicate``;
    :meth:`Cluster.acknowledge` ends that."""


OPTIONS = PushOptions.__annotations__.keys() | StepOptions.__annotations__.keys()
BATCH_OPTIONS = frozenset({"occurrences", "step", "unix_seconds", "pulled_at"})
"""Options that describe the batch."""


def clock_of(given: StepOptions) -> tuple[int | None, float | None]:
    """Return the checked step and time of a push. Raises InvalidArgument."""
    step, seconds = given.get("step"), given.get("unix_seconds")
    if step is not None:
        step = integer("step", step, 0, 2**63 - 1)
    if seconds is not None:
        seconds = real_number("unix_seconds", seconds)
        if not (math.isfinite(seconds) and seconds >= 0):
            raise InvalidArgument(f"unix_seconds is {seconds!r}; it must be finite and >= 0, as time.time() is")
        check_time(seconds, "this process")
    return step, seconds


def checked_occurrences(given: Any, count: int) -> npt.NDArray[np.uint32] | None:
    """Return the occurrences of ``count`` ids in a batch, as compiled code takes them. Raises InvalidArgument."""
    if given is None:
        return None
    array = np.asarray(given)
    if array.shape != (count,) or array.dtype.kind not in "iu":
        raise InvalidArgument(f"occurrences are {array.dtype} {list(array.shape)}; they must be integers [{count}]")
    if count and (array.min() < 0 or array.max() > _MOST):
        raise InvalidArgument(f"occurrences reach from {array.min()} to {array.max()}; they must lie in [0, {_MOST}]")
    return np.ascontiguousarray(array, np.uint32)
