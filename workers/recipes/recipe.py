"""Settings of an image training: frozen, checked, saved beside the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, get_args

import torch
from torch import nn

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.programs.selection import FullSoftmax, PartialFC, Selection
from geartrain.ams.values.errors import ConfigError
from geartrain.ams.values.optimizers.momentum import Untouched
from geartrain.ams.values.optimizers.registry import RowOptimizerSpec
from geartrain.ams.values.specs import Normal
from geartrain.bridge.head.backends.registry import ROW_BACKENDS
from geartrain.bridge.head.class_head import ClassHead
from geartrain.bridge.head.defaults import default_optimizer
from geartrain.bridge.head.loss.config import HeadConfig
from geartrain.bridge.head.loss.sub_centers import checked_sub_centers, require_margin
from geartrain.bridge.head.selection.knn_selection import KNNSoftmax
from geartrain.bridge.optim.batch_plan import BatchRamp
from geartrain.bridge.optim.lars import LARS
from geartrain.bridge.parallel.topk.hook import TopKGradients
from geartrain.workers.data.augment import Augmentation
from geartrain.workers.data.bitmaps import Preprocessing
from geartrain.workers.job.options import SnapshotSettings
from geartrain.workers.recipes.margins import margin_of
from geartrain.workers.recipes.optimizers import JOB_OPTIMIZERS

PLACES = tuple(ROW_BACKENDS)
UNTOUCHED = get_args(Untouched)
LARS_TRUST = 0.02
"""Trust ratio by which a rate for SGD suits LARS, too; layers that start at zero, biases and norms start with SGD."""

WITH_LARS = ("sgd",)
"""Optimizers of the backbone with a layerwise variant: ``lars``."""


@dataclass(frozen=True, kw_only=True)
class FccsSettings:
    """Batch size that grows instead of a learning rate that falls (:class:`geartrain.FCCS`)."""

    max_batch: int | None = None
    """Images of the last step, over all ranks, a multiple of ``batch_size``; None: every step has ``batch_size``, and
    the rates fall."""
    initial_steps: int = 0
    """Steps of ``batch_size`` images; then the batch grows along half a cosine, and the rates stay constant."""


@dataclass(frozen=True, kw_only=True)
class GraphSettings:
    """Graph of classes by which ``knn`` selects."""

    k: int | None = None
    """Neighbours kept of each class; None: ``neighbours``, its name in older recipes."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Settings of a training. The defaults are those of the quickstart."""

    steps: int = 600
    """Updates of one stage of training; a resumed run that was complete does another stage."""
    batch_size: int = 256
    """Images of a step, over all ranks."""
    backbone: str = "stroke_net"
    """Name of the backbone, as in ``build_backbone``."""
    imprint: bool = True
    """Whether class centers start at the mean features of their images, and may end there."""
    optimizer: str = "sgd"
    """Optimizer of backbone and class centers: ``sgd`` (the backbone's with Nesterov momentum) or ``adamw``."""
    lr: float = 0.2
    """Peak learning rate of the backbone."""
    row_lr: float | None = None
    """Peak learning rate of the class centers; None: as ``lr``. Without a margin, where they learn by AdamW, 1/200 of
    it (at a full softmax, else more, as a head's own rate)."""
    rate: float = 1.0
    """Factor of both rates, found by trials: a table keeps the rate that it was made with."""
    row_momentum: float = 0.0
    """Momentum of the class centers' optimizer (SparseMomentum); 0 is plain SGD."""
    row_momentum_untouched: Untouched = "freeze"
    """Effect of a step on inactive class centers: ``freeze`` (none) or ``elapsed`` (they move on by their momentum, as
    under dense momentum)."""
    warmup_steps: int = 50
    """Steps over which both rates rise linearly; then they fall along a cosine to zero, or stay with ``fccs``."""
    fccs: FccsSettings = field(default_factory=FccsSettings)
    """Growth of the batch, if any."""
    lars: bool = False
    """Give each layer of the backbone a rate of its own (``gt.LARS``), for large batches: a step moves its weight by
    ``lr`` / 50 of its norm. Biases and norms learn as without it."""
    micro_batches: int = 1
    """Parts of each rank's images: forward and backward run on one after the other, in as much less memory
    (``gt.MicroBatches``)."""
    momentum: float = 0.9
    """Momentum of the backbone's optimizer."""
    weight_decay: float = 1e-4
    """Weight decay of the backbone's parameters."""
    sparsity: float = 0.0
    """Sparsity of the backbone's gradients, which the ranks average: the share of each large tensor that a rank keeps
    back in a step and sends later (``gt.TopKGradients``); 0: none. It rises over ``warmup_steps``."""
    select: str = "partial"
    """Active classes: ``knn`` (the labels and their neighbours), ``partial`` (the labels and random ones), ``full``."""
    sample_rate: float = 0.1
    """Share of the classes that is active in a step; 1.0 is the full softmax."""
    neighbours: int = 32
    """Neighbours kept of each class by ``knn``, unless ``graph.k`` is set."""
    graph: GraphSettings = field(default_factory=GraphSettings)
    """Graph of ``knn``."""
    near: float = KNNSoftmax.near
    """Share of the negatives of ``knn`` that may be neighbours, in [0, 1]; the others are random."""
    rebuild: str | int = "epoch"
    """Time at which ``knn`` rebuilds its graph: ``auto``, ``epoch``, ``background`` or a number of steps."""
    rows: str = "pull"
    """Place of the work on the class centers: ``pull`` (here; rows travel), ``hosted`` (on the shards; features travel)
    or ``ranks`` (the ranks hold them, and there is no cluster)."""
    margin: str = "cosface:24,0.15"
    """Loss: ``none``, or a margin's name with its numbers (:func:`margin_of`)."""
    sub_centers: int = 1
    """Centers of a class, of which the nearest one counts and learns; with a margin, and not with ``knn``."""
    dim: int = 128
    """Width of features and class centers."""
    width: int = 64
    """Channels of the backbone's trunk; a multiple of 8."""
    seed: int = 0
    """Seed of initial weights, order of the images, distortions and sampled classes."""
    row_dtype: Literal["float32", "float16", "bfloat16", "float8_e4m3fn"] = "float32"
    """Storage type of the class centers: float32, float16 or bfloat16, with ``rows=ranks`` also float8_e4m3fn."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float16_masters"] = "auto"
    """Type of the backbone: ``float32``, ``bfloat16`` (autocast), ``auto`` (bfloat16 where it is faster),
    ``float16_masters`` (products in float16, parameters in float32, a scaled loss) or ``float16`` (parameters,
    gradients and momentum in float16 too, except norms)."""
    augmentation: Augmentation = field(default_factory=Augmentation)
    """Distortions of the training images."""
    look: Preprocessing = field(default_factory=Preprocessing)
    """Conversion of a picture to the backbone's input."""
    snapshots: SnapshotSettings = field(default_factory=SnapshotSettings)

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "dim", "neighbours", "micro_batches"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be at least 1")
        margin_of(self.margin)
        if self.optimizer not in JOB_OPTIMIZERS:
            raise ConfigError(f"optimizer is {self.optimizer!r}; it must be one of {', '.join(JOB_OPTIMIZERS)}")
        if self.row_momentum and not JOB_OPTIMIZERS[self.optimizer].takes_row_momentum:
            takers = ", ".join(repr(name) for name, known in JOB_OPTIMIZERS.items() if known.takes_row_momentum)
            raise ConfigError(
                f"row_momentum is {self.row_momentum!r}; it is for the optimizer {takers}, {self.optimizer!r} has its "
                "own"
            )
        if not 0 <= self.sparsity < 1:
            raise ConfigError(f"sparsity is {self.sparsity!r}; it must lie in [0, 1): 0.999 sends one in a thousand")
        if self.sparsity and not JOB_OPTIMIZERS[self.optimizer].is_sparsifiable:
            takers = ", ".join(repr(name) for name, known in JOB_OPTIMIZERS.items() if known.is_sparsifiable)
            raise ConfigError(
                f"sparsity is {self.sparsity!r}, and gradients that arrive late and summed are not for the optimizer "
                f"{self.optimizer!r}; give optimizer={takers}, or leave sparsity out"
            )
        for name in ("lr", "row_lr", "rate", "weight_decay", "warmup_steps"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name} is {value!r}; it must be finite and >= 0")
        self._check_large_batches()
        if not 0 <= self.near <= 1:
            raise ConfigError(f"near is {self.near!r}; it must lie in [0, 1]")
        if self.graph.k is not None and self.graph.k < 1:
            raise ConfigError(f"graph.k is {self.graph.k!r}; it must be at least 1")
        if not 0 <= self.row_momentum < 1:
            raise ConfigError(f"row_momentum is {self.row_momentum!r}; it must lie in [0, 1)")
        if self.row_momentum_untouched not in UNTOUCHED:
            raise ConfigError(
                f"row_momentum_untouched is {self.row_momentum_untouched!r}; it must be one of {', '.join(UNTOUCHED)}"
            )
        if self.row_momentum_untouched == "elapsed" and self.row_momentum == 0:
            raise ConfigError(
                "row_momentum_untouched is 'elapsed' and row_momentum is 0: without momentum nothing moves untouched "
                "class centers; give row_momentum (0.9) too"
            )
        if self.width % 8 or self.width < 8:
            raise ConfigError(f"width is {self.width!r}; it must be a positive multiple of 8")
        if not 0 < self.sample_rate <= 1:
            raise ConfigError(f"sample_rate is {self.sample_rate!r}; it must lie in (0, 1]")
        if self.select not in SELECTIONS:
            raise ConfigError(f"select is {self.select!r}; it must be one of {', '.join(SELECTIONS)}")
        if self.rows not in PLACES:
            raise ConfigError(f"rows is {self.rows!r}; it must be one of {', '.join(PLACES)}")
        if self.select == "knn" and self.sample_rate == 1:
            raise ConfigError(
                "select is 'knn' and sample_rate is 1, the full softmax; give less of the classes (sample_rate=0.1)"
            )
        is_steps = str(self.rebuild).isdecimal() and int(self.rebuild) >= 1
        if self.rebuild not in ("auto", "epoch", "background") and not is_steps:
            raise ConfigError(
                f"rebuild is {self.rebuild!r}; it must be 'auto', 'epoch', 'background' or a number of steps"
            )
        checked_sub_centers(self.sub_centers, self.dim, selection_of(self), 0.0)
        require_margin(margin_of(self.margin), self.sub_centers)
        if not 0 <= self.seed < 2**31:
            raise ConfigError(f"seed is {self.seed!r}; it must lie in [0, 2^31)")

    def _check_large_batches(self) -> None:
        fccs, batch = self.fccs, self.batch_size
        if fccs.max_batch is not None and (fccs.max_batch < batch or fccs.max_batch % batch):
            raise ConfigError(
                f"fccs.max_batch is {fccs.max_batch}; it must be a multiple of batch_size, {batch}: give "
                f"{max(1, round(fccs.max_batch / batch)) * batch}"
            )
        if fccs.initial_steps < 0:
            raise ConfigError(f"fccs.initial_steps is {fccs.initial_steps}; it must be at least 0")
        if fccs.initial_steps >= self.steps:
            raise ConfigError(
                f"fccs.initial_steps is {fccs.initial_steps}, and steps is {self.steps}; the batch grows after the "
                "first and before the second: give less"
            )
        if self.row_dtype == "float8_e4m3fn" and self.rows != "ranks":
            raise ConfigError(f"row_dtype is {self.row_dtype!r}, and rows is {self.rows!r}; give rows=ranks")
        if self.lars and self.optimizer not in WITH_LARS:
            raise ConfigError(f"lars is True, and optimizer is {self.optimizer!r}; LARS is SGD: give optimizer=sgd")
        if self.sparsity and self.dtype == "float16":
            raise ConfigError(
                f"sparsity is {self.sparsity!r}, and dtype is 'float16': what waits to be sent is no float16; give "
                "dtype=float16_masters"
            )

    @cached_property
    def _ramp(self) -> BatchRamp:
        last = (self.fccs.max_batch or self.batch_size) // self.batch_size
        return BatchRamp(first=1, last=last, initial_steps=self.fccs.initial_steps, total_steps=self.steps)

    def batches(self, step: int) -> int:
        """Return the batches of ``batch_size`` in ``step``, of a training from step 0 on."""
        return self._ramp.at(step)

    def batches_before(self, step: int) -> int:
        """Return the batches of all steps before ``step``."""
        return self._ramp.before(step)

    def rate_factor(self, step: int, steps: int) -> float:
        """Return the factor of ``lr`` and ``row_lr`` at ``step`` (from 0) of a stage of ``steps``."""
        warmup = min(1.0, (step + 1) / max(1, min(self.warmup_steps, steps // 4)))
        if self.fccs.max_batch is not None:
            return self.rate * warmup
        return self.rate * warmup * 0.5 * (1 + math.cos(math.pi * step / steps))

    def stage_steps(self) -> int:
        """Return the updates of one stage."""
        return self.steps


@dataclass(frozen=True, kw_only=True)
class GlyphRecipe(Recipe):
    """Recipe of ``geartrain worker glyphs``."""

    classes: int | None = None
    """Number of characters, evenly spread; None: all."""


@dataclass(frozen=True, kw_only=True)
class ClassifyRecipe(Recipe):
    """Recipe of ``geartrain worker classify``: all classes are active, and small batches see them often."""

    sample_rate: float = 1.0
    batch_size: int = 64
    steps: int = 300
    warmup_steps: int = 20
    look: Preprocessing = field(default_factory=lambda: Preprocessing(kind="photo", size=64, channels=3))
    held_out: float = 0.2
    """Share of each class held out for the validation, which chooses the model."""
    skip_unreadable: bool = False
    """Skip images that cannot be read; they are counted and named."""
    image_memory: int = 2048
    """MiB of decoded images kept in memory; beyond that, every batch is read on demand."""


def selection_of(recipe: Recipe) -> Selection:
    """Return the head's ``select``."""
    return FullSoftmax() if recipe.sample_rate == 1 else SELECTIONS[recipe.select](recipe)


def row_optimizer_of(recipe: Recipe, num_classes: int) -> RowOptimizerSpec:
    """Return the head's ``optimizer``.

    Without a margin nothing bounds the rows' lengths, and plain SGD at a rate for cosines lets them grow without end:
    there it is a head's default, at a rate that differs from its own as ``row_lr`` differs from ours.
    """
    lr = recipe.lr if recipe.row_lr is None else recipe.row_lr
    if margin_of(recipe.margin) is None and JOB_OPTIMIZERS[recipe.optimizer].is_for_cosines and not recipe.row_momentum:
        usual = default_optimizer(selection_of(recipe), num_classes)
        return replace(usual, lr=usual.lr * lr / Recipe.lr)
    return JOB_OPTIMIZERS[recipe.optimizer].of_rows(
        lr=lr, momentum=recipe.row_momentum, untouched=recipe.row_momentum_untouched
    )


def optimizer_of(recipe: Recipe, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the backbone's optimizer; if it is sparsified, :func:`sparsifier_of` has its momentum and decay."""
    momentum, decay = (0.0, 0.0) if recipe.sparsity else (recipe.momentum, recipe.weight_decay)
    if recipe.lars:
        settings: dict[str, Any] = {"momentum": momentum, "weight_decay": decay, "nesterov": momentum > 0}
        return LARS(parameters, recipe.lr, trust_coefficient=LARS_TRUST, **settings)
    return JOB_OPTIMIZERS[recipe.optimizer].of_backbone(parameters, lr=recipe.lr, momentum=momentum, weight_decay=decay)


def sparsifier_of(recipe: Recipe) -> TopKGradients | None:
    """Return the :class:`TopKGradients` of the backbone; None if its gradients are dense."""
    if not recipe.sparsity:
        return None
    return TopKGradients(
        sparsity=recipe.sparsity,
        warmup_steps=recipe.warmup_steps,
        momentum=recipe.momentum,
        nesterov=recipe.momentum > 0,
        weight_decay=recipe.weight_decay,
    )


def head_of(
    recipe: Recipe,
    cluster: Cluster | None,
    table: str,
    num_classes: int,
    *,
    reuse: bool = False,
    sync: bool = False,
) -> ClassHead:
    """Return the class head of a recipe, whose rows are in ``table`` of ``cluster``, or on the ranks."""
    margin = margin_of(recipe.margin)
    return ClassHead(
        cluster,
        table,
        num_classes=num_classes,
        dim=recipe.dim,
        select=selection_of(recipe),
        margin=margin,
        sub_centers=recipe.sub_centers,
        optimizer=row_optimizer_of(recipe, num_classes),
        initializer=None if margin is None else Normal(),
        rows=recipe.rows,
        reuse=reuse,
        sync=sync,
        config=HeadConfig(seed=recipe.seed, dtype=recipe.row_dtype),
    )


def _knn_of(recipe: Recipe) -> KNNSoftmax:
    k = recipe.neighbours if recipe.graph.k is None else recipe.graph.k
    return KNNSoftmax(recipe.sample_rate, k, _steps_or_word(recipe.rebuild), near=recipe.near)


def _steps_or_word(rebuild: str | int) -> str | int:
    return int(rebuild) if str(rebuild).isdecimal() else rebuild


SELECTIONS: dict[str, Callable[[Recipe], Selection]] = {
    "knn": _knn_of,
    "partial": lambda recipe: PartialFC(recipe.sample_rate),
    "full": lambda _: FullSoftmax(),
}
"""Selections by their names in recipes."""
