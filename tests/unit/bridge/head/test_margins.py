"""Margins: the continuation beyond π, the derivative, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from geartrain.ams.values.errors import InvalidArgument
from geartrain.bridge.head.loss.margins.angular import ArcFace, CombinedMargin, CosFace, SphereFace, psi
from geartrain.bridge.head.loss.margins.elasticface import ElasticArcFace


def test_psi_falls_everywhere_and_has_no_jump() -> None:
    angle = torch.linspace(0, 4 * math.pi, 40_001, dtype=torch.float64)
    value, slope = psi(angle)
    steps = value.diff()
    assert (steps <= 1e-15).all()
    assert steps.abs().max() < 1.01 * float(angle[1])
    torch.testing.assert_close(steps / angle.diff(), (slope[1:] + slope[:-1]) / 2, rtol=0, atol=1e-6)


def test_psi_is_the_cosine_up_to_pi() -> None:
    angle = torch.linspace(0, math.pi - 1e-9, 100, dtype=torch.float64)
    torch.testing.assert_close(psi(angle)[0], torch.cos(angle))


@given(
    cos=st.floats(-0.9999, 0.9999),
    m1=st.floats(1, 4),
    m2=st.floats(0, math.pi),
    m3=st.floats(0, 1),
    scale=st.floats(0.5, 64),
)
def test_the_derivative_is_that_of_the_value(cos: float, m1: float, m2: float, m3: float, scale: float) -> None:
    margin = CombinedMargin(scale=scale, m1=m1, m2=m2, m3=m3)
    step = 1e-6 * (1 - abs(cos))
    at = torch.tensor([cos - step, cos, cos + step], dtype=torch.float64)
    value, slope, *_ = margin.target(at)
    difference = float(value[2] - value[0]) / (2 * step)
    assert difference == pytest.approx(float(slope[1]), rel=1e-3, abs=1e-3 * scale)
    assert float(slope[1]) >= 0


@pytest.mark.parametrize("margin", [ArcFace(64), SphereFace(64), CombinedMargin(64, m1=2, m2=0.5, m3=0.1)], ids=str)
@pytest.mark.parametrize("cos", [-1.0, 1.0, -1.0000001, 1.0000001])
def test_value_and_derivative_are_finite_at_the_ends(margin: ArcFace | SphereFace | CombinedMargin, cos: float) -> None:
    value, slope, *_ = margin.combined.target(torch.tensor([cos]))
    assert torch.isfinite(value).all()
    assert torch.isfinite(slope).all()


def test_the_named_margins_are_special_cases() -> None:
    cos = torch.tensor([0.3], dtype=torch.float64)
    theta = math.acos(0.3)
    assert float(ArcFace(scale=2, margin=0.5).combined.target(cos)[0]) == pytest.approx(2 * math.cos(theta + 0.5))
    assert float(CosFace(scale=2, margin=0.35).combined.target(cos)[0]) == pytest.approx(2 * (0.3 - 0.35))
    assert float(SphereFace(scale=2, margin=1.35).combined.target(cos)[0]) == pytest.approx(2 * math.cos(1.35 * theta))


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: ArcFace(scale=0), "scale is 0"),
        (lambda: ArcFace(margin=4), "margin is 4"),
        (lambda: CosFace(margin=-0.1), "margin is -0.1"),
        (lambda: SphereFace(margin=0.5), "margin is 0.5"),
        (lambda: CombinedMargin(scale=math.inf), "scale is inf"),
        (lambda: CombinedMargin(m2=math.nan), "m2 is nan"),
        (lambda: ArcFace(scale="a"), "scale is 'a'; it must be a number"),  # type: ignore[arg-type]
        (lambda: ElasticArcFace(seed=True), "seed is True; it must be an integer"),
        (lambda: ArcFace(scale=True), "scale is True; it must be a number"),
        (lambda: CosFace(margin=None), "margin is None; it must be a number"),  # type: ignore[arg-type]
    ],
)
def test_an_impossible_margin_is_refused_by_name(make: object, named: str) -> None:
    assert callable(make)
    with pytest.raises(InvalidArgument, match=named):
        make()
