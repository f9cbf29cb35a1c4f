"""The row update that a head collects between two steps; the optimizer applies it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Generic, TypeVar

import numpy.typing as npt
import torch
from torch import Tensor

from geartrain.ams.errors import NonFinite
from geartrain.ams.messages import Done, SyncGroup
from geartrain.ams.specs import Ids
from geartrain.bridge.heads.gradients import CollectedGradient, RowGradient
from geartrain.bridge.heads.ranks import Ranks
from geartrain.bridge.heads.tables import HeadTable, HeadWrite, ReadableTable

G = TypeVar("G", bound=CollectedGradient)


class PendingUpdate(ABC, Generic[G]):
    """Pending row gradients of one table, and the carrier through which PyTorch sees them.

    ``carrier`` is a tensor of one element that stands for the rows in ``param_groups``. Its gradient is 1 after a
    backward pass and NaN if the row gradients are not finite; whatever multiplies it (GradScaler's unscaling, clipping)
    multiplies the rows' gradients at the step.
    """

    table: ReadableTable
    ranks: Ranks | None = None

    def __init__(self) -> None:
        self.carrier = torch.zeros(1, requires_grad=True)
        self.step = 0
        """Updates applied; with the seed it decides which classes are sampled next."""
        self.generation = 0
        """Raised when the classes change: a backward pass must be of this one."""
        self._pending: G | None = None
        self._samples = 0

    @property
    def is_pending(self) -> bool:
        """Whether row gradients wait for the step."""
        return self._pending is not None and self.carrier.grad is not None

    def carrier_on(self, device: torch.device) -> Tensor:
        """The carrier, moved to the device of the features."""
        if self.carrier.device != device:
            self.carrier.data = self.carrier.data.to(device)
            if self.carrier.grad is not None:
                self.carrier.grad = self.carrier.grad.to(device)
        return self.carrier

    def add(self, gradient: G, checksum: Tensor, samples: int) -> None:
        """Queue the gradient of one micro-batch over ``samples`` samples; ``checksum`` is finite if the gradient is."""
        if self.ranks is not None:
            checksum = self.ranks.sum(checksum)
        mark = torch.ones_like(self.carrier) + 0.0 * checksum.to(self.carrier.dtype)
        if self._pending is None or self.carrier.grad is None:
            self.discard()
            self._pending = gradient
            self.carrier.grad = mark
        else:
            self._pending.merge(gradient)
            self.carrier.grad.mul_(mark)
        self._samples += samples

    def check_finite(self) -> None:
        """Raise NonFinite if the pending gradients, or what they are multiplied by, are not finite."""
        grad = self.carrier.grad
        if grad is not None and not bool(torch.isfinite(grad).all()):
            raise NonFinite(
                f"the row gradients of table {self.table.spec.name!r} hold NaN or infinity; nothing was pushed. "
                "Call zero_grad() to skip this step, lower the learning rate, or use torch.amp.GradScaler with float16"
            )

    @abstractmethod
    def apply(self, lr: float) -> None:
        """Apply what is pending with this learning rate, then forget it."""

    def squared_norm(self) -> float:
        """Σ g² of the pending gradients as they would be applied; 0 if there are none."""
        if self._pending is None or self.carrier.grad is None:
            return 0.0
        return self._pending.squared_norm() * float(self.carrier.grad) ** 2

    def discard(self) -> None:
        """Forget what is pending."""
        if self._pending is not None:
            self._pending.discard()
        self._pending = None
        self._samples = 0


class RowUpdate(PendingUpdate[RowGradient]):
    """The update of rows in the AMS: pushed to its shards."""

    table: HeadTable

    def __init__(self, table: HeadTable, ranks: Ranks | None) -> None:
        super().__init__()
        self.table = table
        self.ranks = ranks
        self._writer: _PushWriter | None = None

    def apply(self, lr: float) -> None:
        """Push what is pending with this learning rate, then forget it.

        After an error a second call goes on where the first stopped, with its learning rate; no shard applies twice.
        """
        if self._pending is None or self.carrier.grad is None:
            return
        if self._writer is None:
            self._writer = _PushWriter(self.table, self.ranks, lr, float(self.carrier.grad), self._samples)
        try:
            self._writer.settle()
            self._pending.push(self._writer)
        except BaseException:
            if (
                not self._writer.begun
            ):  # nothing was numbered yet: the next step may bring another lr, scale and samples
                self._writer = None
            raise
        self.step += 1
        self.discard()

    def discard(self) -> None:
        """Forget what is pending."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.abandon()
        super().discard()


class _PushWriter:
    """The pushes of one step; see ``gradients.Writer``."""

    def __init__(self, table: HeadTable, ranks: Ranks | None, lr: float, scale: float, samples: int) -> None:
        self._table = table
        self._ranks = ranks
        self._lr = lr
        self._scale = scale
        self._samples = samples
        self._write: HeadWrite | None = None
        self._sending: Future[Done] | None = None
        self.begun = False
        """Whether a push was prepared: from then on its settings hold for the whole step."""
        self._background = ThreadPoolExecutor(1, thread_name_prefix="geartrain-push")

    def prepare(
        self, ids: Ids, gradients: npt.NDArray[Any], *, goes_on: bool = False, known_finite: bool = False
    ) -> None:
        self.prepare_write(
            lambda lr, scale, group: self._table.prepare_push(
                ids, gradients, lr=lr, scale=scale, group=group, step_goes_on=goes_on, known_finite=known_finite
            )
        )

    def prepare_write(self, make: Callable[[float, float, SyncGroup | None], HeadWrite]) -> None:
        self.settle()
        group = None if self._ranks is None else self._ranks.sync_group(self._samples)
        self._write = make(self._lr, self._scale, group)
        self.begun = True

    def send_behind(self) -> None:
        if self._write is not None:
            self._sending = self._background.submit(self._write.send)

    def settle(self) -> None:
        if self._write is None:
            return
        sending, self._sending = self._sending, None
        if sending is None:
            self._write.send()
        else:
            sending.result()
        self._write = None
        if self._ranks is not None:
            self._ranks.sequence += 1

    def abandon(self) -> None:
        if self._sending is not None:
            wait([self._sending])
        if self._write is not None:
            self._write.abandon()
