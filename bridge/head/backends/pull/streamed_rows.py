"""Active rows that do not fit in memory: streamed past the batch in blocks.

Legend: B samples, D width, N rows of a chunk.
"""

from __future__ import annotations

from torch import Tensor

from geartrain.ams.client.table import Table
from geartrain.ams.values.shard_messages import SyncGroup
from geartrain.ams.values.specs import Ids
from geartrain.bridge.head.backends.active_rows import HostActive
from geartrain.bridge.head.backends.memory_plan import MemoryPlan
from geartrain.bridge.head.backends.pending_gradients import Factors, StreamedGradient
from geartrain.bridge.head.backends.row_stream import NUM_BUFFERS, RowStream, block_rows_for
from geartrain.bridge.head.loss.batch import Batch
from geartrain.bridge.head.loss.block_loop import add_rows
from geartrain.bridge.head.loss.chunk_pass import pass_for
from geartrain.bridge.head.loss.softmax import OnlineSoftmax
from geartrain.bridge.placements.workspace import BufferPool

PARTS = 4
"""Number of partial sums, added in order: the result does not depend on the number of threads."""


class StreamedRows:
    """Rows of one forward pass. Costs one pull per block and shard; memory of four blocks."""

    def __init__(
        self,
        table: Table,
        active: HostActive,
        pool: BufferPool,
        batch: Batch,
        labels_B: Ids,
        positives: Ids,
        log2_weight: float,
        required_sync: SyncGroup | None,
    ) -> None:
        self._table = table
        self._active = active
        self._pool = pool
        self.batch = batch
        self._labels_B = labels_B
        self._required_sync = required_sync
        self._positives, self._log2_weight = positives, log2_weight
        self._pass = pass_for(batch)

    @staticmethod
    def memory(plan: MemoryPlan) -> tuple[int, int]:
        """Return (bytes of a block, blocks held at a time) of such a pass."""
        return min(block_rows_for(plan.spec.row_bytes), plan.active) * plan.spec.row_bytes, NUM_BUFFERS

    def forward(self, *, want_gradient: bool, keep_bytes: int) -> tuple[Tensor, Tensor | None]:  # noqa: ARG002
        """Return losses [B] and feature gradients [B, D]; nothing is kept."""
        batch = self.batch
        softmax = OnlineSoftmax(batch, PARTS, want_gradient=want_gradient)
        stream = RowStream(self._table, self._active, self._pool, batch.arithmetic.device, self._required_sync)
        add_rows(softmax, self._pass, stream.blocks())
        stream.close()
        return softmax.finish()

    def gradient(self, upstream: Tensor) -> tuple[StreamedGradient, Tensor]:
        """Return the row gradients in factored form, and a sum that is finite only if all of them are."""
        batch = self.batch
        factor, weights_B = batch.row_factors(upstream)
        checksum = factor + batch.lse2_B.sum() + batch.target_weight_B.sum()
        factors = Factors(
            batch=batch,
            chunk_pass=self._pass if weights_B is None else pass_for(batch, weights_B),
            active=self._active,
            labels_B=self._labels_B,
            positives=self._positives,
            log2_weight=self._log2_weight,
            factor=factor,
        )
        return StreamedGradient(self._table, self._pool, factors), checksum

    def discard(self) -> None:
        """Do nothing: no memory is held."""
