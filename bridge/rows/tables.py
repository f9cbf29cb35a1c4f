"""What a head needs of a table, numpy views of tensors so that rows reach it without a copy, and how long is waited."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from geartrain.ams.values.shard_messages import Done, SyncGroup
from geartrain.ams.values.specs import DTYPES, SCALED, Ids, TableSpec

TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
TORCH_DTYPES |= {name: TORCH_DTYPES[read_as] for name, read_as in SCALED.items()}
"""In which rows and slots are read and written."""


class ReadableTable(Protocol):
    """Rows that can be read and overwritten. Ids are distinct int64; arrays are C-contiguous."""

    @property
    def spec(self) -> TableSpec:
        """What the table is."""

    @property
    def incarnation(self) -> int:
        """Which table of its name it is; 0 where tables are not numbered."""

    def pull_into(self, ids: Ids, out: npt.NDArray[Any], *, required_sync: SyncGroup | None = None) -> None:
        """Write the rows of ``ids`` to ``out`` [N, D]."""

    def pull_into_async(
        self, ids: Ids, out: npt.NDArray[Any], *, required_sync: SyncGroup | None = None
    ) -> Future[None]:
        """Begin :meth:`pull_into`."""

    def assign(self, ids: Ids, rows: npt.NDArray[Any]) -> Done:
        """Overwrite rows."""


def as_numpy(tensor: Tensor) -> npt.NDArray[Any]:
    """The same memory as a numpy array; the tensor lies on the host. bfloat16 becomes that of ml_dtypes."""
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(DTYPES["bfloat16"])
    return np.asarray(tensor.numpy())


def gradient_view(rows: Tensor) -> Tensor:
    """The memory of pulled rows in the type their gradient is kept in: 16-bit rows have bfloat16 gradients.

    float16 would lose the small gradients of the negatives; bfloat16 has the range of float32.
    """
    return rows.view(torch.bfloat16) if rows.dtype == torch.float16 else rows


ROW_SECONDS: dict[str, float] = {"pull": 0.0, "push": 0.0}
"""Spent by this process waiting for rows. Pulls that run while something else is computed are not counted."""


@contextmanager
def counted_as(name: str) -> Iterator[None]:
    """Count what happens inside."""
    started = time.perf_counter()
    try:
        yield
    finally:
        ROW_SECONDS[name] += time.perf_counter() - started
