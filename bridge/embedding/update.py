"""The row gradients of several embedding tables that one optimizer trains: pushed at the step, each exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from geartrain.ams.kernels import ops
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.optimizers.registry import RowOptimizerSpec
from geartrain.ams.values.specs import Ids
from geartrain.bridge.rows.pending import Moment, Pace, PendingUpdate
from geartrain.bridge.rows.ranks import Ranks
from geartrain.bridge.rows.same_rows import incarnation_of
from geartrain.bridge.rows.tables import TableWrite

if TYPE_CHECKING:
    from geartrain.ams.client.table import Table

_NAMED = 3


class TableGradient(NamedTuple):
    """The gradients of the rows of one table."""

    ids: Ids
    """[U], distinct."""
    rows: npt.NDArray[np.float32]
    """[U, D]."""
    occurrences: npt.NDArray[np.uint32] | None = None
    """[U]: how often each id was in the batch; None: the table does not ask."""
    pulled_at: tuple[int, ...] | None = None
    """The writes that the table had had on each shard when the rows were pulled; None: it is not known."""

    def joined(self, other: TableGradient) -> TableGradient:
        """The sum of both: of rows as old as the older ones."""
        both = np.concatenate([self.ids, other.ids])
        ids, places, rows = ops.merge_duplicates(both, np.concatenate([self.rows, other.rows]))
        occurrences = None
        if self.occurrences is not None and other.occurrences is not None:
            counts = np.bincount(places, np.concatenate([self.occurrences, other.occurrences]), len(ids))
            occurrences = np.minimum(counts, 2**32 - 1).astype(np.uint32)
        return TableGradient(ids, rows, occurrences, _older(self.pulled_at, other.pulled_at))


class EmbeddingGradient:
    """Those of one or several micro-batches, by the place of the table among those of the update."""

    def __init__(self, tables: dict[int, TableGradient], squares: float) -> None:
        """``squares`` is Σ g² over all of them, in float64."""
        self.tables = tables
        self._squares = squares

    def merge(self, other: EmbeddingGradient) -> None:
        """Add the gradient of another micro-batch, which is used up. Costs a pass over both."""
        for place, theirs in other.tables.items():
            mine = self.tables.get(place)
            if mine is None:
                self.tables[place] = theirs
                continue
            self.tables[place] = mine.joined(theirs)
        self._squares = sum(float(np.vdot(wide, wide)) for wide in map(_wide, self.tables.values()))

    @property
    def squares(self) -> Tensor:
        """Σ g² (0-dim, float64)."""
        return torch.tensor(self._squares, dtype=torch.float64)

    def squared_norm(self) -> float:
        """Σ g² in float64."""
        return self._squares

    def discard(self) -> None:
        """There is nothing to give back."""


def _none_of(table: Table) -> TableGradient:
    return TableGradient(np.empty(0, np.int64), np.empty((0, table.spec.dim), np.float32))


def _older(one: tuple[int, ...] | None, other: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Of each shard the lower number of writes that is known (-1: it is not)."""
    if one is None or other is None:
        return other if one is None else one
    return tuple(max(both) if -1 in both else min(both) for both in zip(one, other, strict=True))


def _wide(gradient: TableGradient) -> npt.NDArray[np.float64]:
    return gradient.rows.reshape(-1).astype(np.float64)


class EmbeddingUpdate(PendingUpdate[EmbeddingGradient]):
    """See the module."""

    table: Table

    def __init__(self, tables: Sequence[Table], ranks: Ranks | None = None, pace: Pace | None = None) -> None:
        """The tables have one optimizer. ``ranks`` train them together; None: this process by itself, at ``pace``."""
        super().__init__()
        self.tables = tuple(tables)
        self.ranks = ranks
        self.pace = pace
        self.table = self.tables[0]
        self._writes: list[TableWrite] | None = None
        """The pushes of a step that has begun."""

    @property
    def name(self) -> str:
        """Of the tables."""
        names = [table.spec.name for table in self.tables]
        return ", ".join(names) if len(names) <= _NAMED else f"{names[0]} … {names[-1]} ({len(names)} tables)"

    @property
    def moment(self) -> Moment:
        """See the base class."""
        return self.generation, tuple(map(incarnation_of, self.tables))

    def require_no_step(self) -> None:
        """Raise InvalidArgument if a step has begun and not ended."""
        if self._writes is not None:
            raise InvalidArgument(
                f"the last step() stopped with an error before all gradients of {self.name} were pushed; call step() "
                "again, or zero_grad() to give the rest up, before the next backward()"
            )

    def prepare(self, optimizer: RowOptimizerSpec) -> Sequence[TableWrite]:
        """See the base class: one push a table. Once begun, a step keeps its optimizer and factor."""
        if self._pending is None or self.carrier.grad is None:
            return ()
        if self._writes is None:
            settings: dict[str, Any] = {
                "lr": optimizer.lr,
                "optimizer_scalars": self.table.spec.optimizer.scalars_of_push(optimizer),
                "scale": float(self._factor()),
                "group": None if self.ranks is None else self.ranks.sync_group(self._samples),
            }
            writes: list[TableWrite] = []
            try:
                for place, table in enumerate(self.tables):
                    gradient = self._pending.tables.get(place)
                    if gradient is None and self.ranks is None:
                        continue
                    gradient = gradient or _none_of(table)  # the others wait for this rank
                    # Their squares are finite, or check_finite() would have said so; the product is looked at there.
                    push = table.prepare_push(
                        gradient.ids,
                        gradient.rows,
                        known_finite=True,
                        known_distinct=True,
                        occurrences=gradient.occurrences,
                        step=self.step,
                        pulled_at=gradient.pulled_at,
                        **settings,
                    )
                    writes.append(push)
            except BaseException:
                for write in writes:
                    write.abandon()
                raise
            self._writes = writes
        return self._writes

    def hand_over(self) -> None:
        """See the base class."""
        self._writes = None
        super().hand_over()

    def flush(self) -> None:
        """Wait for pushes that are under way in the background. Raises an error of theirs that is news."""
        if self.background is not None:
            self.background.wait()

    def apply(self, optimizer: RowOptimizerSpec) -> None:
        """Push what is pending, then forget it. After an error a second call sends what is left; none applies twice."""
        if self._pending is None or self.carrier.grad is None:
            return
        left = [write for write in self.prepare(optimizer) if not write.is_sent]
        if left:
            left[0].send_with(left[1:])
        self._writes = None
        self.step += 1
        if self.ranks is not None:
            self.ranks.sequence += 1
        self.discard()

    def _squared_norm(self, pending: EmbeddingGradient, factor: float) -> float:
        """With ranks every row gradient of each travels to all."""
        ranks = self.ranks
        if ranks is None:
            return super()._squared_norm(pending, factor)
        total = float(ranks.sum(torch.tensor(float(self._samples))))
        weight = factor * self._samples / total if total else 0.0  # as the shards weigh them
        squares = 0.0
        for place, table in enumerate(self.tables):
            mine = pending.tables.get(place) or _none_of(table)
            ids, rows = ranks.gather_labels(mine.ids), ranks.gather_rows(mine.rows * np.float32(weight))
            _, _, sums = ops.merge_duplicates(ids, np.concatenate(rows))
            squares += float(np.square(sums, dtype=np.float64).sum())
        return squares

    def discard(self) -> None:
        """Forget what is pending."""
        writes, self._writes = self._writes, None
        for write in writes or ():
            write.abandon()
        super().discard()
