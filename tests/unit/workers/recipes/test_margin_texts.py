"""Margins by name, as command lines and recipes give them."""

from __future__ import annotations

import pytest

import geartrain as gt
from geartrain.ams.values.errors import ConfigError
from geartrain.workers.recipes.margins import MARGINS, margin_of


def test_every_margin_of_the_library_has_a_name() -> None:
    of_library = {gt.ArcFace, gt.CosFace, gt.SphereFace, gt.CombinedMargin, gt.AdaFace, gt.MagFace}
    assert set(MARGINS.values()) == of_library | {gt.ElasticArcFace, gt.ElasticCosFace, gt.CurricularFace}


@pytest.mark.parametrize(
    ("text", "margin"),
    [
        ("adaface:32,0.3,0.25", gt.AdaFace(scale=32, margin=0.3, h=0.25)),
        ("magface:64", gt.MagFace(scale=64)),
        ("elasticarcface:32,0.4,0.02", gt.ElasticArcFace(scale=32, margin=0.4, std=0.02)),
        ("elasticcosface:32,0.3,0.02,7", gt.ElasticCosFace(scale=32, margin=0.3, std=0.02, seed=7)),
        ("curricularface", gt.CurricularFace()),
    ],
)
def test_numbers_are_given_in_the_order_of_the_fields(text: str, margin: object) -> None:
    assert margin_of(text) == margin


def test_numbers_out_of_range_are_named() -> None:
    with pytest.raises(ConfigError, match="the margin is 'adaface:32,9'"):
        margin_of("adaface:32,9")
