"""Table versions for followers: the rows of one moment, or those written since an earlier version.

A version is a snapshot (:mod:`~geartrain.ams.client.snapshots.snapshot`) of the rows alone, in a folder of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from geartrain.ams.client.shard_calls import ShardCalls
from geartrain.ams.client.snapshots.snapshot import JobContents, PendingSnapshot, start_snapshot
from geartrain.ams.rpc.client.backoff import Backoff
from geartrain.ams.storage.export.versions import newest_number, newest_version, version, version_name
from geartrain.ams.storage.snapshot.folder import Snapshot
from geartrain.ams.storage.snapshot.store import Place, place
from geartrain.ams.values.arguments import integer
from geartrain.ams.values.errors import Busy, InvalidArgument, SnapshotDamaged, TableNotFound
from geartrain.ams.values.scheduler_messages import ClusterView
from geartrain.ams.values.shard_messages import CallContext
from geartrain.ams.values.text import quoted

logger = logging.getLogger(__name__)


class PendingExport:
    """A version whose moment is frozen and whose files are being written."""

    def __init__(self, number: int, snapshot: PendingSnapshot) -> None:
        self.version = number
        """Number that the version will have."""
        self.path: Place = snapshot.path
        """Folder of the version: an absolute Path, or a URL."""
        self._snapshot = snapshot

    def done(self) -> bool:
        """Return whether :meth:`result` returns at once."""
        return self._snapshot.done()

    def result(self, timeout_seconds: float | None = None) -> int:
        """Wait until the version is visible to followers; return its number.

        Raises SnapshotSuperseded if a snapshot of the same tables began before it was written, SnapshotFailed, or
        another GeartrainError if a shard was lost; TimeoutError if it is not done in time.
        """
        self._snapshot.result(timeout_seconds)
        return self.version


def start_export(
    calls: ShardCalls,
    view: Callable[[], ClusterView],
    tables: str | Sequence[str],
    root: str | Path,
    *,
    since: int | None = None,
    caller: CallContext | None = None,
    check_caller: Callable[[], None] = lambda: None,
) -> PendingExport:
    """Freeze the present moment of tables on every shard and begin to write it as the next version in ``root``.

    :meth:`geartrain.ams.client.cluster.Cluster.export` describes the arguments.
    """
    root = place(root)
    specs = {spec.name: spec for spec in view().tables}
    names = tables_named(tables, specs)
    for name in names:
        if specs[name].counts_steps:
            raise InvalidArgument(
                f"rows of table {name!r} move at every step, whether they are touched or not "
                f"({specs[name].optimizer}), so that no version could add to another; take snapshots of it, or export "
                "it as one .safetensors file"
            )
    parent = _parent(root, since)
    backoff = Backoff(calls.config.recovery_timeout_seconds)
    while True:
        number = newest_number(root) + 1
        try:
            pending = start_snapshot(
                calls,
                view,
                root,
                version_name(number),
                JobContents(step=number),
                tables=names,
                parent=None if parent is None else parent.path,
                caller=caller,
                check_caller=check_caller,
                rows_alone=True,
            )
        except Busy as exc:
            if not backoff.pause(exc.retry_after_seconds):
                raise
        else:
            return PendingExport(number, pending)


def tables_named(wanted: str | Sequence[str], existing: Iterable[str]) -> list[str]:
    """Return the tables of these names or patterns (``"ctr/*"``), each once. Raises TableNotFound, InvalidArgument."""
    patterns = [wanted] if isinstance(wanted, str) else list(wanted)
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise InvalidArgument(f"tables are {quoted(wanted)}; give a name ('ctr/item'), a pattern ('ctr/*') or a list")
    names, found = list(existing), dict[str, None]()
    for pattern in patterns:
        matching = [name for name in names if name == pattern or fnmatchcase(name, pattern)]
        if not matching:
            known = ", ".join(map(repr, names)) or "none"
            raise TableNotFound(f"there is no table {pattern!r}; tables of this cluster: {known}")
        found.update(dict.fromkeys(matching))
    return list(found)


def _parent(root: Place, since: int | None) -> Snapshot | None:
    """Return the version to build on; None: a base is written."""
    if since is not None:
        number = integer("since", since, 0)
        return None if number == 0 else version(root, number)
    try:
        newest = newest_version(root)
        if newest is not None:
            newest.chain()
    except SnapshotDamaged as exc:
        logger.warning("the next version is a whole one, since nothing can be added to the last: %s", exc)
        return None
    return newest
