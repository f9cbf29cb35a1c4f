"""The update of rows that lie in the shards of a cluster: pushed at the step, each shard's part exactly once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, Protocol, TypedDict, runtime_checkable

import numpy.typing as npt
import torch
from torch import Tensor

from geartrain.ams.client.table import Table
from geartrain.ams.client.writes import RowWrite, Write
from geartrain.ams.values.optimizers.registry import RowOptimizerSpec
from geartrain.ams.values.shard_messages import Done, SyncGroup
from geartrain.ams.values.specs import Ids
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

    def push(self, writer: PushWriter) -> None:
        """Send all of it; a second call after an error goes on behind what was prepared."""

    def joint_squared_norm(self, ranks: SyncRanks, weight: float) -> float:
        """Σ g² over all rows of the sum over the ranks of ``weight`` · gradient, the same on each. Collective."""


@runtime_checkable
class SinglePush(Protocol):
    """A row gradient that is one push of rows, which can be sent together with those of other tables."""

    def prepare(self, writer: PushWriter) -> None:
        """Prepare the push, once."""


class RowUpdate(PendingUpdate[RowGradient]):
    """See the module. ``ranks`` train the rows together; None: this process alone."""

    table: Table

    def __init__(self, table: Table, ranks: SyncRanks | None) -> None:
        super().__init__()
        self.table = table
        self.ranks = ranks
        self._writer: PushWriter | None = None

    def apply(self, optimizer: RowOptimizerSpec) -> None:
        """Push what is pending to be applied by ``optimizer``, then forget it.

        After an error a second call goes on where the first stopped, with its optimizer; no shard applies twice.
        """
        if self._pending is None or self.carrier.grad is None:
            return
        with self._writing(optimizer) as writer:
            writer.settle()
            self._pending.push(writer)
        self.step += 1
        self.discard()

    def prepare(self, optimizer: RowOptimizerSpec) -> Sequence[RowWrite]:
        if self.carrier.grad is None or not isinstance(self._pending, SinglePush):
            return ()
        with self._writing(optimizer) as writer:
            self._pending.prepare(writer)
            return () if writer.table_write is None else (writer.table_write,)

    @contextmanager
    def _writing(self, optimizer: RowOptimizerSpec) -> Iterator[PushWriter]:
        """What makes the pushes of this step."""
        if self._writer is None:
            self._writer = PushWriter(self.table, self.ranks, optimizer, self.factor(), self._samples)
        try:
            yield self._writer
        except BaseException:
            if not self._writer.begun:  # nothing is numbered: the next step may bring another optimizer and samples
                self._writer = None
            raise

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
        """Forget what is pending."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.abandon()
        super().discard()


class PushWriter:
    """The pushes of one step, one after the other, each applied once."""

    def __init__(
        self, table: Table, ranks: SyncRanks | None, optimizer: RowOptimizerSpec, scale: float, samples: int
    ) -> None:
        self._table = table
        self._ranks = ranks
        self._optimizer = optimizer
        self._scale = scale
        self._samples = samples
        self._write: Write | None = None
        self.table_write: RowWrite | None = None
        """The prepared push, if it is one of rows."""
        self._sending: Future[Done] | None = None
        self.begun = False
        """Whether a push was prepared: from then on its settings hold for the whole step."""
        self._background = ThreadPoolExecutor(1, thread_name_prefix="geartrain-push")

    def prepare(
        self, ids: Ids, gradients: npt.NDArray[Any], *, goes_on: bool = False, known_finite: bool = False
    ) -> None:
        """Settle the last push, then check and number that of the gradients [N, D] of distinct ids [N].

        ``goes_on``: more pushes of the same step follow. ``known_finite``: none of them need be looked for.
        """

        def make(settings: PushSettings) -> Write:
            self.table_write = self._table.prepare_push(
                ids, gradients, **settings, step_goes_on=goes_on, known_finite=known_finite
            )
            return self.table_write

        self.prepare_write(make)

    def prepare_write(self, make: Callable[[PushSettings], Write]) -> None:
        self.settle()
        own = self._table.spec.optimizer
        self._write = make(
            {
                "lr": self._optimizer.lr,
                "optimizer_scalars": own.scalars_of_push(self._optimizer),
                "scale": self._scale,
                "group": None if self._ranks is None else self._ranks.sync_group(self._samples),
            }
        )
        self.begun = True

    def send_behind(self) -> None:
        """Begin to send the prepared push in the background."""
        if self._write is not None:
            self._sending = self._background.submit(self._write.send)

    def settle(self) -> None:
        """Return once the prepared push is applied; after an error it is still prepared, to be sent again."""
        if self._write is None:
            return
        sending, self._sending = self._sending, None
        if sending is not None:
            sending.result()
        elif self.table_write is None or not self.table_write.is_sent:
            self._write.send()
        self._write = self.table_write = None
        if self._ranks is not None:
            self._ranks.sequence += 1

    def abandon(self) -> None:
        """Give up what was not sent."""
        if self._sending is not None:
            wait([self._sending])
        if self._write is not None:
            self._write.abandon()
