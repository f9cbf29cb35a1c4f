"""Hot rows of a table in a cluster, kept on the device of the module that looks them up: a copy of what shards hold.

Which id has which place is known on the host, where ids are merged and where a pull begins and ends anyway: so a device
is never asked what it lacks. Legend: C places, D width, U distinct ids of a look-up, W numbers of a row's state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from geartrain.ams.client.table import pull_together
from geartrain.ams.kernels.position_lru import PositionLru
from geartrain.ams.observe.metrics import Metric, cache_metrics, tell_of
from geartrain.ams.values.errors import InvalidArgument, InvalidRows
from geartrain.ams.values.optimizers.registry import RowOptimizerSpec
from geartrain.ams.values.specs import Ids, TableSpec
from geartrain.bridge.placements.cached_rows import CachedPush, CachedRead, CachedRows

if TYPE_CHECKING:
    from geartrain.ams.client.table import Table
    from geartrain.ams.client.writes import RowWrite, WrittenPart

Array = npt.NDArray[Any]
_LONGEST_REST = 63
_INDEX_BYTES = 128
"""Of the host's memory for each place: what is where, and which other ids were seen."""
_NONE = np.empty(0, np.int64)


def bytes_of_place(spec: TableSpec) -> int:
    """Of memory for each row, with its slots."""
    return spec.row_bytes + spec.slot_bytes + spec.step_bytes


@dataclass
class CacheCounts:
    """What came of the distinct ids that were looked up."""

    hits: int = 0
    misses: int = 0
    evicted: int = 0
    """Rows that gave way to others."""
    cleared: int = 0
    """How often all rows were dropped: somebody else had written to the table, or it was restored."""
    saved_bytes: int = 0
    """Of rows that did not travel, less what the states of rows took that were taken in."""


class RowCache:
    """Which rows of one table have one of ``capacity`` places. For one thread.

    A row that is here is used if it is what the shard holds. The shard says with every pull how many writes the table
    has had there; those of this process are counted, and what they make of a row is computed here, too, by the shard's
    own formula, from the row's state (slots, updates), which is pulled when a row is taken in. Where the counts are
    equal, nobody else has written, and the rows here are those of the shard. Where they are not, all rows here are
    dropped and those of the look-up pulled, and for a while nothing is kept: the more often that comes, the longer.

    With ``oldest`` (:class:`gt.SSP`) it is by the clock instead: a row is used while all that was written before that
    step is in it.

    Least recently used rows give way; where there is no room, an id is taken in when it is looked up a second time.
    """

    def __init__(
        self, table: Table, capacity: int, store: CachedRows, first_place: int, *, by_clock: bool = False
    ) -> None:
        """The places are those of ``store`` from ``first_place`` on. ``by_clock``: :meth:`find` is told ``oldest``."""
        self.table = table
        self.store = store
        self.counts = CacheCounts()
        self._first = first_place
        self._index = PositionLru(capacity)
        self._seen = PositionLru(capacity)
        """Ids that were looked up and have no place."""
        self._table_is = self._table_now()
        self._writes = np.full(table.num_shards, -1, np.int64)
        """The writes that the table has had on each shard; -1: it is not known."""
        self._is_pushing = False
        self._rest = self._resting = 0
        self._reader = table.write_log.reader() if by_clock else None
        self._own_write: int | None = None
        tell_of(self)

    def metrics(self) -> Iterator[Metric]:
        """Hits and misses."""
        name = self.table.spec.name
        yield from cache_metrics(name, "rows", self.counts.hits, self.counts.misses)

    def _table_now(self) -> tuple[int, TableSpec]:
        return self.table.incarnation, self.table.spec

    def _is_altered(self) -> bool:
        """Whether the table is another than when this was asked last, or has other settings."""
        before, self._table_is = self._table_is, self._table_now()
        return before != self._table_is

    def clear(self) -> None:
        """Drop all rows; the counts stay."""
        self._is_pushing = False
        self._writes[:] = -1
        if len(self._index):
            self.counts.cleared += 1
            self._index.remove(self._index.oldest(len(self._index))[0])

    def report(self) -> dict[str, Any]:
        """Hits and misses (distinct ids of look-ups), and more; plain numbers, for metrics and JSON."""
        counts = vars(self.counts)
        looked_up = self.counts.hits + self.counts.misses
        return {
            **counts,
            "hit_rate": self.counts.hits / max(1, looked_up),
            "entries": len(self._index),
            "capacity": self._index.capacity,
            "bytes": self._index.capacity * bytes_of_place(self.table.spec),
            "host_bytes": self._index.capacity * (_INDEX_BYTES + 17),
        }

    def find(self, ids: Ids, *, oldest: int | None, clock: int) -> Found:
        """What of ``ids`` [U], distinct, is here, and what is to be pulled. ``clock``: the step before which all writes
        are in what is pulled now; ``oldest``: see the class.
        """
        if self._is_altered() or self._is_pushing:  # a step stopped half way
            self.clear()
        self.drop_written()
        if self._resting:
            self._resting -= 1
            return Found(self, ids, _NONE, _NONE, _NONE, np.arange(len(ids)), _NONE, None, clock)
        positions = self._index.find(ids, touch=True)
        is_hit = positions >= 0
        if oldest is not None:
            is_hit &= self.store.clock_C[self._first + positions] >= oldest
        hits, missing = np.flatnonzero(is_hit), np.flatnonzero(~is_hit)
        is_taken = (positions[missing] >= 0) | (self._seen.find(ids[missing], touch=False) >= 0)
        is_taken[np.flatnonzero(~is_taken)[: self._index.capacity - len(self._index)]] = True
        taken, others = missing[is_taken], missing[~is_taken]
        room = self._index.capacity - len(hits)
        taken, others = taken[:room], np.concatenate([others, taken[room:]])
        self._seen.place(ids[others[-self._seen.capacity :]])
        shards, probes = None, _NONE
        if oldest is None and len(hits):  # of each shard that hits are of something is asked, for its count
            asked = {shard for shard, _ in self.table.shards_of(ids[missing])} if len(missing) else set()
            owners = [(shard, 0 if of is None else int(of[0])) for shard, of in self.table.shards_of(ids[hits])]
            probes = hits[[first for shard, first in owners if shard not in asked]]
            shards = np.array([shard for shard, _ in owners])
        return Found(self, ids, hits, self._first + positions[hits], taken, others, probes, shards, clock)

    def drop_written(self) -> None:
        """By the clock no count tells of what this process has written otherwise than by a step. Called at each step,
        too, for else what the log tells would pile up where nothing is looked up here.
        """
        while self._reader is not None and self._reader.entries:
            number, name, ids = self._reader.entries.popleft()
            if name == self.table.spec.name and number != self._own_write:
                self._index.remove(ids)

    def is_current(self, found: Found, writes: npt.NDArray[np.int64]) -> bool:
        """Whether what was found is what the shards hold, which have had so many ``writes`` (-1: not known)."""
        if found.shards is None:
            self._rest = self._rest if len(found.hits) == 0 else 0
            return True
        is_known = (writes >= 0) & (self._writes >= 0)
        if bool((writes[found.shards] >= 0).all()) and bool((writes == self._writes)[is_known].all()):
            self._rest = 0
            return True
        self.clear()
        self._rest = self._resting = min(2 * self._rest + 1, _LONGEST_REST)
        return False

    def settle(self, found: Found | None, out_UD: Array) -> CachedRead:
        """What a look-up reads here, and what of it is kept. Without ``found`` all rows of ``out`` were pulled."""
        if found is None:
            return CachedRead(out_UD, _NONE, _NONE, _NONE, _NONE, None, np.arange(len(out_UD)))
        writes, known = found.writes, found.writes >= 0
        if self._reader is None and bool((writes != self._writes)[known & (self._writes >= 0)].any()):
            self.clear()  # of shards that nothing was found of
        self._writes[known] = writes[known]
        hits, taken, others = (found.hits, found.positions), found.taken, found.others
        if not len(taken) or not known.any():
            return CachedRead(out_UD, *hits, _NONE, _NONE, None, np.concatenate([taken, others]))
        places, evicted = self._index.place(found.ids[taken])
        self.counts.evicted += evicted
        places += self._first
        self.store.clock_C[places] = found.clock
        return CachedRead(out_UD, *hits, taken, places, found.states, others)

    def begin_push(self) -> None:
        """A step of this process is about to be pushed."""
        self._is_pushing = True

    def pushed(self, push: CachedPush, optimizer: RowOptimizerSpec, write: WrittenPart) -> CachedPush | None:
        """What a push of gradients of distinct ids, which all shards have applied, does to rows here; None: nothing.

        What cannot follow is dropped. ``positions`` of the push are still to be found.
        """
        makes_way = self.table.spec.max_bytes is not None and write.created > 0  # who knows which rows have gone
        if self._is_altered() or not self._is_pushing or makes_way:
            self.clear()
            return None
        self._is_pushing = False
        self._own_write = write.log_number
        self._writes[[shard for shard in write.shards if self._writes[shard] >= 0]] += 1
        positions = self._index.find(push.ids, touch=False)
        is_here = positions >= 0
        positions += self._first
        follows = is_here & self.store.can_follow(optimizer)
        if self.table.spec.admission is not None:  # whether the shard has made a row it does not say
            follows &= self.store.is_there_C[positions]
        self._index.remove(push.ids[is_here & ~follows])
        positions = positions[follows]
        self.store.is_there_C[positions] = True
        return (
            CachedPush(push.spec, positions, push.ids[follows], push.gradients_ND[follows]) if len(positions) else None
        )


@dataclass
class Found:
    """What a cache has of the ids of one look-up; places are those among the ids."""

    cache: RowCache
    ids: Ids
    hits: Ids
    positions: Ids
    """Of the hits in the cache."""
    taken: Ids
    """To be pulled with their state, and kept."""
    others: Ids
    """To be pulled."""
    probes: Ids
    """Hits that are pulled for what their shards say."""
    shards: Ids | None
    """Of the hits; None: they are taken as they are."""
    clock: int
    states: Array = field(init=False)
    """[A, W] of what was taken, or [A, D]."""
    writes: npt.NDArray[np.int64] = field(init=False)
    """That the table had had on each shard; -1: it is not known."""
    _rows: Array = field(init=False)

    def pulls(self) -> list[tuple[Table, Ids, Array]]:
        """What :func:`pull_together` is to read: two entries."""
        table, spec = self.cache.table, self.cache.table.spec
        width = table.state_width or spec.dim
        self.states = np.empty((len(self.taken), width), spec.numpy_dtype)
        narrow = np.concatenate([self.others, self.probes])
        self._rows = np.empty((len(narrow), spec.dim), spec.numpy_dtype)
        return [(table, self.ids[self.taken], self.states), (table, self.ids[narrow], self._rows)]

    def arrived(self, writes: Sequence[Sequence[int]], out_UD: Array) -> tuple[int, ...] | None:
        """Write the pulled rows to their places of ``out``. Returns the writes that the table had had on each shard
        when the oldest of all rows were read (-1: not known); None: what was found is outdated, pull all.
        """
        one, other = (np.array(each, np.int64) for each in writes)
        cache = self.cache
        counts, spec = cache.counts, cache.table.spec
        self.writes = both = np.where(one < 0, other, one)
        if bool(((one >= 0) & (other >= 0) & (one != other)).any()):
            both[:] = -1  # somebody has written in between
        if not cache.is_current(self, both):
            counts.misses += len(self.ids)
            return None
        out_UD[self.taken] = self.states[:, : spec.dim]
        out_UD[self.others] = self._rows[: len(self.others)]
        counts.hits += len(self.hits)
        counts.misses += len(self.taken) + len(self.others)
        counts.saved_bytes += (len(self.hits) - len(self.probes)) * (8 + spec.row_bytes) - (
            self.states.nbytes - len(self.taken) * spec.row_bytes
        )
        found_by_clock = self.shards is None and len(self.hits)
        return tuple((np.full_like(both, -1) if found_by_clock else both).tolist())


def row_caches(tables: Mapping[str, Table], places: Mapping[str, int], *, by_clock: bool) -> dict[str, RowCache]:
    """A cache of so many places for each table; of those with equal rows, slots and optimizer in one array."""
    alike: dict[Any, list[str]] = {}
    for name in places:
        spec = tables[name].spec
        kind = (spec.dim, spec.dtype, spec.slot_dtype, spec.optimizer, tables[name].state_width)
        alike.setdefault(kind, []).append(name)
    made: dict[str, RowCache] = {}
    for names in alike.values():
        first, table = 0, tables[names[0]]
        store = CachedRows(table.spec, sum(places[name] for name in names), has_states=table.state_width > 0)
        for name in names:
            made[name] = RowCache(tables[name], places[name], store, first, by_clock=by_clock)
            first += places[name]
    return made


def _by_store(caches: Sequence[RowCache]) -> list[tuple[CachedRows, list[int]]]:
    numbers: dict[int, list[int]] = {}
    for number, cache in enumerate(caches):
        numbers.setdefault(id(cache.store), []).append(number)
    return [(caches[own[0]].store, own) for own in numbers.values()]


@contextmanager
def _whole(caches: Sequence[RowCache]) -> Iterator[None]:
    """What stops half way, for memory maybe, leaves no rows here that are not those of the shards."""
    try:
        yield
    except BaseException:
        for cache in caches:
            cache.clear()
        raise


def push_through(
    pushes: Sequence[tuple[RowCache, Ids, npt.NDArray[np.float32]]],
    write: RowWrite,
    optimizer: RowOptimizerSpec,
    scale: float,
) -> None:
    """Make the rows here what shards hold now that all have applied ``write``: pushes of gradients [U, D] of distinct
    ids [U], in the order of its tables.
    """
    moved: list[tuple[RowCache, CachedPush]] = []
    with _whole([cache for cache, *_ in pushes]):
        for place, (cache, ids, gradients) in enumerate(pushes):
            push = cache.pushed(CachedPush(cache.table.spec, _NONE, ids, gradients), optimizer, write.part(place))
            moved += [] if push is None else [(cache, push)]
        for store, numbers in _by_store([cache for cache, _ in moved]):
            refused = store.update([moved[number][1] for number in numbers], optimizer, scale)
            for number, is_refused in zip(numbers, refused, strict=True):
                if is_refused:
                    moved[number][0].clear()


def pull_through(
    caches: Sequence[RowCache],
    pulls: Sequence[tuple[Table, Ids, Array]],
    *,
    oldest: int | None = None,
    clock: int = 0,
) -> tuple[list[tuple[int, ...] | None], list[Tensor]]:
    """:func:`pull_together` of (table, distinct ids [U], out [U, D]) each, with what ``caches`` have of it.

    Returns of each the writes as pull_together does (None: there were no ids), and where the caches are on a device
    other than the host the rows there, [U, D] of the table's type: ``out`` is scratch then. See :meth:`RowCache.find`.
    """
    found = [
        cache.find(ids, oldest=oldest, clock=clock) if len(ids) else None
        for cache, (_, ids, _) in zip(caches, pulls, strict=True)
    ]
    asked = [pull for own in found if own is not None for pull in own.pulls()]
    try:
        answers = iter(pull_together(asked))
    except InvalidRows as exc:
        if not any(cache.table.state_width for cache in caches):
            raise
        raise InvalidArgument(
            f"a shard refused to send rows with their slots, which a device cache keeps: {exc}. Shards of releases "
            "before it cannot: update them, or leave device_cache_bytes out"
        ) from exc
    writes: list[tuple[int, ...] | None] = [
        None if own is None else own.arrived([next(answers), next(answers)], out)
        for own, (_, _, out) in zip(found, pulls, strict=True)
    ]
    outdated = [number for number, own in enumerate(found) if own is not None and writes[number] is None]
    for number, again in zip(outdated, pull_together([pulls[number] for number in outdated]), strict=True):
        writes[number], found[number] = tuple(again), None
    on_device: dict[int, Tensor | None] = {}
    with _whole(caches):
        for store, numbers in _by_store(caches):
            reads = [caches[number].settle(found[number], pulls[number][2]) for number in numbers]
            on_device.update(zip(numbers, store.read(reads), strict=True))
    rows = [on_device[number] for number in range(len(pulls))]
    return writes, [own for own in rows if own is not None]
