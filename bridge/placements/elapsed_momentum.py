"""Momentum of rows on ranks that a step does not touch (``SparseMomentum(untouched="elapsed")``).

A row is stored as of its last step. The effect of later steps on it is a 2 x 2 matrix for each age, which the core
computes once a step (``step_history.hpp``); ``tests/specification/elapsed_momentum.py`` is the specification. Reading
a row computes its current value and writes nothing.

Legend: L rows of this rank, D width, N rows of a call, K ages.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from geartrain.ams.kernels import ops
from geartrain.ams.kernels._core import CatchUp, StepHistory
from geartrain.ams.tables.compiled_store import ELAPSED_WINDOW
from geartrain.ams.tables.row_table import TableSteps
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.specs import TableSpec
from geartrain.bridge.rows.tables import TORCH_DTYPES
from geartrain.bridge.rows.transfers import upload

RESTING = -1
"""Last step of a row at rest: its slot is zero, and there is no weight decay."""
_OVERDUE_SHARE, _SWEEP_SHARE = 2, 4
"""As on a shard: a row is caught up half a window after its last step, by a sweep that takes about a quarter window."""


class ElapsedSteps:
    """Steps that rows count in, the same on every rank, and their effect on untouched rows.

    Host memory: 4 bytes for each step remembered, about 20,000 at most; and for its matrix 32 bytes on the host and 32
    on the device.
    """

    def __init__(self, spec: TableSpec, share: int, device: torch.device, window: int = ELAPSED_WINDOW) -> None:
        """``share``: most rows of any rank. All ranks sweep as many, and so remember the same steps."""
        assert spec.optimizer.drift is not None
        self._momentum, self._weight_decay = spec.optimizer.drift
        self._name = spec.name
        self._share = share
        self._window = window
        self._device = device
        self._largest = [torch.finfo(TORCH_DTYPES[dtype]).max for dtype in (spec.dtype, spec.slot_dtype)]
        self._history = StepHistory(ops.compiled_optimizer(spec.optimizer))
        self.moves_rows_at_rest = self._history.moves_rows_at_rest
        """Whether a step moves a row without momentum."""
        self._sweep_at = self._sweep_began = 0
        self._refresh()

    @property
    def now(self) -> int:
        """Number of steps that have ended."""
        return self.catch_up.now

    @property
    def state(self) -> TableSteps:
        """Steps as snapshots store them."""
        now, lrs, row_factor, slot_factor = self._history.state()
        return TableSteps(now, lrs, (row_factor, slot_factor))

    def adopt(self, steps: TableSteps) -> None:
        """Continue from ``steps``. Raises InvalidArgument if no table can have made them."""
        try:
            self._history.adopt(steps.now, list(steps.lrs), *steps.origin)
        except ValueError as exc:
            raise InvalidArgument(f"these are no steps of table {self._name!r}: {exc}") from exc
        self._sweep_at, self._sweep_began = 0, steps.now
        self._refresh()

    def reset(self) -> None:
        """Start anew, before the first step."""
        self.adopt(TableSteps(0, [], (1.0, 0.0)))

    def move_to(self, device: torch.device) -> None:
        """Use another device, to which the rows were moved."""
        self._device = device
        self._refresh()

    def end_step(self, lr: float) -> None:
        """Count a step, which has ended on every rank."""
        self._history.end_step(lr)
        self._refresh()

    def sweep(self) -> slice:
        """Return the next rows to check for old ones, before a step ends; forget steps that no row needs."""
        if self._sweep_at >= self._share:
            self._history.forget_before(self._sweep_began - self._window // _OVERDUE_SHARE)
            self._sweep_at, self._sweep_began = 0, self.now
        start = self._sweep_at
        self._sweep_at += self._share * _SWEEP_SHARE // self._window + 1
        return slice(start, min(self._sweep_at, self._share))

    def are_overdue(self, last_N: Tensor) -> Tensor:
        """Return whether the sweep catches up each row of these last steps, bool [N]."""
        return (last_N > 0) & (last_N <= self.now - self._window // _OVERDUE_SHARE)

    def are_late(self, last_N: Tensor) -> Tensor:
        """Return whether each row, as restored, has a gradient of the step that has not ended: bool [N]."""
        return last_N > self.now

    def moved_rows(self, rows_ND: Tensor, slots_ND: Tensor, last_N: Tensor) -> Tensor:
        """Return the current values of rows stored as of these last steps, float64 [N, D], in their dtype's range."""
        return self._combined(self._factors(last_N)[:, :2], rows_ND, slots_ND, 0)

    def moved(self, rows_ND: Tensor, slots_ND: Tensor, last_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return :meth:`moved_rows`, and the slots."""
        factors = self._factors(last_N)
        rows = self._combined(factors[:, :2], rows_ND, slots_ND, 0)
        return rows, self._combined(factors[:, 2:], rows_ND, slots_ND, 1)

    def update(self, rows_ND: Tensor, slots_ND: Tensor, last_N: Tensor, gradient_ND: Tensor, lr: float) -> None:
        """Catch up rows of these last steps and make one step of ``lr``, in place. The gradient is overwritten."""
        moved_ND, moved_slots_ND = self.moved(rows_ND, slots_ND, last_N)
        rows_ND.copy_(moved_ND)
        slots_ND.copy_(moved_slots_ND)
        is_late = self.are_late(last_N).unsqueeze(1)  # [N, 1]: the row already had a gradient in this step
        gradient_ND.add_(torch.where(is_late, 0.0, rows_ND), alpha=self._weight_decay)
        slots_ND.copy_(torch.where(is_late, slots_ND, slots_ND * self._momentum)).add_(gradient_ND)
        rows_ND.add_(torch.where(is_late, gradient_ND, slots_ND), alpha=-lr)

    def _factors(self, last_N: Tensor) -> Tensor:
        """Return the 2 x 2 matrix of each row, [N, 4]."""
        ages = len(self._factors_K4) - 1
        of_age_N = (self.now - last_N).clamp_(0, ages - 1)  # clamped for last steps of a damaged snapshot
        index_N = torch.where(last_N == 0, ages, of_age_N)
        return self._factors_K4[torch.where((last_N < 0) | (last_N >= self.now), 0, index_N)]

    def _combined(self, factors: Tensor, rows_ND: Tensor, slots_ND: Tensor, part: int) -> Tensor:
        # Not one fused operation: every device must give the bits of the core.
        sums_ND = rows_ND.double() * factors[:, :1]
        sums_ND += slots_ND.double() * factors[:, 1:]
        largest = self._largest[part]
        return sums_ND.clamp_(-largest, largest)

    def _refresh(self) -> None:
        self.catch_up = CatchUp(self._history)
        """Matrices by age, for compiled code."""
        factors = np.empty((self.catch_up.num_ages + 1, 4))
        self.catch_up.copy_factors(factors)
        with torch.inference_mode(False):
            self._factors_K4 = upload(factors, self._device)
