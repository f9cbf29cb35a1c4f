"""Scales of margins, and the legal ranges of their settings."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import is_dataclass, replace
from typing import Any

from geartrain.ams.values.arguments import real_number
from geartrain.ams.values.errors import InvalidArgument
from geartrain.bridge.head.loss.margins.margin import AnyMargin

SMALLEST_AUTOMATIC_SCALE = 16.0
"""Least automatic scale: below it a margin costs accuracy where classes are few (``geartrain bench defaults``)."""


def automatic_scale(num_classes: int) -> float:
    """Return √2 · ln(C − 1), at least 16: the scale for C classes of a margin whose ``scale`` is None.

    The fixed scale of AdaCos (Zhang et al., CVPR 2019, section 4.1), which is 0 for two classes.
    """
    return max(SMALLEST_AUTOMATIC_SCALE, math.sqrt(2) * math.log(max(1, num_classes - 1)))


def with_scale(margin: Any, num_classes: int) -> Any:
    """Return the margin, with the automatic scale of ``num_classes`` if it has none."""
    if hasattr(margin, "for_classes"):
        return margin.for_classes(num_classes)
    if margin.scale is not None or not is_dataclass(margin):
        return margin
    return replace(margin, scale=automatic_scale(num_classes))  # type: ignore[type-var]


def scale_of(margin: AnyMargin) -> float:
    """Return the margin's scale. Raises InvalidArgument if it is None: it depends on a head's number of classes."""
    if margin.scale is None:
        raise InvalidArgument(
            f"scale of {margin!r} is None, and only a ClassHead replaces that, by a scale for its number of classes; "
            "give a number > 0, such as 32"
        )
    return margin.scale


def require(name: str, value: object, legal: Callable[[float], bool], range_text: str) -> None:
    """Raise InvalidArgument unless the value is a number in the legal range."""
    if not legal(real_number(name, value)):
        raise InvalidArgument(f"{name} is {value!r}; it must be {range_text}")


def require_scale(scale: float | None) -> None:
    """Raise InvalidArgument unless the scale is a factor for logits, or waits for the number of classes."""
    if scale is not None:
        text = "finite and > 0, or None for that of the number of classes"
        require("scale", scale, lambda v: 0.0 < v < math.inf, text)
