"""Interface of a table for a head, numpy views of tensors without copies, and time spent waiting for rows."""

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
"""Types in which rows and slots are read and written."""


class ReadableTable(Protocol):
    """Table of rows that can be read and overwritten. Ids are distinct int64; arrays are C-contiguous."""

    @property
    def spec(self) -> TableSpec:
        """Spec of the table."""

    @property
    def incarnation(self) -> int:
        """Incarnation of the table; 0 where tables are not numbered."""

    def pull_into(self, ids: Ids, out: npt.NDArray[Any], *, required_sync: SyncGroup | None = None) -> None:
        """Write the rows of ``ids`` to ``out`` [N, D]."""

    def pull_into_async(
        self, ids: Ids, out: npt.NDArray[Any], *, required_sync: SyncGroup | None = None
    ) -> Future[None]:
        """Start :meth:`pull_into`."""

    def assign(self, ids: Ids, rows: npt.NDArray[Any]) -> Done:
        """Overwrite rows."""


def as_numpy(tensor: Tensor) -> npt.NDArray[Any]:
    """Return a host tensor's memory as a numpy array. bfloat16 becomes that of ml_dtypes."""
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(DTYPES["bfloat16"])
    return np.asarray(tensor.numpy())


def gradient_view(rows: Tensor) -> Tensor:
    """Return the memory of pulled rows in their gradient's type: 16-bit rows have bfloat16 gradients.

    float16 would lose the small gradients of the negatives; bfloat16 has the range of float32.
    """
    return rows.view(torch.bfloat16) if rows.dtype == torch.float16 else rows


ROW_SECONDS: dict[str, float] = {"pull": 0.0, "push": 0.0}
"""Seconds that this process has waited for rows. Pulls that overlap with computation are not counted."""


@contextmanager
def counted_as(name: str) -> Iterator[None]:
    """Add the time of the block to ``ROW_SECONDS[name]``."""
    started = time.perf_counter()
    try:
        yield
    finally:
        ROW_SECONDS[name] += time.perf_counter() - started
