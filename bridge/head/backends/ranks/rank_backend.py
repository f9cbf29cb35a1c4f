"""Class rows on the devices of torch.distributed ranks.

Legend: S samples of this rank, k answers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from geartrain.ams.programs.class_lifecycle import LiveClasses
from geartrain.ams.programs.selection import FullSoftmax
from geartrain.ams.storage.snapshot.folder import Snapshot
from geartrain.ams.storage.snapshot.store import Place
from geartrain.ams.values.errors import GeartrainError
from geartrain.ams.values.specs import TableSpec
from geartrain.bridge.collectives.communicator import Communicator
from geartrain.bridge.head.backends.backend import HeadSettings, Imprinted, require_no_wire
from geartrain.bridge.head.backends.memory_plan import COMPUTE_BYTES, MemoryPart, MemoryPlan, in_step
from geartrain.bridge.head.backends.predict import top_on_ranks
from geartrain.bridge.head.backends.ranks import passes as rank_rows
from geartrain.bridge.head.backends.ranks.checkpoint import ShardedRows
from geartrain.bridge.head.backends.ranks.device_labels import DeviceLabels
from geartrain.bridge.head.backends.ranks.fused import RANGE_BYTES
from geartrain.bridge.head.backends.ranks.gathered_features import rows_of_parts
from geartrain.bridge.head.backends.ranks.passes import RankGradient, RankRows
from geartrain.bridge.head.backends.ranks.selector import RankSelector
from geartrain.bridge.head.backends.ranks.update import RankStep, RankStepFacts, named, raise_late, refused_rows
from geartrain.bridge.head.loss.autograd_node import HeadCall
from geartrain.bridge.head.loss.chunk_pass import chunk_rows_on
from geartrain.bridge.head.loss.config import HeadConfig
from geartrain.bridge.head.loss.feature_parts import FeatureParts
from geartrain.bridge.head.loss.kept_logits import kept_rows
from geartrain.bridge.head.loss.margins.head_margin import HeadMargin
from geartrain.bridge.head.loss.sample_weights import CountedSamples
from geartrain.bridge.head.selection.rank_graph import RankGraphs
from geartrain.bridge.kernels.head import TILE
from geartrain.bridge.placements.device_rows import DeviceRows
from geartrain.bridge.placements.device_snapshot import restore_rows, snapshot_rows
from geartrain.bridge.placements.device_update import DeviceUpdate

LOGITS_CACHE_BYTES = 64 << 20
"""Default bytes of kept logits on a CPU: rows are not held beside them."""
DEVICE_CACHE_BYTES = 2 << 30
"""Default elsewhere: the need of 1 M classes for 512 samples of products in float32, or 2 M in 16 bits. Without it
exponentials are computed twice, a third more products."""
_WIDTHS = 9
"""Matrices [B, D] of all ranks beside the sums; measured like those of ``pull_backend.py``."""


def _kept_bytes(config: HeadConfig, device: torch.device) -> int:
    if config.logits_cache_bytes is not None:
        return config.logits_cache_bytes
    return LOGITS_CACHE_BYTES if device.type == "cpu" else DEVICE_CACHE_BYTES


class RankBackend:
    """Implements :class:`geartrain.bridge.head.backends.backend.RowBackend`."""

    summary: ClassVar = "rows are here"
    needs_cluster: ClassVar = False

    def __init__(self, settings: HeadSettings) -> None:
        """Create the table on every rank of the group (None: all; without torch.distributed this process alone).

        Raises InvalidArgument, and SpecMismatch on every rank unless all give equal settings. Costs two all-gathers
        between the hosts, and for KNN softmax a process group for its builds.
        """
        require_no_wire(settings, "the ranks hold them, and features and labels are gathered")
        self.live_classes = LiveClasses.first(settings.num_classes, settings.num_live_classes)
        self.imprinted: Imprinted | None = None
        self.table = _open_table(settings, Communicator(settings.config.process_group))
        self.process_group = settings.config.process_group
        self.peers = self.table.link
        self.update: DeviceUpdate[RankGradient] = DeviceUpdate(self.table)
        self.select = settings.select.bound(self)
        self.selector = RankSelector(self.table, self.select)
        self.late_labels, self.checks_late = DeviceLabels(settings.config.ignore_index), False
        self.update.late = self
        self.fuses = False
        self.margins = HeadMargin(settings.margin)
        self.settings = settings

    @classmethod
    def step_memory(cls, plan: MemoryPlan) -> list[MemoryPart]:
        """Return the memory of a step: features are gathered, gradients made and used chunk by chunk."""
        joint = plan.batch * plan.ranks
        chunk_rows = chunk_rows_on(plan.device, plan.batch, plan.dim)
        row_bytes = joint * plan.sub_centers * COMPUTE_BYTES
        keep_bytes, own = _kept_bytes(plan.config, plan.device), -(-plan.active // plan.ranks)
        kept = kept_rows(own, chunk_rows, row_bytes, keep_bytes) * row_bytes
        again = 0 if plan.device.type == "cpu" else min(RANGE_BYTES, max(0, own * row_bytes - kept))
        tiles = 0 if plan.device.type == "cpu" else -(-own // TILE) * joint * 2 * COMPUTE_BYTES
        copies = DeviceRows.chunk_copies(plan.spec, plan.device, picked=plan.active < plan.num_classes)
        return in_step(
            "rank",
            ("kept logits", kept, "A·B·4, at most logits_cache_bytes"),
            ("logits made again, and sums of tiles", again + tiles, "2 GiB at most, and A/128·B·8, on a GPU"),
            plan.sampled_ids(),
            *plan.batch_parts(joint, rank_rows.PARTS, chunk_rows, row_copies=copies, others=_WIDTHS),
        ) + RankSelector.memory(plan)

    @property
    def local(self) -> RankBackend:
        """This backend: its rows are local."""
        return self

    @property
    def own_classes(self) -> range:
        """Classes of this rank."""
        return range(self.table.first, self.table.stop)

    def graph_source(self) -> RankGraphs:
        """Return a source of graphs that all ranks build together, over a process group of their own."""
        return RankGraphs(self.table)

    def identity(self) -> dict[str, Any] | None:
        """Return the identity of this rank's rows: reading others is a collective, and one rank alone may save a
        state."""
        self._warn_of_late_errors(self.update.count_refused())
        return self.table.identity()

    def _warn_of_late_errors(self, refused: int) -> None:
        """Warn of steps that changed no row, or not these: after the last one no call raises it."""
        late: GeartrainError | None = self.late_labels.first_error()
        if late is None and refused:
            late = refused_rows(self.table.spec, refused)
        if late is not None:
            warnings.warn(f"{late}. The next call of the head raises this, too", stacklevel=4)

    def require_rows(self, identity: Mapping[str, Any] | None) -> None:
        """Raise SpecMismatch unless this rank's rows are those of the state."""
        self.table.require_same(identity)

    def require_step(self, step: int) -> None:
        """Raise SpecMismatch for rows of another step, unless they were just restored."""
        self.update.require_step(step)

    def raise_late(self) -> None:
        """Raise on every rank the errors of earlier steps: one exchange between the hosts."""
        found = [self.update.pop_refused(), self.late_labels.has_bad, self.update.step]
        left, bad, steps = zip(*self.table.link.exchange(found), strict=True)
        raise_late(self, refused=sum(left), has_bad=any(bad), steps=steps)

    def pop_captured(self) -> Callable[[int], None]:
        """Return the result of :meth:`DeviceLabels.pop_captured`."""
        return self.late_labels.pop_captured()

    def move_with(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Move rows with ``head.to(device)``; they are no buffers, which DDP would make equal on all ranks."""
        device = fn(torch.empty(0, device=self.table.device)).device
        self.update.discard()
        self.update.generation += device != self.table.device  # a CUDA graph writes where the rows were
        self.table.move_to(device)

    def snapshot(
        self, root: str | Path, name: str | None, *, step: int, values: Mapping[str, Any], files: Mapping[str, bytes]
    ) -> Place:
        """Write as ``ClassHead.snapshot``. Costs one exchange between the hosts, of the number of refused rows."""
        self._warn_of_late_errors(sum(count for (count,) in self.table.link.exchange([self.update.count_refused()])))
        return snapshot_rows([self.table], root, name, step=step, values=values, files=files)

    def restore(self, path: str | Path) -> Snapshot:
        """Read as ``ClassHead.restore``."""
        self.update.discard()
        snapshot = restore_rows([self.table], path)
        self.update.rows_are_of(snapshot.manifest.step)
        return snapshot

    def rows_are_of(self, step: int) -> None:
        """Record that the rows were read from elsewhere, and are those of ``step``."""
        self.update.rows_are_of(step)

    def sharded_rows(self, head: nn.Module) -> ShardedRows:
        """Return the result of ``ClassHead.sharded_rows``."""
        return ShardedRows(self, head)

    def start(
        self, features: Tensor, labels: Tensor, weight: Tensor | None, *, in_training: bool, want_rows: bool
    ) -> HeadCall:
        """Start as ``RowBackend``. Raises as :meth:`RankStep.agree`."""
        step = RankStep(self, training=want_rows, adapts=in_training)
        samples, agreed = step.agree(features, labels, weight)
        return self._call(step.rows(samples, agreed), samples, agreed, want_rows=want_rows)

    def start_parts(
        self, parts: FeatureParts, labels: Tensor, weight: Tensor | None, *, in_training: bool, want_rows: bool
    ) -> HeadCall:
        """Start as ``LocalRows``. Raises as :meth:`RankStep.agree`, and what computing a part raises."""
        step = RankStep(self, training=want_rows, adapts=in_training)
        samples, agreed, rows = rows_of_parts(step, parts, labels, weight)
        return self._call(rows, samples, agreed, want_rows=want_rows)

    def _call(self, rows: RankRows, samples: CountedSamples, agreed: RankStepFacts, *, want_rows: bool) -> HeadCall:
        return HeadCall(
            rows,
            self.update,
            samples,
            _kept_bytes(self.settings.config, self.table.device),
            want_rows=want_rows,
            link=self.table.link,
            share=agreed.share,
            num_ranks=self.table.link.world_size,
            takes_mean=agreed.take_mean,
        )

    def predict(self, features: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Predict as ``RowBackend``. Collective: every rank gives its own features [S, D]."""
        normalised = self.margins.margin is not None
        active = self.live_classes.select(FullSoftmax(), np.empty(0, np.int64), 0)
        centers = self.settings.sub_centers
        return top_on_ranks(self.table, active, features, k, normalised=normalised, centers=centers)


def _open_table(settings: HeadSettings, link: Communicator) -> DeviceRows:
    try:
        spec = TableSpec(name=settings.name, **settings.table())
    except GeartrainError as exc:
        link.require_equal({"error": str(exc)}, f"table {settings.name!r}")
        raise
    settings_of_all = {
        **spec.to_dict(),
        "select": named(settings.select),
        "margin": named(settings.margin),
        "loss": settings.config.loss,
        "num_live_classes": settings.num_live_classes,
        "sub_centers": settings.sub_centers,
    }
    link.require_equal(settings_of_all, f"table {settings.name!r}")
    return DeviceRows(spec, link, link.device)
