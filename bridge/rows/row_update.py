"""Update of rows in a cluster's shards: pushed at the step, each shard's part exactly once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Protocol, TypedDict, cast

import torch
from torch import Tensor

from geartrain.ams.client.table import Table
from geartrain.ams.client.writes import RowWrite, Write
from geartrain.ams.values.optimizers.registry import RowOptimizerSpec
from geartrain.ams.values.shard_messages import Done, SyncGroup
from geartrain.bridge.rows.pending import CollectedGradient, PendingUpdate
from geartrain.bridge.rows.ranks import SyncRanks


class PushSettings(TypedDict):
    """Settings of all pushes of a step, by the argument names of tables and hosted calls."""

    lr: float
    optimizer_scalars: Mapping[str, float]
    scale: float
    group: SyncGroup | None


class RowGradient(CollectedGradient, Protocol):
    """Gradient of rows in a cluster."""

    @property
    def is_one_push(self) -> bool:
        """Whether it is one push of rows, which can be sent together with those of other tables."""

    prepared: int
    """Prepared part of it, as set by the last :meth:`RowUpdate.prepare_push`; 0 at first."""

    def push(self, update: RowUpdate) -> None:
        """Prepare each push of it by ``update``, which sends the last; after an error a second call resumes."""

    def joint_squared_norm(self, ranks: SyncRanks, weight: float) -> float:
        """Return Σ g² of the sum over the ranks of ``weight`` · gradient, over all rows, on each rank. Collective."""


class RowUpdate(PendingUpdate[RowGradient]):
    """Pending update of rows in a cluster. ``ranks`` train the rows together; None: this process alone.

    A step is one push or several, one after the other. Its settings hold from its first prepared push to its end.
    """

    table: Table

    def __init__(self, table: Table, ranks: SyncRanks | None) -> None:
        super().__init__()
        self.table = table
        self.ranks = ranks
        self._optimizer: RowOptimizerSpec = table.spec.optimizer
        """Optimizer of the next step."""
        self._settings: dict[str, Any] | None = None
        """Settings, without the group, of the step under way, of which a push is prepared."""
        self._write: Write | None = None
        """Push that is prepared and not known to be applied."""
        self._sending: Future[Done] | None = None
        self._sender: ThreadPoolExecutor | None = None
        """Executor of this step alone: a forked child would have none of its threads."""

    def prepare(self, optimizer: RowOptimizerSpec) -> Sequence[RowWrite]:
        pending = self._pending
        if pending is None or self.carrier.grad is None or not pending.is_one_push:
            return ()
        self._optimizer = optimizer
        pending.push(self)
        return () if self._write is None else (cast("RowWrite", self._write),)

    def apply(self, optimizer: RowOptimizerSpec) -> None:
        """Push the pending gradient, to be applied by ``optimizer``, then drop it.

        After an error a second call continues where the first stopped, with its optimizer; no shard applies twice.
        """
        if self._pending is None or self.carrier.grad is None:
            return
        self._optimizer = optimizer
        self._pending.push(self)
        self.finish_push()
        pending, self._pending = self._pending, None  # before the step is counted, so that it counts once
        self.step += 1
        pending.discard()
        self.discard()

    def prepare_push(self, make: Callable[..., Write], prepared: int = 1) -> None:
        """Settle the last push, then make, check and number the next by ``make``, given :class:`PushSettings` by name.

        ``prepared`` is the part of the gradient after it; if that is prepared already, nothing is made."""
        pending = self._pending
        assert pending is not None
        if pending.prepared >= prepared:
            return
        self.finish_push()
        settings = self._settings or {
            "lr": self._optimizer.lr,
            "optimizer_scalars": self.table.spec.optimizer.scalars_of_push(self._optimizer),
            "scale": self.factor(),
        }
        write = make(**settings, group=None if self.ranks is None else self.ranks.sync_group(self._samples))
        # In one assignment, since Ctrl-C comes between two calls: an unmarked push would be made again.
        self._write, self._settings, pending.prepared = write, settings, prepared

    def send_in_background(self) -> None:
        """Start to send the prepared push in the background."""
        if self._write is not None:
            if self._sender is None:
                self._sender = ThreadPoolExecutor(1, thread_name_prefix="geartrain-push")
            self._sending = self._sender.submit(self._write.send)

    def finish_push(self) -> None:
        """Return once the prepared push is applied; after an error it stays prepared, for a retry."""
        if self._write is None:
            return
        if (sending := self._sending) is not None:
            try:
                sending.result()
            finally:
                if sending.done():  # else it is still under way, and is waited for again
                    self._sending = None
        elif not self._write.is_sent:
            self._write.send()
        self._write = None
        if self.ranks is not None:
            self.ranks.sequence += 1

    def squares_on_device(self) -> Tensor | None:
        squares = None if self._pending is None or self.ranks is not None else self._pending.squares
        if squares is None or squares.device.type == "cpu" or self.carrier.grad is None:
            return None
        return squares * self._factor()[0].double().square()

    def _squared_norm(self, pending: RowGradient, factor: float) -> float:
        if self.ranks is None:
            return super()._squared_norm(pending, factor)
        total = float(self.ranks.sum(torch.tensor(self._samples, dtype=torch.float64, device="cpu")))
        weight = factor * self._samples / total if total else 0.0  # as the shards weigh them
        return pending.joint_squared_norm(self.ranks, weight)

    def discard(self) -> None:
        """Drop the pending gradient, and abandon its unsent pushes."""
        write, self._write, self._settings = self._write, None, None
        sending, self._sending, self._sender = self._sending, None, None
        if sending is not None:
            wait([sending])
        if write is not None:
            write.abandon()
        super().discard()
