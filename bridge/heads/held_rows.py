"""Active rows that fit in memory: pulled once, and overwritten in place by their gradient.

Legend: A active rows, B samples, D width, N rows of a chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from geartrain.ams.messages import SyncGroup
from geartrain.bridge.heads.batch import Batch, Workspace, chunk_bounds, chunk_rows_for, normalise_
from geartrain.bridge.heads.chunk_pool import CHUNKS
from geartrain.bridge.heads.gradients import HeldGradient
from geartrain.bridge.heads.row_pass import KeptExponentials, RowPass, fold_normalisation_
from geartrain.bridge.heads.scratch import Buffer, BufferPool, Scratch, wait_for_copies
from geartrain.bridge.heads.selection import ActiveClasses
from geartrain.bridge.heads.softmax import OnlineSoftmax
from geartrain.bridge.heads.tables import TORCH_DTYPES, HeadTable, as_numpy, gradient_view

PARTS = 8
"""Sums that are kept apart and added in order, whatever the number of threads: the result does not depend on it."""


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
        self._chunks = chunk_bounds(active.num, chunk_rows_for(batch.size, spec.dim, device))
        self._kept: dict[int, KeptExponentials] = {}
        self._kept_buffer: Buffer | None = None

    @property
    def _in_place(self) -> bool:
        """Whether chunks are views of the held rows, which the forward pass then leaves normalised."""
        arithmetic = self._batch.arithmetic
        return self._rows_AD.device == arithmetic.device and self._rows_AD.dtype == arithmetic.compute

    def forward(self, *, want_gradient: bool, keep_bytes: int) -> tuple[Tensor, Tensor | None]:
        """Loss (0-dim) and feature gradient [B, D]; exponentials of up to ``keep_bytes`` are kept for the row pass."""
        batch = self._batch
        softmax = OnlineSoftmax(batch, min(PARTS, len(self._chunks)), want_gradient=want_gradient)
        kept_NB = self._reserve(keep_bytes)

        def add_part(scratch: Scratch, part: int) -> None:
            work = Workspace(batch.arithmetic, scratch)
            sums = softmax.parts[part]
            for start, stop in self._chunks[part :: len(softmax.parts)]:
                unit_ND = work.load_rows(self._rows_AD[start:stop], blocking=False)
                if self._inverse_A is not None:
                    self._inverse_A[start:stop] = normalise_(unit_ND)
                kept = kept_NB.get(start)
                logits_NB = kept if kept is not None else work.empty("logits", stop - start, batch.size)
                sums.add(work, unit_ND, start, logits_NB)
                if kept is not None:
                    self._kept[start] = KeptExponentials(kept, sums.shift_B)

        CHUNKS.map(add_part, range(len(softmax.parts)), batch.arithmetic.device)
        return softmax.finish()

    def _reserve(self, keep_bytes: int) -> dict[int, Tensor]:
        """Room for the exponentials [N, B] of as many chunks as fit, by the start of the chunk."""
        arithmetic, size = self._batch.arithmetic, self._batch.size
        if arithmetic.matmul != arithmetic.compute or size == 0:
            return {}  # with products this cheap nothing is gained
        row_bytes = size * arithmetic.compute.itemsize
        chunks = [(start, stop) for start, stop in self._chunks if stop * row_bytes <= keep_bytes]
        if not chunks:
            return {}
        self._kept_buffer = self._pool.take(chunks[-1][1] * row_bytes, arithmetic.device)
        tensor = self._kept_buffer.tensor
        return {a: tensor((b - a, size), arithmetic.compute, a * row_bytes) for a, b in chunks}

    def gradient(self, upstream: Tensor) -> tuple[HeldGradient, Tensor]:
        """Overwrite the rows by ``upstream`` · gradient; also return a sum that is finite only if all of it is."""
        batch, arithmetic = self._batch, self._batch.arithmetic
        out_AD = gradient_view(self._rows_AD)
        row_pass = RowPass(batch)
        factor = (upstream * (batch.scale / batch.divisor)).to(arithmetic.compute)

        def overwrite(scratch: Scratch, chunk: tuple[int, int]) -> Tensor:
            work = Workspace(arithmetic, scratch)
            start, stop = chunk
            unit_ND = work.load_rows(self._rows_AD[start:stop], blocking=False)
            inverse_N = None if self._inverse_A is None else self._inverse_A[start:stop]
            if inverse_N is not None and not self._in_place:
                unit_ND.mul_(inverse_N.unsqueeze(1))
            gradient_ND = row_pass.chunk(work, unit_ND, start, self._kept.get(start))
            fold_normalisation_(work, unit_ND, inverse_N, gradient_ND, factor)
            if not self._in_place:
                out_AD[start:stop].copy_(unit_ND, non_blocking=True)
            return unit_ND.sum()

        checksums = CHUNKS.map(overwrite, self._chunks, arithmetic.device)
        self._give_back_kept()
        gradient = HeldGradient(self._active, out_AD, self._buffer, self._pool, arithmetic.device)
        return gradient, torch.stack(checksums).sum()

    def discard(self) -> None:
        """Give the memory back when no row gradient is wanted."""
        wait_for_copies(self._batch.arithmetic.device)
        self._give_back_kept()
        self._pool.give_back(self._buffer)

    def _give_back_kept(self) -> None:
        self._kept.clear()
        if self._kept_buffer is not None:
            self._pool.give_back(self._kept_buffer)
            self._kept_buffer = None
