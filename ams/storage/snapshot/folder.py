"""Snapshots in a root, each whole or not there: folders of a local disk, or of a URL (``store.py``).

    ROOT/NAME/manifest.json              every file with its hash, read first
    ROOT/NAME/*.safetensors, …           blocks of rows, dedup state, state of the job (below a URL in ROOT/NAME/ID/)
    ROOT/.staging-NAME-ID/               one being written; takes its name, by a rename, as the last step
    ROOT/.trash-NAME-ID/                 one being removed

Order of a commit: every file synced (by its writer), manifest synced, staging folder synced, renamed, root synced.
One process commits and prunes in a root; any number may write blocks and read.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from geartrain.ams.observe import failpoints
from geartrain.ams.storage.durable import failed
from geartrain.ams.storage.snapshot.blocks import read_block, read_dedup, read_file
from geartrain.ams.storage.snapshot.manifest import (
    DEDUP,
    JOB,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    FileEntry,
    Manifest,
    Parent,
    Writer,
    decode_manifest,
    encode_manifest,
    encode_placement,
    in_words,
)
from geartrain.ams.storage.snapshot.store import Place, is_name, name_of, parent_of, place, store_of, within
from geartrain.ams.values.errors import (
    InvalidArgument,
    SnapshotDamaged,
    SnapshotError,
    SnapshotFailed,
    SnapshotNotFound,
    SnapshotOfOtherFormat,
)
from geartrain.ams.values.placement import BucketShards
from geartrain.ams.values.text import counted

logger = logging.getLogger(__name__)

STALE_STAGING_SECONDS = 86_400.0


@dataclass(frozen=True)
class Staging:
    """A snapshot being written."""

    root: Place
    name: str
    id: str
    """32 hexadecimal digits, new for every attempt."""

    @property
    def path(self) -> str:
        """The folder that blocks are written to, for those who write them."""
        return str(self._folder)

    def commit(
        self,
        *,
        step: int,
        created: float,
        num_shards: int,
        bucket_shards: BucketShards,
        tables: Sequence[Mapping[str, Any]],
        files: Sequence[FileEntry],
        job: Mapping[str, Any] | None = None,
        parent: Parent | None = None,
        deltas: Mapping[str, Sequence[int]] | None = None,
        moment: str | None = None,
        writer: Writer | None = None,
        number: int | None = None,
    ) -> Place:
        """Make the snapshot appear, whole and safe from a loss of power, and return its folder.

        ``created`` is Unix time in seconds; ``bucket_shards`` is the bucket map of the shards that wrote the rows;
        ``tables`` and ``job`` hold JSON values; ``parent`` is left out if there are no ``deltas``; ``writer`` is the
        process that took it, if it has a name; ``number`` that of the snapshot that it was compacted from, None: the
        next one of the root, for which all manifests there are read. Raises InvalidArgument for values that cannot be a
        manifest, and SnapshotFailed; then the staging folder is removed and nothing new listed.
        """
        final, store = within(self.root, self.name), store_of(self.root)
        try:
            manifest = self._manifest(
                step=step,
                created=created,
                num_shards=num_shards,
                placement=encode_placement(bucket_shards),
                tables=[dict(table) for table in tables],
                job=dict(job or {}),
                files=sorted(files, key=lambda entry: entry.path),
                parent=parent if deltas else None,
                deltas={table: sorted(shards) for table, shards in (deltas or {}).items()},
                moment=moment,
                writer=writer,
                number=self._next_number() if number is None else number,
            )
            data = encode_manifest(manifest)
            self._require_files(files)
            failpoints.reach("manifest.write.before")
            store.write(self._folder, MANIFEST, data)
            store.sync(self._folder)
            failpoints.reach("manifest.write.after")
            _require_free(final)
            store.publish(self._folder, final)
        except OSError as exc:
            self.abandon()
            raise failed(f"snapshot {self.name!r} in {self.root} was not written", exc) from exc
        except Exception:
            self.abandon()
            raise
        return final

    def remove_all_but(self, files: Sequence[FileEntry]) -> None:
        """Remove every other file, such as those of a writer that did not finish. Raises SnapshotFailed."""
        store, listed = store_of(self.root), {entry.path for entry in files}
        try:
            for name in store.names(self._folder):
                if name not in listed:
                    store.drop(self._folder, name)
        except FileNotFoundError:  # nothing is there, or it went by itself
            return
        except OSError as exc:
            raise failed(f"snapshot {self.name!r} in {self.root} was not written", exc) from exc

    def abandon(self) -> None:
        """Remove the staging folder. What cannot be removed stays hidden until :func:`prune`."""
        store_of(self.root).discard(self._folder)

    @property
    def _folder(self) -> Place:
        return store_of(self.root).staging(self.root, self.name, self.id)

    def _next_number(self) -> int:
        found = (listed.snapshot for listed in list_snapshots(self.root))
        return 1 + max((snapshot.manifest.number for snapshot in found if snapshot is not None), default=0)

    def _manifest(self, **fields: Any) -> Manifest:
        try:
            return Manifest(id=self.id, **fields)
        except ValidationError as exc:
            raise InvalidArgument(in_words(exc)) from exc

    def _require_files(self, files: Sequence[FileEntry]) -> None:
        """Check that the folder holds the listed files and no other. Their content is checked by who reads them."""
        folder, store = self._folder, store_of(self.root)
        names = store.names(folder) if files or isinstance(folder, Path) else []
        present = {name: store.size(folder, name) for name in names if not name.startswith(".")}
        for entry in files:
            found = present.pop(entry.path, None)
            if found != entry.bytes:
                has = "is missing" if found is None else f"has {found:,} of {counted(entry.bytes, 'byte')}"
                raise SnapshotFailed(f"snapshot {self.name!r} was not written: {within(folder, entry.path)} {has}")
        if present:
            extra = within(folder, min(present))
            raise SnapshotFailed(f"snapshot {self.name!r} was not written: {extra} is not listed in files; list it")


@dataclass(frozen=True)
class Snapshot:
    """A snapshot whose manifest is sound. Its blocks are checked as they are read."""

    path: Place
    """Its folder: an absolute Path, or a URL."""
    manifest: Manifest

    @property
    def name(self) -> str:
        """Name of its folder."""
        return name_of(self.path)

    @property
    def _files(self) -> Place:
        return store_of(self.path).files_of(self.path, self.manifest.id)

    def read(self, entry: FileEntry) -> dict[str, np.ndarray]:
        """Return the arrays of a block, writable, once its size, hash and labels have been checked.

        Raises SnapshotDamaged naming file, shard, table and rows, and InvalidArgument for what is no block.
        """
        if entry.kind in (JOB, DEDUP):
            raise InvalidArgument(f"{entry.path!r} is no block; use read_bytes")
        return read_block(self._files, self.manifest.id, entry)[1]

    def read_dedup(self, entry: FileEntry) -> dict[str, Any]:
        """Return a shard's dedup state, checked as in :meth:`read`. Raises SnapshotDamaged."""
        return read_dedup(self._files, self.manifest.id, entry)[1]

    def job_files(self) -> dict[str, bytes]:
        """Return the job's files (``files=`` of ``Cluster.snapshot``) by name, each checked. Raises SnapshotDamaged."""
        entries = [entry for entry in self.manifest.files if entry.kind == JOB]
        return {entry.path.removeprefix(f"{JOB}-"): self.read_bytes(entry) for entry in entries}

    def read_bytes(self, entry: FileEntry) -> bytes:
        """Return the content of any file, checked as in :meth:`read`. Raises SnapshotDamaged."""
        if entry.kind == JOB:
            return read_file(self._files, entry)
        if entry.kind == DEDUP:
            return read_dedup(self._files, self.manifest.id, entry)[0]
        return read_block(self._files, self.manifest.id, entry)[0]

    def chain(self) -> list[Snapshot]:
        """Return this snapshot and those that it adds to, the newest first; the last one is whole.

        Only manifests are read. Raises SnapshotDamaged if one is missing, damaged or another one of that name.
        """
        found, ids = [self], {self.manifest.id}
        while (parent := found[-1].manifest.parent) is not None:
            adds = f"{found[-1].path} is damaged: it adds to snapshot {parent.name!r} ({parent.id}), "
            try:
                older = open_snapshot(within(parent_of(self.path), parent.name))
            except SnapshotNotFound as exc:
                raise SnapshotDamaged(f"{adds}which is missing. {_INSTEAD_OF_PARENT}") from exc
            if older.manifest.id != parent.id or parent.id in ids:
                raise SnapshotDamaged(f"{adds}but the one of that name is {older.manifest.id}. {_INSTEAD_OF_PARENT}")
            found.append(older)
            ids.add(parent.id)
        return found

    def verify(self, progress: Callable[[int, int], None] | None = None) -> list[SnapshotDamaged]:
        """Read all files of this snapshot and of its parents; return all damage found, empty if there is none.

        ``progress`` is called with (bytes checked, bytes in all) after each file. Files that the manifest does not list
        are damage, except those whose names begin with a dot.
        """
        damage: list[SnapshotDamaged] = []
        try:
            read_manifest(self.path)
        except SnapshotNotFound as exc:
            return [SnapshotDamaged(str(exc))]
        except SnapshotDamaged as exc:
            damage.append(exc)
        try:
            chain = self.chain()
        except SnapshotDamaged as exc:
            damage.append(exc)
            chain = [self]
        files = [(snapshot, entry) for snapshot in chain for entry in snapshot.manifest.files]
        done, total = 0, sum(entry.bytes for _, entry in files)
        for snapshot, entry in files:
            try:
                snapshot.read_bytes(entry)
            except SnapshotDamaged as exc:
                damage.append(exc)
            done += entry.bytes
            if progress is not None:
                progress(done, total)
        return damage + [extra for snapshot in chain for extra in snapshot._extra_files()]

    def _extra_files(self) -> list[SnapshotDamaged]:
        known = {MANIFEST, *(entry.path for entry in self.manifest.files)}
        try:
            names = sorted(store_of(self.path).names(self._files))
        except OSError as exc:
            return [SnapshotDamaged(f"{self.path} is damaged: it cannot be listed ({exc})")]
        return [
            SnapshotDamaged(f"{within(self._files, name)} is damaged: it is not of this snapshot. Move it away")
            for name in names
            if name not in known and not name.startswith(".")
        ]


@dataclass(frozen=True)
class ListedSnapshot:
    """A snapshot as a listing shows it: either its manifest is sound, or ``damage`` says why not."""

    path: Place
    snapshot: Snapshot | None
    damage: SnapshotDamaged | None

    @property
    def name(self) -> str:
        """Name of its folder."""
        return name_of(self.path)


def new_staging(root: str | Path, name: str) -> Staging:
    """Create the folder to write snapshot ``name`` in. Raises InvalidArgument, and SnapshotFailed if it exists."""
    if not is_name(name):
        raise InvalidArgument(
            f"name is {name!r}; it must be 1 to 100 of A-Z, a-z, 0-9 and ._- and begin with a letter or digit"
        )
    staging = Staging(place(root), name, uuid.uuid4().hex)
    try:
        _require_free(within(staging.root, name))
        store_of(staging.root).create(staging._folder)
    except OSError as exc:
        staging.abandon()
        raise failed(f"snapshot {name!r} in {root} was not begun", exc) from exc
    return staging


def open_snapshot(path: str | Path) -> Snapshot:
    """Read a snapshot's manifest. Raises SnapshotNotFound, SnapshotDamaged (the manifest is), SnapshotOfOtherFormat."""
    folder = place(path)
    return Snapshot(folder, read_manifest(folder))


def read_manifest(folder: Place) -> Manifest:
    """Return the manifest of a snapshot. Raises SnapshotNotFound if there is none, SnapshotDamaged."""
    try:
        return _manifest_in(folder)
    except SnapshotDamaged:
        with suppress(OSError):
            if not store_of(folder).exists(folder):  # one that went between two looks is not damaged
                raise _not_found(folder) from None
        raise


def _manifest_in(folder: Place) -> Manifest:
    path, store = within(folder, MANIFEST), store_of(folder)
    try:
        if MANIFEST not in _names_in(folder) or (size := store.size(folder, MANIFEST)) is None:
            raise SnapshotDamaged(f"{path} is damaged: it is missing. {_INSTEAD}")
        if size > MAX_MANIFEST_BYTES:
            raise SnapshotDamaged(f"{path} is damaged: it has {size:,} bytes, no manifest has. {_INSTEAD}")
        return decode_manifest(store.read(folder, MANIFEST))
    except OSError as exc:
        raise SnapshotDamaged(f"{path} is damaged: it cannot be read ({exc}). {_INSTEAD}") from exc
    except SnapshotOfOtherFormat as exc:
        raise SnapshotOfOtherFormat(f"{path} {exc}, or use another snapshot") from None
    except ValueError as exc:
        raise SnapshotDamaged(f"{path} is damaged: {exc}. {_INSTEAD}") from exc


def _names_in(folder: Place) -> list[str]:
    try:
        return store_of(folder).names(folder)
    except (FileNotFoundError, NotADirectoryError):
        raise _not_found(folder) from None


def _not_found(folder: Place) -> SnapshotNotFound:
    return SnapshotNotFound(f"{folder} is not the folder of a snapshot; give one, or the folder that holds some")


def list_snapshots(root: str | Path) -> list[ListedSnapshot]:
    """Return the snapshots of a root, the newest first; none if there is no such folder.

    The one that was written last is the newest, by its number, whatever its step and the clock; one that was compacted
    comes right before the one that it was made from.

    Only manifests are read. One with a damaged manifest, whose age is therefore unknown, comes before all others. After
    all others come those of a process beside which its successor, a higher incarnation of the same stream, has taken
    one as well, at the same step or an earlier one, or before them: the job went on without what they hold.
    Raises SnapshotFailed if the root cannot be read.
    """
    root = place(root)
    try:
        names = store_of(root).snapshots(root)
    except FileNotFoundError:
        return []
    except OSError as exc:
        raise SnapshotFailed(
            f"the snapshots in {root} cannot be listed: {exc}. Give the folder that holds them"
        ) from exc
    listed = []
    for folder in (within(root, name) for name in sorted(names)):
        try:
            listed.append(ListedSnapshot(folder, open_snapshot(folder), None))
        except SnapshotDamaged as exc:
            listed.append(ListedSnapshot(folder, None, exc))
        except SnapshotNotFound:
            continue  # removed in the meantime
    abandoned = _abandoned([found.snapshot.manifest for found in listed if found.snapshot is not None])
    return sorted(listed, key=lambda found: _age(found, abandoned), reverse=True)


def latest(root: str | Path, *, allow_fallback: bool = False) -> Snapshot:
    """Return the newest snapshot, after reading and checking all of it.

    If it is damaged, raises SnapshotDamaged, or with ``allow_fallback`` takes the next one that is sound and logs what
    it passed over. Raises SnapshotNotFound if there is none.
    """
    passed: list[str] = []
    for listed in list_snapshots(root):
        damage = _damage(listed)
        if not damage and listed.snapshot is not None:
            if passed:
                logger.warning("using snapshot %s; passed over as damaged: %s", listed.name, "; ".join(passed))
            return listed.snapshot
        more = f" ({counted(len(damage), 'damaged file')} in this snapshot)" if len(damage) > 1 else ""
        if not allow_fallback:
            raise type(damage[0])(
                f"the newest snapshot, {listed.name!r}, is not sound: {damage[0]}{more}. allow_fallback=True uses the "
                "newest one that is, and loses the steps since"
            )
        passed.append(f"{damage[0]}{more}")
    if passed:
        raise SnapshotDamaged(f"none of the snapshots in {root} is sound: {'; '.join(passed)}")
    raise SnapshotNotFound(f"there is no snapshot in {root}; give the folder that holds some, or take one")


def prune(
    root: str | Path,
    keep: int,
    *,
    spare: int | None = None,
    stale_seconds: float = STALE_STAGING_SECONDS,
    now: float | None = None,
) -> list[str]:
    """Remove all but the newest ``keep`` snapshots and those of step ``spare``, what earlier prunes left, and stale
    staging folders.

    Returns the names of the removed snapshots. Those that a kept one adds to are kept too. If none of those to keep is
    sound, so is the newest sound one of the others, which costs reading them. One with a damaged manifest is neither
    counted nor removed, nor is any that is older than its files: it may add to them. A staging folder is
    stale when nothing was written to it in the ``stale_seconds`` before ``now`` (Unix time in seconds; None: the
    clock's). Raises InvalidArgument, and SnapshotFailed for the first that cannot be removed.
    """
    if keep < 1:
        raise InvalidArgument(f"keep is {keep}; it must be >= 1")
    root = place(root)
    store = store_of(root)
    listing = list_snapshots(root)
    known = [listed.snapshot for listed in listing if listed.snapshot is not None]
    kept, old = known[:keep], known[keep:]
    kept += [snapshot for snapshot in old if snapshot.manifest.step == spare]
    kept += _perhaps_needed(old, [listed for listed in listing if listed.snapshot is None])
    if old and all(snapshot.verify() for snapshot in kept):
        kept += [snapshot for snapshot in old if not snapshot.verify()][:1]
    removed = []
    try:
        for snapshot in _children_first(_without_ancestors(old, kept)):
            hidden = store.hide(snapshot.path)
            removed.append(snapshot.name)
            failpoints.reach("prune.before")
            store.remove(hidden)
        store.sweep(root, (time.time() if now is None else now) - stale_seconds)
    except OSError as exc:
        raise failed(f"{root} was not pruned to {counted(keep, 'snapshot')}", exc) from exc
    return removed


_INSTEAD = "Bring the file back from a copy, or use another snapshot and move this one away"
_INSTEAD_OF_PARENT = "Bring that one back from a copy, or use another snapshot"


def _perhaps_needed(old: Sequence[Snapshot], unreadable: Sequence[ListedSnapshot]) -> list[Snapshot]:
    """Return snapshots to which one with a damaged manifest may add: all that are older than its first file."""
    if not old or not unreadable:
        return []
    began = max(store_of(listed.path).first_written(listed.path) for listed in unreadable)
    found = [snapshot for snapshot in old if snapshot.manifest.created <= began]
    if found:
        logger.warning(
            "%s kept beyond the number wanted: snapshot %s may add to them, which its damaged manifest does not tell. "
            "Bring the manifest back from a copy, or move that snapshot away",
            counted(len(found), "snapshot"),
            ", ".join(repr(listed.name) for listed in unreadable),
        )
    return found


def _without_ancestors(old: Sequence[Snapshot], kept: Sequence[Snapshot]) -> list[Snapshot]:
    """Return the ``old`` snapshots that are neither kept nor an ancestor of a kept one."""
    by_id = {snapshot.manifest.id: snapshot for snapshot in [*old, *kept]}
    needed: set[str] = set()
    for snapshot in kept:
        found: Snapshot | None = snapshot
        while found is not None and found.manifest.id not in needed:
            needed.add(found.manifest.id)
            found = by_id.get(found.manifest.parent.id) if found.manifest.parent else None
    return [snapshot for snapshot in old if snapshot.manifest.id not in needed]


def _children_first(snapshots: Sequence[Snapshot]) -> list[Snapshot]:
    """Return the order of removal: each snapshot before its parent, otherwise the newest first."""
    left, order = list(snapshots), []
    while left:
        needed = {snapshot.manifest.parent.id for snapshot in left if snapshot.manifest.parent}
        free = next((snapshot for snapshot in reversed(left) if snapshot.manifest.id not in needed), left[-1])
        left.remove(free)
        order.append(free)
    return order


def _require_free(folder: Place) -> None:
    if store_of(folder).exists(folder):
        raise SnapshotFailed(f"{folder} already exists; choose another name or remove it")


def _abandoned(manifests: Sequence[Manifest]) -> set[str]:
    """Ids of those whose step a higher incarnation of their writer has gone back before, or that are later than its
    first."""
    found = set()
    for manifest in manifests:
        for other in manifests:
            if manifest.writer is None or other.writer is None or manifest.writer.stream != other.writer.stream:
                continue
            first, second = ((one.number, one.created) for one in (other, manifest))
            is_later = other.step <= manifest.step or first <= second
            if manifest.writer.incarnation < other.writer.incarnation and is_later:
                found.add(manifest.id)
    return found


def _age(listed: ListedSnapshot, abandoned: Collection[str]) -> tuple[bool, float, float, str]:
    if listed.snapshot is None:
        return (True, float("inf"), 0.0, listed.name)
    manifest = listed.snapshot.manifest
    return (manifest.id not in abandoned, manifest.number, manifest.created, listed.name)


def _damage(listed: ListedSnapshot) -> Sequence[SnapshotError]:
    if listed.snapshot is None:
        assert listed.damage is not None
        return [listed.damage]
    return listed.snapshot.verify()
