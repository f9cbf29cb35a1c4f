"""Active and retired classes of a head: classes come and go while it trains, and the table stays the same.

A head has ``num_classes`` rows; retired classes take no part until their ids are given out again. Selections know only
the live ones, numbered 0 … L − 1 in ascending order of their ids, so their choice is a function of (labels, seed,
step, retired classes) alone. Numpy only: shards use it beside their rows.

Legend: C classes (rows), L live ones, R runs of consecutive retired ids, N ids of a call.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from geartrain.ams.programs.selection import ActiveClasses, Selection
from geartrain.ams.values.errors import InvalidArgument, InvalidIds
from geartrain.ams.values.specs import Ids

_NONE = np.empty((0, 2), np.int64)


class LiveClasses:
    """Classes of a table of C rows that are not retired. Immutable; memory O(R), time O(log R) an id.

    Attributes: ``num_classes`` (C); ``retired_runs`` int64 [R, 2] of (first, last + 1), ascending, with a live class
    between any two; ``jumps`` int64 [R], the number of the first live class after each run; ``retired_before`` int64
    [R + 1], the retired classes before each run, and in all; ``num_live_classes`` (L); ``are_all``: whether no class is
    retired.
    """

    def __init__(self, num_classes: int, retired_runs: Any = _NONE) -> None:
        """Raise InvalidArgument unless the runs are as above and leave a live class."""
        try:
            runs = np.array(retired_runs, np.int64).reshape(-1, 2)
        except (ValueError, TypeError, OverflowError) as exc:
            raise InvalidArgument(f"retired classes are {retired_runs!r:.80}; they must be runs [R, 2]") from exc
        bounds = np.concatenate([[-1], runs.ravel(), [num_classes + 1]])
        if np.any(bounds[1:] <= bounds[:-1]):
            raise InvalidArgument(
                f"the runs of retired classes {runs[:3].tolist()} … must rise within [0, {num_classes}], with a live "
                "class between two of them"
            )
        lengths = runs[:, 1] - runs[:, 0]
        self.num_classes = num_classes
        self.retired_runs = runs
        self.retired_before = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        self.jumps = runs[:, 0] - self.retired_before[:-1]
        self.num_live_classes = num_classes - int(self.retired_before[-1])
        self.are_all = not len(runs)
        if self.num_live_classes < 1:
            raise InvalidArgument(f"all {num_classes} classes are retired; keep at least one")

    @staticmethod
    def first(num_classes: int, num_live_classes: int | None) -> LiveClasses:
        """Return the first ``num_live_classes`` (None: all) of ``num_classes``. Raises InvalidArgument."""
        if num_live_classes is None or num_live_classes == num_classes:
            return LiveClasses(num_classes)
        if (
            isinstance(num_live_classes, bool)
            or not isinstance(num_live_classes, int)
            or not 1 <= num_live_classes <= num_classes
        ):
            raise InvalidArgument(
                f"num_live_classes is {num_live_classes!r}; it must lie in [1, {num_classes}], the largest number "
                "of classes that can be live at a time"
            )
        return LiveClasses(num_classes, [[num_live_classes, num_classes]])

    def between(self, first: int, stop: int) -> LiveClasses:
        """Return the live classes numbered [first, stop), in the same table; others count as retired."""
        lowest, highest = self.ids(np.array([first, stop - 1], np.int64)).tolist()
        starts = self.retired_runs[:, 0]
        inside = self.retired_runs[(starts > lowest) & (starts < highest)].tolist()
        before, behind = [0, lowest], [highest + 1, self.num_classes]
        return LiveClasses(self.num_classes, [run for run in (before, *inside, behind) if run[0] < run[1]])

    @property
    def fingerprint(self) -> int:
        """Hash of the set of live classes; 0 if all live."""
        return 0 if self.are_all else xxhash.xxh3_64_intdigest(self.retired_runs.tobytes()) >> 2 | 1

    @cached_property
    def all_ids(self) -> Ids:
        """Ids [L] of the live classes, ascending. Cached: 8 · L bytes."""
        return self.ids(np.arange(self.num_live_classes, dtype=np.int64))

    def ids(self, numbers: Ids) -> Ids:
        """Return the ids [N] of the live classes with these numbers [N]."""
        return numbers + self.retired_before[np.searchsorted(self.jumps, numbers, side="right")]

    def numbers(self, ids: Ids) -> Ids:
        """Return the numbers [N] of live class ids [N]."""
        return ids - self.retired_before[np.searchsorted(self.retired_runs[:, 0], ids, side="right")]

    def num_below(self, class_id: int) -> int:
        """Return the number of live classes with ids below ``class_id``."""
        runs = int(np.searchsorted(self.retired_runs[:, 0], class_id))
        last_stop = int(self.retired_runs[runs - 1, 1]) if runs else 0
        return class_id - int(self.retired_before[runs]) + max(0, last_stop - class_id)

    def holds(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Return whether each of the class ids [N] is live."""
        runs = np.searchsorted(self.retired_runs[:, 0], ids, side="right")
        last_stop = np.concatenate([[0], self.retired_runs[:, 1]])
        held: npt.NDArray[np.bool_] = ids >= last_stop[runs]
        return held

    def require(self, ids: Ids, what: str) -> Ids:
        """Return class ids [N] within the table; raise InvalidIds naming the first that is retired."""
        if not self.are_all and len(wrong := np.flatnonzero(~self.holds(ids))):
            raise InvalidIds(
                f"{what} {int(ids[wrong[0]])} at index {int(wrong[0])} is no live class: it was retired, or never "
                "added; drop such samples, or add it with head.add_classes(...)"
            )
        return ids

    def free_ids(self, count: int) -> Ids:
        """Return the lowest ``count`` ids without a live class, ascending. Raises InvalidArgument if too few."""
        free = self.num_classes - self.num_live_classes
        if count > free:
            raise InvalidArgument(
                f"{count} classes were to be added, and {free} of {self.num_classes} ids are free; retire others, or "
                "make the head with a larger num_classes (rows never written take no memory on a shard)"
            )
        others = LiveClasses(self.num_classes, _complement(self.retired_runs, self.num_classes)) if free else self
        return others.ids(np.arange(count, dtype=np.int64))

    def with_added(self, ids: Ids) -> LiveClasses:
        """Return these classes together with the retired ``ids``, which are distinct."""
        live = _joined(_complement(self.retired_runs, self.num_classes), ids)
        return LiveClasses(self.num_classes, _complement(live, self.num_classes))

    def without(self, ids: Ids) -> LiveClasses:
        """Return these classes without the live ``ids``, distinct. Raises InvalidArgument if none would be left."""
        return LiveClasses(self.num_classes, _joined(self.retired_runs, ids))

    def select(self, select: Selection, labels: Ids, step: int) -> ActiveClasses:
        """Return the active classes of ``select`` among the live ones, for live labels [B]."""
        if self.are_all:
            return select.select(labels, self.num_classes, step)
        chosen = select.select(self.numbers(labels), self.num_live_classes, step)
        return ActiveClasses(chosen.num, self.all_ids if chosen.sorted_ids is None else self.ids(chosen.sorted_ids))


def _joined(runs: Ids, ids: Ids) -> Ids:
    """Return runs [R, 2] and single ids outside them, as runs."""
    starts, stops = np.concatenate([runs[:, 0], ids]), np.concatenate([runs[:, 1], ids + 1])
    order = np.argsort(starts)
    starts, stops = starts[order], stops[order]
    apart = starts[1:] != stops[:-1]
    return np.stack([starts[np.append(True, apart)[: len(starts)]], stops[np.append(apart, True)[: len(stops)]]], 1)


def _complement(runs: Ids, num_classes: int) -> Ids:
    bounds = np.concatenate([[0], runs.ravel(), [num_classes]]).reshape(-1, 2)
    return bounds[bounds[:, 0] < bounds[:, 1]]
