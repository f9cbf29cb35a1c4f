"""The row gradients of several embedding tables that one optimizer trains: pushed at the step, each exactly once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from geartrain.ams.client.table import Table, prepare_pushes
from geartrain.ams.client.writes import RowWrite
from geartrain.ams.kernels import ops
from geartrain.ams.programs.bag_pooling import NAME, SQUARED_NORM
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.optimizers.registry import RowOptimizerSpec
from geartrain.ams.values.specs import Ids
from geartrain.bridge.embedding.hosted_bags import HostedUpdate, ShardInputs, row_inputs
from geartrain.bridge.placements.row_cache import RowCache, push_through
from geartrain.bridge.rows.pending import Pace, PendingUpdate, PulledVersion
from geartrain.bridge.rows.ranks import SyncRanks
from geartrain.bridge.rows.row_update import PushSettings
from geartrain.bridge.rows.same_rows import incarnation_of
from geartrain.bridge.rows.tables import TableWrite

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

    def __init__(
        self, tables: dict[int, TableGradient], squares: float, bags: dict[int, ShardInputs] | None = None
    ) -> None:
        """``squares`` is Σ g² over all ``tables``, in float64; ``bags`` are gradients of vectors that shards pool."""
        self.tables = tables
        self.bags = bags or {}
        self._squares = squares

    def merge(self, other: EmbeddingGradient) -> None:
        """Add the gradient of another micro-batch, which is used up. Costs a pass over both."""
        for place, theirs in other.tables.items():
            mine = self.tables.get(place)
            if mine is None:
                self.tables[place] = theirs
                continue
            self.tables[place] = mine.joined(theirs)
        for place, inputs in other.bags.items():
            here = self.bags.setdefault(place, [[] for _ in inputs])
            for shard, its in enumerate(inputs):
                here[shard] += its
        self._squares = sum(float(np.vdot(wide, wide)) for wide in map(_wide, self.tables.values()))

    def inputs(self, place: int, table: Table) -> ShardInputs:
        """What a hosted update of a table takes of each shard: of bags, and of rows that were pulled."""
        calls = table.hosted(NAME)
        bags = self.bags.get(place) or [[] for _ in range(calls.view.num_shards)]
        if place not in self.tables:
            return bags
        pulled = self.tables[place]
        rows = row_inputs(pulled.ids, pulled.rows, pulled.occurrences, calls, table)
        return [[*its, *own] for its, own in zip(bags, rows, strict=True)]

    @property
    def squares(self) -> Tensor | None:
        """Σ g² (0-dim, float64); None where shards alone know some of the gradients."""
        return None if self.bags else torch.tensor(self._squares, dtype=torch.float64)

    def squared_norm(self) -> float:
        """Σ g² over :attr:`tables`, in float64."""
        return self._squares

    def discard(self) -> None:
        """There is nothing to give back."""


def _nothing() -> None:
    """Where no caches are."""


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

    def __init__(
        self,
        tables: Sequence[Table],
        *,
        hosted: frozenset[int] = frozenset(),
        ranks: SyncRanks | None = None,
        pace: Pace | None = None,
        caches: Sequence[RowCache] = (),
    ) -> None:
        """The tables have one optimizer; at the places ``hosted`` there are bags that shards pool. ``ranks`` train the
        tables together; None: this process by itself, at ``pace``. ``caches`` keep rows of all tables, or none.
        """
        super().__init__()
        self.tables = tuple(tables)
        self._hosted = hosted
        self.ranks = ranks
        self.pace = pace
        self.table = self.tables[0]
        self._writes: list[RowWrite] | None = None
        """The pushes of a step that has begun."""
        self._caches = caches
        self._follow: Callable[[], None] = _nothing
        """What the caches make of the pushes once they are applied."""
        self._hosted_writes: list[HostedUpdate] = []
        """Its hosted updates that are not sent yet."""

    @property
    def name(self) -> str:
        """Of the tables."""
        names = [table.spec.name for table in self.tables]
        return ", ".join(names) if len(names) <= _NAMED else f"{names[0]} … {names[-1]} ({len(names)} tables)"

    @property
    def rows_version(self) -> PulledVersion:
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
            scalars: dict[str, float] = {}
            for its in {table.spec.optimizer for table in self.tables}:  # one of them may have been altered
                scalars |= its.scalars_of_push(optimizer)
            settings: PushSettings = {
                "lr": optimizer.lr,
                "optimizer_scalars": scalars,
                "scale": self.factor(),
                "group": None if self.ranks is None else self.ranks.sync_group(self._samples),
            }
            writes: list[RowWrite] = []
            pushed: dict[int, TableGradient] = {}
            try:
                for place, table in enumerate(self.tables):
                    gradient = self._pending.tables.get(place)
                    if gradient is None and place not in self._pending.bags and self.ranks is None:
                        continue
                    if place in self._hosted:  # in one write, so that a row moves once
                        inputs = self._pending.inputs(place, table)
                        self._hosted_writes.append(HostedUpdate(table, inputs, self.step, settings))
                        continue
                    pushed[place] = gradient or _none_of(table)  # the others wait for this rank
                if pushed:
                    ids, rows, occurrences, pulled_at = zip(*pushed.values(), strict=True)
                    tables = [self.tables[place] for place in pushed]
                    # Their squares are finite, or check_finite() would have said so; the product is looked at there.
                    writes = [
                        prepare_pushes(
                            *(tables, ids, rows),
                            occurrences=occurrences,
                            pulled_at=pulled_at,
                            step=self.step,
                            **settings,
                        )
                    ]
            except BaseException:
                self._abandon(writes)
                raise
            self._writes = writes
            if self._caches and pushed:
                caches = [self._caches[place] for place in pushed]
                for cache in caches:
                    cache.begin_push()
                own = [
                    (cache, gradient.ids, gradient.rows)
                    for cache, gradient in zip(caches, pushed.values(), strict=True)
                ]
                self._follow = partial(push_through, own, writes[0], optimizer, settings["scale"])
        return self._writes

    def hand_over(self) -> None:
        self._writes = None
        super().hand_over()

    def apply(self, optimizer: RowOptimizerSpec) -> None:
        """Push what is pending, then forget it. After an error a second call sends what is left; none applies twice."""
        if self._pending is None or self.carrier.grad is None:
            return
        left = [write for write in self.prepare(optimizer) if not write.is_sent]
        if left:
            left[0].send_with(left[1:])
        while self._hosted_writes:
            self._hosted_writes[0].send()
            del self._hosted_writes[0]
        follow, self._writes = self._follow, None
        self.step += 1
        if self.ranks is not None:
            self.ranks.sequence += 1
        self.discard()
        follow()  # at last: an error takes no push back
        for cache in self._caches:
            cache.drop_written()

    def _squared_norm(self, pending: EmbeddingGradient, factor: float) -> float:
        """With ranks every row gradient of each travels to all; of hosted tables every shard is asked."""
        ranks = self.ranks
        if ranks is None and not self._hosted:
            return super()._squared_norm(pending, factor)
        if ranks is None:
            own = [_wide(table) for place, table in pending.tables.items() if place not in self._hosted]
            squares = sum(float(np.vdot(item, item)) for item in own)
            return (squares + sum(self._asked_norm(pending, place) for place in self._hosted)) * factor**2
        if self._hosted:
            raise InvalidArgument(
                f"{self.name} has hosted fields, and the gradients of several ranks meet in the shards: no rank knows "
                "their norm. Keep these rows out of clip_grad_norm_, or give the fields where='pull'"
            )
        total = float(ranks.sum(torch.tensor(float(self._samples))))
        weight = factor * self._samples / total if total else 0.0  # as the shards weigh them
        squares = 0.0
        for place, table in enumerate(self.tables):
            mine = pending.tables.get(place) or _none_of(table)
            ids, rows = ranks.gather_labels(mine.ids), ranks.gather_rows(mine.rows * np.float32(weight))
            _, _, sums = ops.merge_duplicates(ids, np.concatenate(rows))
            squares += float(np.square(sums, dtype=np.float64).sum())
        return squares

    def _asked_norm(self, pending: EmbeddingGradient, place: int) -> float:
        inputs = [tuple(its) for its in pending.inputs(place, self.tables[place])]
        answers = self.tables[place].hosted(NAME).compute(SQUARED_NORM, inputs.__getitem__)
        return float(sum(float(answer["squared_norm"][0]) for answer in answers))

    def discard(self) -> None:
        """Forget what is pending."""
        writes, self._writes = self._writes, None
        self._follow = _nothing
        self._abandon(writes or ())
        super().discard()

    def _abandon(self, writes: Sequence[TableWrite]) -> None:
        for write in writes:
            write.abandon()
        hosted, self._hosted_writes = self._hosted_writes, []
        for update in hosted:
            update.abandon()
