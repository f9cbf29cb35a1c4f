"""Class rows on the devices of torch.distributed ranks.

Legend: S samples of this rank, k answers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from geartrain.ams.programs.class_lifecycle import LivingClasses
from geartrain.ams.programs.selection import FullSoftmax, PartialFC
from geartrain.ams.values.errors import GeartrainError
from geartrain.ams.values.specs import TableSpec
from geartrain.bridge.head.backends.place import HeadSettings
from geartrain.bridge.head.backends.ranks.link import RankLink
from geartrain.bridge.head.backends.ranks.predict import top_classes_on_ranks
from geartrain.bridge.head.backends.ranks.rank_table import RankTable
from geartrain.bridge.head.backends.ranks.selector import RankSelector
from geartrain.bridge.head.backends.ranks.update import RankStep, RankUpdate
from geartrain.bridge.head.batch import Arithmetic
from geartrain.bridge.head.head_loss import HeadCall
from geartrain.bridge.head.selection.knn_selection import KNNSelection, KNNSoftmax


class RankPlace:
    """Implements :class:`geartrain.bridge.head.backends.place.RowPlace`."""

    def __init__(
        self, settings: HeadSettings, *, process_group: dist.ProcessGroup | None, logits_cache_bytes: int
    ) -> None:
        """Make the table on every rank of the group (None: all; without torch.distributed this process alone).

        Raises InvalidArgument, and SpecMismatch on every rank unless all give equal settings. Two all-gathers between
        the hosts, and for KNN softmax a process group for its builds.
        """
        self.living = LivingClasses.first(settings.num_classes, settings.num_living)
        self.table = _open_table(settings, RankLink(process_group))
        self.peers = self.table.link
        self.update = RankUpdate(self.table)
        select = settings.select
        self.select: FullSoftmax | PartialFC | KNNSelection = (
            KNNSelection(select, self.table, self.table.link, lambda: self.update.step)
            if isinstance(select, KNNSoftmax)
            else select
        )
        if isinstance(self.select, KNNSelection):
            self.select.living = self.living
        self.selector = RankSelector(self.table, self.select)
        self.margin = settings.margin
        self._logits_cache_bytes = logits_cache_bytes

    def identity(self) -> dict[str, Any] | None:
        """None: rows on ranks are told by their step, and reading some would be a collective."""
        return None

    def begin(self, features: Tensor, labels: Tensor, *, in_training: bool, want_rows: bool) -> HeadCall:  # noqa: ARG002
        """See ``RowPlace`` in ``place.py``. Raises what :meth:`RankStep.begin` does."""
        step = RankStep(
            update=self.update,
            select=self.select,
            selector=self.selector,
            living=self.living,
            margin=self.margin,
            training=want_rows,
        )
        rows, samples = step.begin(features, labels)
        return HeadCall(rows, self.update, samples, self._logits_cache_bytes, want_rows=want_rows)

    def predict(self, features: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """See ``RowPlace`` in ``place.py``. Every rank calls it, with its own features [S, D]."""
        normalised = self.margin is not None
        active = self.living.select(FullSoftmax(), np.empty(0, np.int64), 0)
        arithmetic = Arithmetic.of(features)
        return top_classes_on_ranks(self.table, active, features, k, normalised=normalised, arithmetic=arithmetic)


def _open_table(settings: HeadSettings, link: RankLink) -> RankTable:
    try:
        spec = TableSpec(
            name=settings.name,
            dim=settings.dim,
            optimizer=settings.optimizer,
            num_rows=settings.num_classes,
            initializer=settings.initializer,
            seed=settings.seed,
            dtype=settings.dtype,
            slot_dtype=settings.slot_dtype,
        )
    except GeartrainError as exc:
        link.require_equal({"error": str(exc)}, f"table {settings.name!r}")
        raise
    said = {
        **spec.to_dict(),
        "select": repr(settings.select),
        "margin": repr(settings.margin),
        "num_living": settings.num_living,
    }
    link.require_equal(said, f"table {settings.name!r}")
    return RankTable(spec, link, link.device)
