"""Margins and scales that change with the step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import pairwise
from typing import Any

from geartrain.ams.values.errors import InvalidArgument
from geartrain.bridge.head.loss.margins.margin import AnyMargin, Margin, MarginBatch, changes_negatives
from geartrain.bridge.head.loss.margins.scale import with_scale


@dataclass(frozen=True, init=False)
class ScheduledMargin:
    """A margin whose numbers go straight from point to point, as ``head.step`` does. Before the first point they are
    that point's, after the last one the last one's.

        gt.ScheduledMargin((0, gt.ArcFace(scale=16, margin=0.0)), (10_000, gt.ArcFace(scale=64, margin=0.5)))

    The points are pairs (step, margin) with rising steps and margins of one kind: any frozen dataclass, of your own or
    built in, whose fields are equal or numbers. The margin of a step depends on nothing else, so a run that is resumed
    goes on as it would have.
    """

    points: tuple[tuple[int, AnyMargin], ...]

    def __init__(self, *points: tuple[int, AnyMargin]) -> None:
        """Raises InvalidArgument."""
        are_pairs = bool(points) and all(isinstance(point, tuple | list) and len(point) == 2 for point in points)
        if not are_pairs or any(not isinstance(step, int) or step < 0 for step, _ in points):
            raise InvalidArgument(f"points are {points!r}; give pairs (step, margin), steps being integers >= 0")
        if any(before >= after for (before, _), (after, _) in pairwise(points)):
            raise InvalidArgument(f"the steps of the points are {[step for step, _ in points]}; they must rise")
        first = points[0][1]
        for _, margin in points:
            if type(margin) is not type(first) or not is_dataclass(margin) or isinstance(margin, type):
                raise InvalidArgument(
                    f"the margins {first!r} and {margin!r} of a schedule must be of one kind, a frozen dataclass; a "
                    "margin of 0 takes the place of None"
                )
        for name in _changing(points):
            values = [getattr(margin, name) for _, margin in points]
            if name == "scale" and None in values:  # until a head gives them its own
                continue
            if any(isinstance(value, bool) or not isinstance(value, int | float) for value in values):
                raise InvalidArgument(f"{name} is {values} at the points of a schedule; only numbers may change")
        object.__setattr__(self, "points", tuple((step, margin) for step, margin in points))
        if self.scale is not None:
            for start, _ in points:  # refuses now what could not be between two points, such as half a seed
                self.at(start + 1)

    def __repr__(self) -> str:
        """As it was made."""
        return f"ScheduledMargin({', '.join(map(repr, self.points))})"

    @property
    def scale(self) -> float | None:
        """The largest; None if one waits for the number of classes."""
        scales = [margin.scale for _, margin in self.points if margin.scale is not None]
        return max(scales) if len(scales) == len(self.points) else None

    def for_classes(self, num_classes: int) -> ScheduledMargin:
        """With the scale of so many classes where it is None."""
        return ScheduledMargin(*((step, with_scale(margin, num_classes)) for step, margin in self.points))

    @property
    def changes_negatives(self) -> bool:
        """As its margins do."""
        return changes_negatives(self.points[0][1])

    def at(self, step: int) -> AnyMargin:
        """The margin of a step."""
        if step <= self.points[0][0]:
            return self.points[0][1]
        for (start, before), (stop, after) in pairwise(self.points):
            if step < stop:
                share = (step - start) / (stop - start)
                values = {
                    name: getattr(before, name) + share * (getattr(after, name) - getattr(before, name))
                    for name in _changing(self.points)
                }
                return replace(before, **values)  # type: ignore[type-var]
        return self.points[-1][1]

    def begin(self, batch: MarginBatch) -> Margin:
        """That of the step."""
        margin: Any = self.at(batch.step)
        return margin.begin(batch) if hasattr(margin, "begin") else margin  # type: ignore[no-any-return]


def _changing(points: Iterable[tuple[int, Any]]) -> list[str]:
    margins = [margin for _, margin in points]
    names = [field.name for field in fields(margins[0])]
    return [name for name in names if any(getattr(margin, name) != getattr(margins[0], name) for margin in margins)]
