"""Active rows that fit in memory: pulled once, and overwritten in place by their gradient.

Legend: A active rows, B samples, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from geartrain.ams.client.table import Table
from geartrain.ams.programs.hosted import chunk_bounds
from geartrain.ams.values.shard_messages import SyncGroup
from geartrain.bridge.head.backends.active_rows import HostActive
from geartrain.bridge.head.backends.memory_plan import COMPUTE_BYTES, MemoryPlan
from geartrain.bridge.head.backends.pending_gradients import HeldGradient
from geartrain.bridge.head.backends.row_stream import Block
from geartrain.bridge.head.loss.batch import Batch
from geartrain.bridge.head.loss.block_loop import add_rows, gradient_blocks
from geartrain.bridge.head.loss.chunk_pass import chunk_rows_on, parts_for, pass_for
from geartrain.bridge.head.loss.chunk_pool import CHUNKS
from geartrain.bridge.head.loss.kept_logits import KeptLogits, kept_rows
from geartrain.bridge.head.loss.softmax import OnlineSoftmax
from geartrain.bridge.placements.workspace import BufferPool, Workspace
from geartrain.bridge.rows.gradient_carrier import squared_sum
from geartrain.bridge.rows.tables import TORCH_DTYPES, as_numpy, counted_as, gradient_view
from geartrain.bridge.rows.transfers import DeviceEvent

PARTS = 8
"""Number of partial sums, added in order: the result does not depend on the number of threads."""


class HeldRows:
    """Rows of one forward pass. Costs one pull; memory A·D of the table's type plus the kept logits."""

    def __init__(
        self, table: Table, active: HostActive, pool: BufferPool, batch: Batch, required_sync: SyncGroup | None
    ) -> None:
        self.batch = batch
        self._active = active
        self._pool = pool
        spec, device = table.spec, batch.arithmetic.device
        self._buffer = pool.acquire(active.num * spec.row_bytes, torch.device("cpu"), pinned=device.type == "cuda")
        rows_AD = self._buffer.tensor((active.num, spec.dim), TORCH_DTYPES[spec.dtype])
        self._rows = Block(0, active.num, active.ids, rows_AD)
        with counted_as("pull"):
            table.pull_into(self._rows.ids, as_numpy(rows_AD), required_sync=required_sync)
        self._pass = pass_for(batch)
        self._is_whole = rows_AD.dtype == batch.arithmetic.compute
        """Whether one call of a compiled pass may process all rows in place."""

    @staticmethod
    def memory(plan: MemoryPlan, keep_bytes: int) -> tuple[tuple[int, str], int, int]:
        """Return (bytes of the rows with their formula, bytes of kept logits, number of partial sums) of such a
        pass."""
        spec, width = plan.spec, plan.batch * plan.sub_centers * COMPUTE_BYTES
        walks = plan.device.type == "cpu" and spec.dtype == "float32"  # one call of C++ goes through all rows
        chunk_rows = 1 if walks else chunk_rows_on(plan.device, plan.batch, plan.dim)
        sums = parts_for(plan.active, plan.batch, plan.dim) if walks else PARTS
        kept = kept_rows(plan.active, chunk_rows, width, keep_bytes) * width
        return (plan.active * spec.row_bytes, f"A·D·{spec.numpy_dtype.itemsize}"), kept, sums

    def forward(self, *, want_gradient: bool, keep_bytes: int) -> tuple[Tensor, Tensor | None]:
        """Return losses [B] and feature gradients [B, D]; keep logits of up to ``keep_bytes`` for the row gradients."""
        batch, num = self.batch, self._active.num
        keep_bytes = keep_bytes if self._pass.keeps_logits else 0
        if self._is_whole and (over_all := self._pass.over_all):
            self._kept = KeptLogits(self._pool, batch, num, 1, keep_bytes)
            softmax = OnlineSoftmax(batch, parts_for(num, *batch.features_BD.shape), want_gradient=want_gradient)
            rows_AD, kept_KB = self._rows.rows_ND, self._kept.all_KB
            over_all.forward_all(softmax.sums, rows_AD, 0, kept_KB, threads=CHUNKS.num_threads)
        else:
            self._kept = KeptLogits(self._pool, batch, num, self._pass.chunk_rows, keep_bytes)
            num_parts = min(PARTS, len(chunk_bounds(num, self._pass.chunk_rows)))
            softmax = OnlineSoftmax(batch, num_parts, want_gradient=want_gradient)
            add_rows(softmax, self._pass, [self._rows], self._kept)
        return CHUNKS.apart(softmax.finish, batch.arithmetic.device)

    def gradient(self, upstream: Tensor) -> tuple[HeldGradient, Tensor]:
        """Overwrite the rows by ``upstream`` · gradient; also return a sum that is finite only if all of it is."""
        arithmetic, out_AD = self.batch.arithmetic, gradient_view(self._rows.rows_ND)
        factor, weights_B = self.batch.row_factors(upstream)
        if weights_B is not None:
            self._pass = pass_for(self.batch, weights_B)
        if self._is_whole and (over_all := self._pass.over_all):
            rows_AD, kept_KB = self._rows.rows_ND, self._kept.all_KB
            checksum, squares = over_all.overwrite_all(rows_AD, 0, factor, kept_KB, threads=CHUNKS.num_threads)
        else:
            checksum, squares = self._overwrite(factor, out_AD)
        self._kept.clear()
        # It does not cover what 16 bits, or 32 of 64, make of the values.
        known = checksum if out_AD.dtype == arithmetic.compute == torch.float32 else None
        held = HeldGradient(
            self._active, self._rows.ids, out_AD, self._buffer, self._pool, arithmetic.device, known, squares
        )
        return held, checksum

    def _overwrite(self, factor: Tensor, out_AD: Tensor) -> tuple[Tensor, Tensor | None]:
        """Overwrite chunk by chunk; return (checksum, Σ g² where a device computes it at once, without a host
        waiting)."""
        device = self.batch.arithmetic.device

        def overwrite(work: Workspace, rows_ND: Tensor, start: int, kept_NB: Tensor | None) -> Tensor:
            return self._pass.overwrite(work, rows_ND, start, factor, kept_NB)

        def store(block: Block, start: int, stop: int, gradient_ND: Tensor, checksum: Tensor) -> list[Tensor]:
            del block
            squares = [] if device.type == "cpu" else [squared_sum(gradient_ND)]
            if gradient_ND.data_ptr() != out_AD[start:stop].data_ptr():
                out_AD[start:stop].copy_(gradient_ND, non_blocking=True)
            return [checksum, *squares]

        made = gradient_blocks(overwrite, self._pass, self.batch.arithmetic, [self._rows], store, self._kept)
        checksum, *squares = (torch.stack(parts).sum() for parts in zip(*next(made)[1], strict=True))
        return checksum, squares[0] if squares else None

    def discard(self) -> None:
        """Release the memory when no row gradient is needed."""
        self._kept.clear()
        self._pool.release(self._buffer, DeviceEvent(self.batch.arithmetic.device))
