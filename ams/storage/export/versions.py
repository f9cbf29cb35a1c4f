"""The folder of an export: versions of tables, each a whole base or what was written since an earlier one.

    ROOT/version-000000001/              a base: all rows, without the optimizer's state
    ROOT/version-000000002/ …            adds to an earlier version, its parent
    ROOT/version-000000002-whole/        the same moment as version 2, compacted: a base

Each is a snapshot of :mod:`geartrain.ams.storage.snapshot`: it is there once its manifest is, with the hash of every
file. So the newest version is known from one listing of names and one manifest, and whoever has version n goes from
the newest to its parents until it comes to what it has, or to a base.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from geartrain.ams.storage.snapshot.compaction import compact
from geartrain.ams.storage.snapshot.folder import Snapshot, open_snapshot
from geartrain.ams.storage.snapshot.store import Place, name_of, parent_of, place, store_of, within
from geartrain.ams.values.errors import (
    InvalidArgument,
    SnapshotDamaged,
    SnapshotFailed,
    SnapshotNotFound,
)

_WHOLE = "-whole"
_NAME = re.compile(rf"version-([0-9]{{9}})({_WHOLE})?")


def version_name(number: int) -> str:
    """Name of the folder of a version, compacted ones apart."""
    return f"version-{number:09}"


def newest_version(root: str | Path) -> Snapshot | None:
    """Return the newest version of an export, compacted where it is; None: there is none yet.

    Costs a listing and one manifest. Raises InvalidArgument for a folder of snapshots that are no versions,
    SnapshotDamaged if the newest one's manifest is damaged, SnapshotFailed if the folder cannot be read.
    """
    found, others = _names(place(root))
    for name in found:
        folder = within(place(root), name)
        if not store_of(folder).exists(folder):  # below a URL: being written, or given up
            continue
        return _opened(folder)
    if others:
        raise InvalidArgument(f"{root} holds snapshots ({others[0]!r}); an export needs a folder of its own")
    return None


def version_names(root: str | Path) -> list[str]:
    """Return the names of the folders of all versions, the newest first. Raises SnapshotFailed."""
    return _names(place(root))[0]


def number_of(name: str) -> int:
    """Return the number of the version that lies in a folder of this name."""
    return int(name[len("version-") :][:9])


def newest_number(root: str | Path) -> int:
    """Return the number of the newest version, whatever state it is in; 0: there is none. Raises SnapshotFailed."""
    return max(map(number_of, _names(place(root))[0]), default=0)


def version(root: str | Path, number: int) -> Snapshot:
    """Return version ``number``, compacted where it is. Raises SnapshotNotFound, naming those there are."""
    found, _ = _names(place(root))
    for name in found:
        if number_of(name) == number:
            return _opened(within(place(root), name))
    known = sorted({number_of(name) for name in found})
    there = f"versions {known[0]} to {known[-1]}" if known else "no version"
    raise SnapshotNotFound(f"version {number} is not in {root}, which holds {there}")


def increments_to(newest: Snapshot, moment_id: str) -> list[Snapshot]:
    """Return the way to ``newest`` from the moment that somebody has (empty: from nothing), in the order in which
    versions are applied; the first one may be a base, which takes the place of all rows.

    Deltas are preferred to a base of the same moment, which is taken where they do not lead back to what is there.
    Raises SnapshotDamaged if neither does.
    """
    steps: list[Snapshot] = []
    base: list[Snapshot] | None = None
    at, seen = newest, {newest.manifest.id}
    while at.manifest.moment_id != moment_id:
        steps.append(at)
        parent = at.manifest.parent
        if parent is None:
            base = base or list(steps)  # the newest one
            older = _compaction_source(at) if moment_id else None
            if older is None:
                return base[::-1]
            steps.pop()
        else:
            try:
                older = _opened(within(parent_of(at.path), parent.name))
                if older.manifest.id != parent.id:
                    raise SnapshotDamaged(
                        f"{at.path} is damaged: it adds to version {parent.id}, but {older.path} is another one"
                    )
            except SnapshotDamaged:
                if base is None:
                    raise
                return base[::-1]
        if older.manifest.id in seen:
            raise SnapshotDamaged(f"{at.path} is damaged: it adds to itself")
        seen.add(older.manifest.id)
        at = older
    return steps[::-1]


def compact_export(root: str | Path) -> Snapshot:
    """Write the newest version once more, as a base; return it. The deltas stay for those who are on the way.

    One that is a base is returned as it is. Costs and errors are those of
    :func:`geartrain.ams.storage.snapshot.compaction.compact`; SnapshotNotFound if there is no version.
    """
    newest = newest_version(root)
    if newest is None:
        raise SnapshotNotFound(f"{root} holds no version of an export; 'geartrain export TABLE {root}' writes one")
    if newest.manifest.parent is None:
        return newest
    return open_snapshot(compact(root, newest.name))


def _opened(folder: Place) -> Snapshot:
    try:
        return open_snapshot(folder)
    except SnapshotNotFound as exc:
        raise SnapshotDamaged(f"{folder} is missing: a version was removed that another one adds to") from exc


def _compaction_source(whole: Snapshot) -> Snapshot | None:
    """The version that a base was compacted from, if it is there still."""
    name = name_of(whole.path)
    if whole.manifest.moment is None or not name.endswith(_WHOLE):
        return None
    folder = within(parent_of(whole.path), name.removesuffix(_WHOLE))
    try:
        found = open_snapshot(folder)
    except (SnapshotNotFound, SnapshotDamaged):
        return None
    return found if found.manifest.moment_id == whole.manifest.moment_id else None


def _names(root: Place) -> tuple[list[str], Sequence[str]]:
    """Names of versions, the newest first and compacted ones before those that they were made of, and of others."""
    store = store_of(root)
    try:
        names = store.names(root)
        found = [name for name in names if _NAME.fullmatch(name)]
        others = [] if found else store.snapshots(root)
    except (FileNotFoundError, NotADirectoryError):
        return [], []
    except OSError as exc:
        raise SnapshotFailed(f"the versions in {root} cannot be listed: {exc}. Give the folder of an export") from exc
    return sorted(found, reverse=True), others
