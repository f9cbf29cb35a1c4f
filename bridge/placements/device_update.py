"""Update of rows on the ranks' devices: applied where the rows are, without traffic."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from geartrain.ams.values.errors import InvalidArgument, SpecMismatch
from geartrain.ams.values.optimizers.registry import RowOptimizerSpec
from geartrain.bridge.kernels.launch import is_capturing
from geartrain.bridge.kernels.optimizers import step_numbers
from geartrain.bridge.placements.device_rows import DeviceRows
from geartrain.bridge.rows.pending import CollectedGradient, PendingUpdate, PulledVersion, Replayed
from geartrain.bridge.rows.transfers import Readback


class DeviceGradient(CollectedGradient, Protocol):
    """Row gradients that are applied on this rank's device."""

    def apply(self, optimizer: RowOptimizerSpec, scale: Tensor) -> None:
        """Update the rows and slots by ``optimizer`` with ``scale`` (0-dim) times the gradient; that ends the step."""
        ...

    def squares_on_device(self) -> Tensor:
        """Σ g² over all rows (0-dim, float64), the same on every rank; collective."""
        ...


class LateErrors(Protocol):
    """Errors that a module finds on its device and the host learns only after the step."""

    def raise_late(self) -> None:
        """Raise the errors known by now, on every rank; collective between the hosts."""

    def pop_captured(self) -> Callable[[int], None]:
        """Return a function that reads errors back after each replay of the captured step, called with its number."""


class CapturedStep(NamedTuple):
    """Update in a CUDA graph."""

    optimizer: RowOptimizerSpec
    """The optimizer; all its numbers but the learning rate are fixed in the graph."""
    rows_version: PulledVersion
    ask: Callable[[int], None]


D = TypeVar("D", bound=DeviceGradient)


class DeviceUpdate(PendingUpdate[D]):
    """Update of one or several tables on this rank's device by one optimizer.

    On a CPU a gradient that is not finite is an error of its step, on every rank alike. On a device the host does not
    look: such a step changes no row, and a later call of the module, most often the next, raises NonFinite on every
    rank. Where untouched rows move, they move as in a step without a gradient.
    """

    table: DeviceRows

    def __init__(self, *tables: DeviceRows) -> None:
        super().__init__()
        self.tables = tables
        self.table = tables[0]
        self.takes_any_step = False
        """Whether rows are restored and unchanged since, so that a state_dict may set their step."""
        self._refused: list[Readback | None] = [None for _ in tables]
        self._asks_again = [False for _ in tables]
        """Whether steps were made since the counts under way were read."""
        self.late: LateErrors | None = None
        """The module whose steps may be captured; else None."""
        self._captured: list[CapturedStep] = []
        """Updates of graphs that were not replayed yet."""
        self._graphs: WeakKeyDictionary[Replayed, CapturedStep] = WeakKeyDictionary()

    def rows_are_of(self, step: int) -> None:
        """Set the step of rows that were read from elsewhere."""
        self.resume_at(step)
        self.takes_any_step = True
        for table in self.tables:
            table.is_written = False
            if table.clock is not None:  # so that rounding draws the same bits as without the restore
                table.clock.fill_(step)

    def require_step(self, step: int) -> None:
        """Raise SpecMismatch unless the rows are of ``step``, that of a state to load, or were just restored."""
        if not self.takes_any_step and step != self.step:
            raise SpecMismatch(
                f"the state is of step {step}, and the rows of {self.name!r} are of step {self.step}: no state_dict "
                "contains them. Save a model with geartrain.save(model, path), and go back with "
                "geartrain.load(model, path, replace=True); for a head, restore() the snapshot() of that step"
            )

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
        """Update the rows by ``optimizer`` with the pending gradient, and drop that."""
        if self._pending is None or self.carrier.grad is None:
            return
        captures = is_capturing(self.table.device)
        if captures and (self.late is None or step_numbers(optimizer) is None):
            raise InvalidArgument(
                f"the step of table {self.name!r} by {optimizer} cannot be captured in a CUDA graph; those of class "
                "heads by SGD, momentum, Adagrad and Adam can"
            )
        with torch.inference_mode(False), torch.no_grad():
            self._pending.apply(optimizer, self._factor()[0])
        if captures and self.late is not None:
            self._captured.append(CapturedStep(optimizer, self.rows_version, self.late.pop_captured()))
        else:
            self._count_step()
        self.discard()

    def before_replay(self, graph: Replayed, optimizer: RowOptimizerSpec) -> None:
        """Raise errors of earlier steps, then write the numbers of the next step to the device."""
        captured = self._graphs.get(graph)
        if captured is None:
            found, self._captured = self._captured, []
            if len(found) != 1:
                raise InvalidArgument(
                    f"{len(found)} steps of table {self.name!r} were captured since the last graph was replayed for "
                    "the first time; capture one step in each graph, and replay that before you capture another"
                )
            captured = self._graphs[graph] = found[0]
        if captured.rows_version != self.rows_version:
            raise InvalidArgument(
                f"classes of table {self.name!r} were added or retired, or its rows restored or moved, since the step "
                "was captured; capture it anew"
            )
        others = [made.settings() | {"lr": 0.0} for made in (captured.optimizer, optimizer)]
        if others[0] != others[1]:
            raise InvalidArgument(
                f"table {self.name!r} is to be trained by {optimizer}, and the step was captured with "
                f"{captured.optimizer}; only lr may change between replays: capture it anew"
            )
        assert self.late is not None
        self.late.raise_late()
        for table in self.tables:
            table.lr.write(optimizer.lr)
            table.step.write(self.step)

    def after_replay(self, graph: Replayed) -> None:
        """Count the step."""
        self._graphs[graph].ask(self.step)
        self._count_step()

    def _count_step(self) -> None:
        for number, table in enumerate(self.tables):
            table.is_written = True
            if self._refused[number] is None:
                self._refused[number] = Readback(table.refused)
            else:  # the read under way comes first; the device goes on counting
                self._asks_again[number] = True
        self.step += 1
        self.takes_any_step = False

    def count_refused(self) -> int:
        """Return the number of rows that :meth:`pop_refused` has yet to report; waits for the device."""
        return sum(int(table.refused) for table in self.tables)

    def pop_refused(self) -> int:
        """Return the number of refused row updates known since the last call, without waiting.

        A later call returns what a device has not reported yet.
        """
        total = 0
        for number, (table, refused) in enumerate(zip(self.tables, self._refused, strict=True)):
            if refused is None or not refused.is_here:
                continue
            self._refused[number] = None
            if count := int(refused.values()):
                table.refused.sub_(count)
            total += count
            if self._asks_again[number]:  # there may be no further step to read it
                self._refused[number], self._asks_again[number] = Readback(table.refused), False
        return total
