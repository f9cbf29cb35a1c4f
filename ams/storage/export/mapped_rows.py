"""A table in one file that is mapped into memory and asked as it lies there: by several processes, larger than memory.

A safetensors file: ``ids`` [N] by rising :func:`splitmix64 <geartrain.ams.kernels.ops.splitmix64>`, their rows
``weight`` [N, D], and ``starts`` [2^bits + 1], where the ids begin whose hashes have the same first ``bits``; four of
them on average. An id costs three reads: of a start, of the ids there, of a row
(:class:`geartrain.ams.kernels.embedding.MappedRows`).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from geartrain.ams.kernels import ops
from geartrain.ams.storage.tensor_file import tensor_head
from geartrain.ams.values.specs import Ids, Rows, TableSpec

_IDS_TOGETHER = 4
_PART_BYTES = 256 << 20


def write_mapped(path: Path, spec: TableSpec, num_rows: int, blocks: Iterable[tuple[Ids, Rows]]) -> int:
    """Write the rows of ``blocks``, which name each id once; return how many. There are at most ``num_rows``.

    They go through files beside it, each of which is sorted in memory: about 1 GiB of it, and twice the room on the
    disk, are enough for any table. Raises OSError.
    """
    with TemporaryDirectory(dir=path.parent) as spill:
        count = 1 + num_rows * (8 + spec.row_bytes) // _PART_BYTES
        parts = [(Path(spill, f"{part}-ids"), Path(spill, f"{part}-rows")) for part in range(count)]
        total = _spill(parts, blocks)
        bits = (total // _IDS_TOGETHER).bit_length()
        whole = np.dtype(np.int64)
        shapes = {"starts": (whole, [(1 << bits) + 1]), "ids": (whole, [total])}
        head, offsets = tensor_head({**shapes, "weight": (spec.numpy_dtype, [total, spec.dim])})
        in_range = np.zeros(1 << bits, np.int64)
        with path.open("wb") as file:
            file.write(head)
            done = 0
            for ids_file, rows_file in parts:
                ids = np.fromfile(ids_file, np.int64)
                rows = np.fromfile(rows_file, np.uint8).reshape(len(ids), spec.row_bytes)
                hashes = ops.splitmix64(ids)
                order = np.argsort(hashes)
                ranges = (hashes >> np.uint64(64 - bits)).astype(np.int64) if bits else np.zeros(len(ids), np.int64)
                in_range += np.bincount(ranges, minlength=len(in_range))
                for name, array in (("ids", ids), ("weight", rows)):
                    file.seek(offsets[name] + done * array.nbytes // max(1, len(array)))
                    file.write(array[order].data)
                done += len(ids)
            file.seek(offsets["starts"])
            file.write(np.concatenate([np.zeros(1, np.int64), np.cumsum(in_range)]).data)
    return total


def _spill(parts: list[tuple[Path, Path]], blocks: Iterable[tuple[Ids, Rows]]) -> int:
    """Write ids and rows to the files of their parts, by rising hashes; return how many."""
    files = [(ids.open("wb"), rows.open("wb")) for ids, rows in parts]
    total = 0
    try:
        for ids, rows in blocks:
            part_N = ((ops.splitmix64(ids) >> np.uint64(32)) * np.uint64(len(parts)) >> np.uint64(32)).astype(np.int64)
            order = np.argsort(part_N, kind="stable")
            ends = np.cumsum(np.bincount(part_N, minlength=len(parts)))
            for pair, mine in zip(files, np.split(order, ends[:-1]), strict=True):
                pair[0].write(ids[mine].data)
                pair[1].write(rows[mine].reshape(-1).view(np.uint8).data)
            total += len(ids)
    finally:
        for pair in files:
            for file in pair:
                file.close()
    return total
