"""First values of layers that were never whole on one rank: a function of the seed, the name and the row's number."""

from __future__ import annotations

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from geartrain.ams.tables.row_table import RowTable
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.specs import MAX_DIM, Initializer, Normal, TableSpec, Uniform

_BLOCK_BYTES = 16 << 20
_BUCKETS = 4096


def has_first_rows(module: nn.Module) -> bool:
    """Return whether :func:`first_rows` knows the distributions of the ``reset_parameters`` of ``module``."""
    return type(module) in (nn.Linear, nn.Embedding)


def first_rows(name: str, module: nn.Module, parameter: str, rows: range, device: torch.device, seed: int) -> Tensor:
    """Return ``rows`` [len(rows), …] of a ``parameter`` of the module called ``name``, on ``device``.

    They are drawn from the distributions of its ``reset_parameters``, with the precision of float32, as rows of tables
    are, and so do not depend on their rank.
    """
    like = module._parameters[parameter]
    assert like is not None
    values = _drawn(f"{name}.{parameter}", like, rows, device, _initializer_of(module), seed)
    padding = getattr(module, "padding_idx", None)
    if padding is not None and padding in rows:
        values[padding - rows.start] = 0.0
    return values


def _initializer_of(module: nn.Module) -> Initializer:
    if isinstance(module, nn.Linear):  # the same for weight and bias
        bound = module.in_features**-0.5 if module.in_features else 0.0
        return Uniform(-bound, bound)
    return Normal(0.0, 1.0)


def _drawn(name: str, like: Tensor, rows: range, device: torch.device, first: Initializer, seed: int) -> Tensor:
    width = like.shape[1:].numel()
    out_LD = torch.empty(len(rows), width, dtype=like.dtype, device=device)
    for piece, start in enumerate(range(0, width, MAX_DIM)):
        stop = min(start + MAX_DIM, width)
        spec = TableSpec(
            name=f"{xxhash.xxh3_128_hexdigest(name.encode())}/{piece}",
            dim=stop - start,
            optimizer=SGD(0.0),
            initializer=first,
            seed=seed,
        )
        table = RowTable(spec, np.arange(_BUCKETS, dtype=np.int64))
        step = max(1, _BLOCK_BYTES // (4 * spec.dim))
        for row in range(rows.start, rows.stop, step):
            ids = np.arange(row, min(row + step, rows.stop), dtype=np.int64)
            values = np.empty((len(ids), spec.dim), np.float32)
            table.pull(ids, values)
            out_LD[row - rows.start :][: len(ids), start:stop] = torch.from_numpy(values)
    return out_LD.view(len(rows), *like.shape[1:])
