"""Selections of the active classes of a step: all, or positives with a random part (PLSC, section 2.2; partial FC).

A selection is a function of (labels, num_classes, step) alone, so every rank and every process with the labels of the
whole batch finds the same active classes, and a resumed run continues with the same ones.

Legend: A active classes, B labels. Class ids are int64.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np
import numpy.typing as npt

from geartrain.ams.kernels.ops import sample_ids
from geartrain.ams.values.arguments import boolean, integer, real_number
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.specs import Ids

_HASH_BITS = 16


@dataclass(frozen=True)
class ActiveClasses:
    """Active classes of one step, ascending by id; position p of A is the p-th of them."""

    num: int
    """Number A of classes."""
    sorted_ids: Ids | None = None
    """[A] ascending; None: the classes 0 … A − 1, without an array."""

    @property
    def ids(self) -> Ids:
        """Class ids [A], ascending."""
        return self.range(0, self.num)

    def range(self, start: int, stop: int) -> Ids:
        """Return class ids at positions ``start`` … ``stop`` − 1, ascending."""
        if self.sorted_ids is None:
            return np.arange(start, stop, dtype=np.int64)
        return self.sorted_ids[start:stop]

    def positions(self, labels_B: Ids) -> Ids:
        """Return the position of each label [B]; every label must be active."""
        if self.sorted_ids is None:
            return labels_B
        return np.searchsorted(self.sorted_ids, labels_B).astype(np.int64, copy=False)


@dataclass(frozen=True, kw_only=True)
class ShardRule:
    """Selection that every shard repeats by itself, so that no ids travel."""

    seed: int = 0
    settings: Mapping[str, float]
    """Settings of ``class_head.py`` by name."""
    takes_labels: bool
    """Whether it depends on the labels of all ranks."""


@dataclass(frozen=True, eq=False)
class Ranking:
    """Selection that a device repeats by itself: labels, their neighbours, the keyed permutation, up to the budget."""

    seed: int
    neighbours: Any = None
    """The ``NeighbourTable`` that comes before the permutation; None: none."""
    near: float = 1.0
    """Share of the places beside the labels, rounded, that neighbours may take; the permutation fills the rest."""


class Selection(ABC):
    """Rule that selects the active classes of a step: the argument ``select`` of a head.

    A selection of your own is a frozen dataclass derived from this (ranks compare selections by their repr) with
    :meth:`budget` and :meth:`select`; the other methods are optional. It works wherever the rows are; with rows on
    shards that compute, the ids of the chosen classes travel to them.
    """

    @abstractmethod
    def budget(self, num_classes: int) -> int:
        """Return the number of active classes, unless the positives alone are more."""

    @abstractmethod
    def select(self, labels: Ids, num_classes: int, step: int) -> ActiveClasses:
        """Return the active classes for the labels int64 [B] (of all ranks) at ``step``; every label is among them.

        A function of these arguments alone, so that all ranks find the same. Classes are numbered 0 … num_classes − 1.
        """

    def corrects(self, margin: object) -> bool:  # noqa: ARG002
        """Return whether a head with this margin (None: none) corrects its logits: :class:`SamplingCorrection`."""
        return False

    def shard_rule(self, *, corrected: bool) -> ShardRule | None:  # noqa: ARG002
        """Return the rule by which a shard selects by itself; None: the ids are sent, 8 bytes each."""
        return None

    def ranking(self, num_labels: int, num_classes: int) -> Ranking | None:  # noqa: ARG002
        """Return the rule by which a device selects for so many distinct labels; None: the host selects."""
        return None

    def steps_between_draws(self, num_classes: int) -> float:  # noqa: ARG002
        """Return the mean number of steps between two random selections of a class; 1 if nothing is random."""
        return 1.0

    def neighbours_of(self, num_classes: int) -> int:  # noqa: ARG002
        """Return the neighbours of each class that it keeps in a graph."""
        return 0

    def bound(self, backend: Any) -> Selection:  # noqa: ARG002
        """Return the selection that a head uses: this, or one made for the rows of a
        :class:`~geartrain.bridge.head.backends.backend.RowBackend` (a graph of them)."""
        return self

    takes_sub_centers: ClassVar = True
    """Whether it is correct for rows with several centers of a class: False if it compares rows."""

    has_graph = False
    """Whether the methods below do anything. Every rank calls them alike."""

    def prepare(self) -> None:  # noqa: B027
        """Prepare for the selection of a training step."""

    def next_epoch(self) -> None:  # noqa: B027
        """React to the end of a pass over the data."""

    def rebuild_graph(self) -> None:
        """Build the graph now. Raises InvalidArgument without one."""
        raise InvalidArgument(f"select is {self!r}, which has no graph; give the head KNNSoftmax(...)")

    def follow(self, live: Any, added: Ids) -> None:  # noqa: B027
        """Continue with other live classes, of which ``added`` are new."""

    def cancel(self) -> None:  # noqa: B027
        """Cancel background work."""

    def report_progress(self, progress: Callable[[int, int], None]) -> None:  # noqa: B027
        """Call ``progress(done, total)`` while a graph is built."""

    def state(self) -> dict[str, Any] | None:
        """Return its part of a head's state_dict, JSON values; None: nothing."""
        return None

    def resume(self, state: Mapping[str, Any] | None, live: Any) -> None:  # noqa: B027
        """Continue from :meth:`state` (None: none was saved) with these live classes."""

    def graph_state(self) -> dict[str, Any] | None:
        """Return the graph in use, of which each rank has its part; None: no graph is ever used."""
        return None

    def load_graph(self, state: Mapping[str, Any], own: Callable[[Any, range], Any]) -> None:  # noqa: B027
        """Use the graph of :meth:`graph_state`; ``own`` selects rows of its lists. Every rank calls it."""

    def graph_to_bytes(self) -> bytes | None:
        """Return the whole graph in use; None: there is none."""
        return None

    def graph_from_bytes(self, data: bytes) -> None:  # noqa: B027
        """Use the graph of :meth:`graph_to_bytes`; without a graph do nothing."""


@final
@dataclass(frozen=True)
class FullSoftmax(Selection):
    """Selection of every class."""

    def budget(self, num_classes: int) -> int:
        """Return ``num_classes``."""
        return num_classes

    def select(self, labels: Ids, num_classes: int, step: int) -> ActiveClasses:  # noqa: ARG002
        """Return all of ``num_classes``; O(1)."""
        return ActiveClasses(num_classes)

    def shard_rule(self, *, corrected: bool) -> ShardRule:  # noqa: ARG002
        """Return the rule of every class of the shard."""
        return ShardRule(settings={}, takes_labels=False)

    def ranking(self, num_labels: int, num_classes: int) -> Ranking:  # noqa: ARG002
        """Return the rule of all classes: the budget is their number."""
        return Ranking(seed=0)


@final
@dataclass(frozen=True)
class PartialFC(Selection):
    """Selection of the distinct labels and random other classes, round(sample_rate · num_classes), or ``min_active``.

    Positives are always kept: if they alone are more than the budget they enlarge it. The others are the first of the
    keyed permutation of (seed, step), hence O(active) work; nothing is drawn per class.
    """

    sample_rate: float = 0.1
    """Share of the classes that is active, in (0, 1]."""
    seed: int = 0
    """Key of the sampling, with the step; an unsigned 64-bit integer."""
    corrected: bool | None = None
    """Whether each sampled negative is weighted by the number of classes it stands for (:class:`SamplingCorrection`).
    None: where the head has no margin, as its loss is then meant to be that over all classes."""
    min_active: int = 0
    """Fewest active classes: up to this number of live ones it is the full softmax."""

    def __post_init__(self) -> None:
        if self.corrected is not None:
            boolean("corrected", self.corrected)
        if not 0.0 < real_number("sample_rate", self.sample_rate) <= 1.0:
            raise InvalidArgument(f"sample_rate is {self.sample_rate!r}; it must lie in (0, 1]")
        integer("seed", self.seed, 0, 2**64 - 1)
        integer("min_active", self.min_active, 0)

    def budget(self, num_classes: int) -> int:
        """Return round(sample_rate · num_classes), at least ``min_active`` and 1, at most all."""
        return min(num_classes, max(1, self.min_active, round(self.sample_rate * num_classes)))

    def select(self, labels: Ids, num_classes: int, step: int) -> ActiveClasses:
        """Return positives and sampled classes for the labels [B]; O(active log active)."""
        return positives_and_sample(labels, num_classes, self.budget(num_classes), self.seed, step)

    def corrects(self, margin: object) -> bool:
        """Return ``corrected``; by default whether there is no margin."""
        return margin is None if self.corrected is None else self.corrected

    def shard_rule(self, *, corrected: bool) -> ShardRule:
        """Return the rule of the sampling, a function of labels, seed and step."""
        settings = {"sample_rate": self.sample_rate, "corrected": float(corrected)}
        settings["min_active"] = float(self.min_active)
        return ShardRule(seed=self.seed, settings=settings, takes_labels=True)

    def steps_between_draws(self, num_classes: int) -> float:
        """Return num_classes / budget."""
        return num_classes / self.budget(num_classes)

    def ranking(self, num_labels: int, num_classes: int) -> Ranking:  # noqa: ARG002
        """Return the rule of labels, then the permutation."""
        return Ranking(self.seed)


@dataclass(frozen=True)
class SamplingCorrection:
    """Correction of a softmax over sampled classes to one over all: −log q is added to the logit of each sampled one.

    q = (A − P) / (L − P) is the probability that one of the L live classes outside the P distinct labels is among the
    A active ones. Labels always are, and are not corrected. (Sampled softmax: Jean et al. 2015, section 3; Bengio and
    Senécal 2008.) The sums of exponentials are then unbiased; their logarithm has a bias that shrinks with 1 / A.
    """

    log2_weight: float
    """−log2 q."""
    positives: Ids
    """Ids [P] of the distinct labels, ascending."""

    @staticmethod
    def of(labels: Ids, num_active: int, num_live_classes: int) -> SamplingCorrection | None:
        """Return the correction for the labels [B] of the whole batch; None if nothing was sampled."""
        positives = np.unique(labels)
        num_positive = len(positives)
        if not num_positive < num_active < num_live_classes:
            return None
        return SamplingCorrection(math.log2((num_live_classes - num_positive) / (num_active - num_positive)), positives)

    def offsets_at(self, positions: Ids, num: int) -> npt.NDArray[np.float32]:
        """Return the offsets of the logits, to base 2, of ``num`` active classes with positives at ``positions``."""
        offsets = np.full(num, self.log2_weight, np.float32)
        offsets[positions] = 0.0
        return offsets


def positives_and_sample(labels: Ids, num_classes: int, budget: int, seed: int, step: int) -> ActiveClasses:
    """Return the distinct labels, filled up to ``budget`` from the keyed permutation of (seed, step)."""
    positives = np.unique(labels)
    budget = max(budget, len(positives))
    if budget >= num_classes:
        return ActiveClasses(num_classes)
    sampled = sample_ids(num_classes, budget, seed, step)
    # At most len(positives) of the sampled ids are positives, so enough others remain to fill the budget.
    negatives = sampled[~is_member(sampled, positives)][: budget - len(positives)]
    ids = np.concatenate([positives, negatives])
    ids.sort()
    return ActiveClasses(len(ids), ids)


def is_member(ids: Ids, few: Ids) -> npt.NDArray[np.bool_]:
    """Return whether each of ``ids`` is in the short sorted array ``few``, prefiltered by a small hash set."""
    mask = (1 << _HASH_BITS) - 1
    table = np.zeros(mask + 1, dtype=np.bool_)
    table[few & mask] = True
    member: npt.NDArray[np.bool_] = table[ids & mask]
    candidates = np.flatnonzero(member)
    member[candidates] = np.isin(ids[candidates], few)
    return member
