"""Class rows in the shards of a cluster: code shared by pulled and hosted rows.

Legend: B samples, D width, k answers.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from geartrain.ams.client.table import Table
from geartrain.ams.programs.class_lifecycle import LiveClasses
from geartrain.ams.values.errors import GeartrainError, InvalidArgument, InvalidRows
from geartrain.ams.values.shard_messages import SyncGroup
from geartrain.ams.values.specs import Ids
from geartrain.ams.values.text import quoted
from geartrain.bridge.head.backends.backend import HeadSettings, Imprinted
from geartrain.bridge.head.loss.autograd_node import HeadCall, RowsPass
from geartrain.bridge.head.loss.batch import with_ones
from geartrain.bridge.head.loss.checks import check_finite
from geartrain.bridge.head.loss.margins.head_margin import HeadMargin, JointBatch
from geartrain.bridge.head.loss.margins.margin import Margin
from geartrain.bridge.head.loss.sample_weights import CountedSamples
from geartrain.bridge.head.loss.sub_centers import largest_cosines
from geartrain.bridge.head.selection.served_graph import TableGraphs
from geartrain.bridge.rows.ranks import SyncRanks
from geartrain.bridge.rows.row_identity import identity_of, require_same_rows
from geartrain.bridge.rows.row_update import RowUpdate
from geartrain.bridge.rows.tables import TORCH_DTYPES, as_numpy, counted_as
from geartrain.bridge.rows.transfers import upload

if TYPE_CHECKING:
    pass


class ClusterBackend(ABC):
    """Base of the implementations of :class:`geartrain.bridge.head.backends.backend.RowBackend` on a cluster's
    table."""

    summary: ClassVar[str]
    needs_cluster: ClassVar = True
    local = None
    can_change_negatives: ClassVar = True
    """Whether a margin may change the logits of other classes."""
    keeps_logits_bytes = 0
    """Bytes of logits that a pass may keep."""

    def __init__(self, settings: HeadSettings) -> None:
        """Create the table, or open it with ``reuse``. Raises TableExists, SpecMismatch, InvalidArgument."""
        cluster = settings.cluster
        if cluster is None or not hasattr(cluster, "create_table"):
            raise InvalidArgument(
                f"cluster is {quoted(cluster)}; rows in a cluster need one (gt.local(), gt.connect(...)), "
                "rows='ranks' none"
            )
        self.live_classes = LiveClasses.first(settings.num_classes, settings.num_live_classes)
        self.imprinted: Imprinted | None = None
        group = settings.config.process_group
        joined = group is not None or (settings.sync and dist.is_initialized())
        self.peers = ranks = SyncRanks(settings.name, group) if joined else None

        def create(reuse: bool) -> Table:
            return cluster.create_table(settings.name, **settings.table(), reuse=reuse)

        reuse = settings.reuse
        self.table: Table = (
            create(reuse) if ranks is None else ranks.first_then_others(lambda: create(reuse), lambda: create(True))
        )
        wire = settings.config.wire_dtype
        self.step_table: Table = self.table if wire is None else self.table.with_wire(wire)
        """The table with the wire dtype of a step's rows; :attr:`table` reads exact rows, to save or show them."""
        self.update = RowUpdate(self.step_table, ranks)
        self.settings = settings
        self.margins = HeadMargin(settings.margin, negatives=self.can_change_negatives)
        self._recent_labels: Ids = np.empty(0, np.int64)
        """Labels of the last training batch."""
        self.select = settings.select.bound(self)

    def graph_source(self) -> TableGraphs:
        """Return a source of graphs: pulled rows, or the cluster's graph service."""
        # A cluster of another kind may know nothing of graphs.
        return TableGraphs(self.table, getattr(self.settings.cluster, "graph_service", None))

    def start(
        self, features: Tensor, labels: Tensor, weight: Tensor | None, *, in_training: bool, want_rows: bool
    ) -> HeadCall:
        """Raises InvalidRows, InvalidIds, InvalidArgument and NonFinite; with ranks also SyncError for the input of
        another rank, and SpecMismatch for other live classes.
        """
        ranks = self.peers if in_training else None
        samples, joint, share = self._samples(features, labels, weight, ranks)
        if in_training:
            self.select.prepare()
        if want_rows:
            self._recent_labels = joint.labels
        required = None if ranks is None else ranks.sync_group(len(samples.labels_S))
        margin = self.margins.of_pass(
            samples.features_SD,
            samples.labels_S,
            joint,
            step=self.update.step,
            training=in_training,
            target_cos=lambda unit_SD: self._target_cos(unit_SD, samples.labels_S, required),
        )
        features_SD = with_ones(samples.features_SD) if self.settings.bias else samples.features_SD
        rows = self._pass(features_SD, samples.labels_S, joint.labels, margin, required)
        return HeadCall(
            rows,
            self.update,
            samples,
            self.keeps_logits_bytes,
            want_rows=want_rows,
            link=ranks,
            share=share,
        )

    @abstractmethod
    def _pass(
        self,
        features: Tensor,
        labels_B: Ids,
        all_labels: Ids,
        margin: Margin | None,
        required: SyncGroup | None,
    ) -> RowsPass:
        """Return the rows of one forward pass over a checked batch."""

    def _target_cos(self, unit_BD: Tensor, labels_B: Ids, required: SyncGroup | None) -> Tensor:
        """Return cosines [B] of unit features and the rows of their classes. Costs a pull of those rows."""
        ids, places = np.unique(labels_B, return_inverse=True)
        rows_ND = torch.empty(len(ids), self.table.spec.dim, dtype=TORCH_DTYPES[self.table.spec.dtype], device="cpu")
        with counted_as("pull"):
            self.step_table.pull_into(ids, as_numpy(rows_ND), required_sync=required)
        rows_ND = upload(rows_ND, unit_BD.device).to(unit_BD.dtype)
        return largest_cosines(unit_BD, rows_ND[upload(places, unit_BD.device)])

    @abstractmethod
    def predict(self, features: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the result of :meth:`RowBackend.predict`."""

    def _samples(
        self, features: Tensor, labels: Tensor, weight: Tensor | None, ranks: SyncRanks | None
    ) -> tuple[CountedSamples, JointBatch, float | None]:
        """Return this rank's checked samples, their places among those of all ranks, and the share of this rank's loss
        in that of all (None: ranks have no joint loss). Ranks refuse a batch together, or some would wait."""
        samples: CountedSamples | None = None
        failure: GeartrainError | None = None
        try:
            samples = CountedSamples.of(
                features, labels, weight, self.settings.config, self.settings.dim, self.live_classes
            )
            if ranks is None:
                check_finite(samples.features_SD)
                if len(features) == 0:
                    raise InvalidRows("the batch is empty; a mean loss needs at least one sample")
        except GeartrainError as exc:
            if ranks is None:
                raise
            failure = exc
        if ranks is None:
            assert samples is not None
            return samples, JointBatch(labels=samples.labels_S, first=0, sum=lambda own: own), None
        none: Ids = np.empty(0, np.int64)
        parts, amounts = ranks.gather_samples(
            none if samples is None else samples.labels_S,
            failure=failure,
            classes=self.live_classes.fingerprint,
            settings=self._said(),
            amount=0.0 if samples is None else samples.amount,
        )
        assert samples is not None
        joint = JointBatch(labels=np.concatenate(parts), first=sum(map(len, parts[: ranks.rank])), sum=ranks.sum)
        shares = {"mean": samples.amount / (sum(amounts) or 1.0), "sum": 1.0}
        return samples, joint, shares.get(self.settings.config.reduction)

    def _said(self) -> str:
        """Return the settings that decide a pass's collectives and its loss, as text."""
        own = self.settings
        parts = {
            "margin": self.margins.margin,
            "select": own.select,
            "loss": own.config.loss,
            "sub_centers": own.sub_centers,
        }
        texts = (f"{name} {_named(value)}" for name, value in parts.items())
        return f"{self.summary}, {', '.join(texts)}"

    def identity(self) -> dict[str, Any] | None:
        return identity_of(self.table, self._recent_labels)

    def require_rows(self, identity: Mapping[str, Any] | None) -> None:
        """Raise SpecMismatch unless the rows have this :meth:`identity`; pulls up to 128 rows where the table is
        another."""
        require_same_rows(self.table, identity)


def _named(setting: object) -> str:
    """Return the setting's repr without memory addresses, which differ by process."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(setting))
