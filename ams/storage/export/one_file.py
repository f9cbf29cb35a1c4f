"""A version of an export as one safetensors file: the ids of a table and their rows."""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from pathlib import Path

import numpy as np

from geartrain.ams.storage.snapshot.folder import Snapshot
from geartrain.ams.storage.snapshot.manifest import EXPORT
from geartrain.ams.storage.tensor_file import tensor_head
from geartrain.ams.values.specs import TableSpec

IDS, ROWS = "ids", "weight"


def write_one_file(base: Snapshot, spec: TableSpec, path: Path) -> int:
    """Write tensors ``ids`` [N] and ``weight`` [N, D] of a table of a base; return N. Block by block, in no order.

    A file that is there is replaced in one step. Raises SnapshotDamaged, OSError.
    """
    entries = [entry for entry in base.manifest.files if entry.kind == EXPORT and entry.table == spec.name]
    num_rows = sum(entry.num_rows for entry in entries)
    tensors = {IDS: (np.dtype(np.int64), [num_rows]), ROWS: (spec.numpy_dtype, [num_rows, spec.dim])}
    head, offsets = tensor_head(tensors, {"table": spec.name})
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    try:
        with temporary.open("wb") as file:
            file.write(head)
            file.truncate(len(head) + (8 + spec.row_bytes) * num_rows)
            done = 0
            for entry in entries:
                arrays = base.read(entry)
                for offset, name, size in ((offsets[IDS], "ids", 8), (offsets[ROWS], "rows", spec.row_bytes)):
                    file.seek(offset + done * size)
                    file.write(arrays[name].reshape(-1).view("u1").data)
                done += entry.num_rows
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    return num_rows
