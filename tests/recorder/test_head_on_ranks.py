"""Budgets of a class head whose rows are on the ranks' devices. Tighten them as steps get cheaper.

``python -m tests.recorder head classes=100_000 dim=512 ...`` shows where launches and waits come from.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.recorder.budgets import Budget, reports_of
from tests.recorder.report import Report

pytestmark = pytest.mark.timeout(600)  # the first that asks waits for all recordings
LARGE: dict[str, Any] = {"classes": 100_000, "dim": 512, "batch": 512}
NARROW: dict[str, Any] = {"dtype": "bfloat16", "slot_dtype": "bfloat16", "autocast": "bfloat16"}
EIGHT: dict[str, Any] = {"dtype": "float8_e4m3fn", "slot_dtype": "int8", "autocast": "bfloat16"}
PARTIAL: dict[str, Any] = {"select": 0.1}
ON_DEVICE: dict[str, Any] = {"labels": "cuda"}

BUDGETS = [
    Budget(23, 0, "head", LARGE),
    Budget(23, 0, "head", LARGE | {"autocast": "bfloat16"}),
    Budget(23, 0, "head", LARGE | NARROW),
    Budget(33, 0, "head", LARGE | NARROW | PARTIAL),
    Budget(34, 0, "head", LARGE | PARTIAL | ON_DEVICE),
    Budget(35, 0, "head", LARGE | EIGHT | PARTIAL | ON_DEVICE),
    Budget(43, 0, "head", LARGE | EIGHT | PARTIAL | ON_DEVICE | {"classes": 100_000_000}),
    Budget(41, 0, "head", LARGE | NARROW | ON_DEVICE | {"clip": True}),
    Budget(24, 0, "head", LARGE | ON_DEVICE | {"optimizer": "AdamW"}),
    Budget(27, 0, "head", LARGE | NARROW | {"ranks": 8}),
    # Ranks find a common cut by 8 rounds of counts, most of 4 small launches, in place of an all-reduce of all lists.
    Budget(140, 0, "head", LARGE | NARROW | PARTIAL | ON_DEVICE | {"ranks": 8, "neighbours": 32}),
    Budget(38, 0, "head", LARGE | NARROW | PARTIAL | ON_DEVICE | {"ranks": 8}),
    Budget(41, 0, "head", LARGE | NARROW | PARTIAL | ON_DEVICE | {"margin": ""}),
    Budget(47, 0, "head", LARGE | NARROW | PARTIAL | ON_DEVICE | {"margin": "", "ranks": 8}),
    Budget(58, 0, "head", LARGE | PARTIAL | ON_DEVICE | {"margin": "", "clip": True}),
]
reports = reports_of(BUDGETS)

MARGINS = [
    "ArcFace",
    "CosFace",
    "SphereFace",
    "CombinedMargin",
    "AdaFace",
    "MagFace",
    "CurricularFace",
    "ElasticArcFace",
]
SMOOTH: dict[str, Any] = {"label_smoothing": 0.1}
COMBINATIONS = [
    Budget(320, 0, "head", PARTIAL | {"margin": margin, **options})
    for margins, more in ((MARGINS, {"sub_centers": 3}), ([""], {"bias": True}))
    for margin in margins
    for options in (SMOOTH, ON_DEVICE | more)
]
combined = reports_of(COMBINATIONS)


@pytest.mark.parametrize("index", range(len(BUDGETS)), ids=str)
def test_a_step_stays_within_its_launches_and_waits(reports: list[Report], index: int) -> None:
    BUDGETS[index].require(reports[index])


def test_no_margin_mixes_devices_with_any_option(combined: list[Report]) -> None:
    for budget, report in zip(COMBINATIONS, combined, strict=True):
        budget.require(report)
