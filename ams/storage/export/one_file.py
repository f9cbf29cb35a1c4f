"""A version of an export as one safetensors file: the ids of a table and their rows."""

from __future__ import annotations

import json
import os
import uuid
from contextlib import suppress
from pathlib import Path

from geartrain.ams.storage.snapshot.folder import Snapshot
from geartrain.ams.storage.snapshot.manifest import EXPORT
from geartrain.ams.values.specs import TableSpec

_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
IDS, ROWS = "ids", "weight"


def write_one_file(base: Snapshot, spec: TableSpec, path: Path) -> int:
    """Write tensors ``ids`` [N] and ``weight`` [N, D] of a table of a base; return N. Block by block, in no order.

    A file that is there is replaced in one step. Raises SnapshotDamaged, OSError.
    """
    entries = [entry for entry in base.manifest.files if entry.kind == EXPORT and entry.table == spec.name]
    num_rows = sum(entry.num_rows for entry in entries)
    middle, end = 8 * num_rows, (8 + spec.row_bytes) * num_rows
    tensors = {
        IDS: {"dtype": "I64", "shape": [num_rows], "data_offsets": [0, middle]},
        ROWS: {"dtype": _DTYPES[spec.dtype], "shape": [num_rows, spec.dim], "data_offsets": [middle, end]},
    }
    header = json.dumps({"__metadata__": {"table": spec.name}, **tensors}).encode()
    header += b" " * (-len(header) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    try:
        with temporary.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            start, done = file.tell(), 0
            file.truncate(start + end)
            for entry in entries:
                arrays = base.read(entry)
                for offset, name, size in ((0, "ids", 8), (middle, "rows", spec.row_bytes)):
                    file.seek(start + offset + done * size)
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
