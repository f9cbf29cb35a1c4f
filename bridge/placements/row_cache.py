"""LRU cache of a table's hot rows on the device of the module that looks them up: exact copies of the shards' rows.

The host keeps the index of ids to places: ids are merged and pulled there, so no look-up waits for a device. Legend: C
places, D width, U distinct ids of a look-up, W numbers of a row's state.
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
from geartrain.ams.observe.metrics import Metric, cache_metrics, register_source
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
"""Host memory of each place: its index entry, and ids that were seen but are not cached."""
_NONE = np.empty(0, np.int64)


def bytes_of_place(spec: TableSpec) -> int:
    """Return the bytes of each place: a row with its slots."""
    return spec.row_bytes + spec.slot_bytes + spec.step_bytes


@dataclass
class CacheCounts:
    """Counters of distinct ids that were looked up."""

    hits: int = 0
    misses: int = 0
    evicted: int = 0
    """Rows that were evicted for others."""
    cleared: int = 0
    """Times that all rows were dropped, after another client's write to the table or a restore."""
    saved_bytes: int = 0
    """Bytes of rows that were not sent, less those of the states of inserted rows."""


class RowCache:
    """Cache of one table's rows, with ``capacity`` places. For one thread.

    A cached row is used only if it equals the shard's. With every pull the shard returns its number of writes of the
    table. This process counts its own writes, and applies them to cached rows by the shard's formula, from the row's
    state (slots, updates), which is pulled when a row is inserted. Equal counts mean that no other client has written,
    so the cached rows equal the shard's. Otherwise all cached rows are dropped, the look-up pulls its rows, and nothing
    is cached for a while: longer, the more often this occurs.

    With ``oldest`` (:class:`gt.SSP`) the clock decides instead: a row is used while it contains all writes before that
    step.

    The least recently used rows are evicted. When the cache is full, an id is inserted at its second look-up.
    """

    def __init__(
        self, table: Table, capacity: int, store: CachedRows, first_place: int, *, by_clock: bool = False
    ) -> None:
        """Use the places of ``store`` from ``first_place`` on. ``by_clock``: :meth:`look_up` receives ``oldest``."""
        self.table = table
        self.store = store
        self.counts = CacheCounts()
        self._first = first_place
        self._index = PositionLru(capacity)
        self._seen = PositionLru(capacity)
        """Ids that were looked up but are not cached."""
        self._table_is = self._table_now()
        self._writes = np.full(table.num_shards, -1, np.int64)
        """Number of the table's writes on each shard; -1: unknown."""
        self._is_pushing = False
        self._rest = self._resting = 0
        self._reader = table.write_log.reader() if by_clock else None
        self._own_write: int | None = None
        register_source(self)

    def metrics(self) -> Iterator[Metric]:
        """Yield the metrics of hits and misses."""
        name = self.table.spec.name
        yield from cache_metrics(name, "rows", self.counts.hits, self.counts.misses)

    def _table_now(self) -> tuple[int, TableSpec]:
        return self.table.incarnation, self.table.spec

    def _is_altered(self) -> bool:
        """Return whether the table was replaced, or its settings changed, since the last call."""
        before, self._table_is = self._table_is, self._table_now()
        return before != self._table_is

    def clear(self) -> None:
        """Drop all rows; keep the counters."""
        self._is_pushing = False
        self._writes[:] = -1
        if len(self._index):
            self.counts.cleared += 1
            self._index.remove(self._index.oldest(len(self._index))[0])

    def report(self) -> dict[str, Any]:
        """Return hits, misses (distinct ids of look-ups) and more, as plain numbers for metrics and JSON."""
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

    def look_up(self, ids: Ids, *, oldest: int | None, clock: int) -> CacheLookup:
        """Split distinct ``ids`` [U] into cached ones and ones to pull.

        ``clock``: step before which all writes are in rows pulled now; ``oldest``: as in the class.
        """
        if self._is_altered() or self._is_pushing:  # still pushing: a step was interrupted
            self.clear()
        self.drop_written()
        if self._resting:
            self._resting -= 1
            return CacheLookup(self, ids, _NONE, _NONE, _NONE, np.arange(len(ids)), _NONE, None, clock)
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
        if oldest is None and len(hits):  # every shard with hits gets a request, for its count of writes
            asked = {shard for shard, _ in self.table.shards_of(ids[missing])} if len(missing) else set()
            owners = [(shard, 0 if of is None else int(of[0])) for shard, of in self.table.shards_of(ids[hits])]
            probes = hits[[first for shard, first in owners if shard not in asked]]
            shards = np.array([shard for shard, _ in owners])
        return CacheLookup(self, ids, hits, self._first + positions[hits], taken, others, probes, shards, clock)

    def drop_written(self) -> None:
        """Drop rows that this process wrote other than by a step; under the clock no count shows these writes.

        Each step calls it, or the log would grow while nothing is looked up.
        """
        while self._reader is not None and self._reader.entries:
            number, name, ids = self._reader.entries.popleft()
            if name == self.table.spec.name and number != self._own_write:
                self._index.remove(ids)

    def is_current(self, found: CacheLookup, writes: npt.NDArray[np.int64]) -> bool:
        """Return whether the found rows equal the shards', given their numbers of ``writes`` (-1: unknown)."""
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

    def finish_lookup(self, found: CacheLookup | None, out_UD: Array) -> CachedRead:
        """Return the reads and inserts of a look-up. Without ``found`` all rows of ``out`` were pulled."""
        if found is None:
            return CachedRead(out_UD, _NONE, _NONE, _NONE, _NONE, None, np.arange(len(out_UD)))
        writes, known = found.writes, found.writes >= 0
        if self._reader is None and bool((writes != self._writes)[known & (self._writes >= 0)].any()):
            self.clear()  # another client wrote to a shard without hits
        self._writes[known] = writes[known]
        hits, taken, others = (found.hits, found.positions), found.taken, found.others
        if not len(taken) or not known.any():
            return CachedRead(out_UD, *hits, _NONE, _NONE, None, np.concatenate([taken, others]))
        places, evicted = self._index.place(found.ids[taken])
        self.counts.evicted += evicted
        places += self._first
        self.store.clock_C[places] = found.clock
        return CachedRead(out_UD, *hits, taken, places, found.states, others)

    def start_push(self) -> None:
        """Mark that a step's push begins."""
        self._is_pushing = True

    def pushed(self, push: CachedPush, optimizer: RowOptimizerSpec, write: WrittenPart) -> CachedPush | None:
        """Return the update of cached rows for a push of distinct ids that all shards have applied; None: no update.

        Rows that cannot be updated are dropped. ``positions`` of the push are filled in later.
        """
        makes_way = self.table.spec.max_bytes is not None and write.created > 0  # unknown which rows were evicted
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
        if self.table.spec.admission is not None:  # the shard does not report whether it created a row
            follows &= self.store.is_there_C[positions]
        self._index.remove(push.ids[is_here & ~follows])
        positions = positions[follows]
        self.store.is_there_C[positions] = True
        return (
            CachedPush(push.spec, positions, push.ids[follows], push.gradients_ND[follows]) if len(positions) else None
        )


@dataclass
class CacheLookup:
    """Result of :meth:`RowCache.look_up` for one look-up; places are positions among its ids."""

    cache: RowCache
    ids: Ids
    hits: Ids
    positions: Ids
    """Positions of the hits in the cache."""
    taken: Ids
    """Places of rows to pull with their state, and insert."""
    others: Ids
    """Places of rows to pull."""
    probes: Ids
    """Places of hits that are pulled only for their shard's count of writes."""
    shards: Ids | None
    """Shards of the hits; None: hits are used without a check."""
    clock: int
    states: Array = field(init=False)
    """States [A, W] of the inserted rows, or [A, D]."""
    writes: npt.NDArray[np.int64] = field(init=False)
    """Number of the table's writes on each shard; -1: unknown."""
    _rows: Array = field(init=False)

    def pulls(self) -> list[tuple[Table, Ids, Array]]:
        """Return the two entries that :func:`pull_together` is to read."""
        table, spec = self.cache.table, self.cache.table.spec
        width = table.state_width or spec.dim
        self.states = np.empty((len(self.taken), width), spec.numpy_dtype)
        narrow = np.concatenate([self.others, self.probes])
        self._rows = np.empty((len(narrow), spec.dim), spec.numpy_dtype)
        return [(table, self.ids[self.taken], self.states), (table, self.ids[narrow], self._rows)]

    def arrived(self, writes: Sequence[Sequence[int]], out_UD: Array) -> tuple[int, ...] | None:
        """Write the pulled rows to their places of ``out``.

        Returns the table's number of writes on each shard when the oldest row was read (-1: unknown); None: found rows
        are outdated, pull all.
        """
        one, other = (np.array(each, np.int64) for each in writes)
        cache = self.cache
        counts, spec = cache.counts, cache.table.spec
        self.writes = both = np.where(one < 0, other, one)
        if bool(((one >= 0) & (other >= 0) & (one != other)).any()):
            both[:] = -1  # another write came in between
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
    """Return a cache for each table with its number of ``places``; tables of equal rows, slots and optimizer share an
    array."""
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
    """Clear the caches if the block fails midway, so that no cached row differs from the shards'."""
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
    """Update cached rows after all shards have applied ``write``.

    ``pushes`` are gradients [U, D] of distinct ids [U], in the order of its tables.
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
    """Pull (table, distinct ids [U], out [U, D]) each, as :func:`pull_together`, through ``caches``.

    Returns the writes of each as pull_together does (None: no ids), and, if the caches are on a device other than the
    host, the rows there, [U, D] of the table's type: ``out`` is scratch then. Arguments as of :meth:`RowCache.look_up`.
    """
    found = [
        cache.look_up(ids, oldest=oldest, clock=clock) if len(ids) else None
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
            reads = [caches[number].finish_lookup(found[number], pulls[number][2]) for number in numbers]
            on_device.update(zip(numbers, store.read(reads), strict=True))
    rows = [on_device[number] for number in range(len(pulls))]
    return writes, [own for own in rows if own is not None]
