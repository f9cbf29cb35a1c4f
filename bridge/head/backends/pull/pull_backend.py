"""Backend that pulls class rows from a cluster's shards to this process: held until the step, or streamed."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from geartrain.ams.programs.selection import SamplingCorrection
from geartrain.ams.values.shard_messages import SyncGroup
from geartrain.ams.values.specs import Ids, checked_wire_dtype
from geartrain.bridge.head.backends.active_rows import HostActive, add_log_q_correction
from geartrain.bridge.head.backends.backend import HeadSettings
from geartrain.bridge.head.backends.cluster_backend import ClusterBackend
from geartrain.bridge.head.backends.memory_plan import MemoryPart, MemoryPlan, id_arrays, in_step
from geartrain.bridge.head.backends.predict import TopOfPulled
from geartrain.bridge.head.backends.pull import streamed_rows
from geartrain.bridge.head.backends.pull.held_rows import HeldRows
from geartrain.bridge.head.backends.pull.streamed_rows import StreamedRows
from geartrain.bridge.head.loss.autograd_node import RowsPass
from geartrain.bridge.head.loss.batch import Batch
from geartrain.bridge.head.loss.checks import check_finite
from geartrain.bridge.head.loss.chunk_pass import chunk_rows_on
from geartrain.bridge.head.loss.config import HeadConfig
from geartrain.bridge.head.loss.margins.margin import Margin
from geartrain.bridge.head.loss.statistics import LOOKS_EVERY
from geartrain.bridge.placements.workspace import Arithmetic, BufferPool

LOGITS_CACHE_BYTES = 26 << 20
"""Default bytes of kept logits: the active rows are held beside them."""

_WIDTHS = 12
"""Matrices [B, D] beside the sums: features, packed, target rows, gradients, and those that the allocator keeps for
the next step; measured, in the processes of the tests."""


def _kept_bytes(config: HeadConfig) -> int:
    return LOGITS_CACHE_BYTES if config.logits_cache_bytes is None else config.logits_cache_bytes


class PullBackend(ClusterBackend):
    """Implements :class:`geartrain.bridge.head.backends.backend.RowBackend`."""

    summary: ClassVar = "rows travel here"

    def __init__(self, settings: HeadSettings) -> None:
        self.keeps_logits_bytes = _kept_bytes(settings.config)
        self._pool = BufferPool()
        checked_wire_dtype(settings.config.wire_dtype, settings.name, settings.config.dtype)  # before the table exists
        super().__init__(settings)
        self._top = TopOfPulled(
            self.table, self._pool, centers=settings.sub_centers, kept_bytes=settings.config.rows_cache_bytes
        )

    @classmethod
    def step_memory(cls, plan: MemoryPlan) -> list[MemoryPart]:
        """Return the memory of a step: a rank holds the active rows and overwrites them by their gradients, or streams
        them."""
        row_bytes = plan.spec.row_bytes
        if plan.active * row_bytes <= plan.config.rows_cache_bytes:
            keep_bytes = _kept_bytes(plan.config)
            (buffers, formula), kept, sums = HeldRows.memory(plan, keep_bytes)
            push = buffers
        else:
            push, blocks = StreamedRows.memory(plan)
            buffers, formula, kept, sums = blocks * push, f"{blocks} blocks of 8 MiB", 0, streamed_rows.PARTS
        return in_step(
            "rank",
            ("active rows, then their gradients", buffers, formula),
            ("gradients cut by shard", push if plan.shards > 1 else 0, "as much as one push, if S > 1"),
            ("kept logits", kept, "A·B·4, at most logits_cache_bytes"),
            id_arrays(buffers // row_bytes),
            *plan.batch_parts(
                plan.batch,
                sums,
                chunk_rows_on(plan.device, plan.batch, plan.dim),
                row_copies=0 if plan.spec.dtype == "float32" else 1,
                others=_WIDTHS,
            ),
        ) + plan.wire_parts(push)

    def _pass(
        self,
        features: Tensor,
        labels_B: Ids,
        all_labels: Ids,
        margin: Margin | None,
        required: SyncGroup | None,
    ) -> RowsPass:
        live_classes, table = self.live_classes, self.step_table
        chosen = live_classes.select(self.select, all_labels, self.update.draw)
        active = HostActive(chosen.num, chosen.sorted_ids)
        is_corrected = self.select.corrects(margin)
        correction = (
            SamplingCorrection.of(all_labels, active.num, live_classes.num_live_classes) if is_corrected else None
        )
        stands_for, log2_weight = (
            (active.num, 0.0) if correction is None else (live_classes.num_live_classes, correction.log2_weight)
        )
        targets, smoothing = active.targets(labels_B), self.settings.config.label_smoothing
        batch = Batch.of(
            features,
            targets,
            labels_B,
            margin,
            stands_for,
            Arithmetic.of(features),
            smoothing,
            num_active=active.num,
            centers=self.settings.sub_centers,
            looks_for_highest=features.device.type == "cpu" or self.update.step % LOOKS_EVERY == 0,
        )
        add_log_q_correction(batch, active, all_labels, log2_weight)
        if (
            self.select.budget(live_classes.num_live_classes) * table.spec.row_bytes
            <= self.settings.config.rows_cache_bytes
        ):
            return HeldRows(table, active, self._pool, batch, required)
        return StreamedRows(table, active, self._pool, batch, labels_B, all_labels, log2_weight, required)

    def predict(self, features: Tensor, k: int) -> tuple[Tensor, Tensor]:
        check_finite(features)
        return self._top(self.live_classes, features, k, normalised=self.margins.margin is not None)
