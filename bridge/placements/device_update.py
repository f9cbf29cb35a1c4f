"""The update of rows on the ranks' devices: applied where the rows are, nothing travels."""

from __future__ import annotations

from typing import Protocol, TypeVar

import torch
from torch import Tensor

from geartrain.ams.values.optimizers.registry import RowOptimizerSpec
from geartrain.bridge.placements.device_rows import DeviceRows
from geartrain.bridge.rows.pending import CollectedGradient, PendingUpdate
from geartrain.bridge.rows.transfers import Readback


class DeviceGradient(CollectedGradient, Protocol):
    """Row gradients that are applied on this rank's device."""

    def apply(self, optimizer: RowOptimizerSpec, scale: Tensor) -> None:
        """Update the rows and slots by ``optimizer`` with ``scale`` (0-dim) times the gradient; that ends the step."""
        ...

    def squares_on_device(self) -> Tensor:
        """Σ g² over all rows (0-dim, float64), the same on every rank; collective."""
        ...


D = TypeVar("D", bound=DeviceGradient)


class DeviceUpdate(PendingUpdate[D]):
    """The update of one or several tables on this rank's device, which one optimizer trains.

    On a CPU a gradient that is not finite is an error of the step, on every rank alike. A device is not looked at: such
    a step changes no row, and a later call of the module, most often the next, raises NonFinite on every rank. Where
    untouched rows move, all do as in a step without a gradient.
    """

    table: DeviceRows

    def __init__(self, *tables: DeviceRows) -> None:
        super().__init__()
        self.tables = tables
        self.table = tables[0]
        self.takes_any_step = False
        """Whether the rows were restored and not changed since, so that a state_dict may say which step they are of."""
        self._refused: list[Readback | None] = [None for _ in tables]
        self._asks_again = [False for _ in tables]
        """Whether there were steps since the numbers that are under way were asked for."""

    def rows_are_of(self, step: int) -> None:
        """The rows were read from elsewhere, and are those of ``step``."""
        self.go_on_at(step)
        self.takes_any_step = True
        for table in self.tables:
            table.is_written = False
            if table.clock is not None:  # so that rounding draws what it would have drawn
                table.clock.fill_(step)

    def check_finite(self) -> None:
        """Raise NonFinite if the pending gradients are not finite; on a CPU only."""
        if self.table.device.type == "cpu":
            super().check_finite()

    def squares_on_device(self) -> Tensor | None:
        if self.table.device.type == "cpu":
            return None
        if self._pending is None or self.carrier.grad is None:
            return torch.zeros((), dtype=torch.float64, device=self.table.device)
        with torch.no_grad():
            return self._pending.squares_on_device() * self._factor()[0].double().square()

    def apply(self, optimizer: RowOptimizerSpec) -> None:
        """Update the rows with what is pending by ``optimizer``, then forget it."""
        if self._pending is None or self.carrier.grad is None:
            return
        with torch.inference_mode(False), torch.no_grad():
            self._pending.apply(optimizer, self._factor()[0])
        for number, table in enumerate(self.tables):
            table.is_written = True
            if self._refused[number] is None:
                self._refused[number] = Readback(table.refused)
            else:  # that is asked first; the device goes on counting
                self._asks_again[number] = True
        self.step += 1
        self.takes_any_step = False
        self.discard()

    def count_refused(self) -> int:
        """How many rows :meth:`take_refused` has yet to tell of; waits for the device."""
        return sum(int(table.refused) for table in self.tables)

    def take_refused(self) -> int:
        """How many rows the updates that are known of since the last look left as they were. Waits for nothing: what a
        device has not told yet a later look tells.
        """
        total = 0
        for number, (table, refused) in enumerate(zip(self.tables, self._refused, strict=True)):
            if refused is None or not refused.is_here:
                continue
            self._refused[number] = None
            if count := int(refused.values()):
                table.refused.sub_(count)
            total += count
            if self._asks_again[number]:  # maybe there is no further step that would
                self._refused[number], self._asks_again[number] = Readback(table.refused), False
        return total
