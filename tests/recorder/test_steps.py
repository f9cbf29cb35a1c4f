"""Budgets of the other steps on a GPU. Tighten them as steps get cheaper.

Of rows in a cluster one wait is left by design: for the one copy of what is pushed; of streamed ones one for each
block, of hosted ones another for the features. A slow gear's ids, features and gradients come to the host, too.
"""

from __future__ import annotations

import pytest

from tests.recorder.budgets import Budget, reports_of
from tests.recorder.report import Report

pytestmark = pytest.mark.timeout(600)  # the first that asks waits for all recordings
_CACHE = {"ids": "cpu", "num_rows": 2000, "device_cache_bytes": 2_000_000}
BUDGETS = [
    Budget(138, 1, "pull"),
    Budget(138, 1, "pull", {"classes": 100_000, "dim": 128, "batch": 256, "select": 0.1}),
    Budget(163, 1, "pull", {"select": 0.2, "autocast": "bfloat16", "dtype": "bfloat16", "clip": True}),
    Budget(203, 4, "pull", {"classes": 40_000, "dim": 128, "rows_cache_bytes": 1 << 20}),
    Budget(102, 2, "hosted"),
    Budget(123, 3, "hosted", {"select": 0.2, "label_smoothing": 0.1, "clip": True}),
    Budget(5, 2, "embedding"),
    Budget(4, 1, "embedding", {"ids": "cpu"}),
    Budget(29, 1, "embedding", _CACHE),
    Budget(36, 1, "embedding", {**_CACHE, "optimizer": "Adam", "dtype": "bfloat16"}),
    Budget(21, 0, "embedding", {"rows": "ranks"}),
    Budget(21, 0, "embedding", {"rows": "ranks", "ids": "cpu", "optimizer": "Adam"}),
    Budget(36, 1, "embedding", {"rows": "ranks", "ranks": 2}),
    Budget(36, 1, "embedding", {"rows": "ranks", "ranks": 8, "fields": 60}),
    Budget(36, 0, "embedding", {"rows": "ranks", "ranks": 8, "is_ahead": True}),
    Budget(29, 0, "embedding", {"rows": "ranks", "grows": True}),
    Budget(50, 1, "embedding", {"rows": "ranks", "grows": True, "ranks": 8}),
    Budget(11, 0, "hashing"),
    Budget(83, 0, "split"),
    Budget(103, 1, "topk"),
    Budget(5, 1, "dense"),
    Budget(55, 5, "gear"),
]
reports = reports_of(BUDGETS)


@pytest.mark.parametrize("index", range(len(BUDGETS)), ids=[budget.step for budget in BUDGETS])
def test_a_step_stays_within_its_launches_and_waits(reports: list[Report], index: int) -> None:
    BUDGETS[index].require(reports[index])
