"""``geartrain export TABLE FOLDER``: table versions of a running cluster, for followers."""

from __future__ import annotations

import fnmatch
import json
import shutil
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geartrain.ams.client.factory import connect
from geartrain.ams.client.snapshots.table_export import tables_named
from geartrain.ams.storage.export.one_file import write_one_file
from geartrain.ams.storage.export.versions import compact_export, newest_version, number_of, version, version_names
from geartrain.ams.storage.snapshot.folder import open_snapshot, prune
from geartrain.ams.values.errors import (
    ConfigError,
    Fenced,
    SnapshotFailed,
    SnapshotRefused,
    TableNotFound,
    Unavailable,
)
from geartrain.ams.values.text import counted, sized

if TYPE_CHECKING:
    from geartrain.ams.client.cluster import Cluster
    from geartrain.ams.storage.snapshot.folder import Snapshot
    from geartrain.ams.values.config import ClientConfig

_PASSING = (Unavailable, Fenced, TableNotFound, SnapshotFailed)
"""Transient errors: a shard is away, a table is being restored, a disk is full; the next version may succeed."""
_MAX_DELTAS = 100
"""Deltas in a row before they are compacted."""


class Exporter:
    """Writes table versions of one cluster into one folder."""

    def __init__(self, address: str, config: ClientConfig, tables: str, root: str, *, keep: int, as_json: bool) -> None:
        self._address = address
        self._config = config
        self._tables = tables
        self._root = root
        self._keep = keep
        self._as_json = as_json
        self._seen: dict[str, tuple[int, ...]] = {}
        """Writes that each shard had applied to each table when the last version started."""

    def once(self, since: int | None) -> None:
        """Write one version."""
        with connect(self._address, config=self._config) as cluster:
            self._write(cluster, since)

    def follow(self, every_seconds: float, since: int | None) -> None:
        """Write a version now, then one whenever something was written, until Ctrl-C or SIGTERM."""
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            with connect(self._address, config=self._config) as cluster:
                self._write(cluster, since)  # a permanent error is raised here
                self._export_until_failure(cluster, every_seconds)
            while True:
                time.sleep(every_seconds)
                with _passing(), connect(self._address, config=self._config) as cluster:
                    self._write(cluster, None)
                    self._export_until_failure(cluster, every_seconds)
        except KeyboardInterrupt:
            newest = newest_version(self._root)
            at = "before the first version" if newest is None else f"after version {newest.manifest.step}"
            print(f"ended {at} of {self._root}", file=sys.stderr)

    def compact(self) -> None:
        """Write the newest version as a base, and remove versions that are no longer needed. Needs no cluster."""
        newest = newest_version(self._root)
        names = [] if newest is None else [str(spec["name"]) for spec in newest.manifest.tables]
        if newest is not None and self._tables not in names and not fnmatch.filter(names, self._tables):
            raise ConfigError(
                f"{self._root} holds versions of {', '.join(names)}, not of {self._tables}; give a folder of its own"
            )
        whole, removed = self._compacted()
        facts = {**_facts(whole), "removed": removed}
        gone = f"; removed {counted(len(removed), 'older one')}" if removed else ""
        self._report(
            facts,
            f"version {facts['version']} is whole: {counted(facts['rows'], 'row')}, {sized(facts['bytes'])}{gone}",
        )

    def _export_until_failure(self, cluster: Cluster, every_seconds: float) -> None:
        """Write versions until an error that a new connection may cure."""
        with _passing():
            while True:
                time.sleep(every_seconds)
                if self._writes(cluster) != self._seen:
                    self._write(cluster, None)
                    self._tidy()

    def _write(self, cluster: Cluster, since: int | None) -> None:
        began = time.monotonic()
        writes = self._writes(cluster)
        number = cluster.export(self._tables, self._root, since=since).result()
        self._seen = writes
        facts = {**_facts(version(self._root, number)), "seconds": round(time.monotonic() - began, 3)}
        since_which = "all of them" if facts["since"] is None else f"written since version {facts['since']}"
        rows = f"{counted(facts['rows'], 'row')}, {since_which}"
        self._report(facts, f"version {number}: {rows}, {sized(facts['bytes'])} in {facts['seconds']:.2f} s")

    def _writes(self, cluster: Cluster) -> dict[str, tuple[int, ...]]:
        return {
            name: cluster.table(name).versions() for name in tables_named(self._tables, cluster.table_incarnations())
        }

    def _tidy(self) -> None:
        """Compact a chain whose deltas are as large as its base; remove versions that are no longer needed."""
        newest = newest_version(self._root)
        assert newest is not None
        chain = newest.chain()
        *deltas, base = (_facts(snapshot)["bytes"] for snapshot in chain)
        if sum(deltas) > base or len(deltas) >= _MAX_DELTAS:
            whole, _ = self._compacted()
            print(f"version {whole.manifest.step} was written once more, as a whole one", file=sys.stderr, flush=True)
        elif len(version_names(self._root)) > max(self._keep, len(chain)):
            prune(self._root, self._keep)

    def _compacted(self) -> tuple[Snapshot, list[str]]:
        return compact_export(self._root), prune(self._root, self._keep)

    def _report(self, facts: dict[str, Any], text: str) -> None:
        print(json.dumps(facts) if self._as_json else text, flush=True)


def export_hashed(cluster: Cluster, table: str, out: Path) -> int:
    """Write ids and rows of a hashed table as one file; return the number of rows. Raises as ``Cluster.export``."""
    spec = cluster.table(table).spec
    folder = out.parent.absolute() / f".export-{uuid.uuid4().hex}"
    try:
        path = cluster.export(table, folder)
        path.result()
        return write_one_file(open_snapshot(path.path), spec, out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _passing() -> Iterator[None]:
    """Report a transient error and continue."""
    try:
        yield
    except _PASSING as exc:
        if isinstance(exc, SnapshotRefused):
            raise
        print(f"no version now, it is tried again: {exc}", file=sys.stderr, flush=True)


def _facts(snapshot: Snapshot) -> dict[str, Any]:
    manifest = snapshot.manifest
    parent = None if manifest.parent is None else number_of(manifest.parent.name)
    return {
        "version": manifest.step,
        "since": parent,
        "path": str(snapshot.path),
        "rows": sum(entry.num_rows for entry in manifest.files),
        "bytes": sum(entry.bytes for entry in manifest.files),
    }
