"""What a person sees while a worker trains."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from geartrain.workers.job import live

NUMBERS = {"loss": 1.25, "epoch": 0.5, "steps_per_second": 12.5, "samples_per_second": 2000.0}
NUMBERS |= {"pull_ms": 1.0, "push_ms": 0.25}


def shown(*, terminal: bool, is_shown: bool = True) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=140, color_system=None)
    with live.ProgressLine(console, 0, 40, is_shown=is_shown) as line:
        for step in range(10, 41, 10):
            line.show(step, NUMBERS)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_terminal_has_a_bar_with_its_share_and_the_time_left() -> None:
    text = shown(terminal=True)
    assert "━" in text and "100%" in text and " left " in text
    assert re.search(r"step 40/40  epoch 0\.5/0\.5  loss 1\.250  12\.5 steps/s  2,000 samples/s  pull", text)


def test_lines_stay_every_ten_seconds_and_a_log_has_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_SECONDS_BETWEEN_LINES", 0.0)
    for terminal in (False, True):
        assert (
            len(re.findall(r"step [1-4]0/40 [^\n]*samples/s  pull 1\.00 ms  push 0\.25 ms\n", shown(terminal=terminal)))
            >= 4
        )
    assert "━" not in shown(terminal=False)


def test_one_rank_of_several_is_shown() -> None:
    assert shown(terminal=False, is_shown=False) == ""
    assert "step" not in shown(terminal=True, is_shown=False)
