"""The benches of calls: ratios point the right way, a push that is lost or doubled is seen, rivals take turns."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def benches() -> Iterator[Any]:
    """Imports a file of benchmarks/ by name."""
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module
    sys.path.remove(str(BENCHMARKS))


def test_a_ratio_above_one_means_that_we_win(benches: Any) -> None:
    result = benches("_calls").result
    assert result("time", 2.0, "rival", 6.0, "ms", target=None)["ratio"] == 3.0
    assert result("calls", 2.0, "rival", 6.0, "calls/s", target=None, more_is_better=True)["ratio"] == 0.3333


@pytest.mark.parametrize(("difference", "is_seen"), [(-1, True), (0, False), (1, True)])
def test_one_push_lost_or_applied_twice_is_seen(
    benches: Any, monkeypatch: pytest.MonkeyPatch, difference: int, is_seen: bool
) -> None:
    overload = benches("calls_overload")
    monkeypatch.setattr(overload, "NUM_IDS", 50)
    monkeypatch.setattr(overload, "NUM_ROWS", 200)
    rows = np.zeros((200, 3), np.float32)
    for client, pushes in enumerate((3, 4 + difference)):
        rows[overload._ids_of(client)] += pushes
    assert overload._wrong_rows(rows, [3, 4]) == (50 if is_seen else 0)


def test_every_way_stands_against_the_process_itself(benches: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = benches("calls_rows")
    for name, value in {"NUM_IDS": 50, "NUM_ROWS": 500, "ROUNDS": 1}.items():
        monkeypatch.setattr(rows, name, value)
    monkeypatch.setenv("PATH", "")  # no Redis
    found = list(rows.results())
    assert [one["rival"] for one in found] == ["in the process"] * 4
    assert [one["target"] for one in found] == [0.5, 0.22] * 2
    assert len({one["case"] for one in found}) == 4
    assert all(one["ours"] > 0 and one["theirs"] > 0 and one["ratio"] > 0 for one in found)
