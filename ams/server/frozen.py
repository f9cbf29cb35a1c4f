"""Snapshots, seen from one shard: its tables held as they were at one moment, blocks written, blocks read back."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt

from geartrain.ams.observe import failpoints
from geartrain.ams.storage.snapshot.blocks import BLOCK_BYTES, write_block, write_marks
from geartrain.ams.storage.snapshot.chain import layers_of
from geartrain.ams.storage.snapshot.folder import open_snapshot
from geartrain.ams.storage.snapshot.manifest import MARKS, ROWS, FileEntry
from geartrain.ams.tables.row_table import RowTable, StoredRows
from geartrain.ams.values.errors import InternalError, SnapshotFailed, SpecMismatch
from geartrain.ams.values.placement import NUM_BUCKETS, bucket_of, even_placement
from geartrain.ams.values.specs import Ids, TableSpec

_WRITERS = 2
"""Blocks written side by side: while one waits for the disk another is copied and hashed."""

_READ_BYTES = 2 << 20
"""Read at a time: a table's writers wait no longer than this takes to copy."""


class FrozenTables:
    """Tables of a shard as they were when this was made. Writes go on; :meth:`thaw` ends it.

    Of a table whose last kept freeze is ``parent_id``, only the rows written since are held: they are named in
    ``deltas``. Any other table is held whole, so that a snapshot never rests on rows that its parent has not.
    """

    def __init__(
        self, snapshot_id: str, tables: Mapping[str, RowTable], *, marks: Mapping[str, Any], parent_id: str = ""
    ) -> None:
        self.snapshot_id = snapshot_id
        self._marks = marks
        """JSON values that belong to the moment."""
        self.deltas = tuple(name for name, table in tables.items() if parent_id and table.kept_as == parent_id)
        self._tables: dict[str, RowTable] = {}
        self._num_rows: dict[str, int] = {}
        self._is_thawed = False
        self._lock = threading.Lock()
        """Between a read of rows and the end of the freeze: a table may be frozen anew, for another, right after it."""
        try:
            for name, table in tables.items():
                self._num_rows[name] = table.freeze(only_touched=name in self.deltas)
                self._tables[name] = table
        except BaseException:
            self.thaw(kept=False)
            raise

    @property
    def tables(self) -> frozenset[str]:
        """Names of the tables that are held."""
        return frozenset(self._tables)

    def write(self, folder: str, shard: int) -> tuple[FileEntry, ...]:
        """Write every held row once, in blocks of about 8 MiB, and the marks, synced; may run beside the shard's work.

        Raises SnapshotFailed if the disk fails, or the freeze was ended before or meanwhile.
        """
        self._require_frozen()
        entries = [write_marks(folder, snapshot_id=self.snapshot_id, shard=shard, values=self._marks)]
        with ThreadPoolExecutor(_WRITERS, thread_name_prefix=f"shard-{shard}-blocks") as pool:
            for name, table in self._tables.items():
                written = 0
                under_way: deque[Future[FileEntry]] = deque()
                for index, arrays in enumerate(self._blocks(table)):
                    written += len(arrays["ids"])
                    under_way.append(
                        pool.submit(
                            write_block,
                            folder,
                            snapshot_id=self.snapshot_id,
                            kind=ROWS,
                            table=name,
                            shard=shard,
                            index=index,
                            arrays=arrays,
                        )
                    )
                    if len(under_way) == _WRITERS:  # no more blocks in memory than are being written
                        entries.append(under_way.popleft().result())
                entries += [block.result() for block in under_way]
                self._require_frozen()
                if written != self._num_rows[name]:
                    raise InternalError(f"{written} of {self._num_rows[name]} frozen rows of table {name!r} were read")
        return tuple(entries)

    def thaw(self, *, kept: bool) -> None:
        """Let go of the moment; ``kept`` says whether the snapshot was completed. Idempotent."""
        with self._lock:
            if self._is_thawed:
                return
            self._is_thawed = True
            for table in self._tables.values():
                table.thaw(kept=kept)
                if kept:
                    table.kept_as = self.snapshot_id

    def _require_frozen(self) -> None:
        if self._is_thawed:
            raise SnapshotFailed(
                f"snapshot {self.snapshot_id} was given up, or another one of the same tables was begun before it was "
                "written (a shard writes one at a time); take it again"
            )

    def _read(self, table: RowTable, most: int) -> StoredRows:
        with self._lock:
            self._require_frozen()
            return table.read_frozen(most)

    def _blocks(self, table: RowTable) -> Iterator[dict[str, npt.NDArray[Any]]]:
        spec = table.spec
        item_bytes = 8 + spec.row_bytes + spec.slot_bytes + spec.step_bytes
        most, per_block = max(1, _READ_BYTES // item_bytes), max(1, BLOCK_BYTES // item_bytes)
        parts: list[StoredRows] = []
        held = 0
        while True:
            part = self._read(table, min(most, per_block - held))
            held += len(part.ids)
            if len(part.ids):
                parts.append(part)
            if parts and (held == per_block or not len(part.ids)):
                yield _joined(parts)
                parts, held = [], 0
            if not len(part.ids):
                return


def marks_for(folder: str, owned_buckets: Ids) -> list[dict[str, Any]]:
    """Return the marks of the shards that wrote rows of these buckets. Raises SnapshotError."""
    snapshot = open_snapshot(folder)
    sources = set(even_placement(snapshot.manifest.num_shards)[owned_buckets].tolist())
    return [
        snapshot.read_marks(entry)
        for entry in snapshot.manifest.files
        if entry.kind == MARKS and entry.shard in sources
    ]


def _joined(parts: list[StoredRows]) -> dict[str, npt.NDArray[Any]]:
    columns = {name: [getattr(part, name) for part in parts] for name in StoredRows._fields}
    return {name: np.concatenate(column) for name, column in columns.items() if column[0] is not None}


def restore_tables(
    folder: str,
    tables: Mapping[str, RowTable],
    owned_buckets: Ids,
    turn: AbstractContextManager[Any],
    begin: Callable[[], None],
) -> int:
    """Write the rows of ``tables`` that a snapshot, and those it adds to, have and this shard owns.

    Returns the number of owned rows that it read: of a chain, some of them are superseded by others. Every block is
    checked before any of its rows is written, and written while holding ``turn``. ``begin`` is called once it is known
    that they can be written. Raises SnapshotError, SpecMismatch, and what ``turn`` and ``begin`` raise.
    """
    snapshot = open_snapshot(folder)
    chain = snapshot.chain()
    specs = {spec.name: spec for spec in (TableSpec.from_dict(spec) for spec in snapshot.manifest.tables)}
    for name, table in tables.items():
        if name not in specs:
            raise SpecMismatch(f"table {name!r} is not in the snapshot {str(folder)!r}; it has {sorted(specs)}")
        if specs[name] != table.spec:
            raise SpecMismatch(f"table {name!r} is not as in the snapshot: its {table.spec.unlike(specs[name])}")
    begin()
    owned = np.zeros(NUM_BUCKETS, np.bool_)
    owned[owned_buckets] = True
    num_read = 0
    for name, table in tables.items():
        for layer in reversed(layers_of(chain, name)):  # the oldest first: what comes later holds
            for entry in layer.blocks(owned):
                arrays = layer.snapshot.read(entry)
                buckets = bucket_of(arrays["ids"], dense=table.spec.num_rows is not None)
                num_read += int(np.count_nonzero(owned[buckets]))
                mine = owned[buckets] & layer.buckets[buckets]
                if not mine.all():
                    arrays = {kind: array[mine] for kind, array in arrays.items()}
                failpoints.reach("restore.block.before")
                with turn:
                    table.restore(arrays["ids"], arrays["rows"], arrays.get("slots"), arrays.get("steps"))
                failpoints.reach("restore.block.after")
        with turn:
            # A table that was kept before may hold other rows, which count as written only since then.
            table.kept_as = table.kept_as or snapshot.manifest.moment_id
    return num_read
