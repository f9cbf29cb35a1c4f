"""Active rows that fit in memory: pulled once, and overwritten in place by their gradient.

Legend: A active rows, B samples, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from geartrain.ams.client.table import Table
from geartrain.ams.values.shard_messages import SyncGroup
from geartrain.bridge.head.backends.active_rows import HostActive
from geartrain.bridge.head.backends.memory_plan import COMPUTE_BYTES, MemoryPlan
from geartrain.bridge.head.backends.pending_gradients import HeldGradient
from geartrain.bridge.head.loss.batch import Batch, chunk_bounds
from geartrain.bridge.head.loss.chunk_pass import ChunkPass, chunk_rows_on, parts_for, pass_for
from geartrain.bridge.head.loss.chunk_pool import CHUNKS
from geartrain.bridge.head.loss.kept_logits import KeptLogits, kept_rows
from geartrain.bridge.head.loss.softmax import OnlineSoftmax
from geartrain.bridge.placements.workspace import BufferPool, Scratch, Workspace
from geartrain.bridge.rows.gradient_carrier import squared_sum
from geartrain.bridge.rows.tables import TORCH_DTYPES, as_numpy, counted_as, gradient_view
from geartrain.bridge.rows.transfers import Moment

PARTS = 8
"""Sums that are kept apart and added in order, whatever the number of threads: the result does not depend on it."""


class HeldRows:
    """The rows of one forward pass. Costs one pull; memory A·D of the table's type plus the kept logits."""

    def __init__(
        self, table: Table, active: HostActive, pool: BufferPool, batch: Batch, required_sync: SyncGroup | None
    ) -> None:
        self.batch = batch
        self._active = active
        self._pool = pool
        spec = table.spec
        dtype, device = TORCH_DTYPES[spec.dtype], batch.arithmetic.device
        self._buffer = pool.take(active.num * spec.row_bytes, torch.device("cpu"), pinned=device.type == "cuda")
        self._rows_AD = self._buffer.tensor((active.num, spec.dim), dtype)
        with counted_as("pull"):
            table.pull_into(active.ids, as_numpy(self._rows_AD), required_sync=required_sync)
        self._kept = KeptLogits(pool)
        self._take(pass_for(batch))
        self._chunks = chunk_bounds(active.num, self._pass.chunk_rows)

    def _take(self, chunk_pass: ChunkPass) -> None:
        self._pass = chunk_pass
        self._in_one_call = chunk_pass.takes_all and self._rows_AD.dtype == self.batch.arithmetic.compute
        self._work = Workspace(self.batch.arithmetic, Scratch())

    @staticmethod
    def memory(plan: MemoryPlan, keep_bytes: int) -> tuple[tuple[int, str], int, int]:
        """(bytes of the rows and where they come from, bytes of kept logits, sums kept apart) of such a pass."""
        spec, width = plan.spec, plan.batch * plan.sub_centers * COMPUTE_BYTES
        walks = plan.device.type == "cpu" and spec.dtype == "float32"  # one call of C++ goes through all rows
        chunk_rows = 1 if walks else chunk_rows_on(plan.device, plan.batch, plan.dim)
        sums = parts_for(plan.active, plan.batch, plan.dim) if walks else PARTS
        kept = kept_rows(plan.active, chunk_rows, width, keep_bytes) * width
        return (plan.active * spec.row_bytes, f"A·D·{spec.numpy_dtype.itemsize}"), kept, sums

    def forward(self, *, want_gradient: bool, keep_bytes: int) -> tuple[Tensor, Tensor | None]:
        """Losses [B] and feature gradients [B, D]; logits of up to ``keep_bytes`` are kept for the row gradients."""
        batch, device = self.batch, self.batch.arithmetic.device
        if self._pass.keeps_logits:
            chunk_rows = 1 if self._in_one_call else self._pass.chunk_rows
            self._kept.reserve(batch, self._active.num, chunk_rows, keep_bytes)
        if self._in_one_call:
            num_parts = parts_for(self._active.num, *batch.features_BD.shape)
            softmax = OnlineSoftmax(batch, num_parts, want_gradient=want_gradient)
            kept_KB, threads = self._kept.all_KB, CHUNKS.num_threads
            self._pass.forward(self._work, softmax.sums, self._rows_AD, 0, kept_KB, threads=threads)
            return CHUNKS.apart(softmax.finish, device)
        softmax = OnlineSoftmax(batch, min(PARTS, len(self._chunks)), want_gradient=want_gradient)

        def add_part(scratch: Scratch, part: int) -> None:
            work = Workspace(batch.arithmetic, scratch)
            for start, stop in self._chunks[part :: len(softmax.parts)]:
                rows_ND = work.load_rows(self._rows_AD[start:stop])
                self._pass.forward(work, softmax.parts[part], rows_ND, start, self._kept.chunk(start, stop))

        CHUNKS.map(add_part, range(len(softmax.parts)), device, spreads_operations=self._pass.spreads_operations)
        return CHUNKS.apart(softmax.finish, device)

    def gradient(self, upstream: Tensor) -> tuple[HeldGradient, Tensor]:
        """Overwrite the rows by ``upstream`` · gradient; also return a sum that is finite only if all of it is."""
        batch, arithmetic = self.batch, self.batch.arithmetic
        out_AD = gradient_view(self._rows_AD)
        factor, weights_B = batch.row_factors(upstream)
        if weights_B is not None:
            self._take(pass_for(batch, weights_B))
        if self._in_one_call:
            kept_KB, threads = self._kept.all_KB, CHUNKS.num_threads
            checksum = self._pass.overwrite(self._work, self._rows_AD, 0, factor, kept_KB, threads=threads)
            self._kept.give_back()
            return HeldGradient(self._active, out_AD, self._buffer, self._pool, arithmetic.device, checksum), checksum

        counts_squares = arithmetic.device.type != "cpu"  # else once they are all there: no host waits for a device

        def overwrite(scratch: Scratch, chunk: tuple[int, int]) -> tuple[Tensor, Tensor | None]:
            work = Workspace(arithmetic, scratch)
            start, stop = chunk
            rows_ND = work.load_rows(self._rows_AD[start:stop])
            checksum = self._pass.overwrite(work, rows_ND, start, factor, self._kept.chunk(start, stop))
            squares = squared_sum(rows_ND) if counts_squares else None
            if rows_ND.data_ptr() != out_AD[start:stop].data_ptr():
                out_AD[start:stop].copy_(rows_ND, non_blocking=True)
            return checksum, squares

        made = CHUNKS.map(overwrite, self._chunks, arithmetic.device, spreads_operations=self._pass.spreads_operations)
        self._kept.give_back()
        checksum = torch.stack([checksum for checksum, _ in made]).sum()
        squares = [squares for _, squares in made if squares is not None]
        # Of what 16 bits, or 32 of 64, make of the values it says nothing.
        says_all = out_AD.dtype == arithmetic.compute == torch.float32
        own = checksum if says_all else None
        total = torch.stack(squares).sum() if squares else None
        return HeldGradient(self._active, out_AD, self._buffer, self._pool, arithmetic.device, own, total), checksum

    def discard(self) -> None:
        """Give the memory back when no row gradient is wanted."""
        self._kept.give_back()
        self._pool.give_back(self._buffer, Moment(self.batch.arithmetic.device))
