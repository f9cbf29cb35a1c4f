"""Files of a snapshot: blocks of rows (safetensors), dedup state (JSON) and opaque files of the job.

A writer needs the path of the staging folder and the snapshot's id. A reader checks hash and labels first.
Legend: N rows of a block, D width of a row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import xxhash
from pydantic import ValidationError
from safetensors import SafetensorError, deserialize

from geartrain.ams.observe import failpoints
from geartrain.ams.storage.durable import failed
from geartrain.ams.storage.snapshot.manifest import DEDUP, JOB, FileEntry, block_path, dedup_path, in_words, job_path
from geartrain.ams.storage.snapshot.store import Place, place, store_of, within
from geartrain.ams.storage.tensor_file import DTYPES, tensor_file
from geartrain.ams.values.errors import InvalidArgument, SnapshotDamaged
from geartrain.ams.values.text import counted

BLOCK_BYTES = 8 << 20
"""Target size of a block of rows. A shard holds three blocks in memory while it writes."""

_MAX_RANGES = 8
"""Most ranges of buckets into which a shard divides the rows of a table. After a restore onto another number of shards,
two shards read each range that a new border cuts, an eighth of all rows."""
_BYTES_PER_RANGE = 32
"""Bytes of a row for each range after the first. A range costs some 30 ns for every row that is not written yet: one
more pass over them."""

_PER_ROW_ARRAYS = ("ids", "rows", "slots", "steps", "seen_steps", "seen_seconds", "counts")


def plan_blocks(num_rows: int, row_bytes: int) -> tuple[int, int]:
    """Return the number of bucket ranges of a shard's rows, and the most rows of a block.

    ``row_bytes`` are all bytes written for a row. Ranges have about equal sizes. Blocks have about BLOCK_BYTES, chosen
    so that the last block of a range is not small.
    """
    num_ranges = min(_MAX_RANGES, 1 + row_bytes // _BYTES_PER_RANGE, max(1, -(-num_rows * row_bytes // BLOCK_BYTES)))
    rows_each = num_rows / num_ranges
    num_blocks = max(1, round(rows_each * row_bytes / BLOCK_BYTES))
    return num_ranges, max(1, int(1.05 * rows_each / num_blocks))  # hashed ids are not quite evenly spread


def write_block(
    staging_path: str,
    *,
    snapshot_id: str,
    kind: str,
    table: str,
    shard: int,
    index: int,
    arrays: Mapping[str, np.ndarray],
    buckets: tuple[int, int] | None = None,
) -> FileEntry:
    """Write one block into a staging folder and sync it; a second call for the same block replaces the first.

    ``arrays`` are named arrays of bool, integers or floats (float16 to float64, bfloat16). If one is named ``ids``, it
    is int64 [N], and ``rows`` and ``slots``, where given, have N rows. ``buckets`` are the first and last place, in
    ``BUCKET_ORDER``, of the buckets of ``ids``. Arrays are hashed and written without a copy, unless they are not
    C-contiguous or not in native byte order. Raises InvalidArgument, and SnapshotFailed if the disk fails or the
    snapshot was abandoned; then no block is left.
    """
    num_rows = _checked_num_rows(arrays)
    path = block_path(kind, table, shard, index)
    return _write(
        staging_path,
        snapshot_id,
        *tensor_file(arrays, _labels(snapshot_id, kind, table, shard, index)),
        path=path,
        kind=kind,
        table=table,
        shard=shard,
        index=index,
        num_rows=num_rows,
        buckets=None if buckets is None else list(buckets),
    )


def write_job_file(staging_path: str, *, snapshot_id: str, name: str, data: bytes) -> FileEntry:
    """Write opaque bytes (a backbone, a rank's random state) into a staging folder and sync them.

    ``name`` is 1 to 100 of A-Z, a-z, 0-9 and ``._-``; a second call for the same name replaces the first. Raises as
    :func:`write_block`.
    """
    return _write(staging_path, snapshot_id, data, path=job_path(name), kind=JOB)


def write_dedup(staging_path: str, *, snapshot_id: str, shard: int, values: Mapping[str, Any]) -> FileEntry:
    """Write a shard's dedup state, JSON values, into a staging folder and sync them. Raises as :func:`write_block`."""
    labelled = {"snapshot": snapshot_id, "shard": shard, "dedup": values}
    data = json.dumps(labelled, sort_keys=True, allow_nan=False).encode()
    return _write(staging_path, snapshot_id, data, path=dedup_path(shard), kind=DEDUP, shard=shard)


def read_dedup(folder: Place, snapshot_id: str, entry: FileEntry) -> tuple[bytes, dict[str, Any]]:
    """Return the checked bytes of a shard's dedup state, and their values. Raises SnapshotDamaged."""
    data = read_file(folder, entry)
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise damaged(folder, entry, f"it is not JSON ({exc})") from exc
    is_whole = isinstance(values, dict) and set(values) == {"snapshot", "shard", "dedup"}
    if not is_whole or (values["snapshot"], values["shard"]) != (snapshot_id, entry.shard):
        raise damaged(folder, entry, f"it does not say that it is of shard {entry.shard} of snapshot {snapshot_id}")
    if not isinstance(values["dedup"], dict):
        raise damaged(folder, entry, "it holds no dedup state")
    return data, values["dedup"]


def read_file(folder: Place, entry: FileEntry) -> bytes:
    """Return the bytes of a file whose length and hash are right. Raises SnapshotDamaged."""
    store = store_of(folder)
    try:
        size = store.size(folder, entry.path)
        if size is None:
            raise damaged(folder, entry, "it is not a file")
        if size != entry.bytes:
            raise damaged(folder, entry, f"it has {size:,} of {counted(entry.bytes, 'byte')}")
        data = store.read(folder, entry.path)
    except FileNotFoundError as exc:
        raise damaged(folder, entry, "it is missing") from exc
    except OSError as exc:
        raise damaged(folder, entry, f"it cannot be read ({exc})") from exc
    if xxhash.xxh3_128_hexdigest(data) != entry.xxh3_128:
        raise damaged(folder, entry, f"its content does not match its checksum{_whose(data, entry)}")
    return data


def read_block(folder: Place, snapshot_id: str, entry: FileEntry) -> tuple[bytes, dict[str, np.ndarray]]:
    """Return the checked bytes of a block and its arrays, writable and apart from the bytes. Raises SnapshotDamaged."""
    data = read_file(folder, entry)
    assert entry.table is not None and entry.shard is not None
    labels = _labels(snapshot_id, entry.kind, entry.table, entry.shard, entry.index)
    found = _labels_in(data)
    if found != labels:
        raise damaged(folder, entry, f"it says of itself {found}, not {labels}")
    try:
        arrays = {
            name: np.frombuffer(view["data"], DTYPES[view["dtype"]]).reshape(view["shape"])
            for name, view in deserialize(data)  # type: ignore[no-untyped-call]
        }
        num_rows = _checked_num_rows(arrays)
    except (SafetensorError, KeyError, ValueError) as exc:
        raise damaged(folder, entry, f"it is not a block of this version ({exc})") from exc
    if num_rows != entry.num_rows:
        raise damaged(folder, entry, f"it has {counted(num_rows, 'row')}")
    return data, arrays


def damaged(folder: Place, entry: FileEntry, why: str) -> SnapshotDamaged:
    """Return the error that names the file and what it holds."""
    if entry.kind == JOB:
        holds = "state of the job"
    elif entry.kind == DEDUP:
        holds = f"what shard {entry.shard} knew of the writes applied"
    else:
        rows = counted(entry.num_rows, "row")
        holds = f"{rows} ({entry.kind}, block {entry.index}) of table {entry.table!r} on shard {entry.shard}"
    return SnapshotDamaged(
        f"{within(folder, entry.path)} is damaged: {why}. It holds {holds}. Bring the file back from a copy, or use "
        "another snapshot"
    )


def _write(staging_path: str, snapshot_id: str, *parts: bytes | memoryview, path: str, **labels: Any) -> FileEntry:
    staging = place(staging_path)
    store = store_of(staging)
    if not store.is_staging(staging, snapshot_id):
        raise InvalidArgument(f"{staging_path!r} is not the staging folder of snapshot {snapshot_id!r}")
    num_bytes, content = 0, xxhash.xxh3_128()
    for part in parts:
        num_bytes += len(part)
        content.update(part)
    try:
        fields = {"table": None, "shard": None, "index": 0, "num_rows": 0, **labels}
        entry = FileEntry(path=path, bytes=num_bytes, xxh3_128=content.hexdigest(), **fields)
    except ValidationError as exc:
        raise InvalidArgument(in_words(exc)) from exc
    try:
        failpoints.reach("block.write.before")
        store.write(staging, path, *parts)
        failpoints.reach("block.write.after")
    except OSError as exc:
        raise failed(f"{within(staging, path)} ({counted(num_bytes, 'byte')}) was not written", exc) from exc
    return entry


def _checked_num_rows(arrays: Mapping[str, np.ndarray]) -> int:
    """Return the length of ``ids``, or else of ``rows``, or else 0. Raises InvalidArgument."""
    for name, array in arrays.items():
        if array.dtype.newbyteorder("=") not in DTYPES.values():
            legal = ", ".join(str(dtype) for dtype in DTYPES.values())
            raise InvalidArgument(f"array {name!r} has dtype {array.dtype}; it must be one of {legal}")
    counting = [(name, arrays[name]) for name in _PER_ROW_ARRAYS if name in arrays]
    for name, array in counting:
        if array.ndim < 1 or len(array) != len(counting[0][1]):
            first, rows = counting[0]
            number = f", {len(rows)} as that of {first!r}" if rows.ndim else ""
            raise InvalidArgument(
                f"array {name!r} has shape {array.shape}; its first dimension must be the number of rows{number}"
            )
    if "ids" in arrays and (arrays["ids"].dtype != np.int64 or arrays["ids"].ndim != 1):
        raise InvalidArgument(f"ids are {arrays['ids'].dtype} {arrays['ids'].shape}; they must be int64 [N]")
    if "__metadata__" in arrays:
        raise InvalidArgument("no array can be named '__metadata__'")
    return len(arrays["ids"] if "ids" in arrays else arrays.get("rows", ()))


def _labels(snapshot_id: str, kind: str, table: str, shard: int, index: int) -> dict[str, str]:
    return {"snapshot": snapshot_id, "kind": kind, "table": table, "shard": str(shard), "index": str(index)}


def _labels_in(data: bytes) -> dict[str, str] | None:
    """Return the labels in a block's safetensors header: 8 bytes of length, then JSON; None: it has none."""
    length = int.from_bytes(data[:8], "little")
    if not 0 < length <= len(data) - 8:
        return None
    try:
        labels = json.loads(data[8 : 8 + length])["__metadata__"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return labels if isinstance(labels, dict) and all(isinstance(value, str) for value in labels.values()) else None


def _whose(data: bytes, entry: FileEntry) -> str:
    """Return words for a file that was put in the place of another; empty if it was not."""
    labels = _labels_in(data) or {}
    try:
        says = (labels["kind"], labels["table"], int(labels["shard"]), int(labels["index"]))
    except (KeyError, ValueError):
        return ""
    kind, table, shard, index = says
    if says == (entry.kind, entry.table, entry.shard, entry.index):
        return ""  # changed, or the same block of another snapshot: the label itself may be what changed
    return f" (it says that it is {kind}, block {index} of table {table!r} on shard {shard})"
