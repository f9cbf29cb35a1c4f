"""Row gradients of embedding tables that one optimizer trains: pushed at the step, each exactly once."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from functools import partial
from operator import attrgetter
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
from geartrain.ams.values.specs import Ids, TableSpec
from geartrain.bridge.embedding.group_rows import name_of
from geartrain.bridge.embedding.hosted_bags import HostedUpdate, ShardInputs, row_inputs
from geartrain.bridge.placements.row_cache import RowCache, push_through
from geartrain.bridge.rows.pending import Pace, PendingUpdate, PulledVersion
from geartrain.bridge.rows.ranks import SyncRanks
from geartrain.bridge.rows.row_update import PushSettings

_INCARNATION, _SPEC = attrgetter("incarnation"), attrgetter("spec")


class TableGradient(NamedTuple):
    """Gradients of the rows of one table."""

    ids: Ids
    """Distinct ids [U]."""
    rows: npt.NDArray[np.float32]
    """Gradients [U, D]."""
    occurrences: npt.NDArray[np.uint32] | None = None
    """Number of times that each id was in the batch [U]; None: the table does not use it."""
    pulled_at: tuple[int, ...] | None = None
    """Number of writes of the table on each shard when the rows were pulled; None: unknown."""

    def joined(self, other: TableGradient) -> TableGradient:
        """Return the sum of both, with the age of the older rows."""
        both = np.concatenate([self.ids, other.ids])
        ids, places, rows = ops.merge_duplicates(both, np.concatenate([self.rows, other.rows]))
        occurrences = None
        if self.occurrences is not None and other.occurrences is not None:
            counts = np.bincount(places, np.concatenate([self.occurrences, other.occurrences]), len(ids))
            occurrences = np.minimum(counts, 2**32 - 1).astype(np.uint32)
        return TableGradient(ids, rows, occurrences, _older(self.pulled_at, other.pulled_at))


class EmbeddingGradient:
    """Gradients of one or several micro-batches, by the place of the table in the update."""

    def __init__(
        self, tables: dict[int, TableGradient], squares: float | None = None, bags: dict[int, ShardInputs] | None = None
    ) -> None:
        """``squares`` is Σ g² over all ``tables``, in float64; None: it is computed. ``bags`` are gradients of vectors
        that shards pool.
        """
        self.tables, self.bags = tables, bags or {}
        self._squares = self._sum_squares() if squares is None else squares

    def _sum_squares(self) -> float:
        return sum([squares_of(gradient.rows) for gradient in self.tables.values()])

    def merge(self, other: EmbeddingGradient) -> None:
        """Add the gradient of another micro-batch, which is used up. Costs a pass over both."""
        for place, theirs in other.tables.items():
            mine = self.tables.get(place)
            self.tables[place] = theirs if mine is None else mine.joined(theirs)
        for place, inputs in other.bags.items():
            here = self.bags.setdefault(place, [[] for _ in inputs])
            for shard, its in enumerate(inputs):
                here[shard] += its
        self._squares = self._sum_squares()

    def inputs(self, place: int, table: Table) -> ShardInputs:
        """Return the inputs of each shard for a hosted update of a table: of bags, and of pulled rows."""
        calls = table.hosted(NAME)
        bags = self.bags.get(place) or [[] for _ in range(calls.view.num_shards)]
        if place not in self.tables:
            return bags
        pulled = self.tables[place]
        rows = row_inputs(pulled.ids, pulled.rows, pulled.occurrences, calls, table)
        return [[*its, *own] for its, own in zip(bags, rows, strict=True)]

    @property
    def squares(self) -> Tensor | None:
        """Σ g² (0-dim, float64); None where only shards know some of the gradients."""
        return None if self.bags else torch.tensor(self._squares, dtype=torch.float64, device="cpu")

    def squared_norm(self) -> float:
        """Return Σ g² over :attr:`tables`, in float64."""
        return self._squares

    def discard(self) -> None:
        """Do nothing: no memory is pooled."""


def _none_of(table: Table) -> TableGradient:
    return TableGradient(np.empty(0, np.int64), np.empty((0, table.spec.dim), np.float32))


def _older(one: tuple[int, ...] | None, other: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Return the lower known number of writes for each shard (-1: unknown)."""
    if one is None or other is None:
        return other if one is None else one
    return tuple(max(both) if -1 in both else min(both) for both in zip(one, other, strict=True))


def squares_of(rows: npt.NDArray[np.float32]) -> float:
    """Return Σ g² of gradients [..., D], in float64."""
    wide = rows.reshape(-1).astype(np.float64)
    return float(np.vdot(wide, wide))


class StepFacts(NamedTuple):
    """Needs of a step by the tables' settings, which may be altered."""

    specs: list[TableSpec]
    optimizers: set[RowOptimizerSpec]
    """Optimizers of the tables: several where that of some was altered."""
    counting: list[int]
    """Places of tables that use the number of times that each id was in the batch."""
    moving: list[int]
    """Places of tables whose rows also move at steps that do not touch them."""


class EmbeddingUpdate(PendingUpdate[EmbeddingGradient]):
    """Pending update of the tables of one optimizer."""

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
        """The tables have one optimizer; those at the places ``hosted`` have bags that shards pool. ``ranks`` train the
        tables together; None: this process by itself, at ``pace``. ``caches`` keep rows of all tables, or are empty.
        """
        super().__init__()
        self.tables = tuple(tables)
        self.table = self.tables[0]
        self._name = name_of(list(map(_SPEC, self.tables)))
        self._hosted, self._caches = hosted, caches
        self.ranks, self.pace = ranks, pace
        self._facts = StepFacts([], set(), [], [])
        self._has_begun = False
        """Whether a step has started and not ended: it keeps its optimizer and factor."""
        self._write: RowWrite | None = None
        """Push of the step's rows, of all tables."""
        self._hosted_writes: list[HostedUpdate] = []
        """Hosted updates of the step that are not sent yet."""
        self._follow: Callable[[], None] | None = None
        """Function that updates the caches once the push is applied."""

    @property
    def name(self) -> str:
        """Names of the tables."""
        return self._name

    @property
    def rows_version(self) -> PulledVersion:
        return self.generation, tuple(map(_INCARNATION, self.tables))

    def facts(self) -> StepFacts:
        """Return the needs of the tables now."""
        specs = list(map(_SPEC, self.tables))
        if specs != self._facts.specs:
            counting = [place for place, spec in enumerate(specs) if spec.counts_occurrences]
            moving = [place for place, spec in enumerate(specs) if spec.counts_steps]
            self._facts = StepFacts(specs, {spec.optimizer for spec in specs}, counting, moving)
        return self._facts

    def require_no_step(self) -> None:
        """Raise InvalidArgument if a step has started and not ended."""
        if self._has_begun:
            raise InvalidArgument(
                f"the last step() stopped with an error before all gradients of {self.name} were pushed; call step() "
                "again, or zero_grad() to give the rest up, before the next backward()"
            )

    def prepare(self, optimizer: RowOptimizerSpec) -> Sequence[RowWrite]:
        """Prepare one push of all tables, and an update of each hosted one."""
        pending = self._pending
        if not self._has_begun and pending is not None and self.carrier.grad is not None:
            scalars: dict[str, float] = {}
            for its in self.facts().optimizers:
                scalars |= its.scalars_of_push(optimizer)
            settings: PushSettings = {
                "lr": optimizer.lr,
                "optimizer_scalars": scalars,
                "scale": self.factor(),
                "group": None if self.ranks is None else self.ranks.sync_group(self._samples),
            }
            pulled = pending.tables
            if self.ranks is not None:  # the others wait for this rank
                pulled = {place: pulled.get(place) or _none_of(table) for place, table in enumerate(self.tables)}
            try:
                if self._hosted:
                    self._prepare_hosted(pending, pulled.keys(), settings)
                    pulled = {place: own for place, own in pulled.items() if place not in self._hosted}
                if pulled:
                    self._prepare_push(pulled, optimizer, settings)
            except BaseException:
                self._abandon_step()
                raise
            self._has_begun = True
        return () if self._write is None else (self._write,)

    def _prepare_hosted(self, pending: EmbeddingGradient, pulled: Set[int], settings: PushSettings) -> None:
        """Prepare one write for each table with hosted bags, of those and its pulled rows, so that a row moves once."""
        for place in sorted(self._hosted & (pulled | pending.bags.keys())):
            inputs = pending.inputs(place, self.tables[place])
            self._hosted_writes.append(HostedUpdate(self.tables[place], inputs, self.step, settings))

    def _prepare_push(
        self, pulled: dict[int, TableGradient], optimizer: RowOptimizerSpec, settings: PushSettings
    ) -> None:
        tables = list(map(self.tables.__getitem__, pulled))
        ids, rows, occurrences, pulled_at = zip(*pulled.values(), strict=True)
        # Their squares are finite, or check_finite() would have raised; the product is checked there.
        self._write = prepare_pushes(
            tables, ids, rows, occurrences=occurrences, pulled_at=pulled_at, step=self.step, **settings
        )
        if self._caches:
            caches = list(map(self._caches.__getitem__, pulled))
            for cache in caches:
                cache.start_push()
            pushes = list(zip(caches, ids, rows, strict=True))
            self._follow = partial(push_through, pushes, self._write, optimizer, settings["scale"])

    def hand_over(self) -> None:
        self._write, self._has_begun, self._pending = None, False, None  # at once: Ctrl-C comes between two calls
        super().hand_over()

    def apply(self, optimizer: RowOptimizerSpec) -> None:
        """Push pending gradients, then drop them. After an error a second call sends the rest; none is applied
        twice."""
        if not self._has_begun:
            self.prepare(optimizer)
        if not self._has_begun:  # nothing is pending
            return
        if self._write is not None and not self._write.is_sent:
            self._write.send()
        while self._hosted_writes:
            self._hosted_writes[0].send()
            del self._hosted_writes[0]
        follow, self._follow = self._follow, None
        self._write, self._has_begun, self._pending = None, False, None  # at once: Ctrl-C comes between two calls
        self.step += 1
        if self.ranks is not None:
            self.ranks.sequence += 1
        self.discard()
        if follow is not None:
            follow()  # last: an error does not undo the push
        for cache in self._caches:
            cache.drop_written()

    def _squared_norm(self, pending: EmbeddingGradient, factor: float) -> float:
        """Return Σ g². With ranks every rank's row gradients are sent to all; for hosted tables every shard is
        asked."""
        ranks = self.ranks
        if ranks is None and not self._hosted:
            return super()._squared_norm(pending, factor)
        if ranks is None:
            squares = sum(squares_of(own.rows) for place, own in pending.tables.items() if place not in self._hosted)
            return (squares + sum(self._asked_norm(pending, place) for place in self._hosted)) * factor**2
        if self._hosted:
            raise InvalidArgument(
                f"{self.name} has hosted fields, and the gradients of several ranks meet in the shards: no rank knows "
                "their norm. Keep these rows out of clip_grad_norm_, or give the fields where='pull'"
            )
        total = float(ranks.sum(torch.tensor(self._samples, dtype=torch.float64, device="cpu")))
        weight = factor * self._samples / total if total else 0.0  # the weight that shards use
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
        """Drop pending gradients."""
        if self._has_begun:
            self._abandon_step()
        super().discard()

    def _abandon_step(self) -> None:
        """End the step that has started; its unsent writes are dropped."""
        write, self._write = self._write, None
        hosted, self._hosted_writes = self._hosted_writes, []
        self._follow, self._has_begun = None, False
        if write is not None:
            write.abandon()
        for update in hosted:
            update.abandon()
