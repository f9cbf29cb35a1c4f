"""Folder of an export: versions of tables, each a base (all rows) or an increment over an earlier version.

    ROOT/version-000000001/              a base: all rows, without the optimizer's state
    ROOT/version-000000002/ …            an increment over an earlier version, its parent
    ROOT/version-000000002-whole/        version 2 compacted: a base with the same rows

A version is a snapshot of :mod:`geartrain.ams.storage.snapshot`. It exists once its manifest exists, which lists the
hash of every file. Finding the newest version takes one listing of names and one manifest. A follower with version n
walks from the newest version through its parents, until it reaches version n or a base.
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
    """Return the newest version of an export, in its compacted form if there is one; None: no version yet.

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
    """Return the version number in the name of a version's folder."""
    return int(name[len("version-") :][:9])


def newest_number(root: str | Path) -> int:
    """Return the number of the newest version, damaged or not; 0 if there is none. Raises SnapshotFailed."""
    return max(map(number_of, _names(place(root))[0]), default=0)


def version(root: str | Path, number: int) -> Snapshot:
    """Return version ``number``, in its compacted form if there is one. Raises SnapshotNotFound."""
    found, _ = _names(place(root))
    for name in found:
        if number_of(name) == number:
            return _opened(within(place(root), name))
    known = sorted({number_of(name) for name in found})
    there = f"versions {known[0]} to {known[-1]}" if known else "no version"
    raise SnapshotNotFound(f"version {number} is not in {root}, which holds {there}")


def increments_to(newest: Snapshot, moment_id: str) -> list[Snapshot]:
    """Return the versions that a follower applies, in order, to get from ``moment_id`` to ``newest``.

    An empty ``moment_id`` means a follower without rows. The first version may be a base, which replaces all rows.
    Increments are preferred. A base is used if the increments do not lead back to ``moment_id``. Raises SnapshotDamaged
    if there is no route.
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
    """Compact the newest version into a base; return the base. The increments stay for followers that need them.

    If the newest version is a base already, return it. Cost and errors: see
    :func:`geartrain.ams.storage.snapshot.compaction.compact`. Raises SnapshotNotFound if there is no version.
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
