"""The benches of calls: ratios point the right way, rivals take turns."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def benches() -> Iterator[Any]:
    """Imports a file of benchmarks/ by name."""
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module
    sys.path.remove(str(BENCHMARKS))


def test_a_ratio_above_one_means_that_we_win(benches: Any) -> None:
    result = benches("_common").result
    assert result("time", 2.0, "rival", 6.0, "ms")["ratio"] == 3.0
    assert result("calls", 2.0, "rival", 6.0, "calls/s", more_is_better=True)["ratio"] == 0.3333


def test_every_way_stands_against_the_process_itself(benches: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = benches("calls_rows")
    for name, value in {"NUM_IDS": 50, "NUM_ROWS": 500, "ROUNDS": 1}.items():
        monkeypatch.setattr(rows, name, value)
    monkeypatch.setenv("PATH", "")  # no Redis
    found = list(rows.results())
    assert [case["rival"] for case in found] == ["in the process"] * 4
    assert [case["target"] for case in found] == [0.5, 0.22] * 2
    assert len({case["case"] for case in found}) == 4
    assert all(case["ours"] > 0 and case["theirs"] > 0 and case["ratio"] > 0 for case in found)
