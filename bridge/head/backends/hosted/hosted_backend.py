"""Backend whose rows stay on the shards: features are sent to them (costs: ``hosted_rows.py``)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from geartrain.ams.programs import class_head
from geartrain.ams.values.shard_messages import SyncGroup
from geartrain.ams.values.specs import Ids
from geartrain.bridge.head.backends.backend import HeadSettings, require_no_wire
from geartrain.bridge.head.backends.cluster_backend import ClusterBackend
from geartrain.bridge.head.backends.hosted.hosted_rows import RowsOnShards, StepSelection
from geartrain.bridge.head.backends.memory_plan import COMPUTE_BYTES, MemoryPart, MemoryPlan, in_step
from geartrain.bridge.head.backends.predict import top_of_hosted
from geartrain.bridge.head.loss.autograd_node import RowsPass
from geartrain.bridge.head.loss.checks import check_finite
from geartrain.bridge.head.loss.margins.margin import Margin

_WIDTHS = 13
"""Matrices [B, D] of a rank; measured like those of ``pull_backend.py``."""


class HostedBackend(ClusterBackend):
    """Implements :class:`geartrain.bridge.head.backends.backend.RowBackend`."""

    summary: ClassVar = "features travel to the shards"
    can_change_negatives: ClassVar = False

    def __init__(self, settings: HeadSettings) -> None:
        require_no_wire(settings, "features do")
        super().__init__(settings)
        self._calls = self.table.hosted(class_head.NAME)

    @classmethod
    def step_memory(cls, plan: MemoryPlan) -> list[MemoryPart]:
        """Return the memory of a step: each shard computes beside its part of the active rows."""
        dim, wide = plan.spec.dim, plan.wide * plan.ranks
        active = -(-plan.active // plan.shards)
        work, formula = class_head.step_bytes(active, wide, dim)
        chunk = min(class_head.CHUNK_ROWS, active) * dim * COMPUTE_BYTES
        copies = 2 if plan.spec.dtype == "float32" else 2.5  # one of them is kept by the allocator
        return in_step(
            "shard",
            plan.sampled_ids(),
            ("partial sums, then gradients", work, formula),
            ("features, packed, and target rows", 2 * wide, "2·R·B·D·4"),
            ("scratch of the threads", int(plan.threads * copies * chunk), "2 chunks of rows a thread"),
        ) + in_step(
            "rank",
            ("features, answers and gradients", (_WIDTHS + plan.shards) * plan.wide, f"({_WIDTHS} + S)·B·D·4"),
        )

    def _pass(
        self,
        features: Tensor,
        labels_B: Ids,
        all_labels: Ids,
        margin: Margin | None,
        required: SyncGroup | None,
    ) -> RowsPass:
        is_corrected = self.select.corrects(margin)
        chosen = StepSelection(self.select, self.live_classes, self.update.draw, all_labels, is_corrected)
        smoothing = self.settings.config.label_smoothing
        centers = self.settings.sub_centers
        return RowsOnShards(self._calls, features, labels_B, margin, chosen, required, smoothing, centers)

    def predict(self, features: Tensor, k: int) -> tuple[Tensor, Tensor]:
        check_finite(features)
        normalised = self.margins.margin is not None
        centers = self.settings.sub_centers
        return top_of_hosted(
            self._calls, features, k, live_classes=self.live_classes, normalised=normalised, centers=centers
        )
