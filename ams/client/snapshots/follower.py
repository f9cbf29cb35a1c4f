"""Read-only copy of an exported table, updated from the files of its versions."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from geartrain.ams.storage.export.versions import increments_to, newest_version
from geartrain.ams.storage.snapshot.chain import Buckets
from geartrain.ams.storage.snapshot.folder import Snapshot
from geartrain.ams.storage.snapshot.manifest import EXPORT, REMOVED, FileEntry
from geartrain.ams.storage.snapshot.store import place
from geartrain.ams.tables.row_table import RowTable
from geartrain.ams.values.arrays import ids_array, like
from geartrain.ams.values.errors import InvalidArgument, SnapshotDamaged, SnapshotNotFound, TableNotFound
from geartrain.ams.values.interrupts import uninterrupted
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.placement import NUM_BUCKETS
from geartrain.ams.values.specs import Ids, Rows, TableSpec
from geartrain.ams.values.text import quoted

Arrays = Mapping[str, npt.NDArray[Any]]

_COPIED_ROWS = 65_536


class FollowedTables:
    """Tables of an export at one version, all of one moment. Thread-safe."""

    def __init__(self, root: str | Path, tables: Sequence[str] | None = None) -> None:
        """Read the newest version. ``tables`` are those to keep; None: all.

        Raises SnapshotNotFound if there is none, TableNotFound, and as :meth:`refresh`.
        """
        self.root = place(root)
        self._wanted = None if tables is None else tuple(tables)
        self._tables: dict[str, RowTable] = {}
        self._at: Snapshot | None = None
        self._refreshing = threading.Lock()
        self._copying = threading.Lock()
        """Held while a whole table is read, by one thread at a time."""
        self._readers = _Readers()
        if self.refresh() is None:
            raise SnapshotNotFound(f"{root} holds no version yet: geartrain export TABLE {root} writes one")

    @property
    def version(self) -> int:
        """Number of the version of the rows."""
        assert self._at is not None
        return self._at.manifest.step

    @property
    def created(self) -> float:
        """Unix time at which that version was written, in seconds."""
        assert self._at is not None
        return self._at.manifest.created

    @property
    def specs(self) -> dict[str, TableSpec]:
        """Spec of each table, without its optimizer."""
        return {name: table.spec for name, table in self._tables.items()}

    def refresh(self) -> int | None:
        """Update to the newest version; return its number, or None if it is already here.

        Versions between are applied in order, each atomically: concurrent pulls see rows of one version. Costs a
        listing and a manifest if there is nothing new. If a file is missing or damaged, raises SnapshotDamaged, which
        names it, and the rows stay at the last version that was applied. Raises SnapshotFailed if the folder cannot be
        read, TableNotFound if a table is no longer in it. After Ctrl-C it completes in the background.
        """
        return uninterrupted(self._refresh)

    def _refresh(self) -> int | None:
        with self._refreshing:
            before = self._at
            try:
                self._follow()
            except SnapshotDamaged:  # or it was compacted and removed since its successor was looked for
                if not self._skip_to_base():
                    raise
            return None if self._at is before else self.version

    def pull(self, table: str, ids: Any) -> Any:
        """Read rows: [N] -> [N, dim] of the table's dtype; an absent row has its initial value.

        Returns a numpy array or torch tensor, as ``ids`` is. Raises InvalidIds.
        """
        checked = ids_array(ids, self._table(table).spec.num_rows)
        return like(self.pull_together({table: checked})[table], ids)

    def pull_together(self, tables: Mapping[str, Ids]) -> dict[str, Rows]:
        """Read rows of several tables, all of one version: ids [N] of each -> rows [N, dim]."""
        rows = {}
        with self._readers.reading():
            for name, ids in tables.items():
                found = self._table(name)
                rows[name] = np.empty((len(ids), found.spec.dim), found.spec.numpy_dtype)
                found.pull(ids, rows[name])
        return rows

    def num_rows(self, table: str) -> int:
        """Return the number of rows present."""
        return self._table(table).num_present

    def rows(self, table: str) -> tuple[Ids, Rows]:
        """Return all rows present: ids [N], ascending, and rows [N, dim]. A copy."""
        with self._copying, self._readers.reading():
            blocks = list(_rows_of(self._table(table), None))
            spec = self._table(table).spec
        ids = np.concatenate([np.empty(0, np.int64), *(ids for ids, _ in blocks)])
        rows = np.concatenate([np.empty((0, spec.dim), spec.numpy_dtype), *(rows for _, rows in blocks)])
        order = np.argsort(ids)
        return ids[order], rows[order]

    def _table(self, name: str) -> RowTable:
        found = self._tables.get(name)
        if found is None:
            known = ", ".join(map(repr, self._tables))
            raise TableNotFound(f"there is no table {name!r} in {self.root}; it has {known}")
        return found

    def _follow(self) -> None:
        newest = newest_version(self.root)
        moment = "" if self._at is None else self._at.manifest.moment_id
        if newest is None or newest.manifest.moment_id == moment:
            return
        for step in increments_to(newest, moment):
            self._apply(step)

    def _skip_to_base(self) -> bool:
        """Continue from a base newer than the present version, whatever lies between; return whether there is one."""
        newest = newest_version(self.root)
        steps = [] if newest is None else increments_to(newest, "")
        if not steps or (self._at is not None and steps[0].manifest.step <= self.version):
            return False
        for step in steps:
            self._apply(step)
        return True

    def _apply(self, step: Snapshot) -> None:
        specs = {spec.name: spec for spec in map(spec_of_rows, step.manifest.tables)}
        names = list(specs) if self._wanted is None else self._wanted
        if missing := [name for name in names if name not in specs]:
            raise TableNotFound(
                f"there is no table {missing[0]!r} in version {step.manifest.step} of {self.root}; it has "
                f"{', '.join(map(repr, specs))}"
            )
        made: dict[str, RowTable] = {}
        removed: dict[str, Ids] = {}
        blocks: dict[str, list[Arrays]] = {}
        for name in names:  # all are read, and have room, before any changes
            table = self._tables.get(name)
            replaced = _replaced(step, name)
            if table is None or table.spec != specs[name] or replaced.any():
                made[name] = _made_anew(step, specs[name], table, ~replaced, self._copying)
            else:
                removed[name] = _removed_by(step, name)
                blocks[name] = list(_blocks_of(step, name))
                table.reserve(np.concatenate([np.empty(0, np.int64), *(block["ids"] for block in blocks[name])]))
        with self._readers.alone():
            for name, gone in removed.items():
                self._tables[name].remove(gone)
            for name, changed in blocks.items():
                for block in changed:
                    self._tables[name].restore(block["ids"], block["rows"], None)
            self._tables = {name: made.get(name) or self._tables[name] for name in names}
            self._at = step


class TableFollower:
    """A read-only copy of one exported table, in any process: no cluster is needed. Thread-safe.

    follower = TableFollower("serving/item")
    while follower.refresh() is None: ...
    rows_ND = follower.pull(ids)
    """

    def __init__(self, root: str | Path, table: str | None = None) -> None:
        """Read the newest version in the folder or URL ``root``; ``table`` names the one to keep if there are several.

        Raises SnapshotNotFound if there is no version, TableNotFound, InvalidArgument if ``table`` must be named, and
        as :meth:`refresh`.
        """
        if table is None:
            newest = newest_version(root)
            names = [] if newest is None else [str(spec["name"]) for spec in newest.manifest.tables]
            if len(names) > 1:
                raise InvalidArgument(f"{root} has tables {', '.join(map(repr, names))}; say which: table={names[0]!r}")
            table = names[0] if names else None
        elif not isinstance(table, str):
            raise InvalidArgument(f"table is {quoted(table)}; it must be a name, or None where there is one table")
        self._followed = FollowedTables(root, None if table is None else [table])
        self._name = table or next(iter(self._followed.specs))

    @property
    def spec(self) -> TableSpec:
        """Spec of the table: its name, dim, dtype, initial values."""
        return self._followed.specs[self._name]

    @property
    def version(self) -> int:
        """Number of the version of the rows."""
        return self._followed.version

    @property
    def created(self) -> float:
        """Unix time at which that version was written, in seconds."""
        return self._followed.created

    def refresh(self) -> int | None:
        """Update to the newest version; return its number, or None if it is already here.

        Versions between are applied in order, each atomically: concurrent pulls see rows of one version. If deltas no
        longer lead to it, its base is read beside the present rows. Costs a listing and a manifest if there is nothing
        new. If a file is missing or damaged, raises SnapshotDamaged, which names it, and the rows stay at the last
        version that was applied. Raises SnapshotFailed if the folder cannot be read.
        """
        return self._followed.refresh()

    def pull(self, ids: Any) -> Any:
        """Read rows: [N] -> [N, dim] of the table's dtype; an absent row has its initial value, as in the trained
        table. Returns a numpy array or torch tensor, as ``ids`` is. Raises InvalidIds.
        """
        return self._followed.pull(self._name, ids)

    def rows(self) -> tuple[Ids, Rows]:
        """Return all rows present: ids [N], ascending, and rows [N, dim]. A copy."""
        return self._followed.rows(self._name)

    def __len__(self) -> int:
        return self._followed.num_rows(self._name)

    def __repr__(self) -> str:
        return (
            f"TableFollower({str(self._followed.root)!r}, {self._name!r}, version {self.version}, {len(self):,} rows)"
        )


class _Readers:
    """Reader-writer lock: any number of readers, or one writer, which new readers do not keep waiting."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._reading = 0
        self._is_wanted = False

    @contextmanager
    def reading(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_wanted)
            self._reading += 1
        try:
            yield
        finally:
            with self._changed:
                self._reading -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_wanted)
            self._is_wanted = True
            try:
                self._changed.wait_for(lambda: self._reading == 0)
            except BaseException:
                self._is_wanted = False
                self._changed.notify_all()
                raise
        try:
            yield
        finally:
            with self._changed:
                self._is_wanted = False
                self._changed.notify_all()


def spec_of_rows(fields: Mapping[str, Any]) -> TableSpec:
    """Return the spec of a table's rows alone from its spec in JSON: no training, no admission, no expiry."""
    spec = TableSpec.from_dict(dict(fields))
    rows = {name: getattr(spec, name) for name in ("name", "dim", "num_rows", "initializer", "seed", "dtype")}
    return TableSpec(optimizer=SGD(1.0), **rows)


def _replaced(step: Snapshot, table: str) -> Buckets:
    """Return the buckets in which a version replaces all earlier rows: those of shards that wrote all of their rows."""
    return ~np.isin(step.manifest.bucket_shards, step.manifest.deltas.get(table, []))


def _blocks_of(step: Snapshot, table: str) -> Iterator[Arrays]:
    """Yield the blocks of a version, each verified when it is read."""
    return map(step.read, _entries(step, EXPORT, table))


def _entries(step: Snapshot, kind: str, table: str) -> list[FileEntry]:
    return [entry for entry in step.manifest.files if entry.kind == kind and entry.table == table]


def _removed_by(step: Snapshot, table: str) -> Ids:
    """Return ids of rows removed since the version before; rows that exist again are among the blocks."""
    removed = [step.read(entry)["ids"] for entry in _entries(step, REMOVED, table)]
    return np.concatenate([np.empty(0, np.int64), *removed])


def _made_anew(
    step: Snapshot, spec: TableSpec, before: RowTable | None, counting: Buckets, copying: threading.Lock
) -> RowTable:
    """Return a table with the rows of ``before`` in the buckets ``counting``, read under ``copying``, and a
    version's."""
    table = RowTable(spec, np.arange(NUM_BUCKETS))
    table.moments.forget_all()  # nobody asks for earlier changes
    if spec.num_rows is None:  # allocates all rows at once; any absent ids will do
        table.reserve(np.arange(sum(entry.num_rows for entry in _entries(step, EXPORT, spec.name))))
    if before is not None and before.spec.is_same_table(spec) and counting.any():
        with copying:
            for ids, rows in _rows_of(before, counting):
                table.restore(ids, rows, None)
        table.remove(_removed_by(step, spec.name))
    for block in _blocks_of(step, spec.name):
        table.restore(block["ids"], block["rows"], None)
    return table


def _rows_of(table: RowTable, buckets: Buckets | None) -> Iterator[tuple[Ids, Rows]]:
    """Yield the rows of some buckets, in blocks. Nothing is written to the table meanwhile."""
    table.freeze()
    try:
        while len((part := table.read_frozen(_COPIED_ROWS, buckets)).ids):
            yield part.ids, part.rows
    finally:
        table.thaw(kept=False)
