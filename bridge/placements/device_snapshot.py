"""Snapshots of rows that lie on ranks, in the one format of all snapshots.

Ranks hold ranges of ids, or ids by a hash, not buckets; but they write files as one shard would, in blocks of ranges of
buckets. So any number of ranks and any cluster can restore the snapshot, and ranks restore a cluster's. ``root`` must
be the same folder on every rank.

Legend: L rows on this rank, N rows of a block.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from geartrain.ams.client.snapshots.snapshot import free_name
from geartrain.ams.server.freeze.dedup import ShardDedup, restore_table_steps
from geartrain.ams.storage.snapshot.blocks import BLOCK_BYTES, write_block, write_dedup, write_job_file
from geartrain.ams.storage.snapshot.chain import layers_of
from geartrain.ams.storage.snapshot.folder import Snapshot, Staging, new_staging, open_snapshot
from geartrain.ams.storage.snapshot.manifest import DEDUP, ROWS, FileEntry
from geartrain.ams.storage.snapshot.store import Place, name_of, place, within
from geartrain.ams.tables.row_table import TableSteps
from geartrain.ams.values.errors import SnapshotError, SnapshotFailed, SpecMismatch, TableNotFound
from geartrain.ams.values.placement import BUCKET_ORDER, NUM_BUCKETS, ONE_OWNER, bucket_of
from geartrain.ams.values.specs import Ids, TableSpec
from geartrain.bridge.placements.device_rows import DeviceRows, as_tensor
from geartrain.bridge.placements.device_update import DeviceUpdate
from geartrain.bridge.placements.placement import Placement
from geartrain.bridge.rows.tables import TORCH_DTYPES, as_numpy

logger = logging.getLogger(__name__)


def snapshot_rows(
    tables: Sequence[DeviceRows],
    root: str | Path,
    name: str | None,
    *,
    step: int,
    values: Mapping[str, Any],
    files: Mapping[str, bytes],
) -> Place:
    """Write the rows of all ranks as the snapshot ``root``/``name``; return its folder, on every rank.

    With ``name`` None rank 0 uses :func:`free_name`. Every rank writes and syncs its rows in the same folder; rank 0
    adds ``values`` (JSON) and ``files`` and commits. If any rank fails, no snapshot appears and every rank raises: its
    own error, or SnapshotFailed. Memory: two blocks of 8 MiB.
    """
    link = tables[0].link
    what = f"snapshot {name or f'of step {step}'!r} was not written"
    staging: Staging | None = None
    entries: list[FileEntry] = []
    failure: Exception | None = None  # of any kind: the other ranks wait for this one
    try:
        if link.rank == 0:
            staging = new_staging(root, free_name(root, step) if name is None else name)
    except Exception as exc:
        failure = exc
    final = None if staging is None else str(within(staging.root, staging.name))
    said = link.gather_json(
        [None if staging is None else [staging.path, staging.id, final], [_num_blocks(table) for table in tables]]
    )
    told = said[0][0]
    before = [sum(counts[place] for _, counts in said[: link.rank]) for place in range(len(tables))]
    try:
        if told is not None:
            name = name_of(told[2]) if name is None else name
            if (here := str(within(place(root), name))) != told[2]:
                raise SpecMismatch(f"the snapshot is {here} on rank {link.rank}, {told[2]} on rank 0; name one folder")
            parts = [_write(table, told[0], told[1], index) for table, index in zip(tables, before, strict=True)]
            entries = [entry for part in parts for entry in part]
            if link.rank == 0:
                steps = {table.spec.name: table.steps.state for table in tables if table.steps is not None}
                if steps:
                    entries.append(_dedup(steps, told[0], told[1]))
                entries += [
                    write_job_file(told[0], snapshot_id=told[1], name=k, data=data) for k, data in files.items()
                ]
    except Exception as exc:
        failure = exc
    written = link.gather_json(None if failure is not None else [entry.model_dump_json() for entry in entries])
    try:
        if staging is not None and None in written:
            staging.abandon()
        elif staging is not None:
            _commit(tables, staging, written, step, values)
    except Exception as exc:
        failure = exc
    if None in written and failure is None:
        failure = SnapshotFailed(f"{what}: rank {written.index(None)} failed; its error tells why")
    link.raise_on_all_ranks(failure, what, SnapshotFailed)
    assert name is not None
    return within(place(root), name)


def _commit(
    tables: Sequence[DeviceRows], staging: Staging, written: list[Any], step: int, values: Mapping[str, Any]
) -> None:
    entries = [FileEntry.model_validate_json(text) for part in written for text in part]
    staging.commit(
        step=step,
        created=time.time(),
        num_shards=1,
        bucket_shards=ONE_OWNER,
        tables=[table.spec.to_dict() for table in tables],
        files=sorted(entries, key=lambda entry: entry.path),
        job=values,
    )


def _rows_of_a_block(spec: TableSpec) -> int:
    return max(1, BLOCK_BYTES // (8 + spec.row_bytes + spec.slot_bytes + spec.step_bytes))


def _num_blocks(table: DeviceRows) -> int:
    return -(-table.num_present // _rows_of_a_block(table.spec))


def _write(table: DeviceRows, folder: str, snapshot_id: str, first_block: int) -> Iterator[FileEntry]:
    """Write this rank's rows in the order of their buckets; every rank writes blocks of the one shard."""
    spec, most = table.spec, _rows_of_a_block(table.spec)
    ids = table.present_ids()
    places = BUCKET_ORDER.astype(np.uint16)[bucket_of(ids, dense=spec.num_rows is not None)]
    order = np.argsort(places, kind="stable")
    for block, start in enumerate(range(0, len(ids), most)):
        chosen = order[start : start + most]
        yield write_block(
            folder,
            snapshot_id=snapshot_id,
            kind=ROWS,
            table=spec.name,
            shard=0,
            index=first_block + block,
            arrays=_arrays(table, ids[chosen], chosen),
            buckets=(int(places[chosen[0]]), int(places[chosen[-1]])),
        )


def _dedup(steps: dict[str, TableSteps], folder: str, snapshot_id: str) -> FileEntry:
    """Write a shard's dedup state: no pushes of any client, and the steps, which every rank has counted."""
    values = ShardDedup(streams={}, groups=[], steps=steps).model_dump(mode="json")
    return write_dedup(folder, snapshot_id=snapshot_id, shard=0, values=values)


def _arrays(table: DeviceRows, ids: Ids, own: Ids) -> dict[str, np.ndarray]:
    numbers = torch.from_numpy(own).to(table.device)
    arrays = {"ids": ids, "rows": as_numpy(table.stored.rows(numbers, table.row_dtype).cpu())}
    if (slots := table.stored.slots(numbers, TORCH_DTYPES[table.spec.slot_dtype])) is not None:
        arrays["slots"] = as_numpy(slots.cpu())
    if table.steps_L is not None:
        arrays["steps"] = as_numpy(table.steps_L[numbers].cpu())
    return arrays


def restore_rows(tables: Sequence[DeviceRows], path: str | Path) -> Snapshot:
    """Read this rank's rows and slots from a snapshot of ranks or of a cluster; return the snapshot.

    Rows that are not in it get their initial values. Every rank reads all blocks of the tables and keeps its own rows.
    If any rank fails, every rank raises (its own error, or SyncError), and all rows have their initial values.
    """

    def read() -> Snapshot:
        snapshot = open_snapshot(path)
        for table in tables:
            _require_spec(table, snapshot)
        for table in tables:
            table.write_initial_values()
            _read(table, snapshot)
            if table.steps is not None:
                sources = [snapshot.read_dedup(entry) for entry in snapshot.manifest.files if entry.kind == DEDUP]
                restore_table_steps(sources, table.spec.name, table.steps.adopt)
        return snapshot

    try:
        return tables[0].link.run_together(read, f"{path} was not restored")
    except Exception:
        for table in tables:
            table.write_initial_values()
        raise


def _require_spec(table: DeviceRows, snapshot: Snapshot) -> None:
    specs = {spec.name: spec for spec in (TableSpec.from_dict(fields) for fields in snapshot.manifest.tables)}
    found = specs.get(table.spec.name)
    if found is None:
        known = ", ".join(map(repr, specs)) or "none"
        raise TableNotFound(f"{snapshot.path} has no table {table.spec.name!r}; its tables: {known}")
    if other := found.fixed_unlike(table.spec):
        raise SpecMismatch(f"table {found.name!r} of {snapshot.path} differs from this one: its {other}")
    if found != table.spec:
        logger.warning("table %r keeps its settings: %s in %s", found.name, table.spec.unlike(found), snapshot.path)


def _read(table: DeviceRows, snapshot: Snapshot) -> None:
    every, none, is_dense = np.ones(NUM_BUCKETS, np.bool_), np.empty(0, np.int64), table.spec.num_rows is not None
    layers = layers_of(snapshot.chain(), table.spec.name)
    removed = [np.concatenate([none, *layer.removed_ids(every, dense=is_dense)]) for layer in layers]
    for number, layer in reversed(list(enumerate(layers))):  # the oldest first, so that later layers overwrite
        removed_later = np.concatenate([none, *removed[:number]])
        for entry in layer.blocks(every):
            arrays = layer.snapshot.read(entry)
            ids, rows, slots, steps = arrays["ids"], arrays["rows"], arrays.get("slots"), arrays.get("steps")
            _require_fit(table, entry, snapshot, arrays)
            mine = layer.buckets[bucket_of(ids, dense=is_dense)] & ~np.isin(ids, removed_later)
            mine[mine] = table.ids.are_here(torch.from_numpy(ids[mine])).numpy()
            table.restore(
                table.local(ids[mine])[1],
                as_tensor(rows[mine], table.row_dtype),
                None
                if slots is None or table.slots_LS is None
                else as_tensor(slots[mine], TORCH_DTYPES[table.spec.slot_dtype]),
                None if steps is None else torch.from_numpy(steps[mine]),
            )


def _require_fit(table: DeviceRows, entry: FileEntry, snapshot: Snapshot, arrays: Mapping[str, Any]) -> None:
    spec, slots, steps = table.spec, arrays.get("slots"), arrays.get("steps")
    num = len(arrays["ids"])
    fits = (
        arrays["rows"].shape == (num, spec.dim)
        and (slots is None or slots.shape == (num, spec.slot_dim))
        and (slots is not None) == spec.has_slots
        and (steps is None or (bool(spec.step_bytes) and steps.shape == (num,)))
        and (steps is not None or not spec.needs_step_numbers)
    )
    if not fits:
        raise SnapshotError(f"{entry.path} of {snapshot.path} does not hold rows of {spec}; use another snapshot")


class DevicePlacement(Placement):
    """Rows on the ranks' devices, which ``update`` trains."""

    def __init__(self, update: DeviceUpdate[Any]) -> None:
        self._update = update
        self.peers = update.table.link

    def specs(self) -> list[TableSpec]:
        return [table.spec for table in self._update.tables]

    def is_trained(self) -> bool:
        return any(table.is_written for table in self._update.tables)

    def identities(self, recent: Sequence[Ids]) -> list[dict[str, Any]]:
        del recent
        return [table.identity() for table in self._update.tables]

    def require_same(self, identities: Mapping[str, Any], step: int) -> None:
        self._update.require_step(step)
        for table in self._update.tables:
            table.require_same(identities[table.spec.name])

    def snapshot(self, root: Path, name: str) -> None:
        snapshot_rows(self._update.tables, root, name, step=self._update.step, values={}, files={})

    def restore(self, path: Path) -> None:
        self._update.rows_are_of(restore_rows(self._update.tables, path).manifest.step)
