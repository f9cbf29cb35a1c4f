"""Batch sizes of an FCCS schedule, in whole micro-batches of all ranks."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from geartrain.ams.values.arguments import integer, real_number
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.text import quoted

_LAST_BITS = 1e-9
"""Tolerance of rounding a half up: the result is equal on every machine, whatever the last bits of its sine."""


@dataclass(frozen=True, kw_only=True)
class BatchRamp:
    """Micro-batches of the steps from 0 to ``total_steps``, as a function of the step that never falls.

    ``first`` until ``initial_steps``, then first + (last − first) · (1 − cos(π x)) / 2 to the nearest whole one, where
    x rises from 0 at ``initial_steps`` to 1 at ``total_steps``.
    """

    first: int
    last: int
    initial_steps: int
    total_steps: int

    def at(self, step: int) -> int:
        """Micro-batches of ``step``; from ``total_steps`` on those of the last step."""
        step = min(step, self.total_steps - 1)
        return int(self._grown(np.array([step]))[0]) if step > self.initial_steps else self.first

    @cached_property
    def total(self) -> int:
        """Micro-batches of all steps."""
        return self.before(self.total_steps)

    def before(self, step: int) -> int:
        """Micro-batches of the steps from 0 to ``step`` − 1."""
        grown = self._sums[max(0, min(step, self.total_steps) - self.initial_steps)]
        further = max(0, step - self.total_steps)
        return self.first * min(step, self.initial_steps) + int(grown) + further * self.at(step)

    @cached_property
    def _sums(self) -> np.ndarray:
        """Micro-batches of so many steps from ``initial_steps`` on."""
        return np.cumsum([0, *self._grown(np.arange(self.initial_steps, self.total_steps))])

    def _grown(self, steps: np.ndarray) -> np.ndarray:
        part = (steps - self.initial_steps) / (self.total_steps - self.initial_steps)
        grown = (self.last - self.first) * np.sin(np.pi / 2 * part) ** 2
        return self.first + np.floor(grown + 0.5 + _LAST_BITS).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """Plan of an FCCS: length of the warm-up, and the batch of each step."""

    warmup_steps: int
    quantum: int
    """Samples of one micro-batch on every rank."""
    ramp: BatchRamp

    def settings(self) -> dict[str, int]:
        """Return the settings of the plan, over all ranks: they are equal for every number of ranks."""
        return {
            "warmup_steps": self.warmup_steps,
            "initial_batch": self.ramp.first * self.quantum,
            "max_batch": self.ramp.last * self.quantum,
            "initial_steps": self.ramp.initial_steps,
            "total_steps": self.ramp.total_steps,
        }

    @property
    def total_samples(self) -> int:
        """Samples of all steps, over all ranks."""
        return self.ramp.total * self.quantum


def plan_of_steps(
    *,
    warmup_steps: int,
    initial_batch: int,
    max_batch: int,
    initial_steps: int,
    total_steps: int,
    micro_batch: int,
    ranks: int,
) -> BatchPlan:
    """Return the plan of so many steps. Raises InvalidArgument."""
    warmup_steps = integer("warmup_steps", warmup_steps, 0)
    initial_steps = integer("initial_steps", initial_steps, 0)
    total_steps = integer("total_steps", total_steps, 1)
    if total_steps <= initial_steps:
        raise InvalidArgument(
            f"total_steps is {total_steps} and initial_steps {initial_steps}; the batch grows after initial_steps: "
            "give more total_steps, or fewer initial_steps"
        )
    if total_steps < warmup_steps:
        raise InvalidArgument(
            f"warmup_steps is {warmup_steps} and total_steps {total_steps}; the warm-up ends before the training does"
        )
    quantum = ranks * integer("micro_batch", micro_batch, 1)
    first, last = _first_and_last(initial_batch, max_batch, quantum, ranks)
    ramp = BatchRamp(first=first, last=last, initial_steps=initial_steps, total_steps=total_steps)
    return BatchPlan(warmup_steps=warmup_steps, quantum=quantum, ramp=ramp)


def plan_of_epochs(
    *,
    epochs: float,
    samples_per_epoch: int,
    initial_epochs: float,
    warmup_epochs: float,
    initial_batch: int,
    max_batch: int,
    micro_batch: int,
    ranks: int,
) -> BatchPlan:
    """Return the longest plan of at most so many samples. Raises InvalidArgument."""
    samples = integer("samples_per_epoch", samples_per_epoch, 1)
    for name, value in (("epochs", epochs), ("initial_epochs", initial_epochs), ("warmup_epochs", warmup_epochs)):
        if not 0 <= real_number(name, value) < math.inf:
            raise InvalidArgument(f"{name} is {quoted(value)}; it must be >= 0 and finite")
    if not warmup_epochs <= initial_epochs < epochs:
        raise InvalidArgument(
            f"warmup_epochs, initial_epochs and epochs are {warmup_epochs:g}, {initial_epochs:g} and {epochs:g}; they "
            "must rise: the rate warms up, then the batch grows, then the training ends"
        )
    quantum = ranks * integer("micro_batch", micro_batch, 1)
    first, last = _first_and_last(initial_batch, max_batch, quantum, ranks)
    initial_steps = round(initial_epochs * samples / initial_batch)

    def plan(total_steps: int) -> BatchPlan:
        ramp = BatchRamp(first=first, last=last, initial_steps=initial_steps, total_steps=total_steps)
        warmup_steps = min(total_steps, round(warmup_epochs * samples / initial_batch))
        return BatchPlan(warmup_steps=warmup_steps, quantum=quantum, ramp=ramp)

    lengths = range(initial_steps + 1, initial_steps + 2 + int(epochs * samples / initial_batch))
    place = bisect_right(lengths, epochs * samples, key=lambda length: plan(length).total_samples)
    if not place:
        raise InvalidArgument(
            f"epochs is {epochs:g}, which is {epochs * samples:.0f} samples, and the first {initial_steps + 1} batches "
            f"of {initial_batch} take more; give more epochs, or fewer initial_epochs"
        )
    return plan(lengths[place - 1])


def _first_and_last(initial_batch: int, max_batch: int, quantum: int, ranks: int) -> tuple[int, int]:
    """Return the micro-batches, on each rank, of the smallest and largest batch. Raises InvalidArgument."""
    first = _micro_batches("initial_batch", initial_batch, quantum, ranks)
    last = _micro_batches("max_batch", max_batch, quantum, ranks)
    if last < first:
        raise InvalidArgument(f"max_batch is {max_batch}; it must be at least initial_batch, {initial_batch}")
    return first, last


def _micro_batches(name: str, batch: int, quantum: int, ranks: int) -> int:
    samples = integer(name, batch, 1)
    if samples % quantum:
        factor = "micro_batch" if ranks == 1 else f"{ranks} ranks x micro_batch"
        nearest = max(1, round(samples / quantum)) * quantum
        raise InvalidArgument(f"{name} is {samples}; it must be a multiple of {factor}, {quantum}: give {nearest}")
    return samples // quantum
