"""Steps as CUDA graphs hold them: the same launches with the same numbers in each, and nothing asked of the device."""

from __future__ import annotations

from typing import Any

import pytest

from tests.recorder.budgets import Budget, reports_of
from tests.recorder.report import Report
from tests.recorder.test_head_on_ranks import EIGHT, LARGE, NARROW, PARTIAL

pytestmark = pytest.mark.timeout(600)  # the first that asks waits for all recordings
CAPTURED: dict[str, Any] = LARGE | {"labels": "cuda", "captured": True}
AUTOCAST: dict[str, Any] = {"autocast": "bfloat16"}

BUDGETS = [
    Budget(36 if select else 27, 0, "head", CAPTURED | types | select | {"optimizer": optimizer})
    for types, optimizers in (
        ({}, ("SGD", "SparseMomentum", "AdamW")),
        (AUTOCAST, ("SparseMomentum",)),
        (NARROW, ("SGD", "SparseMomentum")),
        (NARROW | {"slot_dtype": "float32"}, ("AdamW",)),
        (EIGHT, ("SparseMomentum",)),
        (EIGHT | {"slot_dtype": "float32"}, ("SGD", "AdamW")),
    )
    for optimizer in optimizers
    for select in ({}, PARTIAL)
] + [
    Budget(50, 0, "head", CAPTURED | NARROW | PARTIAL | {"clip": True}),
    Budget(40, 0, "head", CAPTURED | NARROW | PARTIAL | {"margin": "", "ignore_index": -1}),
    Budget(37, 0, "head", CAPTURED | NARROW | PARTIAL | {"ranks": 8}),
]
reports = reports_of(BUDGETS)


@pytest.mark.parametrize("index", range(len(BUDGETS)), ids=str)
def test_two_steps_launch_the_same(reports: list[Report], index: int) -> None:
    report = reports[index]
    BUDGETS[index].require(report)
    assert not report.differences, "\n".join(report.differences)
    assert not report.to_device and not report.to_host and report.events == report.before
    assert len(report.trace) >= report.launches > 20
    assert not [line for line in report.trace if "of the host" in line]
