"""The class head: the last layer and loss of a classifier whose class centers are rows of an AMS table.

Legend: B samples, C classes, D width, k answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex

import torch
from torch import Tensor, nn

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.programs.selection import Selection
from geartrain.ams.storage.snapshot.folder import Snapshot
from geartrain.ams.storage.snapshot.store import Place
from geartrain.ams.values.arguments import boolean, integer
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.optimizers.registry import RowOptimizerSpec
from geartrain.ams.values.specs import MAX_DIM, Initializer
from geartrain.bridge.head.backends.backend import HeadSettings, LocalRows, RowBackend
from geartrain.bridge.head.backends.registry import backend_named
from geartrain.bridge.head.class_changes import add_classes, retire_classes
from geartrain.bridge.head.defaults import (
    DEFAULT_OPTIMIZER,
    DEFAULT_SELECT,
    default_optimizer,
    linear_initializer,
    margin_optimizer,
)
from geartrain.bridge.head.head_state import head_rows, require_loadable, resume_state, state_of
from geartrain.bridge.head.imprinting.imprint import Loader, features_of, imprint_rows, in_eval_mode
from geartrain.bridge.head.loss.autograd_node import HeadCall, head_loss
from geartrain.bridge.head.loss.batch import with_ones
from geartrain.bridge.head.loss.checks import (
    FIXED_SETTINGS,
    check_features,
    checked_margin,
    checked_selection,
    checked_wanted_ids,
    require_no_margin,
)
from geartrain.bridge.head.loss.config import HeadConfig, checked_config
from geartrain.bridge.head.loss.feature_parts import FeatureParts, parts_loss
from geartrain.bridge.head.loss.margins.margin import AnyMargin
from geartrain.bridge.head.loss.margins.scale import automatic_scale, scale_of
from geartrain.bridge.head.loss.statistics import LearningWatch, StepStatistics
from geartrain.bridge.head.loss.sub_centers import checked_sub_centers, dominant_centers, require_margin
from geartrain.bridge.kernels.launch import is_capturing
from geartrain.bridge.placements.placement import Placement
from geartrain.bridge.rows.eager import runs_eagerly
from geartrain.bridge.rows.pending import PendingUpdate
from geartrain.bridge.rows.stand_in import ModuleWithRows
from geartrain.bridge.rows.tables import TORCH_DTYPES, ReadableTable, as_numpy

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful


class ClassHead(ModuleWithRows):
    """Class centers in the AMS: ``head(features, labels)`` returns the loss, its backward the exact feature gradient.

    :class:`geartrain.RowOptimizer` trains the rows; a parameter without elements, ``stand_in``, stands for them
    (``requires_grad_(False)`` freezes them, ``grad = None`` drops their gradients). The classes sampled for a batch
    are a function of (seed, ``step``), and ``step`` counts the updates applied. So micro-batches between two steps
    share their negative classes, a skipped step retries the same ones, and a resumed head continues identically. In
    ``eval()`` the loss is over the same selection; features get a gradient, rows none.

    With ranks (a ``process_group``, or ``sync=True`` under an initialised torch.distributed) labels are gathered so
    that all ranks share the active classes, and the loss is that of one worker with the joint batch, the same number on
    every rank. The backbone may be under DDP or FSDP2, with or without the head in the same module: as those average
    gradients over the R ranks, each rank's features get R times the derivative. Not thread-safe.
    """

    def __init__(
        self,
        cluster: Cluster | None,
        name: str,
        *,
        num_classes: int,
        dim: int,
        num_live_classes: int | None = None,
        select: Selection = DEFAULT_SELECT,
        margin: AnyMargin | None = None,
        sub_centers: int = 1,
        bias: bool = False,
        optimizer: RowOptimizerSpec | None = None,
        rows: str = "pull",
        initializer: Initializer | None = None,
        reuse: bool = False,
        sync: bool = False,
        config: HeadConfig | None = None,
    ) -> None:
        """Create the table ``name`` of ``num_classes`` rows of width ``dim`` (or open it with ``reuse``).

        Args:
            cluster: Holds the rows (``gt.local()``, ``gt.connect(...)``); None with ``rows="ranks"``.
            name: Name of the table.
            num_classes: Rows of the table. A row that was never written takes no memory on a shard, so this may exceed
                the number of classes of today.
            dim: Width of features and rows.
            num_live_classes: Number of classes that exist at first, from id 0 on (None: all); :meth:`add_classes` and
                :meth:`retire_classes` change it during training. Every step is over existing classes only.
            select: Selection of the active classes: ``FullSoftmax``, ``PartialFC``, ``KNNSoftmax``, or a subclass of
                :class:`.Selection`. None: all of up to 65,536 existing classes, or a tenth.
            margin: The loss: ``ArcFace``, ``CosFace``, ``SphereFace``, ``CombinedMargin``, ``AdaFace``, ``MagFace``,
                ``ElasticArcFace``, ``ElasticCosFace``, ``CurricularFace`` (not hosted), a ``FilteredMargin``
                around one (not hosted), or one of your own that has ``scale`` and ``target``
                (:class:`.Margin`); ``scale=None`` becomes that of ``num_classes``. None: plain linear, cross entropy.
            sub_centers: Centers of each class, at most 32. Only the one nearest to a feature counts and learns
                (sub-center ArcFace), which tolerates wrong labels and classes of several modes. With a margin only,
                and not with KNN softmax or smoothed labels. Multiplies the memory of rows and slots.
            bias: Whether each class has a bias, as in ``nn.Linear``: a last column of its row. Without a margin only.
            optimizer: Optimizer of the rows, applied at their place. None: AdamW at 1e-3, or with sampled classes (and
                a fixed set of them) at 1e-3 times ``num_classes`` / active ones; its slots are twice the rows. None
                with a margin whose scale is at most the automatic one (and no ``reduction="sum"``): SparseMomentum at
                0.2, for C < 4,000 existing classes at C / 20,000.
            rows: Place of the rows and their products. ``"pull"``: rows are pulled from the cluster and used here.
                ``"hosted"``: features are sent to the shards, which compute (costs: ``hosted_rows.py``). ``"ranks"``:
                the ranks of ``process_group`` hold C / ranks classes each on their devices; labels and features are
                all-gathered. Snapshots of a cluster do not hold such rows: use :meth:`snapshot` and :meth:`restore`.
            initializer: First values of the rows; None: those of ``nn.Linear``, uniform in ±1/√dim.
            reuse: Open an existing table, if it has these settings. ``step`` is 0 until a state is loaded.
            sync: Train together with the other ranks of torch.distributed, if that is initialised.
            config: Rarely changed settings: types of rows and slots, reduction, ignored and smoothed labels, seed,
                process group, caches (:class:`geartrain.HeadConfig`).

        Raises TableExists, SpecMismatch, InvalidArgument.
        """
        super().__init__()
        config = checked_config(config)
        num_classes = integer("num_classes", num_classes, 1)
        self.num_classes = num_classes
        self.dim = dim = integer("dim", dim, 1, MAX_DIM)
        self.bias = boolean("bias", bias)
        self._reduction = config.reduction
        self.sub_centers = checked_sub_centers(sub_centers, dim, checked_selection(select), config.label_smoothing)
        margin = self._checked(margin)
        suits_momentum = margin is not None and scale_of(margin) <= automatic_scale(num_classes)
        # the gradients of a sum are B times as large
        if optimizer is None and suits_momentum and config.reduction != "sum":
            optimizer = margin_optimizer(num_classes if num_live_classes is None else num_live_classes)
        elif optimizer is None:
            optimizer = default_optimizer(select, num_classes) if num_live_classes is None else DEFAULT_OPTIMIZER
        settings = HeadSettings(
            name=name,
            num_classes=num_classes,
            num_live_classes=num_live_classes,
            dim=dim,
            bias=self.bias,
            sub_centers=self.sub_centers,
            select=select,
            margin=margin,
            optimizer=optimizer,
            initializer=initializer if initializer is not None else linear_initializer(dim),
            cluster=cluster,
            reuse=boolean("reuse", reuse),
            sync=boolean("sync", sync),
            config=config,
        )
        self._watch = LearningWatch()
        self._backend: RowBackend = backend_named(rows)(settings)
        self.register_stand_in(self._backend.update)

    def __setattr__(self, name: str, value: Any) -> None:
        """Raise InvalidArgument for attributes whose assignment would have no effect."""
        if name in FIXED_SETTINGS and "_backend" in self.__dict__:
            raise InvalidArgument(f"{name} of ClassHead {self.name!r} cannot be set: {FIXED_SETTINGS[name]}")
        super().__setattr__(name, value)

    @property
    def margin(self) -> AnyMargin | None:
        """The margin. It may be set between two steps, on every rank alike.

        It takes effect at the next forward pass. ``state_dict()`` names it, and holds what it learned: a head that
        loads the state continues with the same settings, and raises SpecMismatch if its margin is of another kind.
        """
        return self._backend.margins.margin

    @margin.setter
    def margin(self, margin: AnyMargin | None) -> None:
        self._backend.margins.set(self._checked(margin))

    def _checked(self, margin: AnyMargin | None) -> AnyMargin | None:
        if self.bias:
            require_no_margin(margin)
        require_margin(margin, self.sub_centers)
        return checked_margin(margin, self.num_classes)

    @property
    def backend(self) -> RowBackend:
        """Backend that holds the rows and computes with them."""
        return self._backend

    @property
    def _local(self) -> LocalRows:
        """Rows on this process and its peers. Raises InvalidArgument for rows in a cluster."""
        if self._backend.local is None:
            raise InvalidArgument(
                f"the rows of {self.name!r} are in a cluster, and none of these processes has them; save the model "
                "with geartrain.save(model, path), or all tables of the cluster with Cluster.snapshot, which "
                "Cluster.restore reads"
            )
        return self._backend.local

    @property
    def table(self) -> ReadableTable:
        """Table of the rows."""
        return self._backend.table

    @property
    def select(self) -> Selection:
        """Selection of active classes; with :class:`KNNSoftmax` the object that holds its graph."""
        return self._backend.select

    @property
    def row_update(self) -> PendingUpdate[Any]:
        """Pending row gradients, for :class:`geartrain.bridge.rows.optimizer.RowOptimizer`."""
        return self._backend.update

    @property
    def row_placement(self) -> Placement:
        """Placement of the rows, for :func:`geartrain.save` and :func:`geartrain.load`."""
        return head_rows(self._backend)

    @property
    def name(self) -> str:
        """Name of the table."""
        return self.table.spec.name

    @property
    def num_live_classes(self) -> int:
        """Number of classes that exist."""
        return self._backend.live_classes.num_live_classes

    @property
    def retired(self) -> Tensor:
        """Ids [N] int64 of the classes that do not exist, ascending: retired, or never added."""
        return torch.from_numpy(self._backend.live_classes.free_ids(self.num_classes - self.num_live_classes))

    def add_classes(
        self,
        num: int,
        *,
        rows: Tensor | None = None,
        examples: Loader | None = None,
        backbone: nn.Module | None = None,
    ) -> Tensor:
        """Add ``num`` classes between two steps; return their ids [num] int64, the lowest free ones.

        Their centers are ``rows`` [num, D] (or [num, sub_centers, D]); or mean features of ``backbone`` over
        ``examples``, batches as of :meth:`imprint` with labels 0 … num − 1 for the new classes; or, without either, the
        initial values of their ids. Centers from ``examples`` are placed as :meth:`imprint` places a few classes, so
        that the others keep their samples. Momentum is zero. Ids of retired classes are reused. New classes take part
        from the next step on, in the graph of KNN softmax too. With several centers a class, a single given one
        becomes the first, and the others have their initial values. With ranks, every rank calls it with equal
        ``num`` and ``rows`` (its own ``examples``); several workers without a process group each call it, in the same
        order, and resume training when all have: each overwrites the rows, so training of them in between is lost.

        Costs an assign of the rows, with ranks one exchange, with ``examples`` a pull of up to 32 MiB; for KNN softmax
        see :meth:`KNNSelection.follow`. Raises InvalidArgument (no ids free, an update pending, a class without an
        example, a batch of another form than :meth:`imprint` takes), InvalidRows, NonFinite, SpecMismatch (ranks
        disagree), SyncError (another rank failed); then no class was added.
        """
        return torch.from_numpy(add_classes(self._backend, self.dim, num, rows, examples, backbone, self.sub_centers))

    def retire_classes(self, ids: Tensor) -> None:
        """Retire the classes ``ids`` [N] int64, between two steps.

        From then on their labels are refused, and they are in no selection, softmax or prediction. Their rows stay
        unchanged and readable (:meth:`weights`) until :meth:`add_classes` reuses the ids; their momentum becomes zero.
        With ranks every rank calls it. Costs a pull and an assign of the rows.

        Raises InvalidIds (outside the table, twice, already retired), InvalidArgument (none would be left, an update
        pending), SpecMismatch, SyncError.
        """
        retire_classes(self._backend, ids)

    @property
    def step(self) -> int:
        """Number of row updates applied; with the seed it determines the sampled classes."""
        return self.row_update.step

    @runs_eagerly
    def forward(self, features: Tensor, labels: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return the mean loss (0-dim, float32 or float64) of features [B, D] with labels [B] int64, on any device.

        ``weight`` [B], finite and >= 0, says how much each sample counts (None: 1): the mean is Σ w·loss / Σ w, of the
        losses that ``torch.nn.functional.cross_entropy`` has with ``reduction="none"``. ``weight_of_class[labels]`` is
        its ``weight=weight_of_class``, but not with ``label_smoothing``: the smoothed part it weighs by every class,
        which no weight of samples says. Like the labels the weight is looked at on the host, unless the labels are on
        the device of the rows. ``reduction`` may ask for the sum, or the losses [B], instead. Where nothing counts (all
        weights 0, all labels ignored) the mean is 0, and so are its gradients. Of ranks that train together mean and
        sum are over the samples of all, and a rank may have none; in ``eval()`` with rows in a cluster, where a rank
        asks alone, over its own. Losses [B] are always its own: :func:`geartrain.mean_over_ranks` makes one loss of
        them.

        Costs one pull of the active rows, and with ranks an all-reduce of two numbers unless they hold the rows and
        give no weights. Labels are read, never changed. Raises InvalidRows, InvalidIds,
        InvalidArgument for weights, and NonFinite for features on the CPU, unless ranks train together. Looking would
        stall a GPU, and ranks must fail as one: there the loss is NaN, and ``RowOptimizer.step`` refuses the gradients.
        Labels on the device of ``rows="ranks"`` are checked there: the loss of a bad one is NaN, its step changes no
        row, and a later call, most often the next, raises InvalidIds.
        ``torch.compile`` breaks its graph here.
        """
        training = self._collects_gradients()
        # Pulled rows outlive this call, so they must not be inference tensors.
        with torch.inference_mode(False), torch.no_grad():
            call = self._backend.start(features, labels, weight, in_training=self.training, want_rows=training)
        stand_in = self._backend.update.on(features.device)
        loss = head_loss(features, stand_in if training else None, call, self._reduction)
        self._record(call, training)
        return loss

    @property
    def adds_up(self) -> bool:
        """Whether the losses of micro-batches, weighted by samples, add up to that of the batch."""
        return self.backend.settings.config.reduction != "none"

    @property
    def takes_parts(self) -> bool:
        """Whether :meth:`loss_of_parts` is available: where several ranks hold the rows."""
        local, peers = self._backend.local, self._backend.peers
        return local is not None and peers is not None and peers.world_size > 1

    @runs_eagerly
    def loss_of_parts(self, parts: FeatureParts, labels: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return ``head(features, labels, weight)`` for features that ``parts`` compute while earlier ones are sent.

        :class:`geartrain.MicroBatches` uses it. Raises as a call of the head, and what computing the features raises;
        SyncError where that happened on another rank.
        """
        training = self._collects_gradients()
        with torch.inference_mode(False), torch.no_grad():
            call = self._local.start_parts(parts, labels, weight, in_training=self.training, want_rows=training)
        stand_in = self.row_update.on(parts.joined[0].device)
        loss = parts_loss(parts, stand_in if training else None, call, self._reduction)
        self._record(call, training)
        return loss

    def _collects_gradients(self) -> bool:
        """Return whether this pass trains rows."""
        return self.training and torch.is_grad_enabled() and self._backend.update.is_trained

    def _record(self, call: HeadCall, training: bool) -> None:
        self._watch.last = call.statistics
        if training and not self._watch.has_ended and not is_capturing(call.statistics.losses.device):
            self._watch.observe(
                call.statistics, self._backend.live_classes.num_live_classes, self._settings_of_learning
            )

    @property
    def stats(self) -> StepStatistics | None:
        """Statistics of the last forward pass: loss, mean cosine of the targets, accuracy over the active classes.

        None before the first. They cost nothing until a number is read, which waits for the device.
        """
        return self._watch.last

    def _settings_of_learning(self) -> str:
        margin, lr = self.margin, self.row_update.applied_lr
        scale = 1.0 if margin is None else scale_of(margin)
        rate = "not trained by any RowOptimizer" if lr is None else f"learning rate {lr:g}"
        return f"{self.name!r} (margin {margin}, scale {scale:g}, {rate})"

    def next_epoch(self) -> None:
        """Signal the end of an epoch, on every rank: KNN softmax schedules rebuilds of its graph by it."""
        self.select.next_epoch()

    def rebuild_graph(self) -> None:
        """Rebuild the graph of KNN softmax now, from the current rows; every rank calls it.

        Raises InvalidArgument without a graph.
        """
        self.select.rebuild_graph()

    def predict(self, features: Tensor, k: int = 5) -> tuple[Tensor, Tensor]:
        """Return the ``k`` best classes of features [B, D]: scores [B, k] and ids [B, k] int64, best first.

        Scores are cos θ (x·w without a margin); the margin is not applied. Pulled rows are cached until they change if
        5 · C · D bytes are within ``rows_cache_bytes``; else all C are pulled, for each 1,024 samples on a GPU. Hosted
        rows are not sent. Raises
        InvalidRows, InvalidArgument, and NonFinite for rows or features on the CPU, unless
        ranks hold the rows: there the scores are NaN.
        """
        check_features(features, self.dim)
        k = integer("k", k, 1, self.num_live_classes)
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(features.device.type, enabled=False):
            return self._backend.predict(with_ones(features) if self.bias else features, k)

    def imprint(
        self,
        loader: Loader,
        backbone: nn.Module,
        *,
        memory_bytes: int = 1 << 30,
        progress: Callable[[int], None] | None = None,
    ) -> int:
        """Make each class center the unit-length mean feature of its images; return how many were changed.

        If the means of at least half of the live classes have an average cosine above 0.5 to each other, as an
        untrained backbone's have, their shared direction is subtracted first, as it distinguishes no class. It is
        part of the state, and is also subtracted from the means of later classes. A mean that has no other direction,
        or is zero, changes nothing.

        If fewer than half are imprinted after the others have trained, they are placed among these, so that they score
        on their own samples as the best other center does. Without a margin a center is the mean of the others, with
        its bias, plus as much of the class's own direction as that needs. Under a margin it scores a quarter more: it
        is turned away from the mean of the others, to a cosine of at least 0.8 with its own mean. The others are up to
        32 MiB of rows, evenly spread.

        ``loader`` yields (images, labels [N] int64) or (images, labels, weights [N]), as in a step: images are the
        input of ``backbone``, a tensor, a tuple of its arguments or a dict of them; weights weigh the mean; samples
        of weight 0 or of the head's ``ignore_index`` do not count. ``backbone`` runs in eval() without gradients, on
        its own device; its mode is restored. Classes without images keep their row; an imprinted row's momentum
        becomes zero. With several centers a class the mean becomes the first, and the others get initial values.
        ``loader`` is read once. Sums of all classes take up to ``memory_bytes``, one byte a class, and 384 MiB while
        they become rows; if they need more, they are in a file without a name in ``tempfile.gettempdir()``
        (``TMPDIR``), 4·dim bytes of disk for each class with images. Rows are assigned when all images were read.
        ``progress`` is called with the number of counted images; without it a bar appears after two seconds. With
        ranks, every rank gives its own images, and they exchange the set of classes with images and their sums.

        Raises InvalidIds for a label that is no class, NonFinite for a feature that is NaN or infinite and
        InvalidArgument for a batch of another form, for weights, and where the file has no room: no class was changed
        then.
        """
        return imprint_rows(self._backend, loader, backbone, memory_bytes, progress)

    @torch.no_grad()
    def dominant_centers(self, loader: Loader, backbone: nn.Module) -> Tensor:
        """Return the number [C] int64 of each class's dominant center: nearest to most of its images; 0 without images.

        Images nearest to other centers are mostly mislabelled or hard (sub-center ArcFace, section 3.3).
        ``gt.export_class_weights(head, path, dominant=...)`` writes these centers alone, for a head with one a class.
        ``loader`` and ``backbone`` are those of :meth:`imprint`. Pulls the rows of each batch's classes; memory 4
        bytes a center. No other ranks take part: it is over the images of this process. Raises InvalidIds,
        InvalidRows, and InvalidArgument for rows that lie on several ranks (save the model, and load it on one).
        """
        peers = self._backend.peers
        if self.takes_parts and peers is not None:
            raise InvalidArgument(
                f"the rows of {self.name!r} lie on {peers.world_size} ranks; save the model (geartrain.save), and ask "
                "for its dominant centers in one process that has loaded it"
            )
        with in_eval_mode(backbone):
            ignored = self._backend.settings.config.ignore_index
            batches = features_of(loader, backbone, self.dim, self._backend.live_classes, ignored)
            return dominant_centers(self.table, batches, self.sub_centers)

    @torch.no_grad()
    def weights(self, ids: Tensor | None = None) -> Tensor:
        """Return rows [N, D] on the host, of the classes ``ids`` [N] int64 (any order, duplicates allowed), or of all.

        With several centers a class [N, sub_centers, D].
        """
        rows = self._rows(ids)
        if self.sub_centers > 1:
            return rows.view(-1, self.sub_centers, self.dim)
        return rows[:, : self.dim].contiguous() if self.bias else rows

    @torch.no_grad()
    def biases(self, ids: Tensor | None = None) -> Tensor:
        """Return biases [N] on the host, of the classes ``ids`` as in :meth:`weights`; zeros without ``bias=True``."""
        if not self.bias:
            return torch.zeros(self.num_classes if ids is None else len(ids), dtype=torch.float32, device="cpu")
        return self._rows(ids)[:, self.dim].contiguous()

    def _rows(self, ids: Tensor | None) -> Tensor:
        wanted, inverse = checked_wanted_ids(ids, self.num_classes)
        spec = self.table.spec
        rows = torch.empty(len(wanted), spec.dim, dtype=TORCH_DTYPES[spec.dtype], device="cpu")
        self.table.pull_into(wanted, as_numpy(rows))
        return rows if inverse is None else rows[torch.from_numpy(inverse)]

    def snapshot(
        self,
        root: str | Path,
        name: str | None = None,
        *,
        step: int | None = None,
        values: Mapping[str, Any] | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> Place:
        """Write rows that lie on ranks, with their slots, as the snapshot ``root``/``name``; return its folder.

        Every rank calls it between two steps and waits; ``root`` is the same folder for all, a URL included. ``step``
        is :attr:`step` and ``name`` ``step-000000042`` unless given (``step-000000042-2`` if an earlier run has left
        that); ``values`` (JSON) and ``files`` of rank 0 travel with the rows: put ``state_to_bytes(head.state_dict())``
        and the backbone there. All rows are written, there are no increments. Warns of bad labels and refused row
        updates that no call of the head has raised yet. :meth:`restore` reads it on any number of
        ranks, and ``Cluster.restore`` into any number of shards.
        Raises SnapshotFailed on every rank if one of them fails, and InvalidArgument for rows in a cluster:
        ``Cluster.snapshot`` is theirs.
        """
        step = self.step if step is None else step
        return self._local.snapshot(root, name, step=step, values=values or {}, files=files or {})

    def restore(self, path: str | Path) -> Snapshot:
        """Read rows that lie on ranks, with their slots, from a snapshot that any number of ranks or a cluster wrote.

        Every rank calls it; pending gradients are dropped. The head is at the snapshot's step then, until the
        state_dict saved with the rows is loaded, which may count otherwise. Raises SnapshotNotFound, SnapshotDamaged,
        TableNotFound, SpecMismatch, SyncError where another rank failed (all rows have their initial values then), and
        InvalidArgument for rows in a cluster.
        """
        return self._local.restore(path)

    def sharded_rows(self) -> Stateful:
        """Return rows on ranks, with slots and the head's state, for ``torch.distributed.checkpoint``.

            dcp.save({"model": model.state_dict(), "rows": head.sharded_rows()}, checkpoint_id=path)

        Every rank calls it, and ``dcp.load`` of the same dict on any number of ranks. The tensors are DTensors over the
        ranks in the memory of the rows: nothing is copied, a load writes into the rows, and one that fails half way
        leaves a mixture: load again. Then ``model.load_state_dict``. Raises InvalidArgument for rows in a cluster:
        :func:`geartrain.save` is theirs.
        """
        return self._local.sharded_rows(self)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse to copy or pickle: rows are trained in one place."""
        raise InvalidArgument(
            f"ClassHead {self.name!r} cannot be copied or pickled: its rows are not in the module. Copy the "
            "backbone alone (for averaged weights, too); geartrain.save(model, folder) saves a head with its rows"
        )

    def get_extra_state(self) -> dict[str, Any]:
        """Return table name, size, step, retired classes, settings and identity of the rows, which are in snapshots.

        Costs one pull of up to 128 rows from a cluster. Warns of bad labels and refused updates of this rank's rows
        that no call of the head has raised yet.
        """
        return state_of(self._backend)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        """Load a state_dict. Raises SpecMismatch if it was saved with other rows than these, whatever ``strict``."""
        state = state_dict.get(f"{prefix}_extra_state")
        if isinstance(state, Mapping):
            require_loadable(self._backend, state)
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Continue at the saved step. Raises SpecMismatch for another table, size, or step of rows on ranks.

        Unlike ``load_state_dict`` it does not check rows in a cluster: the caller has restored them.
        """
        resume_state(self._backend, state)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ClassHead:
        """Move rows of this process with ``head.to(device)``."""
        if self._backend.local is not None:
            self._backend.local.move_with(fn)
        super()._apply(fn, recurse)
        return self

    def extra_repr(self) -> str:
        """Return the settings, for print()."""
        return (
            f"{self.name!r}, num_classes={self.num_classes}, dim={self.dim}, select={self.select}, margin={self.margin}"
            f"{', bias=True' if self.bias else ''}{f', sub_centers={self.sub_centers}' if self.sub_centers > 1 else ''}"
        )
