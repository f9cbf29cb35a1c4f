"""Margins by name: ``arcface``, ``cosface:24,0.15``, ``none``."""

from __future__ import annotations

from dataclasses import fields

from geartrain.ams.values.errors import ConfigError, InvalidArgument
from geartrain.bridge.head.loss.margins.angular import ArcFace, CombinedMargin, CosFace, SphereFace
from geartrain.bridge.head.loss.margins.margin import Margin

NONE = "none"
MARGINS: dict[str, type] = {
    "arcface": ArcFace,
    "cosface": CosFace,
    "sphereface": SphereFace,
    "combined": CombinedMargin,
}
"""Frozen dataclasses; their numbers are given in the order of their fields."""


def margin_of(text: str) -> Margin | None:
    """The margin that ``NAME``, ``NAME:SCALE`` or ``NAME:SCALE,MARGIN,...`` names; None for ``none``.

    Numbers left out have the margin's own defaults. Raises ConfigError.
    """
    name, colon, rest = text.partition(":")
    if name == NONE and not colon:
        return None
    if name not in MARGINS:
        known = ", ".join((NONE, *MARGINS))
        raise ConfigError(f"the margin is {text!r}; it must be one of {known}, as in cosface:24,0.15 (scale, margin)")
    names = [field.name for field in fields(MARGINS[name])]
    given = rest.split(",") if colon else []
    try:
        numbers = [float(number) for number in given]
        if len(numbers) > len(names):
            raise ValueError(f"{len(numbers)} numbers")
        margin: Margin = MARGINS[name](**dict(zip(names, numbers, strict=False)))
    except InvalidArgument as exc:
        raise ConfigError(f"the margin is {text!r}: {exc}") from exc
    except ValueError as exc:
        raise ConfigError(f"the margin is {text!r} ({exc}); {name} takes numbers: {name}:{','.join(names)}") from exc
    return margin
