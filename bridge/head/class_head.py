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
    check_margin,
    check_selection,
    check_wanted_ids,
    require_no_margin,
)
from geartrain.bridge.head.loss.config import HeadConfig, checked_config
from geartrain.bridge.head.loss.feature_parts import FeatureParts, parts_loss
from geartrain.bridge.head.loss.margins.margin import AnyMargin
from geartrain.bridge.head.loss.margins.scale import automatic_scale, scale_of
from geartrain.bridge.head.loss.statistics import LearningWatch, StepStatistics
from geartrain.bridge.head.loss.sub_centers import check_sub_centers, dominant_centers, require_margin
from geartrain.bridge.kernels.launch import is_capturing
from geartrain.bridge.placements.placement import Placement
from geartrain.bridge.rows.eager import runs_eagerly
from geartrain.bridge.rows.pending import PendingUpdate
from geartrain.bridge.rows.stand_in import ModuleWithRows
from geartrain.bridge.rows.tables import TORCH_DTYPES, ReadableTable, as_numpy

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful


class ClassHead(ModuleWithRows):
    """Class centers in the AMS; ``head(features, labels)`` is the loss, its backward the exact feature gradient.

    The rows are trained by :class:`geartrain.RowOptimizer`; a parameter without elements, ``stand_in``, stands for them
    (``requires_grad_(False)`` freezes them, ``grad = None`` drops their gradients). The classes sampled
    for a batch are a function of (seed, ``step``), and ``step`` counts the updates applied. So the micro-batches
    between two steps share their negative classes, a skipped step tries the same ones again, and a resumed head goes on
    as it would have. In ``eval()`` the loss is over the same selection; features get their gradient, rows get none.

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
        num_living: int | None = None,
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
            cluster: Where the rows are (``gt.local()``, ``gt.connect(...)``); None with ``rows="ranks"``.
            name: Name of the table.
            num_classes: Rows of the table. A row that was never written takes no memory on a shard, so this may well
                exceed what is there today.
            dim: Width of features and rows.
            num_living: The first so many classes live (all, unless given); :meth:`add_classes` and
                :meth:`retire_classes` change that while training goes on, and every step is over the living ones alone.
            select: Chooses the active classes: ``FullSoftmax``, ``PartialFC``, ``KNNSoftmax``, or one of your own,
                derived from :class:`.Selection`. Unless given: all of up to 65,536 living classes, or a tenth.
            margin: The loss: ``ArcFace``, ``CosFace``, ``SphereFace``, ``CombinedMargin``, ``AdaFace``, ``MagFace``,
                ``ElasticArcFace``, ``ElasticCosFace``, ``CurricularFace`` (not hosted), a ``FilteredMargin``
                around one (not hosted), or one of your own that has ``scale`` and ``target``
                (:class:`.Margin`); ``scale=None`` becomes that of ``num_classes``. None: plain linear, cross entropy.
            sub_centers: Centers of each class, at most 32. The one nearest to a feature counts and learns (sub-center
                ArcFace): room for wrong labels and for several looks. With a margin only, and not with KNN softmax or
                smoothed labels. Rows and slots take so many times the memory.
            bias: Whether each class has a bias, as in ``nn.Linear``: a last column of its row. Without a margin only.
            optimizer: Applied where the rows are. None: AdamW at 1e-3, or where a sample of the classes is drawn (and
                none come and go) at 1e-3 times ``num_classes`` / active ones; its slots are twice the rows. None with a
                margin whose scale is at most the automatic one (and no ``reduction="sum"``): SparseMomentum at 0.2, of
                C < 4,000 living classes at C / 20,000.
            rows: Where the work on them is done. ``"pull"``: here, rows travel from the cluster. ``"hosted"``: beside
                the rows; features travel to the shards (costs: ``hosted_rows.py``). ``"ranks"``: the ranks of
                ``process_group`` hold C / ranks classes each on their devices; labels and features are all-gathered.
                Such rows are in no snapshot of a cluster: :meth:`snapshot` and :meth:`restore` are theirs.
            initializer: Gives their first values; None: those of ``nn.Linear``, uniform in ±1/√dim.
            reuse: Open a table that is there, if it has these settings. ``step`` is 0 until a state is loaded.
            sync: Train together with the other ranks of torch.distributed, if that is initialised.
            config: What is seldom given: types of rows and slots, reduction, ignored and smoothed labels, seed, process
                group, caches (:class:`geartrain.HeadConfig`).

        Raises TableExists, SpecMismatch, InvalidArgument.
        """
        super().__init__()
        config = checked_config(config)
        num_classes = integer("num_classes", num_classes, 1)
        self.num_classes = num_classes
        self.dim = dim = integer("dim", dim, 1, MAX_DIM)
        self.bias = boolean("bias", bias)
        self._reduction = config.reduction
        self.sub_centers = check_sub_centers(sub_centers, dim, check_selection(select), config.label_smoothing)
        margin = self._checked(margin)
        suits_momentum = margin is not None and scale_of(margin) <= automatic_scale(num_classes)
        if optimizer is None and suits_momentum and config.reduction != "sum":  # of a sum, gradients are a batch larger
            optimizer = margin_optimizer(num_classes if num_living is None else num_living)
        elif optimizer is None:
            optimizer = default_optimizer(select, num_classes) if num_living is None else DEFAULT_OPTIMIZER
        settings = HeadSettings(
            name=name,
            num_classes=num_classes,
            num_living=num_living,
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
        """Refuse what would be taken and change nothing: InvalidArgument."""
        if name in FIXED_SETTINGS and "_backend" in self.__dict__:
            raise InvalidArgument(f"{name} of ClassHead {self.name!r} cannot be set: {FIXED_SETTINGS[name]}")
        super().__setattr__(name, value)

    @property
    def margin(self) -> AnyMargin | None:
        """The margin. It may be set between two steps, on every rank alike.

        It counts from the next forward pass on. ``state_dict()`` names it, and holds what it learned: a head that loads
        the state goes on with the same settings, and raises SpecMismatch if its margin is of another kind.
        """
        return self._backend.margins.margin

    @margin.setter
    def margin(self, margin: AnyMargin | None) -> None:
        self._backend.margins.set(self._checked(margin))

    def _checked(self, margin: AnyMargin | None) -> AnyMargin | None:
        if self.bias:
            require_no_margin(margin)
        require_margin(margin, self.sub_centers)
        return check_margin(margin, self.num_classes)

    @property
    def backend(self) -> RowBackend:
        """The rows and the way they are worked on."""
        return self._backend

    @property
    def _local(self) -> LocalRows:
        """The rows, if they are here. Raises InvalidArgument for rows in a cluster."""
        if self._backend.local is None:
            raise InvalidArgument(
                f"the rows of {self.name!r} are in a cluster, and none of these processes has them; save the model "
                "with geartrain.save(model, path), or all tables of the cluster with Cluster.snapshot, which "
                "Cluster.restore reads"
            )
        return self._backend.local

    @property
    def table(self) -> ReadableTable:
        """The rows themselves."""
        return self._backend.table

    @property
    def select(self) -> Selection:
        """The selection; with :class:`KNNSoftmax` the object that holds its graph."""
        return self._backend.select

    @property
    def row_update(self) -> PendingUpdate[Any]:
        """Row gradients that wait for :class:`geartrain.bridge.rows.optimizer.RowOptimizer`."""
        return self._backend.update

    @property
    def row_placement(self) -> Placement:
        """The rows, for :func:`geartrain.save` and :func:`geartrain.load`."""
        return head_rows(self._backend)

    @property
    def name(self) -> str:
        """Name of the table."""
        return self.table.spec.name

    @property
    def num_living(self) -> int:
        """How many classes live."""
        return self._backend.live_classes.num_living

    @property
    def retired(self) -> Tensor:
        """Ids [N] int64 of the classes that do not live, rising: retired, or never added."""
        return torch.from_numpy(self._backend.live_classes.free_ids(self.num_classes - self.num_living))

    def add_classes(
        self,
        num: int,
        *,
        rows: Tensor | None = None,
        examples: Loader | None = None,
        backbone: nn.Module | None = None,
    ) -> Tensor:
        """Let ``num`` more classes live, between two steps; return their ids [num] int64, the lowest free ones.

        Their centers are ``rows`` [num, D] (or [num, sub_centers, D]); or made of the mean features that ``backbone``
        gives of ``examples``, batches as :meth:`imprint` takes them with labels 0 … num − 1 for the classes to be; or,
        without either, the initial values of their ids. Those of ``examples`` are placed as :meth:`imprint` places a
        few classes, so that the others keep their samples. Momentum is zero. Ids of retired classes are given out
        again. They take part from the next step on, in the graph of KNN softmax too. Of several centers a class a
        single one is the first, and the others have their initial values. With ranks, every rank calls it with equal
        ``num`` and ``rows`` (its own ``examples``); several workers without a process group each call it, in the same
        order, and train on when all have: each writes the rows anew, and what another had trained of them is lost.

        Costs an assign of the rows, with ranks one exchange, with ``examples`` a pull of up to 32 MiB; for KNN softmax
        see :meth:`KNNSelection.follow`. Raises InvalidArgument (no ids free, an update pending, a class without an
        example, a batch of another form than :meth:`imprint` takes), InvalidRows, NonFinite, SpecMismatch (ranks
        disagree), SyncError (another rank failed); then nothing lives that did not before.
        """
        return torch.from_numpy(add_classes(self._backend, self.dim, num, rows, examples, backbone, self.sub_centers))

    def retire_classes(self, ids: Tensor) -> None:
        """Let the classes ``ids`` [N] int64 take no part any more, between two steps.

        Their labels are refused from then on, no selection chooses them, no softmax sums them, no prediction names
        them. Their rows stay as they are and readable (:meth:`weights`) until :meth:`add_classes` gives the ids out
        again; their momentum becomes zero. With ranks every rank calls it. Costs a pull and an assign of the rows.

        Raises InvalidIds (outside the table, twice, not living), InvalidArgument (none would be left, an update
        pending), SpecMismatch, SyncError.
        """
        retire_classes(self._backend, ids)

    @property
    def step(self) -> int:
        """Row updates applied so far; decides, with the seed, which classes are sampled next."""
        return self.row_update.step

    @runs_eagerly
    def forward(self, features: Tensor, labels: Tensor, weight: Tensor | None = None) -> Tensor:
        """Mean loss (0-dim, float32 or float64) of features [B, D] with labels [B] int64, both on any device.

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
        # What is pulled outlives this call: it must not become an inference tensor.
        with torch.inference_mode(False), torch.no_grad():
            call = self._backend.begin(features, labels, weight, in_training=self.training, want_rows=training)
        stand_in = self._backend.update.on(features.device)
        loss = head_loss(features, stand_in if training else None, call, self._reduction)
        self._note(call, training)
        return loss

    @property
    def adds_up(self) -> bool:
        """Whether the losses of micro-batches, weighted by their samples, add up to that of their batch."""
        return self.backend.settings.config.reduction != "none"

    @property
    def takes_parts(self) -> bool:
        """Whether :meth:`loss_of_parts` can be asked: where several ranks hold the rows."""
        local, peers = self._backend.local, self._backend.peers
        return local is not None and peers is not None and peers.world_size > 1

    @runs_eagerly
    def loss_of_parts(self, parts: FeatureParts, labels: Tensor, weight: Tensor | None = None) -> Tensor:
        """As ``head(features, labels, weight)``, for features that ``parts`` compute and that travel meanwhile.

        :class:`geartrain.MicroBatches` asks it. Raises what a call of the head does, and what computing them raises;
        SyncError where that happened on another rank.
        """
        training = self._collects_gradients()
        with torch.inference_mode(False), torch.no_grad():
            call = self._local.begin_parts(parts, labels, weight, in_training=self.training, want_rows=training)
        stand_in = self.row_update.on(parts.joined[0].device)
        loss = parts_loss(parts, stand_in if training else None, call, self._reduction)
        self._note(call, training)
        return loss

    def _collects_gradients(self) -> bool:
        """Whether rows are trained by this pass."""
        return self.training and torch.is_grad_enabled() and self._backend.update.is_trained

    def _note(self, call: HeadCall, training: bool) -> None:
        self._watch.last = call.statistics
        if training and not self._watch.has_ended and not is_capturing(call.statistics.losses.device):
            self._watch.note(call.statistics, self._backend.live_classes.num_living, self._settings_of_learning)

    @property
    def stats(self) -> StepStatistics | None:
        """What the last forward pass has seen: loss, mean cosine of the targets, accuracy over the active classes.

        None before the first. Costs nothing until a number is read, which waits for the device.
        """
        return self._watch.last

    def _settings_of_learning(self) -> str:
        margin, lr = self.margin, self.row_update.applied_lr
        scale = 1.0 if margin is None else scale_of(margin)
        rate = "not trained by any RowOptimizer" if lr is None else f"learning rate {lr:g}"
        return f"{self.name!r} (margin {margin}, scale {scale:g}, {rate})"

    def next_epoch(self) -> None:
        """Say, on every rank, that a pass over the data has ended: KNN softmax builds its graph anew by it."""
        self.select.next_epoch()

    def rebuild_graph(self) -> None:
        """Build the graph of KNN softmax now, from the rows as they are; every rank calls it. InvalidArgument without
        one."""
        self.select.rebuild_graph()

    def predict(self, features: Tensor, k: int = 5) -> tuple[Tensor, Tensor]:
        """The ``k`` best classes of features [B, D]: scores [B, k] (cos θ; x·w without a margin) and ids [B, k] int64.

        Best first; the margin plays no part. Pulled rows are kept until they change if 5 · C · D bytes are within
        ``rows_cache_bytes``; else all C travel, for each 1,024 samples on a GPU. Hosted rows do not travel. Raises
        InvalidRows, InvalidArgument, and NonFinite for rows or features on the CPU, unless
        ranks hold the rows: there the scores are NaN.
        """
        check_features(features, self.dim)
        k = integer("k", k, 1, self.num_living)
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

        If the means of at least half of the living classes have an average cosine above 0.5 to each other, as an
        untrained backbone's have, the direction that they share is taken off first: it tells none from another. It is
        part of the state, and is taken off the means of classes that come later, too. A mean that has nothing else, or
        is zero, changes nothing.

        Fewer than half are placed among the others once these have trained, where they score on their own samples as
        the best other center does. Without a margin: the mean of the others, its bias too, and so much of a class's own
        direction. Under a margin a quarter more: a center is turned away from the mean of the others, to a cosine of
        0.8 with its own mean at least. The others are up to 32 MiB of rows, evenly spread.

        ``loader`` yields (images, labels [N] int64) or (images, labels, weights [N]), as a step takes them: images are
        what ``backbone`` takes, a tensor, a tuple of its arguments or a dict of them; weights weigh the mean; samples
        of weight 0 or of the head's ``ignore_index`` do not count. ``backbone`` runs in eval() without gradients, on
        its own device, and is put back in its mode. Classes without images keep their row; an imprinted row's momentum
        becomes zero. Of several centers a class the mean is the first, and the others get their initial values.
        ``loader`` is read once. Sums of all classes take up to ``memory_bytes``, one byte a class, and 384 MiB while
        they become rows; if they need more, they are in a file without a name in ``tempfile.gettempdir()``
        (``TMPDIR``), 4·dim bytes of disk for each class with images. Rows are assigned when all images were read.
        ``progress`` is called with the images so far that count; without it a bar appears after two seconds. With
        ranks, every rank gives its own images, and they exchange which classes have any, and the sums of those.

        Raises InvalidIds for a label that is no class, NonFinite for a feature that is NaN or infinite and
        InvalidArgument for a batch of another form, for weights, and where the file finds no room: no class was changed
        then.
        """
        return imprint_rows(self._backend, loader, backbone, memory_bytes, progress)

    @torch.no_grad()
    def dominant_centers(self, loader: Loader, backbone: nn.Module) -> Tensor:
        """The number [C] int64 of each class's center that is nearest to most of its images; 0 without images.

        What other centers have drawn to themselves is mostly mislabelled or hard (sub-center ArcFace, section 3.3).
        ``gt.export_class_weights(head, path, dominant=...)`` writes these centers alone, for a head with one a class.
        ``loader`` and ``backbone`` are those of :meth:`imprint`. Pulls the rows of each batch's classes; memory 4
        bytes a center. No ranks take part: it is of the images that this process gives. Raises InvalidIds,
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
        """Rows [N, D] on the host: of the classes ``ids`` [N] int64 (any order, duplicates allowed), or of all.

        With several centers a class [N, sub_centers, D].
        """
        rows = self._rows(ids)
        if self.sub_centers > 1:
            return rows.view(-1, self.sub_centers, self.dim)
        return rows[:, : self.dim].contiguous() if self.bias else rows

    @torch.no_grad()
    def biases(self, ids: Tensor | None = None) -> Tensor:
        """Biases [N] on the host, of the classes ``ids`` as in :meth:`weights`; zeros without ``bias=True``."""
        if not self.bias:
            return torch.zeros(self.num_classes if ids is None else len(ids))
        return self._rows(ids)[:, self.dim].contiguous()

    def _rows(self, ids: Tensor | None) -> Tensor:
        wanted, inverse = check_wanted_ids(ids, self.num_classes)
        spec = self.table.spec
        rows = torch.empty(len(wanted), spec.dim, dtype=TORCH_DTYPES[spec.dtype])
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
        and the backbone there. All rows are written, there are no increments. Warns of bad labels, and of rows that
        were left as they were, which no call of the head has raised yet. :meth:`restore` reads it on any number of
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
        """Rows that lie on ranks, with their slots and the head's state, for ``torch.distributed.checkpoint``.

            dcp.save({"model": model.state_dict(), "rows": head.sharded_rows()}, checkpoint_id=path)

        Every rank calls it, and ``dcp.load`` of the same dict on any number of ranks. The tensors are DTensors over the
        ranks in the memory of the rows: nothing is copied, a load writes into the rows, and one that fails half way
        leaves a mixture: load again. Then ``model.load_state_dict``. Raises InvalidArgument for rows in a cluster:
        :func:`geartrain.save` is theirs.
        """
        return self._local.sharded_rows(self)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Neither copy nor pickle: rows are trained in one place."""
        raise InvalidArgument(
            f"ClassHead {self.name!r} cannot be copied or pickled: its rows are not in the module. Copy the "
            "backbone alone (for averaged weights, too); geartrain.save(model, folder) saves a head with its rows"
        )

    def get_extra_state(self) -> dict[str, Any]:
        """Table name, size, step, retired classes, settings, and what tells the rows from others; the rows themselves
        are in snapshots. One pull of up to 128 rows from a cluster. Warns of bad labels, and of rows of this rank
        that were left as they were, which no call of the head has raised yet."""
        return state_of(self._backend)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        """Of a state_dict; raises SpecMismatch if it was saved with other rows than are here, whatever ``strict``."""
        state = state_dict.get(f"{prefix}_extra_state")
        if isinstance(state, Mapping):
            require_loadable(self._backend, state)
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Go on at the saved step. SpecMismatch for another table or size, or for rows on ranks of another step.

        Rows in a cluster are not looked at here, as ``load_state_dict`` does: whoever calls this has restored them.
        """
        resume_state(self._backend, state)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ClassHead:
        """Rows that are here go with ``head.to(device)``."""
        if self._backend.local is not None:
            self._backend.local.move_with(fn)
        super()._apply(fn, recurse)
        return self

    def extra_repr(self) -> str:
        """Settings for print()."""
        return (
            f"{self.name!r}, num_classes={self.num_classes}, dim={self.dim}, select={self.select}, margin={self.margin}"
            f"{', bias=True' if self.bias else ''}{f', sub_centers={self.sub_centers}' if self.sub_centers > 1 else ''}"
        )
