"""First values of rows that were never anywhere whole: a function of the seed, the name and the row's number alone."""

from __future__ import annotations

import numpy as np
import torch
import xxhash
from torch import Tensor

from geartrain.ams.tables.row_table import RowTable
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.specs import MAX_DIM, Initializer, TableSpec
from geartrain.bridge.parallel.split.shard import RowShard

_BLOCK_BYTES = 16 << 20
_BUCKETS = 4096


def first_rows(name: str, like: Tensor, shard: RowShard, first: Initializer, seed: int) -> Tensor:
    """Rows [num_local, …] of a parameter ``like`` (on the meta device) on the device of ``shard``.

    Values have the precision of float32, drawn as those of tables are; so they do not depend on the number of ranks.
    """
    width = like.shape[1:].numel()
    out_LD = torch.empty(shard.num_local, width, dtype=like.dtype, device=shard.group.device)
    pieces = -(-width // MAX_DIM) or 1
    for piece in range(pieces):
        start, stop = piece * MAX_DIM, min((piece + 1) * MAX_DIM, width)
        if start == stop:
            continue
        spec = TableSpec(
            name=f"{xxhash.xxh3_128_hexdigest(name.encode())}/{piece}",
            dim=stop - start,
            optimizer=SGD(0.0),
            initializer=first,
            seed=seed,
        )
        table = RowTable(spec, np.arange(_BUCKETS, dtype=np.int64))
        step = max(1, _BLOCK_BYTES // (4 * spec.dim))
        for row in range(shard.first, shard.stop, step):
            ids = np.arange(row, min(row + step, shard.stop), dtype=np.int64)
            values = np.empty((len(ids), spec.dim), np.float32)
            table.pull(ids, values)
            out_LD[row - shard.first :][: len(ids), start:stop] = torch.from_numpy(values)
    return out_LD.view(shard.num_local, *like.shape[1:])
