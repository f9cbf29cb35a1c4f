"""Margins by name: ``arcface``, ``cosface:24,0.15``, ``none``."""

from __future__ import annotations

from dataclasses import fields

from geartrain.ams.values.errors import ConfigError, InvalidArgument
from geartrain.bridge.head.loss.margins.adaface import AdaFace
from geartrain.bridge.head.loss.margins.angular import ArcFace, CombinedMargin, CosFace, SphereFace
from geartrain.bridge.head.loss.margins.curricularface import CurricularFace
from geartrain.bridge.head.loss.margins.elasticface import ElasticArcFace, ElasticCosFace
from geartrain.bridge.head.loss.margins.magface import MagFace
from geartrain.bridge.head.loss.margins.margin import Margin

NONE = "none"
MARGINS: dict[str, type] = {
    "arcface": ArcFace,
    "cosface": CosFace,
    "sphereface": SphereFace,
    "combined": CombinedMargin,
    "adaface": AdaFace,
    "magface": MagFace,
    "elasticarcface": ElasticArcFace,
    "elasticcosface": ElasticCosFace,
    "curricularface": CurricularFace,
}
"""Frozen dataclasses; their numbers are given in the order of their fields."""


def margin_of(text: str) -> Margin | None:
    """Return the margin of ``NAME``, ``NAME:SCALE`` or ``NAME:SCALE,MARGIN,...``; None for ``none``.

    Omitted numbers have the margin's own defaults. Raises ConfigError.
    """
    name, colon, rest = text.partition(":")
    if name == NONE and not colon:
        return None
    if name not in MARGINS:
        known = ", ".join((NONE, *MARGINS))
        raise ConfigError(f"the margin is {text!r}; it must be one of {known}, as in cosface:24,0.15 (scale, margin)")
    known_fields = fields(MARGINS[name])
    names = [field.name for field in known_fields]
    given = rest.split(",") if colon else []
    try:
        if len(given) > len(names):
            raise ValueError(f"{len(given)} numbers")
        as_number = [int if field.type == "int" else float for field in known_fields]
        numbers = [make(number) for make, number in zip(as_number, given, strict=False)]
        margin: Margin = MARGINS[name](**dict(zip(names, numbers, strict=False)))
    except InvalidArgument as exc:
        raise ConfigError(f"the margin is {text!r}: {exc}") from exc
    except ValueError as exc:
        raise ConfigError(f"the margin is {text!r} ({exc}); {name} takes numbers: {name}:{','.join(names)}") from exc
    return margin
