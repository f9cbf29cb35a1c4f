"""Freezes of a shard: tables held as they were at one moment, written to a snapshot, released.

A freeze lasts while its owner renews its lease or its blocks are being written: the owner may be gone, and every write
would copy rows for it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from geartrain.ams.observe import failpoints
from geartrain.ams.server.freeze.dedup import HeldDedup
from geartrain.ams.storage.snapshot.blocks import BLOCK_BYTES, plan_blocks, write_block, write_dedup
from geartrain.ams.storage.snapshot.manifest import ADMISSION, EXPORT, REMOVED, ROWS, FileEntry
from geartrain.ams.tables.row_table import RowTable
from geartrain.ams.tables.stored_rows import StoredRows
from geartrain.ams.values.errors import Busy, InternalError, SnapshotSuperseded
from geartrain.ams.values.placement import bucket_ranges, buckets_between
from geartrain.ams.values.shard_messages import Done, Freeze, Reply, WriteFrozen, Written

_WRITERS = 2
"""Blocks written in parallel: while one waits for the disk another is hashed and copied, and a third one read."""

_READ_BYTES = 2 << 20
"""Bytes read at a time: a table's writers wait no longer than this takes to copy."""


_REMEMBERED_FREEZES = 256
_WRITTEN_SOON_SECONDS = 0.2


class FrozenTables:
    """Tables of a shard as they were when this was made. Writes go on; :meth:`thaw` ends it.

    If a table knows the rows written since ``parent_id``, only those are held, and ``deltas`` names it. Any other table
    is held whole, so that a snapshot never depends on rows that its parent lacks.
    """

    def __init__(
        self,
        snapshot_id: str,
        tables: Mapping[str, RowTable],
        *,
        dedup: HeldDedup,
        parent_id: str = "",
        export_root: str = "",
    ) -> None:
        self.snapshot_id = snapshot_id
        self.export_root = export_root
        """Folder of an export; empty for a snapshot."""
        self._dedup = dedup
        """Dedup state of the moment."""
        self.specs = tuple(table.spec for table in tables.values())
        """Tables with their settings of the moment."""
        since = {name: table.moments.number_of(parent_id) for name, table in tables.items()}
        self.deltas = tuple(name for name, moment in since.items() if moment is not None)
        self._parent_id = parent_id
        self._tables: dict[str, RowTable] = {}
        self._moments: dict[str, int] = {}
        self._num_rows: dict[str, int] = {}
        self._is_thawed = False
        self._lock = threading.Lock()
        """Lock between a read of rows and the end of the freeze, right after which a table may be frozen anew."""
        try:
            for name, table in tables.items():
                self._num_rows[name] = table.freeze(since=since[name])
                self._tables[name], self._moments[name] = table, table.latest_moment
        except BaseException:
            self.thaw(kept=False)
            raise

    @property
    def tables(self) -> frozenset[str]:
        """Names of the tables that are held."""
        return frozenset(self._tables)

    def write(self, folder: str, shard: int, *, rows_alone: bool = False) -> tuple[FileEntry, ...]:
        """Write every held row once, and the dedup state, synced; may run in parallel to the shard's work.

        Rows are in blocks of about 8 MiB, each of a range of buckets. ``rows_alone``: without slots and dedup state.
        Raises SnapshotFailed if the disk fails, SnapshotSuperseded if the freeze was ended before or meanwhile.
        """
        self._require_frozen()
        entries: list[FileEntry] = []
        write = partial(write_block, folder, snapshot_id=self.snapshot_id, shard=shard)
        if not rows_alone:
            entries.append(write_dedup(folder, snapshot_id=self.snapshot_id, shard=shard, values=self._dedup.to_json()))
        with ThreadPoolExecutor(_WRITERS, thread_name_prefix=f"shard-{shard}-blocks") as pool:
            for name, table in self._tables.items():
                written = 0
                under_way: deque[Future[FileEntry]] = deque()
                for index, (arrays, buckets) in enumerate(self._blocks(table, rows_alone=rows_alone)):
                    written += len(arrays["ids"])
                    kind = EXPORT if rows_alone else ROWS
                    under_way.append(
                        pool.submit(write, kind=kind, table=name, index=index, arrays=arrays, buckets=buckets)
                    )
                    if len(under_way) > _WRITERS:  # its memory is reused for the next block
                        entries.append(under_way.popleft().result())
                entries += [block.result() for block in under_way]
                for index, ids in enumerate(table.frozen_removed()):
                    entries.append(write(kind=REMOVED, table=name, index=index, arrays={"ids": ids}))
                if not rows_alone:
                    entries += self._write_admission(write, table)
                self._require_frozen()
                if written != self._num_rows[name]:
                    raise InternalError(f"{written} of {self._num_rows[name]} frozen rows of table {name!r} were read")
        return tuple(entries)

    def _write_admission(self, write: Callable[..., FileEntry], table: RowTable) -> Iterator[FileEntry]:
        start = index = 0
        while start >= 0:
            with self._lock:
                self._require_frozen()
                found = table.frozen_admission(start, BLOCK_BYTES)
            if found is None:
                return
            counted, start = found
            if index and not len(counted.ranges):
                continue
            arrays: dict[str, npt.NDArray[Any]] = {
                "ranges": counted.ranges,
                "counters": counted.counters,
                "waiting": counted.waiting,
                "num_pushes": np.array([counted.num_pushes], np.int64),
            }
            yield write(kind=ADMISSION, table=table.spec.name, index=index, arrays=arrays)
            index += 1

    def thaw(self, *, kept: bool) -> None:
        """Release the tables; ``kept`` is whether the snapshot was completed. Idempotent."""
        with self._lock:
            if self._is_thawed:
                return
            self._is_thawed = True
            for name, table in self._tables.items():
                table.thaw(kept=kept)
                if kept:
                    table.moments.record(self.snapshot_id, self._moments[name], parent_id=self._parent_id)

    def _require_frozen(self) -> None:
        if self._is_thawed:
            raise SnapshotSuperseded(
                f"snapshot {self.snapshot_id} was given up, or another one of the same tables was begun or a table was "
                "altered before it was written (a shard writes one at a time); take it again"
            )

    def _blocks(
        self, table: RowTable, *, rows_alone: bool
    ) -> Iterator[tuple[dict[str, npt.NDArray[Any]], tuple[int, int]]]:
        """Yield the rows in blocks, each with the range of buckets of its rows.

        The memory of a block is reused after ``_WRITERS`` more blocks: fresh pages cost as much as a copy.
        """
        spec = table.spec
        item_bytes = 8 + spec.row_bytes + (0 if rows_alone else spec.slot_bytes + spec.step_bytes + spec.life_bytes)
        num_ranges, per_block = plan_blocks(self._num_rows[spec.name], item_bytes)
        at_once = max(1, _READ_BYTES // item_bytes)
        memory = deque(StoredRows.empty(spec, per_block, rows_alone=rows_alone) for _ in range(_WRITERS + 1))
        for first, last in bucket_ranges(table.owned_buckets, num_ranges):
            buckets = buckets_between(first, last)
            while num_rows := self._fill(memory[0], table, buckets, at_once):
                yield memory[0].between(0, num_rows).arrays(), (first, last)
                memory.rotate(-1)

    def _fill(self, block: StoredRows, table: RowTable, buckets: npt.NDArray[np.bool_], at_once: int) -> int:
        """Read rows of ``buckets`` until the block is full or there are no more; return their number."""
        start, num_rows = 0, len(block.ids)
        while start < num_rows:
            stop = min(start + at_once, num_rows)
            with self._lock:
                self._require_frozen()
                num_read = len(table.read_frozen(stop - start, buckets, out=block.between(start, stop)).ids)
            if num_read == 0:
                break
            start += num_read
        return start


class Freezes:
    """Freezes of one shard, by snapshot; no table is in two. Used only by the thread that has the shard's turn."""

    def __init__(self, shard: int, lease_seconds: float, clock: Callable[[], float], files: Executor) -> None:
        self._shard = shard
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._files = files
        """Executor that writes blocks, while the shard goes on."""
        self._held: dict[str, FrozenTables] = {}
        self._deadlines: dict[str, float] = {}
        """End of each lease, on the clock."""
        self._writing: dict[str, Future[Reply]] = {}
        """Write of each freeze: a repeated request joins it."""
        self._ended: deque[str] = deque(maxlen=_REMEMBERED_FREEZES)
        """Ids of ended freezes: a late request must not make them hold another moment."""

    @property
    def snapshots(self) -> tuple[str, ...]:
        """Ids of the present freezes."""
        return tuple(self._held)

    def renewed(self, request: Freeze) -> bool:
        """Return whether it is held already, and renew its lease then. Raises SnapshotSuperseded if it has ended."""
        if request.snapshot_id in self._ended:
            raise SnapshotSuperseded(
                f"snapshot {request.snapshot_id} was given up, completed or superseded on shard {self._shard}; take a "
                "new one"
            )
        if request.snapshot_id not in self._held:
            return False
        self._renew(request.snapshot_id)
        return True

    def start(self, request: Freeze, tables: Mapping[str, RowTable], dedup: HeldDedup) -> Done:
        """Freeze ``tables`` with ``dedup``; end other freezes of the same tables, whose owner is gone or has given them
        up. An export ends only those that the same export left behind; if there is another it is refused (Busy).
        """
        for other in list(self._held.values()):
            if not request.tables or not other.tables.isdisjoint(tables):
                if request.export_root and request.export_root != other.export_root:
                    raise Busy(
                        f"shard {self._shard} is writing a snapshot or another export of the same tables; retry",
                        _WRITTEN_SOON_SECONDS,
                    )
                self.thaw(other.snapshot_id, kept=False)
        failpoints.reach("freeze.before")
        self._held[request.snapshot_id] = FrozenTables(
            request.snapshot_id,
            tables,
            dedup=dedup,
            parent_id=request.parent_id,
            export_root=request.export_root,
        )
        self._renew(request.snapshot_id)
        failpoints.reach("freeze.after")
        return Done()

    def write(self, request: WriteFrozen) -> Future[Reply]:
        """Start to write a freeze, or join the write under way. Raises SnapshotSuperseded if it is not held."""
        frozen = self._held.get(request.snapshot_id)
        if frozen is None:
            raise SnapshotSuperseded(
                f"shard {self._shard} holds no freeze of snapshot {request.snapshot_id}: it was given up or "
                "superseded, or a table of it was altered; take the snapshot again"
            )
        self._renew(request.snapshot_id)
        if request.snapshot_id not in self._writing:
            self._writing[request.snapshot_id] = self._files.submit(self._write, frozen, request)
        return self._writing[request.snapshot_id]

    def thaw(self, snapshot_id: str, *, kept: bool) -> None:
        """End a freeze, also one whose request has not arrived yet."""
        frozen = self._held.pop(snapshot_id, None)
        self._deadlines.pop(snapshot_id, None)
        self._writing.pop(snapshot_id, None)
        if frozen is not None:
            frozen.thaw(kept=kept)
        if snapshot_id not in self._ended:
            self._ended.append(snapshot_id)

    def thaw_table(self, name: str) -> None:
        """End the freeze of a table that is dropped, is altered, or gets other rows."""
        for frozen in list(self._held.values()):
            if name in frozen.tables:
                self.thaw(frozen.snapshot_id, kept=False)

    def next_deadline(self) -> float | None:
        """Return the end of the first lease, on the clock; None: nothing is held."""
        return min(self._deadlines.values(), default=None)

    def thaw_expired(self) -> None:
        """End freezes whose lease is over, unless they are being written."""
        now = self._clock()
        for snapshot_id in [held_id for held_id, deadline in self._deadlines.items() if deadline <= now]:
            writing = self._writing.get(snapshot_id)
            if writing is not None and not writing.done():
                self._renew(snapshot_id)
            else:
                self.thaw(snapshot_id, kept=False)

    def _renew(self, snapshot_id: str) -> None:
        self._deadlines[snapshot_id] = self._clock() + self._lease_seconds

    def _write(self, frozen: FrozenTables, request: WriteFrozen) -> Reply:
        entries = frozen.write(request.folder, self._shard, rows_alone=request.rows_alone)
        files = tuple(entry.model_dump_json() for entry in entries)
        return Written(files=files, deltas=frozen.deltas, tables=frozen.specs)
