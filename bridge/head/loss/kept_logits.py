"""Logits of a forward pass, kept for its backward pass instead of computed twice.

Legend: B samples (times the centers of a class), K rows whose logits are kept, the first ones, N rows of a chunk.
"""

from __future__ import annotations

from torch import Tensor

from geartrain.bridge.head.loss.batch import Batch
from geartrain.bridge.placements.workspace import Buffer, BufferPool


def kept_rows(num_rows: int, chunk_rows: int, row_bytes: int, keep_bytes: int) -> int:
    """Return K: as many whole chunks as fit into ``keep_bytes``."""
    fitting = min(num_rows, keep_bytes // row_bytes)
    return fitting if fitting == num_rows else fitting // chunk_rows * chunk_rows


class KeptLogits:
    """Uninitialised memory for the logits of :func:`kept_rows` rows, reused in the next step."""

    def __init__(self, pool: BufferPool, batch: Batch, num_rows: int, chunk_rows: int, keep_bytes: int) -> None:
        arithmetic, width = batch.arithmetic, batch.size * batch.centers
        row_bytes = width * arithmetic.compute.itemsize
        num_kept = kept_rows(num_rows, chunk_rows, row_bytes, keep_bytes) if keep_bytes else 0
        self._pool = pool
        self._buffer: Buffer | None = None
        self.all_KB: Tensor | None = None
        if num_kept > 0:
            self._buffer = pool.acquire(num_kept * row_bytes, arithmetic.device)
            self.all_KB = self._buffer.tensor((num_kept, width), arithmetic.compute)

    def chunk(self, start: int, stop: int) -> Tensor | None:
        """Return the logits of a chunk [N, B], if all of them are kept."""
        return None if self.all_KB is None or stop > len(self.all_KB) else self.all_KB[start:stop]

    def clear(self) -> None:
        """Release the memory."""
        self.all_KB = None
        if self._buffer is not None:
            self._pool.release(self._buffer)
            self._buffer = None
