"""Compaction of a chain of increments into one full snapshot, so that the older ones can be removed.

Cost: the chain is read about once, the new snapshot is written once and read once. A small block that extends over
several bucket ranges of a large table is read up to 8 times. Memory: two blocks, and 8 bytes (for a short time 16) per
row of one table on one shard. Files of the job are copied one at a time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from geartrain.ams.storage.snapshot.blocks import BLOCK_BYTES, plan_blocks, write_block, write_dedup, write_job_file
from geartrain.ams.storage.snapshot.chain import Layer, is_among, layers_of
from geartrain.ams.storage.snapshot.folder import (
    Snapshot,
    Staging,
    new_staging,
    open_snapshot,
)
from geartrain.ams.storage.snapshot.manifest import DEDUP, EXPORT, JOB, REMOVED, ROW_KINDS, ROWS, FileEntry
from geartrain.ams.storage.snapshot.store import Place, place, store_of, within
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.placement import NUM_BUCKETS, bucket_of, bucket_ranges, buckets_between

Arrays = dict[str, npt.NDArray[Any]]


def compact(root: str | Path, name: str, *, new_name: str | None = None) -> Place:
    """Merge the chain of increments that ends at snapshot ``name`` into one full snapshot; return its folder.

    The new snapshot is named ``new_name`` (None: ``name``-whole) and listed as newer than ``name``. The next increment
    may have either as its parent. The new snapshot is read back and verified before the return. The chain stays until
    it is pruned. Raises InvalidArgument if ``name`` is no increment, SnapshotNotFound, SnapshotDamaged, SnapshotFailed;
    then nothing new is listed.
    """
    snapshot = open_snapshot(within(place(root), name))
    if snapshot.manifest.parent is None:
        raise InvalidArgument(f"snapshot {name!r} in {root} is whole already: it adds to no other")
    chain = snapshot.chain()
    staging = new_staging(root, f"{name}-whole" if new_name is None else new_name)
    try:
        files = [entry for spec in snapshot.manifest.tables for entry in _merged(staging, chain, spec)]
        others = [entry for entry in snapshot.manifest.files if entry.kind not in (*ROW_KINDS, REMOVED)]
        files += [_copied(staging, snapshot, entry) for entry in others]
    except BaseException:
        staging.abandon()
        raise
    path = staging.commit(
        step=snapshot.manifest.step,
        created=max(time.time(), snapshot.manifest.created),
        num_shards=snapshot.manifest.num_shards,
        bucket_shards=snapshot.manifest.bucket_shards,
        tables=snapshot.manifest.tables,
        files=files,
        job=snapshot.manifest.job,
        moment=snapshot.manifest.moment_id,
        writer=snapshot.manifest.writer,
        number=snapshot.manifest.number,
    )
    damage = open_snapshot(path).verify()
    if damage:
        store = store_of(path)
        with suppress(OSError):
            store.discard(store.hide(path))
        raise damage[0]
    return path


def rows_of_table(snapshot: Snapshot, table: str) -> tuple[int, Iterator[Arrays]]:
    """Return the most rows that a table has, and an iterator over its rows, each once, in blocks.

    Memory: a block, and 8 bytes for each row if ``snapshot`` is an increment. Raises SnapshotDamaged, also while
    iterating.
    """
    layers = layers_of(snapshot.chain(), table)
    dense = next(spec for spec in snapshot.manifest.tables if spec["name"] == table)["num_rows"] is not None
    num_rows = sum(entry.num_rows for layer in layers for entry in layer.blocks())
    return num_rows, _rows_of(layers, np.ones(NUM_BUCKETS, np.bool_), dense=dense)


def _merged(staging: Staging, chain: Sequence[Snapshot], spec: Mapping[str, Any]) -> Iterator[FileEntry]:
    """Write a table, shard by shard of the newest snapshot."""
    table, dense, manifest = str(spec["name"]), spec["num_rows"] is not None, chain[0].manifest
    layers = layers_of(chain, table)
    kind = EXPORT if any(layer.snapshot.manifest.is_export for layer in layers) else ROWS
    for shard in range(manifest.num_shards):
        owned = manifest.bucket_shards == shard
        for index, (arrays, buckets) in enumerate(_blocks_of(layers, owned, dense=dense)):
            yield write_block(
                staging.path,
                snapshot_id=staging.id,
                kind=kind,
                table=table,
                shard=shard,
                index=index,
                arrays=arrays,
                buckets=buckets,
            )


def _blocks_of(
    layers: Sequence[Layer], owned: npt.NDArray[np.bool_], *, dense: bool
) -> Iterator[tuple[Arrays, tuple[int, int]]]:
    """Yield the rows in buckets ``owned``, each once, in blocks with the range of buckets of their rows."""
    entries = [entry for layer in layers for entry in layer.blocks(owned)]
    num_rows, num_bytes = sum(entry.num_rows for entry in entries), sum(entry.bytes for entry in entries)
    num_ranges = plan_blocks(num_rows, num_bytes // max(1, num_rows))[0]
    for first, last in bucket_ranges(np.flatnonzero(owned), num_ranges):
        for arrays in _in_blocks(_rows_of(layers, owned & buckets_between(first, last), dense=dense)):
            yield arrays, (first, last)


def _rows_of(layers: Sequence[Layer], owned: npt.NDArray[np.bool_], *, dense: bool) -> Iterator[Arrays]:
    """Yield the rows in buckets ``owned`` [4096], each once, from the newest layer that has it."""
    seen = np.empty(0, np.int64)
    for layer in layers:
        found = [seen, *layer.removed_ids(owned, dense=dense)]
        for entry in layer.blocks(owned):
            arrays = layer.snapshot.read(entry)
            buckets = bucket_of(arrays["ids"], dense=dense)
            mine = owned[buckets] & layer.buckets[buckets] & ~is_among(arrays["ids"], seen)
            found.append(arrays["ids"][mine])
            yield {name: array[mine] for name, array in arrays.items()}
        if layer is not layers[-1]:
            seen = np.sort(np.concatenate(found))


def _in_blocks(parts: Iterator[Arrays]) -> Iterator[Arrays]:
    """Join small parts into blocks of about 8 MiB; large ones stay as they are.

    Parts with other arrays stay apart: of a table that was altered, older layers have lives, or newer ones.
    """
    held: list[Arrays] = []
    held_bytes = 0
    for part in parts:
        if not len(part["ids"]):
            continue
        size = sum(array.nbytes for array in part.values())
        if held and (held_bytes + size > BLOCK_BYTES or held[0].keys() != part.keys()):
            yield {name: np.concatenate([block[name] for block in held]) for name in held[0]}
            held, held_bytes = [], 0
        held.append(part)
        held_bytes += size
    if held:
        yield {name: np.concatenate([block[name] for block in held]) for name in held[0]}


def _copied(staging: Staging, snapshot: Snapshot, entry: FileEntry) -> FileEntry:
    """Copy a file that holds no rows into the new snapshot."""
    if entry.kind == JOB:
        name = entry.path.removeprefix(f"{JOB}-")
        return write_job_file(staging.path, snapshot_id=staging.id, name=name, data=snapshot.read_bytes(entry))
    assert entry.shard is not None
    if entry.kind == DEDUP:
        values = snapshot.read_dedup(entry)
        return write_dedup(staging.path, snapshot_id=staging.id, shard=entry.shard, values=values)
    assert entry.table is not None
    return write_block(
        staging.path,
        snapshot_id=staging.id,
        kind=entry.kind,
        table=entry.table,
        shard=entry.shard,
        index=entry.index,
        arrays=snapshot.read(entry),
    )
