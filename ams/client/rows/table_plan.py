"""Settings of a table's pulls and writes that are constant between calls."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from geartrain.ams.client.rows.push_options import OPTIONS, StepOptions
from geartrain.ams.kernels import ops
from geartrain.ams.kernels._core import TableFacts
from geartrain.ams.values.arguments import real_number
from geartrain.ams.values.errors import NonFinite
from geartrain.ams.values.optimizers.spec import NO_SCALARS
from geartrain.ams.values.shard_messages import SyncGroup
from geartrain.ams.values.specs import DTYPES, DTypeName, TableSpec

NO_CHECK, CHECK_PRODUCT, CHECK_FINITE = 0, 1, 2
"""Checks of a write's rows: none; the largest value times ``scale`` is finite; all values are finite, too."""
PushBatch = tuple[npt.NDArray[np.uint32] | None, int | None, float | None, Sequence[int] | None]
"""Occurrences, step, unix seconds, and pulled_at of each shard (-1: unknown)."""
PushSettings = tuple[float | None, float, Mapping[str, float], SyncGroup | None]
"""Learning rate (None: the table's), scale of the gradients, other numbers of the optimizer, and group."""


class TablePlan:
    """A table as one client means it; replaced when its settings, or the table meant, change."""

    def __init__(self, spec: TableSpec, incarnation: int, wire_dtype: DTypeName | None) -> None:
        """``wire_dtype``: type in which rows are sent; None: their own."""
        self.spec = spec
        self.incarnation = incarnation
        """Incarnation of the table; 0: unknown."""
        self.dtype = spec.numpy_dtype
        self.dtype_code = ops.DTYPE_CODES[self.dtype]
        self.counts_steps = spec.counts_steps
        """Whether every shard receives every push."""
        self._asks_for_clock, self._counts_occurrences = spec.asks_for_clock, spec.counts_occurrences
        self.asks_for_batch = self._asks_for_clock or self._counts_occurrences
        """Whether pushes describe their batch."""
        wire_code = self.dtype_code if wire_dtype is None else ops.DTYPE_CODES[DTYPES[wire_dtype]]
        is_dense = spec.num_rows is not None
        self.facts = TableFacts(spec.name, spec.dim, self.dtype_code, is_dense, wire_code, self._counts_occurrences)
        """Facts of the table for compiled code."""
        self._checked_scalars: Mapping[str, float] = NO_SCALARS

    def settings_of(self, options: StepOptions) -> PushSettings:
        """Return the settings that pushes with these options send to compiled code, for any table of this optimizer.
        Raises TypeError, InvalidArgument, NonFinite.
        """
        if not options:
            return None, 1.0, NO_SCALARS, None
        if unknown := options.keys() - OPTIONS:
            raise TypeError(f"a push has no {sorted(unknown)[0]!r}; its options are {', '.join(sorted(OPTIONS))}")
        lr, scalars = options.get("lr"), options.get("optimizer_scalars", NO_SCALARS)
        scale = real_number("scale", options.get("scale", 1.0))
        checked = self._checked_scalars
        if scalars != checked:
            self.spec.optimizer.for_push(scalars)
            checked = self._checked_scalars = dict(scalars)
        if not math.isfinite(scale):
            raise NonFinite(f"scale is {scale!r}; it must be finite. Push nothing for a skipped step")
        return None if lr is None else real_number("lr", lr), scale, checked, options.get("group")

    def batch(
        self,
        occurrences: npt.NDArray[np.uint32] | None,
        step: int | None,
        seconds: float | None,
        pulled_at: Sequence[int] | None,
    ) -> PushBatch | None:
        """Return a push's description of its batch; None: nothing. Occurrences, step and time are sent only if the
        table's admission or expiry uses them.
        """
        if not self._asks_for_clock:
            step = seconds = None
        elif seconds is None:
            seconds = time.time()
        if not self._counts_occurrences:
            occurrences = None
        if occurrences is None and step is None and seconds is None and pulled_at is None:
            return None
        return occurrences, step, seconds, pulled_at
