"""Choice of the samples of files that are held out, with only one part of them in memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from geartrain.ams.values.errors import ConfigError, SourceDamaged
from geartrain.ams.values.specs import Ids
from geartrain.workers.ctr.recipe import CtrRecipe
from geartrain.workers.ctr.samples.own import OwnSamples

_TIMES_OF_PART = 64
"""Evenly spaced times of a part, by which the start of the held-out time is found."""


class HeldOutPart(NamedTuple):
    """Rows of one part by their use, in order."""

    train: npt.NDArray[Any]
    validation: npt.NDArray[Any]
    test: npt.NDArray[Any]


class HeldOut:
    """Held-out rows of each part: a function of the seed and the part, or of the rows' times.

    ``random``: a fifth of the rows of each part or, if that would be more than ``recipe.held_out``, of some parts.
    ``time``: the latest fifth, or the latest ``held_out``; rows of one time stay together, unless those of the latest
    time alone are more: then so many of them at random. An eighth of the held-out rows, at random, is the validation,
    the rest the test. With ``recipe.validation`` both come from a fifth of the remaining rows, and those held out are
    ignored.
    """

    def __init__(self, samples: OwnSamples, recipe: CtrRecipe) -> None:
        """By time, all samples' times are read twice. Raises ConfigError if a part would be empty."""
        self._samples, self._seed = samples, recipe.seed
        self._last: tuple[int, HeldOutPart] | None = None
        rows = np.asarray(samples.part_rows, np.int64)
        self._late: list[tuple[int, Ids, Ids]] = []
        """By time, for rows left out, then for rows held out: their first time, the number of rows of each part from it
        on, and how many of these are used."""
        if recipe.split == "time":
            left_out, held_out = self._by_time(samples, recipe)
        else:
            held_out = self._at_random(rows, recipe.held_out)
            left_out = np.zeros_like(rows)
            if recipe.validation:
                left_out, held_out = held_out, self._at_random(rows - held_out, recipe.held_out)
        self._left_out, self._held_out = left_out, held_out
        self._validated = _shares(held_out, 8)
        self.train_rows: list[int] = (rows - left_out - held_out).tolist()
        self.num_validated, self.num_tested = int(self._validated.sum()), int((held_out - self._validated).sum())
        self.parts = np.flatnonzero(held_out).tolist()
        """Parts with rows that are held out."""
        if not held_out.sum() or not sum(self.train_rows):
            raise ConfigError(
                f"there are {rows.sum()} samples, {held_out.sum()} of them to be held out; give at least 5, and of "
                "several times"
            )

    def _at_random(self, rows: Ids, most: int) -> Ids:
        fifths = _shares(rows, 5)
        order = np.random.default_rng(self._seed).permutation(len(rows))
        before = np.cumsum(fifths[order]) - fifths[order]
        fifths[order] = np.clip(most - before, 0, fifths[order])
        return fifths

    def _by_time(self, samples: OwnSamples, recipe: CtrRecipe) -> tuple[Ids, Ids]:
        found, weights = [], []
        for of_part in map(np.sort, map(samples.times, range(len(samples.part_rows)))):
            if len(of_part):
                places = np.unique(np.linspace(0, len(of_part) - 1, _TIMES_OF_PART).astype(np.int64))
                found.append(of_part[places])
                weights.append(np.diff(places, prepend=-1))
        known = np.concatenate([np.empty(0, np.int64), *found])
        weight = np.concatenate([np.empty(0, np.float64), *weights])
        found_from: list[tuple[int, int | None]] = []
        for _ in range(1 + recipe.validation):
            first, most = _time_from(known, weight, recipe.held_out)
            found_from.append((first, most))
            is_late = known >= first
            weight[is_late] *= 0 if most is None else 1 - most / weight[is_late].sum()
            known, weight = known[weight > 0], weight[weight > 0]
        counts = np.zeros((len(found_from), len(samples.part_rows)), np.int64)
        for part in range(len(samples.part_rows)):
            times = samples.times(part)
            counts[:, part] = [(times >= first).sum() for first, _ in found_from]
        taken = np.zeros(len(samples.part_rows), np.int64)
        for (first, most), late in zip(found_from, counts, strict=True):
            late = np.maximum(late - taken, 0)
            count = late.sum() if most is None else min(most, late.sum())
            share = np.diff(np.cumsum(late) * count // max(1, late.sum()), prepend=0)
            self._late.append((first, late, share))
            taken = taken + share
        held_out = self._late[-1][2]
        return taken - held_out, held_out

    def parted(self, part: int) -> HeldOutPart:
        """Return the uses of a part's rows. Raises SourceDamaged if the rows are not those that were counted."""
        if self._last is None or self._last[0] != part:
            self._last = part, self._parted(part)
        return self._last[1]

    def _parted(self, part: int) -> HeldOutPart:
        random = np.random.default_rng([self._seed, part])
        left_out, held_out, validated = (int(of[part]) for of in (self._left_out, self._held_out, self._validated))
        if not self._late:
            order = random.permutation(np.arange(self._samples.part_rows[part], dtype=np.int32))
            held, train = order[left_out : left_out + held_out], order[left_out + held_out :]
        else:
            times = self._samples.times(part)
            is_left = np.ones(len(times), np.bool_)
            for first, late, share in self._late:
                held = np.flatnonzero(is_left & (times >= first))
                if len(held) != late[part]:
                    break
                if share[part] < late[part]:
                    held = random.permutation(held)[: share[part]]
                is_left[held] = False
            held, train = random.permutation(held), np.flatnonzero(is_left)
        if (len(train), len(held)) != (self.train_rows[part], held_out):
            raise SourceDamaged(f"the times of part {part} of the samples have changed; start again")
        return HeldOutPart(*(np.sort(of) for of in (train, held[:validated], held[validated:])))


def _shares(rows: Ids, parts: int) -> Ids:
    """Return a number of rows for each part, in all a ``parts``-th of the rows."""
    shares: Ids = np.diff(np.cumsum(rows) // parts, prepend=0)
    return shares


def _time_from(times: Ids, weights: npt.NDArray[np.float64], most: int) -> tuple[int, int | None]:
    """Return the earliest time from which on there are at most a fifth of the rows, and at most ``most``; and None.

    If the latest of several times alone has more rows, return that time, and how many of its rows to use.
    """
    moments, places = np.unique(times, return_inverse=True)
    from_there = np.rint(np.cumsum(np.bincount(places, weights, len(moments))[::-1])[::-1])
    most = int(min(from_there[0] // 5, most)) if len(moments) else 0
    fitting = moments[from_there <= most]
    if len(fitting):
        return int(fitting[0]), None
    return (int(moments[-1]), most) if len(moments) > 1 else (np.iinfo(np.int64).max, None)
