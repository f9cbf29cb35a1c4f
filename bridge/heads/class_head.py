"""The class head: the last layer and loss of a classifier whose class centers are rows of an AMS table.

Legend: B samples, C classes, D width, k answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from geartrain.ams.errors import InvalidArgument, InvalidRows, SpecMismatch
from geartrain.ams.specs import DTypeName, Ids, Initializer, Normal, RowOptimizerSpec, SparseMomentum
from geartrain.bridge.heads.batch import Arithmetic, Batch
from geartrain.bridge.heads.checks import check_class_ids, check_features, check_finite, check_labels, check_margin
from geartrain.bridge.heads.head_loss import HeadCall, head_loss
from geartrain.bridge.heads.held_rows import HeldRows
from geartrain.bridge.heads.hosted_rows import Chosen, HostedRows
from geartrain.bridge.heads.imprint import imprint_rows
from geartrain.bridge.heads.inference import top_classes
from geartrain.bridge.heads.margins import ArcFace, Margin
from geartrain.bridge.heads.ranks import Ranks
from geartrain.bridge.heads.row_update import RowUpdate
from geartrain.bridge.heads.scratch import BufferPool
from geartrain.bridge.heads.selection import FullSoftmax, PartialFC
from geartrain.bridge.heads.streamed_rows import StreamedRows
from geartrain.bridge.heads.tables import TORCH_DTYPES, HeadCluster, HeadTable, as_numpy
from geartrain.bridge.hosted.class_head import NAME as HOSTED_NAME

_DEFAULT_SELECT = PartialFC(sample_rate=0.1)
_DEFAULT_MARGIN = ArcFace()
_DEFAULT_OPTIMIZER = SparseMomentum(lr=0.1)


class ClassHead(nn.Module):
    """Class centers in the AMS; ``head(features, labels)`` is the loss, its backward the exact feature gradient.

    It has no parameters: the rows are trained by :class:`geartrain.bridge.optimizer.RowOptimizer`. The classes sampled
    for a batch are a function of (seed, ``step``), and ``step`` counts the updates applied. So the micro-batches
    between two steps share their negative classes, a skipped step tries the same ones again, and a resumed head goes on
    as it would have. In ``eval()`` the loss is over the same selection; features get their gradient, rows get none.

    With ranks (a ``process_group``, or ``sync=True`` under an initialised torch.distributed) labels are gathered so
    that all ranks share the active classes, each rank's loss is its local mean, and the shards sum the ranks' pushes by
    sample count. Not thread-safe.
    """

    def __init__(
        self,
        cluster: HeadCluster,
        name: str,
        *,
        num_classes: int,
        dim: int,
        select: FullSoftmax | PartialFC = _DEFAULT_SELECT,
        margin: Margin | None = _DEFAULT_MARGIN,
        optimizer: RowOptimizerSpec = _DEFAULT_OPTIMIZER,
        rows: str = "pull",
        dtype: DTypeName = "float32",
        initializer: Initializer | None = None,
        seed: int = 0,
        reuse: bool = False,
        sync: bool = False,
        process_group: dist.ProcessGroup | None = None,
        rows_cache_bytes: int = 64 << 20,
        logits_cache_bytes: int = 26 << 20,
    ) -> None:
        """Create the table ``name`` of ``num_classes`` rows of width ``dim`` (or open it with ``reuse``).

        ``select`` chooses the active classes, ``margin`` the loss (None: plain linear), ``optimizer`` is applied by the
        shards, ``dtype`` is the storage type of the rows, ``initializer`` and ``seed`` give their first values (normal,
        std 0.01). ``rows`` is where the work on them is done: "pull" (here: they travel) or "hosted" (beside them:
        features travel to the shards, see ``hosted_rows.py``; the two caches serve "pull" only). Active rows of up to
        ``rows_cache_bytes`` are pulled once and held until the step, more are streamed twice; ``logits_cache_bytes`` of
        their logits are kept instead of computed again. Raises TableExists, SpecMismatch, InvalidArgument.
        """
        super().__init__()
        if rows not in ("pull", "hosted"):
            raise InvalidArgument(f"rows is {rows!r}; it must be 'pull' or 'hosted'")
        if not isinstance(select, FullSoftmax | PartialFC):
            raise InvalidArgument(f"select is {select!r}; it must be FullSoftmax() or PartialFC(sample_rate=...)")
        self.num_classes = num_classes
        self.dim = dim
        self.select = select
        self.margin = margin
        self._margin = check_margin(margin)
        ranks = Ranks(name, process_group) if process_group is not None or (sync and dist.is_initialized()) else None

        def create(reuse: bool) -> HeadTable:
            table = cluster.create_table(
                name,
                dim=dim,
                optimizer=optimizer,
                num_rows=num_classes,
                initializer=initializer if initializer is not None else Normal(std=0.01),
                seed=seed,
                dtype=dtype,
                reuse=reuse,
            )
            return cast(HeadTable, table)

        self.table = (
            create(reuse) if ranks is None else ranks.first_then_others(lambda: create(reuse), lambda: create(True))
        )
        self.row_update = RowUpdate(self.table, ranks)
        self._hosted = self.table.hosted(HOSTED_NAME) if rows == "hosted" else None
        self._holds_rows = select.budget(num_classes) * self.table.spec.row_bytes <= rows_cache_bytes
        self._logits_cache_bytes = logits_cache_bytes
        self._pool = BufferPool()

    @property
    def name(self) -> str:
        """Name of the table."""
        return self.table.spec.name

    @property
    def step(self) -> int:
        """Row updates applied so far; decides, with the seed, which classes are sampled next."""
        return self.row_update.step

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        """Mean loss (0-dim, float32 or float64) of features [B, D] with labels [B] int64, both on any device.

        Costs one pull of the active rows. Labels are read, never changed. Raises InvalidRows, InvalidIds, and NonFinite
        for features on the CPU, unless ranks train together. Looking would stall a GPU, and ranks must fail as one:
        there the loss is NaN, and ``RowOptimizer.step`` refuses the gradients.
        """
        training = self.training and torch.is_grad_enabled()
        # What is pulled outlives this call: it must not become an inference tensor.
        with torch.inference_mode(False), torch.no_grad():
            call = self._begin(features, labels, training=training)
        carrier = self.row_update.carrier_on(features.device)
        return head_loss(features, carrier if training else carrier.detach(), call)

    def _begin(self, features: Tensor, labels: Tensor, *, training: bool) -> HeadCall:
        """Check the input, choose the active classes and pull their rows."""
        check_features(features, self.dim)
        labels_B = check_labels(labels, len(features), self.num_classes)
        ranks = self.row_update.ranks if self.training else None
        if ranks is None:
            check_finite(features)
        if len(labels_B) == 0 and ranks is None:
            raise InvalidRows("the batch is empty; a mean loss needs at least one sample")
        all_labels = labels_B if ranks is None else ranks.gather_labels(labels_B)
        required = None if ranks is None else ranks.sync_group(len(labels_B))
        if self._hosted is not None:
            chosen = Chosen(self.select, self.num_classes, self.step, all_labels)
            hosted = HostedRows(self._hosted, features, labels_B, self._margin, chosen, required)
            return HeadCall(hosted, self.row_update, len(labels_B), 0, want_rows=training)
        active = self.select.select(all_labels, self.num_classes, self.step)
        arithmetic = Arithmetic.of(features)
        batch = Batch.of(features, active.positions(labels_B), self._margin, active.num, arithmetic)
        rows = (
            HeldRows(self.table, active, self._pool, batch, required)
            if self._holds_rows
            else StreamedRows(self.table, active, self._pool, batch, labels_B, required)
        )
        return HeadCall(rows, self.row_update, len(labels_B), self._logits_cache_bytes, want_rows=training)

    def predict(self, features: Tensor, k: int = 5) -> tuple[Tensor, Tensor]:
        """The ``k`` best classes of features [B, D]: scores [B, k] (cos θ; x·w without a margin) and ids [B, k] int64.

        Best first. Streams all C rows once per 1,024 samples; the margin plays no part.
        """
        check_features(features, self.dim)
        if not 1 <= k <= self.num_classes:
            raise InvalidArgument(f"k is {k!r}; it must lie in [1, {self.num_classes}], the number of classes")
        normalised = self._margin is not None
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(features.device.type, enabled=False):
            arithmetic = Arithmetic.of(features)
            return top_classes(self.table, features, k, normalised=normalised, arithmetic=arithmetic, pool=self._pool)

    def imprint(
        self,
        loader: Iterable[tuple[Tensor, Tensor]],
        backbone: nn.Module,
        *,
        memory_bytes: int = 1 << 30,
        progress: Callable[[int], None] | None = None,
    ) -> int:
        """Make each class center the unit-length mean feature of its images; return how many classes had any.

        ``loader`` yields (images, labels [N] int64); ``backbone`` runs in eval() without gradients, on its own device,
        and is put back in its mode. Classes without images keep their row; an imprinted row's momentum becomes zero.
        Sums take up to ``memory_bytes``: a head with more rows than that reads ``loader`` once per part. ``progress``
        is called with the images read so far; without it a bar appears after two seconds. With ranks, every rank gives
        its own images.
        """
        return imprint_rows(self.table, self.row_update.ranks, loader, backbone, memory_bytes, progress)

    @torch.no_grad()
    def weights(self, ids: Tensor | None = None) -> Tensor:
        """Rows [N, D] on the host: of the classes ``ids`` [N] int64 (any order, duplicates allowed), or of all."""
        spec = self.table.spec
        wanted: Ids
        if ids is None:
            wanted = np.arange(self.num_classes, dtype=np.int64)
            inverse = None
        else:
            wanted, inverse = np.unique(check_labels(ids, len(ids), self.num_classes), return_inverse=True)
            check_class_ids(wanted, self.num_classes, "class id")
        rows = torch.empty(len(wanted), spec.dim, dtype=TORCH_DTYPES[spec.dtype])
        self.table.pull_into(wanted, as_numpy(rows))
        return rows if inverse is None else rows[torch.from_numpy(inverse)]

    def get_extra_state(self) -> dict[str, Any]:
        """Table name, size, step and settings; the rows themselves are in the AMS and its snapshots."""
        return {
            "table": self.name,
            "num_classes": self.num_classes,
            "dim": self.dim,
            "step": self.step,
            "select": repr(self.select),
            "margin": repr(self.margin),
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Go on at the saved step; SpecMismatch if the state is that of another table or size."""
        for key, mine in (("table", self.name), ("num_classes", self.num_classes), ("dim", self.dim)):
            if state[key] != mine:
                raise SpecMismatch(
                    f"the saved head has {key} {state[key]!r}, this one {mine!r}; "
                    "create the head with the saved settings"
                )
        self.row_update.discard()
        self.row_update.step = int(state["step"])

    def extra_repr(self) -> str:
        """Settings for print()."""
        return (
            f"{self.name!r}, num_classes={self.num_classes}, dim={self.dim}, select={self.select}, margin={self.margin}"
        )
