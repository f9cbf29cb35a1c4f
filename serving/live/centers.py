"""Class rows of a snapshot, updated from those of an earlier snapshot at the cost of the changes.

Legend: C classes of the table, L of them live, W columns of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from geartrain.ams.programs.class_lifecycle import LiveClasses
from geartrain.ams.server.freeze.dedup import restore_steps
from geartrain.ams.server.freeze.restore import dedup_for, restore_tables
from geartrain.ams.storage.snapshot.chain import layers_of
from geartrain.ams.storage.snapshot.folder import Snapshot
from geartrain.ams.storage.snapshot.manifest import REMOVED, ROWS
from geartrain.ams.tables.row_table import RowTable
from geartrain.ams.values.errors import SnapshotDamaged
from geartrain.ams.values.placement import NUM_BUCKETS, bucket_of
from geartrain.ams.values.specs import Ids, TableSpec

Rows = npt.NDArray[np.float32]
_ALL_BUCKETS = np.arange(NUM_BUCKETS)
_AT_ONCE = 65_536
_TINY = 1e-12


@dataclass(frozen=True, kw_only=True)
class LiveCenters:
    """Rows of the live classes at one moment. Immutable."""

    moment_id: str
    """Moment of the snapshot."""
    live: LiveClasses
    rows: npt.NDArray[np.float32]
    """[L, W], in the order of ``live.all_ids``."""
    changed: Ids | None
    """Positions in ``rows`` [M], ascending, whose rows may differ from those it was made from; None: all."""


def centers_of(
    snapshot: Snapshot, table: str, live: LiveClasses, before: LiveCenters | None, *, unit: int | None = None
) -> LiveCenters:
    """Read the rows of the live classes: all of them or, if the snapshot builds on that of ``before``, those written
    since. ``unit`` scales every ``unit`` columns to length 1. Memory: the rows once more, and a block.

    Raises SnapshotDamaged, which names the file, and SnapshotNotFound if it was removed meanwhile.
    """
    found = [spec for spec in snapshot.manifest.tables if spec["name"] == table]
    spec = TableSpec.from_dict(dict(found[0])) if found else None
    if spec is None or spec.num_rows != live.num_classes:
        raise SnapshotDamaged(f"{snapshot.path} has no table {table!r} of {live.num_classes} classes; use another")
    changed = None
    if spec.counts_steps:
        rows = _caught_up(snapshot, spec, live.all_ids)
    else:
        newer = None if before is None else _since(snapshot, table, before.moment_id)
        made = None if newer is None or before is None else _with_changes(newer, spec, live, before, unit)
        rows, changed = (_all_rows(snapshot, spec, live), None) if made is None else made
    if unit is not None and changed is None:
        for start in range(0, len(rows), _AT_ONCE):
            rows[start : start + _AT_ONCE] = _unit(rows[start : start + _AT_ONCE], unit)
    rows.setflags(write=False)
    return LiveCenters(moment_id=snapshot.manifest.moment_id, live=live, rows=rows, changed=changed)


def _since(snapshot: Snapshot, table: str, moment: str) -> list[Snapshot] | None:
    """Return the snapshots after ``moment``, oldest first, if all of their shards wrote only changes; else None."""
    newer: list[Snapshot] = []
    for found in snapshot.chain():
        if found.manifest.moment_id == moment:
            return newer[::-1]
        if len(found.manifest.deltas.get(table, ())) < found.manifest.num_shards:
            return None
        newer.append(found)
    return None


def _with_changes(
    newer: Sequence[Snapshot], spec: TableSpec, live: LiveClasses, before: LiveCenters, unit: int | None
) -> tuple[Rows, Ids] | None:
    """Return ``before`` updated with ``newer`` snapshots; None if those are incomplete."""
    written = np.zeros(live.num_live_classes, np.bool_)
    if live.fingerprint == before.live.fingerprint:
        rows, stayed = before.rows.copy(), None
    else:
        ids = live.all_ids
        stayed = before.live.holds(ids)
        rows = np.empty((len(ids), spec.dim), np.float32)
        rows[stayed] = before.rows[before.live.numbers(ids[stayed])]
    for snapshot in newer:  # later snapshots override
        for entry in snapshot.manifest.files:
            if entry.table != spec.name or entry.kind not in (ROWS, REMOVED):
                continue
            if entry.kind == REMOVED:
                return None
            arrays = snapshot.read(entry)
            mine = live.holds(arrays["ids"])
            places, given = live.numbers(arrays["ids"][mine]), arrays["rows"][mine].astype(np.float32)
            rows[places] = given if unit is None else _unit(given, unit)
            written[places] = True
    if stayed is not None and not (written | stayed).all():
        return None
    return rows, np.flatnonzero(written if stayed is None else written | ~stayed)


def _all_rows(snapshot: Snapshot, spec: TableSpec, live: LiveClasses) -> Rows:
    rows = np.empty((live.num_live_classes, spec.dim), np.float32)
    missing = np.ones(len(rows), np.bool_)
    for layer in layers_of(snapshot.chain(), spec.name):  # newest first: its values hold
        seen = [np.empty(0, np.int64)]
        for entry in layer.blocks():
            arrays = layer.snapshot.read(entry)
            ids = arrays["ids"]
            mine = layer.buckets[bucket_of(ids, dense=True)] & live.holds(ids)
            places = live.numbers(ids[mine])
            fresh = missing[places]
            rows[places[fresh]] = arrays["rows"][mine][fresh]
            seen.append(places)
        missing[np.concatenate(seen)] = False
    never_written = np.flatnonzero(missing)
    if len(never_written):  # these have their initial values
        rows[never_written] = _pulled(RowTable(spec, _ALL_BUCKETS), live.ids(never_written))
    return rows


def _caught_up(snapshot: Snapshot, spec: TableSpec, ids: Ids) -> Rows:
    """Return rows that move at every step, as a shard that resumes from the snapshot computes them."""
    table = RowTable(spec, _ALL_BUCKETS)
    folder = str(snapshot.path)
    restore_tables(folder, {spec.name: table}, _ALL_BUCKETS, nullcontext(), lambda: None)
    restore_steps(dedup_for(folder, _ALL_BUCKETS), {spec.name: table})
    return _pulled(table, ids)


def _pulled(table: RowTable, ids: Ids) -> Rows:
    rows = np.empty((len(ids), table.spec.dim), np.float32)
    for start in range(0, len(ids), _AT_ONCE):
        some = ids[start : start + _AT_ONCE]
        out = np.empty((len(some), table.spec.dim), table.spec.numpy_dtype)
        table.pull(some, out)
        rows[start : start + len(some)] = out
    return rows


def _unit(rows: Rows, width: int) -> Rows:
    """Return rows [N, W] with every ``width`` columns scaled to length 1."""
    parts = rows.reshape(len(rows), rows.shape[1] // width, width)
    lengths = np.sqrt(np.einsum("nkd,nkd->nk", parts, parts))
    scaled: Rows = (parts / np.maximum(lengths, _TINY)[..., None]).reshape(rows.shape)
    return scaled
