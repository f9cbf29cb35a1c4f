"""Class rows in the shards of a cluster: pulled to this process, or worked on beside where they are ("hosted").

Legend: B samples, D width, k answers.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch.distributed as dist
from torch import Tensor

from geartrain.ams.programs.class_head import NAME as HOSTED_NAME
from geartrain.ams.programs.class_lifecycle import LivingClasses
from geartrain.ams.programs.selection import FullSoftmax, PartialFC, SamplingCorrection
from geartrain.ams.values.errors import GeartrainError, InvalidRows
from geartrain.ams.values.specs import Ids
from geartrain.bridge.head.backends.hosted.hosted_predict import hosted_top_classes
from geartrain.bridge.head.backends.hosted.hosted_rows import Chosen, HostedRows
from geartrain.bridge.head.backends.place import HeadSettings
from geartrain.bridge.head.backends.pull.held_rows import HeldRows
from geartrain.bridge.head.backends.pull.inference import top_classes
from geartrain.bridge.head.backends.pull.streamed_rows import StreamedRows
from geartrain.bridge.head.batch import Arithmetic, Batch, Targets
from geartrain.bridge.head.checks import check_features, check_finite, check_labels
from geartrain.bridge.head.head_loss import HeadCall
from geartrain.bridge.head.loss.scratch import BufferPool
from geartrain.bridge.head.selection.knn_selection import KNNSelection, KNNSoftmax
from geartrain.bridge.rows.ranks import Ranks
from geartrain.bridge.rows.row_update import RowUpdate
from geartrain.bridge.rows.same_rows import identity_of
from geartrain.bridge.rows.tables import HeadCluster, HeadTable


class ClusterPlace:
    """Implements :class:`geartrain.bridge.head.backends.place.RowPlace`."""

    def __init__(
        self,
        cluster: HeadCluster,
        settings: HeadSettings,
        *,
        hosted: bool,
        reuse: bool,
        sync: bool,
        process_group: dist.ProcessGroup | None,
        rows_cache_bytes: int,
        logits_cache_bytes: int,
    ) -> None:
        """Make the table, or open it with ``reuse``. Raises TableExists, SpecMismatch, InvalidArgument."""
        self.living = LivingClasses.first(settings.num_classes, settings.num_living)
        joined = process_group is not None or (sync and dist.is_initialized())
        self.peers = ranks = Ranks(settings.name, process_group) if joined else None

        def create(reuse: bool) -> HeadTable:
            table = cluster.create_table(
                settings.name,
                dim=settings.dim,
                optimizer=settings.optimizer,
                num_rows=settings.num_classes,
                initializer=settings.initializer,
                seed=settings.seed,
                dtype=settings.dtype,
                slot_dtype=settings.slot_dtype,
                reuse=reuse,
            )
            return cast(HeadTable, table)

        self.table: HeadTable = (
            create(reuse) if ranks is None else ranks.first_then_others(lambda: create(reuse), lambda: create(True))
        )
        self.update = RowUpdate(self.table, ranks)
        select = settings.select
        service = getattr(cluster, "graph_service", None)  # none, of a cluster that knows nothing of graphs
        self.select: FullSoftmax | PartialFC | KNNSelection = (
            KNNSelection(select, self.table, ranks, lambda: self.update.step, service)
            if isinstance(select, KNNSoftmax)
            else select
        )
        if isinstance(self.select, KNNSelection):
            self.select.living = self.living
        self._settings = settings
        self.margin = settings.margin
        self._recent_labels: Ids = np.empty(0, np.int64)
        """Of the last batch that trained."""
        self._hosted = self.table.hosted(HOSTED_NAME) if hosted else None
        self._rows_cache_bytes = rows_cache_bytes
        self._logits_cache_bytes = logits_cache_bytes
        self._pool = BufferPool()

    def identity(self) -> dict[str, Any] | None:
        """See :class:`geartrain.bridge.head.backends.place.RowPlace`."""
        return identity_of(self.table, self._recent_labels)

    def begin(self, features: Tensor, labels: Tensor, *, in_training: bool, want_rows: bool) -> HeadCall:
        """See :class:`geartrain.bridge.head.backends.place.RowPlace`.

        Raises InvalidRows, InvalidIds and NonFinite; with ranks also SyncError for the input of another one, and
        SpecMismatch for other living classes.
        """
        living, margin = self.living, self.margin
        ranks = self.peers if in_training else None
        labels_B, all_labels = self._labels(features, labels, ranks)
        if in_training and isinstance(self.select, KNNSelection):
            self.select.prepare()
        if want_rows:
            self._recent_labels = all_labels
        required = None if ranks is None else ranks.sync_group(len(labels_B))
        is_corrected = isinstance(self.select, PartialFC) and self.select.corrects(margin)
        if self._hosted is not None:
            chosen = Chosen(self.select, living, self.update.step, all_labels, is_corrected)
            hosted = HostedRows(self._hosted, features, labels_B, margin, chosen, required)
            return HeadCall(hosted, self.update, len(labels_B), 0, want_rows=want_rows)
        active = living.select(self.select, all_labels, self.update.step)
        correction = SamplingCorrection.of(all_labels, active.num, living.num_living) if is_corrected else None
        stands_for = active.num if correction is None else living.num_living
        batch = Batch.of(features, Targets(active.positions(labels_B)), margin, stands_for, Arithmetic.of(features))
        batch.take_offsets(None if correction is None else correction.offsets(active))
        rows = (
            HeldRows(self.table, active, self._pool, batch, required)
            if self.select.budget(living.num_living) * self.table.spec.row_bytes <= self._rows_cache_bytes
            else StreamedRows(self.table, active, self._pool, batch, labels_B, required, correction)
        )
        return HeadCall(rows, self.update, len(labels_B), self._logits_cache_bytes, want_rows=want_rows)

    def _labels(self, features: Tensor, labels: Tensor, ranks: Ranks | None) -> tuple[Ids, Ids]:
        """Checked labels [B] of this rank, and those of all: ranks refuse a batch together, or some would wait."""
        labels_B: Ids = np.empty(0, np.int64)
        failure: GeartrainError | None = None
        try:
            check_features(features, self._settings.dim)
            given = check_labels(labels, len(features), self.living.num_classes)
            labels_B = self.living.require(given, "label")
            if ranks is None:
                check_finite(features)
                if len(labels_B) == 0:
                    raise InvalidRows("the batch is empty; a mean loss needs at least one sample")
        except GeartrainError as exc:
            if ranks is None:
                raise
            failure = exc
        if ranks is None:
            return labels_B, labels_B
        return labels_B, ranks.gather_labels(labels_B, failure=failure, classes=self.living.fingerprint)

    def predict(self, features: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """See :class:`geartrain.bridge.head.backends.place.RowPlace`."""
        check_finite(features)
        normalised = self.margin is not None
        if self._hosted is not None:
            return hosted_top_classes(self._hosted, features, k, living=self.living, normalised=normalised)
        arithmetic = Arithmetic.of(features)
        active = self.living.select(FullSoftmax(), np.empty(0, np.int64), 0)
        return top_classes(
            self.table, active, features, k, normalised=normalised, arithmetic=arithmetic, pool=self._pool
        )
