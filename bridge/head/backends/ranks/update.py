"""A step of a head whose rows are on the ranks: agreement of the ranks, and the update of the rows in place.

Legend: B samples of all ranks, S of this one, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
import xxhash
from torch import Tensor

from geartrain.ams.programs.class_lifecycle import LiveClasses
from geartrain.ams.programs.selection import SamplingCorrection, Selection
from geartrain.ams.values.errors import (
    GeartrainError,
    InvalidArgument,
    InvalidRows,
    NonFinite,
    SpecMismatch,
    StepMismatch,
    SyncError,
)
from geartrain.ams.values.specs import Ids, TableSpec
from geartrain.bridge.collectives.communicator import Pending
from geartrain.bridge.head.backends.backend import HeadSettings
from geartrain.bridge.head.backends.ranks.device_labels import DeviceLabels
from geartrain.bridge.head.backends.ranks.fused import takes
from geartrain.bridge.head.backends.ranks.passes import RankGradient, RankRows
from geartrain.bridge.head.backends.ranks.selector import RankSelector
from geartrain.bridge.head.loss.batch import Batch, DeviceTargets, Targets, with_ones
from geartrain.bridge.head.loss.checks import check_features, check_finite
from geartrain.bridge.head.loss.margins.head_margin import HeadMargin, JointBatch
from geartrain.bridge.head.loss.sample_weights import CountedSamples
from geartrain.bridge.head.loss.statistics import LOOKS_EVERY
from geartrain.bridge.head.loss.sub_centers import largest_cosines
from geartrain.bridge.kernels.launch import is_capturing, runs_kernels
from geartrain.bridge.kernels.sample_terms import PreparedLabels, sampled_weight
from geartrain.bridge.placements.device_rows import DeviceRows
from geartrain.bridge.placements.device_update import DeviceUpdate
from geartrain.bridge.placements.workspace import Arithmetic
from geartrain.bridge.rows.ranks import float_bits, float_of
from geartrain.bridge.rows.transfers import upload

AnyRankRows = TypeVar("AnyRankRows", bound=RankRows)

_MODES = ("eval()", "eval() with gradients", "train() without gradients", "train()")
"""Modes of a call: 1 if row gradients follow, plus 2 if margins learn from the batch."""
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def named(setting: object) -> str:
    """Return the text by which ranks compare a margin or selection. Raises InvalidArgument if it cannot tell them
    apart."""
    if type(setting).__repr__ is object.__repr__:
        raise InvalidArgument(
            f"{setting!r} has no repr that names its settings, by which ranks compare them; make its class a frozen "
            "dataclass, or give it a __repr__"
        )
    return repr(setting)


@dataclass(frozen=True, kw_only=True)
class RankStepFacts:
    """Facts about the ranks' parts of a step, in rank order."""

    sizes: list[int]
    """Samples that count."""
    want_gradient: bool
    """Whether the features of any rank need a gradient."""
    all_want_gradient: bool
    """Whether the features of every rank need a gradient."""
    share: float | Tensor | None
    """Share of this rank's loss in that of all ranks; None: there is no joint loss, or every rank's is the plain
    mean."""
    take_mean: bool
    """Whether every rank's loss is the plain mean of its samples."""
    part_sizes: list[list[int]]
    """Counted samples of each part, by rank, for a batch that comes part by part."""
    late: bool
    """Whether labels of some rank are on its device, so that all are gathered and checked there."""


class RankHead(Protocol):
    """Interface of a head's backend on ranks, for steps and checkpoints."""

    settings: HeadSettings
    table: DeviceRows
    live_classes: LiveClasses
    update: DeviceUpdate[RankGradient]
    select: Selection
    selector: RankSelector
    margins: HeadMargin
    late_labels: DeviceLabels
    checks_late: bool
    """Whether labels on a CPU are checked on the backend like those on a device, not by the host: for tests."""
    fuses: bool
    """Whether rows on a CPU are processed by the reference implementations of the kernels: for tests."""

    def rows_are_of(self, step: int) -> None:
        """Record that the rows were read from elsewhere, and are those of ``step``."""

    def require_rows(self, identity: Mapping[str, Any] | None) -> None:
        """Raise SpecMismatch unless the rows are those of ``identity``."""


@dataclass(frozen=True)
class RankStep:
    """Request of a step to a rank; every rank gets one at once."""

    backend: RankHead
    training: bool
    """Whether row gradients will follow."""
    adapts: bool
    """Whether a margin may learn from this batch."""

    def rows(self, samples: CountedSamples, agreed: RankStepFacts) -> RankRows:
        """Gather the features and their labels, and return the pass over the rows."""
        link, sizes = self.backend.table.link, agreed.sizes
        joint_features_BD = link.gather(self.travelling(samples.features_SD), sizes)
        return self.rows_over(joint_features_BD, self.start_labels(samples, agreed).result(), agreed, RankRows)

    def start_labels(self, samples: CountedSamples, agreed: RankStepFacts) -> Pending[Tensor]:
        """Start to gather the labels of all ranks: between the hosts, or the devices where some are there."""
        labels = samples.labels_S if isinstance(samples.labels_S, Tensor) else torch.from_numpy(samples.labels_S)
        if agreed.late:
            labels = upload(labels, self.backend.table.device)
        return self.backend.table.link.start_gather(labels, agreed.sizes)

    def travelling(self, features_SD: Tensor) -> Tensor:
        """Return this rank's features as other ranks get them."""
        return with_ones(features_SD.detach()) if self.backend.settings.bias else features_SD.detach().contiguous()

    def rows_over(
        self,
        joint_features_BD: Tensor,
        joint_labels_B: Tensor,
        agreed: RankStepFacts,
        make: Callable[..., AnyRankRows],
    ) -> AnyRankRows:
        """Return the pass over the rows, for features and labels of all ranks; ``make`` takes the arguments of
        RankRows."""
        captures = is_capturing(self.backend.table.device)
        if captures:
            self._require_capturable(agreed)
        if self.training:
            self.backend.select.prepare()
        table, arithmetic = self.backend.table, Arithmetic.of(joint_features_BD)
        late: PreparedLabels | None = None
        first = sum(agreed.sizes[: table.link.rank])
        own = slice(first, first + agreed.sizes[table.link.rank])
        if agreed.late:
            late = self.backend.late_labels.settled(
                joint_labels_B, self.backend.live_classes, self.backend.update.step, table
            )
        labels_B: Ids | Tensor = joint_labels_B.numpy() if late is None else late.labels_B
        num_active, here = self.backend.selector.choose(labels_B, self.backend.live_classes, self.backend.update.draw)
        numbers_B = labels_B - table.first if late is None or late.positions_B is None else late.positions_B
        margin = self.backend.margins.of_pass(
            joint_features_BD,
            labels_B,
            JointBatch(labels=labels_B, first=0, sum=lambda own: own),
            step=self.backend.update.step,
            training=self.adapts,
            target_cos=lambda unit_BD: _target_cos(table, unit_BD, numbers_B),
            counts_B=None if late is None else late.counts_B,
        )
        num_live_classes = self.backend.live_classes.num_live_classes
        weight = _log2_weight(labels_B, num_active, num_live_classes) if self.backend.select.corrects(margin) else None
        stands_for = num_active if weight is None else num_live_classes
        smoothing = self.backend.settings.config.label_smoothing
        targets: Targets | DeviceTargets
        if late is not None and late.positions_B is not None and here.has_all:
            targets = DeviceTargets(late.positions_B)
        else:
            targets = here.targets(numbers_B)
        is_alone_on_host = table.link.world_size == 1 and joint_features_BD.device.type == "cpu"
        looks = not captures and self.backend.update.step % LOOKS_EVERY == 0
        batch = Batch.of(
            joint_features_BD,
            targets,
            labels_B,
            margin,
            stands_for,
            arithmetic,
            smoothing,
            late,
            num_active=num_active,
            centers=self.backend.settings.sub_centers,
            looks_for_highest=is_alone_on_host or looks,
            own=own,
        )
        fuses = takes(table, here, batch, always=self.backend.fuses)
        if captures and not fuses:
            raise InvalidArgument(
                "a CUDA graph cannot capture this head's step, as Triton kernels do not compute all of it. It needs "
                'Triton, and none of: label_smoothing, sub_centers, untouched="elapsed", float64, and a margin that '
                "changes the logits of other classes"
            )
        return make(table, here, batch, numbers_B, agreed.sizes, agreed.want_gradient, weight, fuses=fuses)

    def _require_capturable(self, agreed: RankStepFacts) -> None:
        """Raise InvalidArgument unless everything that differs from step to step is on the device."""
        table, margin = self.backend.table, self.backend.margins.margin
        if not agreed.late:
            raise InvalidArgument("labels are on the host, which no CUDA graph reads; give them on the device")
        if hasattr(margin, "for_batch"):
            raise InvalidArgument(
                f"{margin!r} depends on the step, or on batches before, which a CUDA graph does not; capture steps of "
                "ArcFace, CosFace, SphereFace, CombinedMargin, MagFace, or without a margin"
            )
        if self.backend.select.has_graph:
            raise InvalidArgument(
                f"{self.backend.select!r} builds its graph of classes anew, and a CUDA graph would go on with the one "
                "that it was captured with; capture steps of FullSoftmax() or PartialFC(sample_rate)"
            )
        table.link.require_capturable()

    def agree(self, features: Tensor, labels: Tensor, weight: Tensor | None) -> tuple[CountedSamples, RankStepFacts]:
        """Check this rank's samples and exchange their facts with the other ranks: one exchange.

        If any rank cannot continue, every rank raises: InvalidRows, InvalidIds, InvalidArgument and NonFinite for its
        own input, SyncError for another rank's; SpecMismatch, StepMismatch; and for an earlier step NonFinite for rows
        that it could not change, and InvalidIds for labels that were on a device.
        """
        failure: GeartrainError | None = None
        samples: CountedSamples | None = None
        try:
            samples = self._checked(features, labels, weight)
        except GeartrainError as exc:
            failure = exc
        return self.agree_on(features, samples, failure, ())

    def agree_on(
        self,
        features: Tensor | None,
        samples: CountedSamples | None,
        failure: Exception | None,
        part_sizes: Sequence[int],
    ) -> tuple[CountedSamples, RankStepFacts]:
        """Do :meth:`agree` for samples already checked: with this ``failure``, or those of each part.

        ``part_sizes``: counted samples of each part, equally many parts on every rank; empty if the features come
        whole.
        """
        captures = is_capturing(self.backend.table.device)  # during which the host may not read from the device
        refused = 0 if captures else self.backend.update.pop_refused()
        margin = xxhash.xxh3_64_intdigest(named(self.backend.margins.margin).encode()) >> 2
        size = 0 if samples is None else len(samples.labels_S)
        amount = 0.0 if samples is None else samples.amount
        reduces = samples is None or samples.reduces
        kind = _DTYPES.index(features.dtype) if isinstance(features, Tensor) and features.dtype in _DTYPES else -1
        wants = isinstance(features, Tensor) and features.requires_grad
        step = self.backend.update.step
        mode = self.training + 2 * self.adapts
        is_late = samples is not None and isinstance(samples.labels_S, Tensor)
        amount_here = 0.0 if callable(amount) else amount
        marks = is_late + 2 * callable(amount) + 4 * (not captures and self.backend.late_labels.has_bad)
        numbers = [
            size,
            failure is None,
            kind,
            step,
            mode,
            wants,
            refused,
            self.backend.live_classes.fingerprint,
            margin,
            marks,
        ]
        of_ranks = self.backend.table.link.exchange([*numbers, float_bits(amount_here), reduces, *part_sizes])
        sizes, sound, kinds, steps, modes, gradients, left, classes, margins, marked, amounts, reducing, *parts = (
            list(column) for column in zip(*of_ranks, strict=True)
        )
        if failure is not None:
            raise failure
        assert samples is not None
        if 0 in sound:
            what = "failed in its backbone, or with" if part_sizes else "was given"
            raise SyncError(f"rank {sound.index(0)} {what} features or labels that it refused; its error tells why")
        raise_late(self.backend, refused=sum(left), has_bad=any(mark & 4 for mark in marked), steps=steps)
        if len(set(classes)) > 1:
            raise SpecMismatch(
                "the ranks have different live classes; add, retire and load the same ones on every rank"
            )
        if len(set(margins)) > 1:
            raise SpecMismatch(
                f"the ranks have different margins, here {self.backend.margins.margin}; set the same on every rank"
            )
        found = {
            "dtype of the features": [str(_DTYPES[k]) for k in kinds],
            "training mode": [_MODES[number] for number in modes],
        }
        for label, values in found.items():
            if len(set(values)) > 1:
                raise SpecMismatch(
                    f"the ranks differ in the {label}: {values}, in rank order; call the head on every rank in the "
                    "same mode (train() with gradients, or not) and with features of one dtype"
                )
        take_mean, known_amounts = all(reducing), [float_of(bits) for bits in amounts]
        reduction, link = self.backend.settings.config.reduction, self.backend.table.link
        share: float | Tensor | None = 1.0 if reduction == "sum" else None
        if reduction == "mean" and not take_mean and any(mark & 2 for mark in marked):
            own = (
                amount().sum(dtype=torch.float64)
                if callable(amount)
                else upload(np.array(amount), self.backend.table.device)
            )
            total = link.sum(own)
            share = own / total.where(total != 0, 1.0)
        elif reduction == "mean" and not take_mean:
            share = amount_here / (sum(known_amounts) or 1.0)
        return samples, RankStepFacts(
            sizes=sizes,
            want_gradient=any(gradients),
            all_want_gradient=all(gradients),
            share=None if link.is_alone else share,
            take_mean=take_mean,
            late=any(mark & 1 for mark in marked),
            part_sizes=[list(of_rank) for of_rank in zip(*parts, strict=True)],
        )

    def _checked(self, features: Tensor, labels: Tensor, weight: Tensor | None) -> CountedSamples:
        self.check_placed(features)
        config = self.backend.settings.config
        if self.checks_late(labels):
            check_features(features, self.dim)
            samples = CountedSamples.on_device(features, labels, weight, config, num=len(features))
        else:
            samples = CountedSamples.of(features, labels, weight, config, self.dim, self.backend.live_classes)
        if len(features) == 0 and self.backend.table.link.world_size == 1:
            raise InvalidRows("the batch is empty; a mean loss needs at least one sample")
        check_finite(samples.features_SD)
        return samples

    def checks_late(self, labels: object) -> bool:
        """Return whether labels stay on the device of the rows, which is no CPU."""
        if not isinstance(labels, Tensor):
            return False
        return (labels.device.type != "cpu" and labels.device == self.backend.table.device) or self.backend.checks_late

    @property
    def dim(self) -> int:
        """Width of features."""
        return self.backend.settings.dim

    def check_placed(self, features: Tensor) -> None:
        """Raise InvalidRows unless these are features, and InvalidArgument where the rows are on another device."""
        check_features(features, self.dim)
        if features.device != self.backend.table.device:
            raise InvalidArgument(
                f"features are on {features.device}, the rows on {self.backend.table.device}; move the head there "
                f"(head.to({str(features.device)!r})) or the features"
            )


def raise_late(backend: RankHead, *, refused: int, has_bad: bool, steps: Sequence[int]) -> None:
    """Raise the errors that the ranks have found in earlier steps."""
    if has_bad:
        raise backend.late_labels.pop_error()
    if refused:
        raise refused_rows(backend.table.spec, refused)
    if len(set(steps)) > 1:
        raise StepMismatch(f"the ranks are at the steps {list(steps)}; load the same state on every rank")


def refused_rows(spec: TableSpec, count: int) -> NonFinite:
    """Return the error that ``count`` rows of all ranks were left unchanged."""
    return NonFinite(
        f"a step before would have carried {count} rows of table {spec.name!r} beyond the range of {spec.dtype} rows "
        f"or {spec.slot_dtype} slots, or its gradients were not finite; those rows were left as they were. Lower the "
        "learning rate, or use torch.amp.GradScaler"
    )


def _log2_weight(labels_B: Ids | Tensor, num_active: int, num_live_classes: int) -> float | Tensor | None:
    """Return the weight of :class:`SamplingCorrection` (0-dim, float64, for labels on a device); None: no sampling."""
    if not isinstance(labels_B, Tensor):
        correction = SamplingCorrection.of(labels_B, num_active, num_live_classes)
        return None if correction is None else correction.log2_weight
    if num_active >= num_live_classes or not len(labels_B):
        return None
    if runs_kernels(labels_B.device):
        return sampled_weight(labels_B, num_active, num_live_classes)
    sorted_B = labels_B.sort().values
    num_positive = (sorted_B[1:] != sorted_B[:-1]).sum().double() + 1
    return torch.log2((num_live_classes - num_positive) / (num_active - num_positive)).where(
        num_positive < num_active, 0.0
    )


def _target_cos(table: DeviceRows, unit_BD: Tensor, numbers_B: Ids | Tensor) -> Tensor:
    """Return cosines [B] of unit features and their classes' rows on the ranks: an all-reduce of B numbers."""
    if isinstance(numbers_B, Tensor):
        is_here_B = (numbers_B >= 0) & (numbers_B < table.num_local)
        rows_BD = table.current_rows(numbers_B.clamp(0, max(table.num_local - 1, 0))).to(unit_BD)
        return table.link.sum(largest_cosines(unit_BD, rows_BD).where(is_here_B, 0.0))
    places = np.flatnonzero((numbers_B >= 0) & (numbers_B < table.num_local))
    here = upload(places, unit_BD.device)
    rows_ND = table.current_rows(upload(numbers_B[places], table.device)).to(unit_BD)
    cos_B = torch.zeros_like(unit_BD[:, 0])
    cos_B[here] = largest_cosines(unit_BD[here], rows_ND)
    return table.link.sum(cos_B)
