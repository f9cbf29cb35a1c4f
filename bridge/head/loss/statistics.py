"""Statistics of a head's forward pass, and a check that the head learns.

Legend: S samples that count, of this rank.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, pvariance

import torch
from torch import Tensor

from geartrain.bridge.rows.transfers import Readback

LOOKS_EVERY = 16
"""Steps between computations of the largest other logit where that takes a pass of its own, or a collective."""
_WATCHES_EVERY = 4
"""Least number of passes between reads: a read costs some ten microseconds."""
_MIN_PASSES = 300
_PASSES_A_CLASS = 2
"""Number of meetings of a class before a head could have learned much of it."""
_CLEARLY = 4.0
"""Standard errors of a clear difference."""


@dataclass(frozen=True, eq=False, kw_only=True)
class StepStatistics:
    """Statistics of the last forward pass, over this rank's samples that count. Reading a number waits for the
    device."""

    losses: Tensor
    """Losses [S], as the head returned them."""
    targets: Tensor
    """Cosines [S] of features and the rows of their classes; logits where the head has no margin."""
    highest_others: Tensor | None
    """Largest cosine or logit [S] of the other active classes. None in most steps on a GPU and on several ranks, where
    computing it would cost time: there it is in every 16th step, unless the sums need it anyway."""
    num_active: int
    """Number of active classes."""
    counts: Tensor | None = None
    """Counts [S], 1 where a sample counts, for labels on a device; None: all."""

    def __repr__(self) -> str:
        """Return the means, for print(), instead of a number for each sample."""
        means = {name: getattr(self, name) for name in ("loss", "accuracy", "target", "highest_other")}
        shown = ", ".join(f"{name}={value if value is None else f'{value:.4g}'}" for name, value in means.items())
        return f"StepStatistics({shown}, num_samples={len(self.losses)}, num_active={self.num_active})"

    @property
    def loss(self) -> float:
        """Mean loss, whatever the reduction; without weights."""
        return self._mean(self.losses)

    @property
    def target(self) -> float:
        """Mean cosine (logit) of the targets, without the margin."""
        return self._mean(self.targets)

    @property
    def highest_other(self) -> float | None:
        """Mean of the largest other cosine (logit)."""
        return None if self.highest_others is None else self._mean(self.highest_others)

    @property
    def accuracy(self) -> float | None:
        """Share of the samples whose class is the best of the active ones, without the margin."""
        hits = self.hits
        return None if hits is None else self._mean(hits)

    @property
    def hits(self) -> Tensor | None:
        """Hits [S]: 1 where the sample's class is the best of the active ones, else 0."""
        return None if self.highest_others is None else (self.targets > self.highest_others).to(self.targets.dtype)

    def mean(self, values_S: Tensor) -> Tensor:
        """Return the mean (0-dim) over the samples that count."""
        if self.counts is None:
            return values_S.mean()
        counts_S = self.counts == 1
        return values_S.where(counts_S, 0.0).sum() / counts_S.sum()

    def _mean(self, values_S: Tensor) -> float:
        return float(self.mean(values_S)) if len(values_S) else math.nan


def _squared_error(values: Sequence[float]) -> float:
    """Return the squared standard error of the mean."""
    return pvariance(values) / (len(values) - 1)


class LearningWatch:
    """Warns once if a head that was trained from its start has learned nothing.

    It compares the first quarter of 300 passes, or of as many as meet each class twice, with the last: the mean cosine
    of the targets, and the accuracy over the active classes. If neither rose by four standard errors, and the accuracy
    is no more than three times that of chance (of few classes half-way from that to 1), the head says so. After that,
    or once it has learned, nothing is checked any more. A single class leaves nothing to learn.
    """

    def __init__(self) -> None:
        self._passes = self._next = 0
        self._horizon = 0
        self._windows: tuple[list[tuple[float, float]], list[tuple[float, float]]] = [], []
        """Mean cosines and accuracies of passes in the first quarter, and in the last."""
        self._last_samples = 0
        self._on_the_way: tuple[Readback, int, int] | None = None
        self.has_ended = False
        self.last: StepStatistics | None = None
        """Statistics of the last pass, trained or not."""

    def observe(self, seen: StepStatistics, num_live_classes: int, settings: Callable[[], str]) -> None:
        """Check a training pass; ``settings`` describe the head, for the warning."""
        self._passes += 1
        hits, samples = seen.hits if self._passes > self._next else None, len(seen.targets)
        if hits is None or samples == 0:
            return
        self._next = self._passes + _WATCHES_EVERY - 1
        if self._horizon == 0:
            self._horizon = max(_MIN_PASSES, _PASSES_A_CLASS * num_live_classes // samples)
        self._collect()
        if self._passes > self._horizon:
            self.has_ended = True
            if not self._has_learned(seen.num_active):
                warnings.warn(self._sentence(seen.num_active, settings()), stacklevel=3)
            return
        quarter = 4 * (self._passes - 1) // self._horizon
        if quarter in (0, 3):
            means = torch.stack([seen.mean(seen.targets), seen.mean(hits)])
            self._on_the_way = Readback(means), quarter // 3, samples
            if means.device.type == "cpu":
                self._collect()

    def _collect(self) -> None:
        """Add arrived values to a window; others are left out, so that nothing waits."""
        on_the_way, self._on_the_way = self._on_the_way, None
        if on_the_way is not None and on_the_way[0].is_here:
            self._add(on_the_way[0].values(), *on_the_way[1:])

    def _add(self, means: Tensor, window: int, samples: int) -> None:
        target, accuracy = means.tolist()
        self._windows[window].append((target, accuracy))
        self._last_samples += samples * window

    def _has_learned(self, num_active: int) -> bool:
        first, last = self._windows
        if min(len(first), len(last)) < 2 or not math.isfinite(sum(map(sum, last))):
            return True  # nothing is known; what is not finite has errors of its own
        for before, after in zip(zip(*first, strict=True), zip(*last, strict=True), strict=True):
            if fmean(after) - fmean(before) > _CLEARLY * math.sqrt(_squared_error(before) + _squared_error(after)):
                return True
        if num_active < 2:
            return True
        chance, accuracy = 1 / num_active, fmean(passed[1] for passed in last)
        return accuracy > min(3 * chance + _CLEARLY * math.sqrt(chance / self._last_samples), (1 + chance) / 2)

    def _sentence(self, num_active: int, settings: str) -> str:
        (target, accuracy), (last_target, last_accuracy) = (
            (fmean(passed[0] for passed in window), fmean(passed[1] for passed in window)) for window in self._windows
        )
        return (
            f"after {self._horizon} training passes the class head {settings} has learned nothing: the mean cosine (or "
            f"logit) of the targets went from {target:.4f} to {last_target:.4f}, the accuracy over "
            f"{num_active} active classes from {accuracy:.4f} to {last_accuracy:.4f}. Try a higher learning rate "
            "of the rows (RowOptimizer's groups), margin=None or a smaller margin (head.margin may be set as training "
            "goes on), and the scale of gt.ArcFace(scale=None); see that the backbone is trained, and that labels "
            "belong to their samples"
        )
