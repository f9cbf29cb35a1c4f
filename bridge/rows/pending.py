"""Pending row gradients of a module between two steps, applied by RowOptimizer.

A :class:`RowModule` has one :class:`PendingUpdate`: its backward passes :meth:`~PendingUpdate.add` row gradients to it.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from geartrain.ams.client.writes import RowWrite
from geartrain.ams.values.errors import InvalidArgument, NonFinite, TableNotFound
from geartrain.ams.values.optimizers.registry import RowOptimizerSpec, optimizer_with
from geartrain.ams.values.text import quoted
from geartrain.bridge.rows.gradient_carrier import StandInGradient, not_for_clippers
from geartrain.bridge.rows.ranks import SyncRanks
from geartrain.bridge.rows.stand_in import StandIn
from geartrain.bridge.rows.tables import ReadableTable
from geartrain.bridge.rows.transfers import read


class CollectedGradient(Protocol):
    """Row gradients of one or several micro-batches."""

    def merge(self, other: Any) -> None:
        """Add the gradient of another micro-batch, of the same kind, which must not be used after."""

    @property
    def squares(self) -> Tensor | None:
        """Σ g² over all rows (0-dim, float64) if they lie in this process's memory, else None."""

    def squared_norm(self) -> float:
        """Return Σ g² over all rows, in float64."""

    def discard(self) -> None:
        """Release the memory."""


class Replayed(Protocol):
    """Interface of a ``torch.cuda.CUDAGraph``."""

    def replay(self) -> None:
        """Replay the graph on the device."""


G = TypeVar("G", bound=CollectedGradient)

PulledVersion = tuple[int, object]
"""Generation of classes, and incarnation of the table (or of several tables)."""
_MAX_LR = float(np.finfo(np.float32).max)
_FORGOTTEN_AFTER = 3
"""Backward passes without a RowOptimizer that trigger a warning: more than an experiment by hand."""


class PendingUpdate(ABC, Generic[G]):
    """Pending row gradients of one table, and the tensors that represent them in PyTorch.

    ``stand_in`` is what autograd reaches, and a parameter of the module. ``carrier``, a tensor of one element, stands
    for the rows in the ``param_groups`` of RowOptimizer. After a backward pass the gradient of both is the 2-norm of
    the row gradients if they lie in this process's memory, else 1; NaN if they are not finite
    (:class:`StandInGradient`). Every factor on it (GradScaler's unscaling, clipping) multiplies the rows' gradients at
    the step.
    """

    table: ReadableTable
    ranks: SyncRanks | None = None
    pace: Pace | None = None
    """Notified of every step, once for all updates that share it; None: no worker waits."""
    background: Background | None = None
    """Sender of a step's pushes while the next one is computed; None: the step sends them."""

    def __init__(self) -> None:
        self.carrier = torch.zeros(1, dtype=torch.float32, requires_grad=True)
        self.stand_in = StandIn(self)
        self._passes: list[tuple[int, ref[BackwardCall], Any]] = []
        """Backward passes that autograd may still accumulate: graph task, call to queue, and upstream of each."""
        self.step = 0
        """Number of updates applied."""
        self.frozen_steps = 0
        """Number of steps of RowOptimizer while the rows were frozen."""
        self.generation = 0
        """Counter of changes of the classes: a backward pass must be of the present one."""
        self._pending: G | None = None
        self._samples = 0
        self._unchanged = torch.ones(1, dtype=torch.float32)
        """Gradient of the carrier before any factor."""
        self._known_factor: float | None = None
        """Last value read by :meth:`check_finite`; None if it may have changed since."""
        self._is_norm = False
        """Whether the carrier's gradient is the norm of the pending gradient."""
        self._rows_version: PulledVersion = (0, 0)
        """Value of :attr:`rows_version` for the pending gradient."""
        self.is_optimized = False
        """Whether a RowOptimizer applies the pending gradient."""
        self._version = 0
        """Version of the carrier's gradient before any change."""
        self.num_passes = 0
        """Number of backward passes since the last step or drop."""
        self.applied_lr: float | None = None
        """Learning rate of the last requested step; None before the first."""

    @property
    def first_optimizer(self) -> RowOptimizerSpec:
        """Optimizer that the table was opened with, even if it was altered since; rows on ranks have only one."""
        optimizer: RowOptimizerSpec = getattr(self.table, "optimizer", self.table.spec.optimizer)
        return optimizer

    def param_group(self) -> dict[str, Any]:
        """Return the rows' group in a torch.optim.Optimizer: carrier, numbers of their optimizer, name of the table."""
        return {"params": [self.carrier], **self.first_optimizer.settings(), "table": self.name}

    def optimizer_of(self, group: Mapping[str, Any]) -> RowOptimizerSpec:
        """Return the table's optimizer with the numbers of such a group. Raises InvalidArgument for an invalid one."""
        try:
            made = optimizer_with(self.table.spec.optimizer, group)
            if not made.lr <= _MAX_LR:
                raise InvalidArgument(f"lr is {made.lr!r}; it must be finite as float32")
        except InvalidArgument as exc:
            raise InvalidArgument(f"param_group of table {self.name!r}: {exc}") from exc
        self.applied_lr = made.lr
        return made

    @property
    def name(self) -> str:
        """Name of the rows in a param_group and in errors: that of their table."""
        return self.table.spec.name

    @property
    def rows_version(self) -> PulledVersion:
        """Classes and table of a forward pass: its gradients are applied to no others."""
        return self.generation, self.table.incarnation

    @property
    def pending(self) -> G | None:
        """Row gradients that wait for the step; None: there are none."""
        return None if self.carrier.grad is None else self._pending

    @property
    def is_pending(self) -> bool:
        """Whether row gradients wait for the step."""
        return self.pending is not None

    @property
    def is_trained(self) -> bool:
        """Whether backward passes collect row gradients: ``module.requires_grad_(False)`` freezes the rows."""
        return self.stand_in.requires_grad and self.carrier.requires_grad

    @property
    def draw(self) -> int:
        """Number that, with the seed, decides which classes are sampled; rises at every step, also of frozen rows."""
        return self.step + self.frozen_steps

    def on(self, device: torch.device) -> StandIn:
        """Return the stand-in for a graph, moved with the carrier to the device of the features."""
        if self.carrier.device != device:
            grad = self._shown()
            self.carrier.data = self.carrier.data.to(device)
            self._unchanged = self._unchanged.to(device)
            self._set_gradient(None if grad is None else grad.to(device))
        return self.stand_in_on(device)

    def stand_in_on(self, device: torch.device) -> StandIn:
        """Return the stand-in alone on ``device``, if the row gradients stay on the host."""
        if self.stand_in.device != device:
            self.stand_in.data = self.stand_in.data.to(device)
        return self.stand_in

    def defer(self, call: BackwardCall, upstream: Any) -> Tensor:
        """Register ``call`` to queue its row gradients once autograd reaches the stand-in; return its gradient [0].

        An earlier registration of the call was from ``torch.autograd.grad``, which accumulates nothing, and is dropped.
        """
        if self._passes:
            self._passes = [item for item in self._passes if item[1]() not in (None, call)]
        self._passes.append((torch._C._current_graph_task_id(), ref(call), upstream))
        return torch.empty(0, device=self.stand_in.device)

    def collect(self) -> None:
        """Queue the row gradients of the backward pass under way: autograd has reached the stand-in."""
        task = torch._C._current_graph_task_id()
        passes, self._passes = self._passes, []
        is_trained = self.is_trained
        for item in passes:
            if item[0] != task:
                self._passes.append(item)
            elif is_trained:
                call = item[1]()
                assert call is not None, "its graph is being walked"
                call.queue_row_gradients(item[2], self)

    def add(self, gradient: G, checksum: Tensor, samples: int) -> None:
        """Queue the gradient of one micro-batch over ``samples`` samples; ``checksum`` is finite if the gradient is."""
        if self.ranks is not None:
            checksum = self.ranks.sum(checksum)
        mark = (checksum.to(self.carrier) * 0.0 + 1.0).reshape(1)
        if self._pending is None or self.carrier.grad is None:
            if self._pending is not None:
                self.discard()
            self._pending = gradient
            self._rows_version = self.rows_version
        else:
            self._require_unscaled()
            mark = mark * (self._unchanged * 0 + 1)  # NaN stays
            self._pending.merge(gradient)
        self._samples += samples
        self._set_norm(mark)
        self.num_passes += 1
        if self.num_passes == _FORGOTTEN_AFTER and not self.is_optimized:
            name = self.name
            warnings.warn(
                f"{_FORGOTTEN_AFTER} backward passes have gone through table {name!r} and nothing trains its rows: "
                "make the optimizer of both, optimizer = geartrain.joint(optimizer, module), or add "
                "rows = geartrain.RowOptimizer(module), and rows.step() and rows.zero_grad() beside the optimizer's",
                stacklevel=2,
            )

    def _require_unscaled(self) -> None:
        """Raise InvalidArgument if the pending gradient was multiplied: a step has one factor."""
        grad = self._shown()
        if grad is None:
            return
        is_changed = grad._version != self._version
        if grad.device.type == "cpu":  # also by way of .data, which counts no version
            is_changed |= not torch.allclose(grad, self._unchanged, rtol=0, atol=0, equal_nan=True)
        if is_changed:
            raise InvalidArgument(
                f"the row gradients of table {self.name!r} were clipped or scaled before the last backward() of their "
                "step; clip once, after it, or call zero_grad() to begin the step anew"
            )

    def _set_norm(self, mark: Tensor) -> None:
        """Set the carrier's gradient anew: the norm, or 1, times ``mark`` (1 or NaN)."""
        assert self._pending is not None
        squares = None if self.ranks is not None else self._pending.squares
        self._is_norm = squares is not None
        self._unchanged = (mark if squares is None else squares.sqrt().to(mark) * mark).detach()
        self._set_gradient(self._unchanged.clone())

    def _set_gradient(self, grad: Tensor | None) -> None:
        """Set ``grad`` [1] as the carrier's gradient."""
        self._known_factor = None
        if grad is None:
            self.carrier.grad = None
            return
        self._version = grad._version
        self.carrier.grad = StandInGradient.of(grad, self.name, self.stand_in.forget, is_norm=self._is_norm)

    def gradient_of_module(self) -> Tensor | None:
        """Return the gradient [1] of the module's parameter, in the memory of the carrier's; None without one."""
        grad = self.carrier.grad
        if self._pending is None or grad is None:
            return None
        own, forget = grad.as_subclass(Tensor), self.stand_in.forget
        return StandInGradient.of(own, self.name, forget, is_norm=self._is_norm, is_unscaled_elsewhere=True)

    def _shown(self) -> Tensor | None:
        """Return the carrier's gradient [1] as a plain tensor in its memory. Raises InvalidArgument for another one."""
        grad = self.carrier.grad
        if grad is None:
            return None
        if self._pending is not None and not isinstance(grad, StandInGradient):
            raise not_for_clippers(self.name, "Another gradient")
        return grad.as_subclass(Tensor)

    def _factor(self) -> Tensor:
        """Return the factor of the pending gradients, [1]."""
        grad = self._shown()
        assert grad is not None
        if not self._is_norm:
            return grad / self._unchanged
        are_zero = (self._unchanged == 0) & (grad == 0)  # the norm: then the factor does not matter
        return torch.where(are_zero, torch.ones_like(grad), grad / self._unchanged)

    def factor(self) -> float:
        """Return the factor of the pending gradients; :meth:`check_finite` has read it, or the host waits for it."""
        return float(self._factor()) if self._known_factor is None else self._known_factor

    def multiply(self, factor: float | Tensor) -> None:
        """Multiply the pending gradients."""
        if self._pending is not None and (grad := self._shown()) is not None:
            self._known_factor = None
            grad.mul_(factor)

    def require_present(self) -> None:
        """Raise TableNotFound if the table was restored since the forward pass of the pending gradients."""
        if self._pending is not None and self._rows_version[1] != self.rows_version[1]:
            raise TableNotFound(
                f"the pending gradients are of rows of table {self.name!r} from before it was restored; "
                "nothing was pushed. Call zero_grad(), and go on with a new forward pass"
            )

    def check_finite(self) -> None:
        """Raise NonFinite if the pending gradients, or their factor, are not finite."""
        if self.carrier.grad is None:
            return
        self._known_factor = float(self._factor())
        if not math.isfinite(self._known_factor):
            raise NonFinite(
                f"the row gradients of table {self.name!r} hold NaN or infinity, or their factor is not finite; "
                "nothing was pushed. Call zero_grad() to skip this step, lower the learning rate, or use "
                "torch.amp.GradScaler with float16"
            )

    def prepare(self, optimizer: RowOptimizerSpec) -> Sequence[RowWrite]:  # noqa: ARG002
        """Prepare the pushes of :meth:`apply`; return them if they can be sent together with others."""
        return ()

    def hand_over(self) -> None:
        """Drop the pending gradients after others have taken over the pushes of :meth:`prepare`."""
        self.step += 1
        self.discard()

    @abstractmethod
    def apply(self, optimizer: RowOptimizerSpec) -> None:
        """Apply the pending gradients by ``optimizer`` of :meth:`optimizer_of`; then drop them."""

    def before_replay(self, graph: Replayed, optimizer: RowOptimizerSpec) -> None:  # noqa: ARG002
        """Prepare for the next step, that of ``graph``, by ``optimizer``. Raises InvalidArgument if it has none."""
        raise InvalidArgument(
            f"the rows of table {self.name!r} are trained by no CUDA graph: they are in a cluster, or in a module of "
            "another kind; steps of ClassHead(rows='ranks') on a GPU can be captured"
        )

    def after_replay(self, graph: Replayed) -> None:
        """Count the step of a replayed ``graph``."""

    def squared_norm(self) -> float:
        """Return Σ g² of the pending gradients as they would be applied; 0 without any, NaN if one is not finite."""
        grad = self._shown()
        if self._pending is None or grad is None:
            return 0.0
        finite, factor = read(torch.isfinite(grad).all(), self._factor())
        return self._squared_norm(self._pending, factor) if finite else math.nan

    def squares_on_device(self) -> Tensor | None:
        """Return :meth:`squared_norm` (0-dim, float64) on the rows' device, without waiting; None: only a host can."""
        return None

    def _squared_norm(self, pending: G, factor: float) -> float:
        """Return Σ g² of ``factor`` · the pending gradient."""
        return pending.squared_norm() * factor**2

    def resume_at(self, step: int) -> None:
        """Reset to a step whose rows were loaded: drop the pending gradients."""
        self.discard()
        self.step = step
        self.generation += 1

    def flush(self) -> None:
        """Wait for pushes in the background. Raises an error of theirs that was not raised yet."""
        if self.background is not None:
            self.background.wait()

    def forget(self) -> None:
        """Drop the pending gradients, as when a parameter's ``grad`` is set to None."""
        self.carrier.grad = None
        self.discard()

    def discard(self) -> None:
        """Drop the pending gradients."""
        if torch._C._current_graph_task_id() < 0:  # else some may belong to the surrounding backward pass
            self._passes.clear()
        if self._pending is not None:
            self._pending.discard()
        self._pending = None
        self._known_factor = None
        self._samples = 0
        self.num_passes = 0


class BackwardCall(Protocol):
    """Forward pass, held by its graph."""

    def queue_row_gradients(self, upstream: Any, update: Any) -> None:
        """Compute the row gradients from the derivatives by the pass's outputs, and add those of ``update`` to it."""


class Pace(Protocol):
    """Barrier that keeps the workers of one job near one another."""

    def step_done(self) -> None:
        """Record that a step of this worker was applied, or skipped. May wait for others."""


class Background(Protocol):
    """Sender of pushes after their step."""

    is_closed: bool
    """Whether steps must send their own pushes."""

    @property
    def is_clean(self) -> bool:
        """Whether every push was applied, or given up."""

    def submit(self, writes: Sequence[RowWrite]) -> None:
        """Queue the pushes of one step."""

    def wait(self, most: int = 0) -> None:
        """Wait until the pushes of at most so many steps are under way. Raises an error that was not raised yet."""

    def raise_or_retry(self) -> None:
        """Raise an error that was not raised yet; after a raised one, retry the remaining pushes."""

    def drop(self) -> None:
        """Give up the pushes that remain after a raised error."""


@runtime_checkable
class RowModule(Protocol):
    """Module whose trained rows are in no parameter of it: a class head, a slow gear, or one of your own.

    Its forward passes join :meth:`PendingUpdate.on` to the graph while :attr:`PendingUpdate.is_trained`; their backward
    passes call :meth:`~PendingUpdate.defer`, and then :meth:`~PendingUpdate.add` the row gradients.
    :class:`~geartrain.bridge.rows.optimizer.RowOptimizer` does the rest. As a :class:`~.stand_in.ModuleWithRows` it has
    the stand-in among its parameters. A state_dict that continues the count of steps holds ``row_update.step``.
    """

    @property
    def row_update(self) -> PendingUpdate[Any]:
        """Pending update; the same object for the module's whole life."""


def require_row_module(module: object) -> PendingUpdate[Any]:
    """Return the module's pending update. Raises InvalidArgument with what a :class:`RowModule` has and it lacks."""
    update = getattr(module, "row_update", None)
    if isinstance(update, PendingUpdate):
        return update
    lacks = "no row_update" if update is None else f"a row_update that is no PendingUpdate but {quoted(update)}"
    raise InvalidArgument(
        f"RowOptimizer trains modules with rows (ClassHead, SlowGear, any RowModule); {quoted(module)} has {lacks}. "
        "Give parameters to an optimizer of their own"
    )
