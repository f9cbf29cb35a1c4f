"""Restore of a shard's tables from a snapshot: blocks are read in the background, rows are written in its turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt

from geartrain.ams.kernels._core import CompletedWrites, SyncGroups, Turn
from geartrain.ams.observe import failpoints
from geartrain.ams.server.freeze.dedup import (
    RestoredDedup,
    restore_clocks,
    restore_steps,
    restored_expiry,
    writes_before,
)
from geartrain.ams.server.freeze.freezes import Freezes
from geartrain.ams.server.tables import RestoreWork, ShardTable, ShardTables
from geartrain.ams.storage.snapshot.chain import Layer, is_among, layers_of
from geartrain.ams.storage.snapshot.folder import Snapshot, open_snapshot
from geartrain.ams.storage.snapshot.manifest import ADMISSION, DEDUP
from geartrain.ams.tables.counted_ids import CountedIds
from geartrain.ams.tables.row_table import RowTable
from geartrain.ams.tables.stored_rows import StoredRows
from geartrain.ams.values.errors import InvalidArgument, SpecMismatch, TableExists, TableNotFound
from geartrain.ams.values.placement import NUM_BUCKETS, bucket_of
from geartrain.ams.values.shard_messages import Done, Reply, Restore
from geartrain.ams.values.specs import Ids, TableSpec


class Restores:
    """Restores of one shard: rows of tables, completed writes and sync groups."""

    def __init__(
        self,
        owned_buckets: Ids,
        tables: ShardTables,
        freezes: Freezes,
        completed_writes: CompletedWrites,
        groups: SyncGroups,
        *,
        turn: Turn,
        files: Executor,
    ) -> None:
        """``turn`` is the shard's, ``files`` the executor that reads blocks."""
        self._owned_buckets = owned_buckets
        self._tables = tables
        self._freezes = freezes
        self._completed_writes = completed_writes
        self._groups = groups
        self._turn = turn
        self._files = files

    def start(self, request: Restore) -> Future[Reply]:
        """Start to restore tables, or join the same restore, under way or done, unless they were written to since.

        Called by the thread that has the turn. Raises TableNotFound, and InvalidArgument unless each table or none has
        an incarnation.
        """
        tables = {name: self._tables.find(name) for name in request.tables}
        meant = request.incarnations or (0,) * len(request.tables)
        if len(meant) != len(request.tables):
            raise InvalidArgument(f"{len(request.tables)} tables to restore have {len(meant)} incarnations; one each")
        for name, incarnation in zip(request.tables, meant, strict=True):
            tables[name].rows.served.require_meant(incarnation)
        names = frozenset(tables)
        for known in [table.restore for table in tables.values()][:1]:
            is_same = known is not None and (known.folder, known.tables) == (request.folder, names)
            if is_same and all(table.restore is known and not table.rows.served.writes for table in tables.values()):
                assert known is not None
                if not known.has_failed:
                    return known.reply
        reply: Future[Reply] = self._files.submit(self._restore, request.folder, tables)
        for table in tables.values():
            table.restore = RestoreWork(request.folder, names, reply)
        return reply

    def _restore(self, folder: str, tables: dict[str, ShardTable]) -> Reply:
        rows = {name: table.rows for name, table in tables.items()}
        turn = _TurnUnlessWritten(self._turn, tables, self._tables)

        def begin() -> None:
            with turn:
                self._mark_begun(folder, tables)

        num_read = restore_tables(folder, rows, self._owned_buckets, turn, begin)
        sources = dedup_for(folder, self._owned_buckets)
        if not tables:  # only a check whether it can be read here
            return Done()
        dedup = RestoredDedup(sources, rows)
        with turn:
            dedup.apply(self._completed_writes, self._groups)
            restore_steps(sources, rows)
            restore_clocks(sources, rows)
            for name, table in tables.items():
                if table.spec.expiry is not None:
                    table.expiry_state = restored_expiry(sources, name, table.rows.clock)
                table.rows.served.writes_before = writes_before(sources, name)
                table.is_whole = True
                table.update_engine()
        return Done(created=num_read)

    def _mark_begun(self, folder: str, tables: dict[str, ShardTable]) -> None:
        """Mark the tables as being restored, all of them or, if one cannot be, none."""
        for name, table in tables.items():
            if table.restored_from not in ("", folder):
                raise TableExists(
                    f"table {name!r} was restored from {table.restored_from}; drop it and restore it anew, or two "
                    "moments would be mixed"
                )
        for name, table in tables.items():
            if table.restored_from and table.is_whole:
                continue
            # Freezes and moments from before are of a table without these rows; a restore that failed in
            # another table has recorded a moment of this one, which is read again.
            self._freezes.thaw_table(name)
            table.rows.moments.forget_all()
            table.restored_from, table.is_whole = folder, False
            table.update_engine()


class _TurnUnlessWritten:
    """Turn of a shard for restored rows. Raises TableExists for a table written to, TableNotFound for one dropped.

    A repeated restore request may arrive long after training has continued; it must not undo that.
    """

    def __init__(self, turn: Turn, tables: dict[str, ShardTable], held: ShardTables) -> None:
        self._turn = turn
        self._tables = tables
        self._held = held
        """All present tables of the shard."""

    def __enter__(self) -> None:
        self._turn.acquire()
        dropped = [name for name, table in self._tables.items() if self._held.get(name) is not table]
        if dropped:
            self._turn.release()
            raise TableNotFound(f"table {dropped[0]!r} was dropped while it was restored; restore it again")
        written = [name for name, table in self._tables.items() if table.rows.served.writes]
        if written:
            self._turn.release()
            raise TableExists(
                f"table {written[0]!r} has been written to since it was made; drop it and restore it anew, or its "
                "writes would be lost"
            )

    def __exit__(self, *_: object) -> None:
        self._turn.release()


def restore_tables(
    folder: str,
    tables: Mapping[str, RowTable],
    owned_buckets: Ids,
    turn: AbstractContextManager[Any],
    begin: Callable[[], None],
) -> int:
    """Write this shard's rows of ``tables`` from a snapshot and those it adds to.

    Returns the number of owned rows that were read: in a chain, some of them are superseded by others. Every block is
    checked before any of its rows is written, and written while holding ``turn``. ``begin`` is called once it is known
    that they can be written. Raises SnapshotError, SpecMismatch, and what ``turn`` and ``begin`` raise.
    """
    snapshot = open_snapshot(folder)
    chain = snapshot.chain()
    specs = {spec.name: spec for spec in (TableSpec.from_dict(spec) for spec in snapshot.manifest.tables)}
    for name, table in tables.items():
        if name not in specs:
            raise SpecMismatch(f"table {name!r} is not in the snapshot {str(folder)!r}; it has {sorted(specs)}")
        if other := table.spec.fixed_unlike(specs[name]):
            raise SpecMismatch(f"table {name!r} is not as in the snapshot: its {other}")
    for spec in specs.values() if not tables else ():  # only a check: the tables to be replaced still exist
        if spec.expiry is not None:
            spec.expiry.require_usable()
    begin()
    owned = np.zeros(NUM_BUCKETS, np.bool_)
    owned[owned_buckets] = True
    num_read = 0
    for name, table in tables.items():
        num_read += _restore_layers(table, layers_of(chain, name), owned, turn)
        is_counted_so = table.spec.admission == specs[name].admission
        for counted in counted_ids(snapshot, name, owned_buckets) if is_counted_so else ():
            with turn:
                table.restore_admission(counted, owned)
        with turn:
            # A table with moments may hold other rows, which count as written only since then; one that evicted rows
            # lacks some of the snapshot's.
            if not table.moments and not table.num_evicted:
                table.moments.record(snapshot.manifest.moment_id, table.record_moment())
    return num_read


def _restore_layers(
    table: RowTable, layers: Sequence[Layer], owned: npt.NDArray[np.bool_], turn: AbstractContextManager[Any]
) -> int:
    """Write the rows of a chain, of the newest layer first, in buckets ``owned`` [4096]; return how many were read.

    Without ``max_bytes`` the oldest are written first, and later ones overwrite them; with it, where rows may be
    evicted, superseded rows are not written at all.
    """
    is_dense, is_bounded = table.spec.num_rows is not None, table.spec.max_bytes is not None
    superseded, num_read = np.empty(0, np.int64), 0
    for layer in layers if is_bounded else reversed(layers):
        found = [superseded]
        for removed in layer.removed_ids(owned, dense=is_dense):
            if is_bounded:
                found.append(removed)
            else:
                with turn:
                    table.remove(removed)
        for entry in layer.blocks(owned):
            arrays = layer.snapshot.read(entry)
            buckets = bucket_of(arrays["ids"], dense=is_dense)
            num_read += int(np.count_nonzero(owned[buckets]))
            mine = owned[buckets] & layer.buckets[buckets]
            if is_bounded:
                mine &= ~is_among(arrays["ids"], superseded)
                found.append(arrays["ids"][mine])
            if not mine.all():
                arrays = {kind: array[mine] for kind, array in arrays.items()}
            failpoints.reach("restore.block.before")
            with turn:
                table.restore(*StoredRows.of(arrays))
            failpoints.reach("restore.block.after")
        superseded = np.sort(np.concatenate(found))
    return num_read


def counted_ids(snapshot: Snapshot, table: str, owned_buckets: Ids) -> Iterator[CountedIds]:
    """Yield the counters of a table's admission on the shards that wrote rows of these buckets, block by block. Raises
    SnapshotError."""
    sources = set(snapshot.manifest.bucket_shards[owned_buckets].tolist())
    for entry in snapshot.manifest.files:
        if entry.kind == ADMISSION and entry.table == table and entry.shard in sources:
            arrays = snapshot.read(entry)
            yield CountedIds(int(arrays["num_pushes"][0]), arrays["ranges"], arrays["counters"], arrays["waiting"])


def dedup_for(folder: str, owned_buckets: Ids) -> list[dict[str, Any]]:
    """Return the dedup state of the shards that wrote rows of these buckets. Raises SnapshotError."""
    snapshot = open_snapshot(folder)
    sources = set(snapshot.manifest.bucket_shards[owned_buckets].tolist())
    return [
        snapshot.read_dedup(entry)
        for entry in snapshot.manifest.files
        if entry.kind == DEDUP and entry.shard in sources
    ]
