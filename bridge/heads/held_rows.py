"""Active rows that fit in memory: pulled once, and overwritten in place by their gradient.

Legend: A active rows, B samples, D width, N rows of a chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from geartrain.ams.messages import SyncGroup
from geartrain.bridge.heads.gradients import HeldGradient
from geartrain.bridge.heads.scratch import Buffer, BufferPool
from geartrain.bridge.heads.selection import ActiveClasses
from geartrain.bridge.heads.softmax import (
    Arithmetic,
    Batch,
    KeptExponentials,
    OnlineSoftmax,
    RowGradientPass,
    chunk_bounds,
    chunk_rows_for,
    fold_normalisation_,
    normalise_,
)
from geartrain.bridge.heads.tables import TORCH_DTYPES, HeadTable, as_numpy, gradient_view


class HeldRows:
    """The rows of one forward pass. Costs one pull; memory A·D of the table's type plus the kept exponentials."""

    def __init__(
        self, table: HeadTable, active: ActiveClasses, pool: BufferPool, batch: Batch, required_sync: SyncGroup | None
    ) -> None:
        self._batch = batch
        self._active = active
        self._pool = pool
        spec = table.spec
        dtype, device = TORCH_DTYPES[spec.dtype], batch.arithmetic.device
        self._buffer = pool.take(active.num * spec.row_bytes, torch.device("cpu"), pinned=device.type == "cuda")
        self._rows_AD = self._buffer.tensor((active.num, spec.dim), dtype)
        table.pull_into(active.ids, as_numpy(self._rows_AD), required_sync=required_sync)
        self._inverse_A: Tensor | None = None
        if batch.margin is not None:
            self._inverse_A = torch.empty(active.num, dtype=batch.arithmetic.compute, device=device)
        self._chunk_rows = chunk_rows_for(batch.size, spec.dim, device)
        self._kept: dict[int, KeptExponentials] = {}
        self._kept_buffer: Buffer | None = None

    @property
    def _in_place(self) -> bool:
        """Whether chunks are views of the held rows, which the forward pass then leaves normalised."""
        arithmetic = self._batch.arithmetic
        return self._rows_AD.device == arithmetic.device and self._rows_AD.dtype == arithmetic.compute

    def forward(self, *, want_gradient: bool, keep_bytes: int) -> tuple[Tensor, Tensor | None]:
        """Loss (0-dim) and feature gradient [B, D]; exponentials of up to ``keep_bytes`` are kept for the row pass."""
        batch, arithmetic = self._batch, self._batch.arithmetic
        softmax = OnlineSoftmax(batch, want_gradient=want_gradient)
        room = self._open_kept(keep_bytes)
        for start, stop in chunk_bounds(self._active.num, self._chunk_rows):
            unit_ND = arithmetic.load_rows(self._rows_AD[start:stop], blocking=False)
            if self._inverse_A is not None:
                self._inverse_A[start:stop] = normalise_(unit_ND)
            kept_BN = room.next(batch.size, stop - start) if room is not None else None
            logits_BN = kept_BN if kept_BN is not None else arithmetic.empty("logits", batch.size, stop - start)
            softmax.add(unit_ND, start, logits_BN)
            if kept_BN is not None:
                self._kept[start] = KeptExponentials(kept_BN, softmax.shift_B)
        return softmax.finish()

    def _open_kept(self, keep_bytes: int) -> _KeptRoom | None:
        arithmetic = self._batch.arithmetic
        num_bytes = min(keep_bytes, self._batch.size * self._active.num * arithmetic.compute.itemsize)
        if num_bytes == 0:
            return None
        self._kept_buffer = self._pool.take(num_bytes, arithmetic.device)
        return _KeptRoom(self._kept_buffer, num_bytes, arithmetic)

    def gradient(self, upstream: Tensor) -> tuple[HeldGradient, Tensor]:
        """Overwrite the rows by ``upstream`` · gradient; also return a sum that is finite only if all of it is."""
        batch, arithmetic = self._batch, self._batch.arithmetic
        out_AD = gradient_view(self._rows_AD)
        row_pass = RowGradientPass(batch)
        factor = (upstream * (batch.scale / batch.divisor)).to(arithmetic.compute)
        checksum = torch.zeros((), dtype=arithmetic.compute, device=arithmetic.device)
        for start, stop in chunk_bounds(self._active.num, self._chunk_rows):
            unit_ND = arithmetic.load_rows(self._rows_AD[start:stop], blocking=False)
            inverse_N = None if self._inverse_A is None else self._inverse_A[start:stop]
            if inverse_N is not None and not self._in_place:
                unit_ND.mul_(inverse_N.unsqueeze(1))
            gradient_ND = row_pass.chunk(unit_ND, start, self._kept.get(start))
            fold_normalisation_(unit_ND, inverse_N, gradient_ND, factor, arithmetic)
            checksum += unit_ND.sum()
            if not self._in_place:
                out_AD[start:stop].copy_(unit_ND, non_blocking=True)
        self._give_back_kept()
        return HeldGradient(self._active, out_AD, self._buffer, self._pool, arithmetic.device), checksum

    def discard(self) -> None:
        """Give the memory back when no row gradient is wanted."""
        self._give_back_kept()
        self._pool.give_back(self._buffer)

    def _give_back_kept(self) -> None:
        self._kept.clear()
        if self._kept_buffer is not None:
            self._pool.give_back(self._kept_buffer)
            self._kept_buffer = None


class _KeptRoom:
    """Hands out consecutive pieces of a buffer until it is full."""

    def __init__(self, buffer: Buffer, num_bytes: int, arithmetic: Arithmetic) -> None:
        self._buffer = buffer
        self._left = num_bytes
        self._used = 0
        self._dtype = arithmetic.compute

    def next(self, batch: int, rows: int) -> Tensor | None:
        num_bytes = batch * rows * self._dtype.itemsize
        if num_bytes > self._left:
            return None
        piece = self._buffer.tensor((batch, rows), self._dtype, self._used)
        self._used += num_bytes
        self._left -= num_bytes
        return piece
