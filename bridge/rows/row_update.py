"""The update of rows that lie in the shards of a cluster: pushed at the step, each shard's part exactly once."""

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
    """What all pushes of a step have in common, by the names that tables and hosted calls take."""

    lr: float
    optimizer_scalars: Mapping[str, float]
    scale: float
    group: SyncGroup | None


class RowGradient(CollectedGradient, Protocol):
    """Those of rows in a cluster."""

    @property
    def is_one_push(self) -> bool:
        """Whether it is one push of rows, which can be sent together with those of other tables."""

    prepared: int
    """So much of it was prepared, as the last :meth:`RowUpdate.prepare_push` said; 0 at first."""

    def push(self, update: RowUpdate) -> None:
        """Prepare each push of it by ``update``, which sends the last; a second call after an error goes on behind what
        was prepared."""

    def joint_squared_norm(self, ranks: SyncRanks, weight: float) -> float:
        """Σ g² over all rows of the sum over the ranks of ``weight`` · gradient, the same on each. Collective."""


class RowUpdate(PendingUpdate[RowGradient]):
    """See the module. ``ranks`` train the rows together; None: this process alone.

    A step is one push or several, one after the other. Its settings hold from its first prepared push to its end.
    """

    table: Table

    def __init__(self, table: Table, ranks: SyncRanks | None) -> None:
        super().__init__()
        self.table = table
        self.ranks = ranks
        self._optimizer: RowOptimizerSpec = table.spec.optimizer
        """That of a step which is yet to begin."""
        self._settings: dict[str, Any] | None = None
        """Those of the step that has begun, but the group: a push of it is prepared."""
        self._write: Write | None = None
        """The push that is prepared and not known to be applied."""
        self._sending: Future[Done] | None = None
        self._sender: ThreadPoolExecutor | None = None
        """Of this step alone: a forked child would have none of its threads."""

    def prepare(self, optimizer: RowOptimizerSpec) -> Sequence[RowWrite]:
        pending = self._pending
        if pending is None or self.carrier.grad is None or not pending.is_one_push:
            return ()
        self._optimizer = optimizer
        pending.push(self)
        return () if self._write is None else (cast("RowWrite", self._write),)

    def apply(self, optimizer: RowOptimizerSpec) -> None:
        """Push what is pending to be applied by ``optimizer``, then forget it.

        After an error a second call goes on where the first stopped, with its optimizer; no shard applies twice.
        """
        if self._pending is None or self.carrier.grad is None:
            return
        self._optimizer = optimizer
        self._pending.push(self)
        self.settle()
        pending, self._pending = self._pending, None  # before it is counted, so that it is counted once
        self.step += 1
        pending.discard()
        self.discard()

    def prepare_push(self, make: Callable[..., Write], prepared: int = 1) -> None:
        """Settle the last push, then have ``make``, given :class:`PushSettings` by name, check and number the next.

        Behind it so much of the gradient is ``prepared``; if it was already, nothing is made."""
        pending = self._pending
        assert pending is not None
        if pending.prepared >= prepared:
            return
        self.settle()
        settings = self._settings or {
            "lr": self._optimizer.lr,
            "optimizer_scalars": self.table.spec.optimizer.scalars_of_push(self._optimizer),
            "scale": self.factor(),
        }
        write = make(**settings, group=None if self.ranks is None else self.ranks.sync_group(self._samples))
        # In one assignment, as Ctrl-C comes between two calls: a push that is not marked would be made again.
        self._write, self._settings, pending.prepared = write, settings, prepared

    def send_behind(self) -> None:
        """Begin to send the prepared push in the background."""
        if self._write is not None:
            if self._sender is None:
                self._sender = ThreadPoolExecutor(1, thread_name_prefix="geartrain-push")
            self._sending = self._sender.submit(self._write.send)

    def settle(self) -> None:
        """Return once the prepared push is applied; after an error it is still prepared, to be sent again."""
        if self._write is None:
            return
        if (sending := self._sending) is not None:
            try:
                sending.result()
            finally:
                if sending.done():  # else it is under way yet, and is waited for again
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
        total = float(self.ranks.sum(torch.tensor(float(self._samples))))
        weight = factor * self._samples / total if total else 0.0  # as the shards weigh them
        return pending.joint_squared_norm(self.ranks, weight)

    def discard(self) -> None:
        """Forget what is pending, and give up what was not sent of it."""
        write, self._write, self._settings = self._write, None, None
        sending, self._sending, self._sender = self._sending, None, None
        if sending is not None:
            wait([sending])
        if write is not None:
            write.abandon()
        super().discard()
