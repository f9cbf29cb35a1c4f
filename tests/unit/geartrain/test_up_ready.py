"""What 'geartrain up' shows a person at a terminal once its cluster is ready, and when its log lines were written."""

from __future__ import annotations

import logging
import re
from datetime import UTC, datetime

import pytest

from geartrain.cli.cluster.up import _show_ready
from geartrain.launch.logs import log_to_stderr
from geartrain.launch.up import ClusterFacts

LINK = f"http://127.0.0.1:7080/?key={'k' * 60}"


def shown(scheduler: str, capsys: pytest.CaptureFixture[str], dashboard: str | None) -> str:
    pids = {"scheduler": 1, "server 0": 2}
    _show_ready(ClusterFacts(scheduler, ("127.0.0.1:9",), pids, {}, dashboard=dashboard))
    return capsys.readouterr().out


def test_the_box_says_what_to_type_and_the_link_below_it_is_not_broken(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    text = shown("127.0.0.1:7123", capsys, LINK)
    assert text.splitlines()[-1] == f"dashboard: {LINK}"
    assert "geartrain status --scheduler 127.0.0.1:7123" in text and "Ctrl-C" in text
    text = shown("127.0.0.1:7000", capsys, None)
    assert re.search(r"geartrain status +│", text) and re.search(r"geartrain dashboard +│", text)


def test_a_line_of_a_log_has_a_time_that_other_programs_read(capsys: pytest.CaptureFixture[str]) -> None:
    log_to_stderr("info")
    before = datetime.now(UTC)
    logging.getLogger("x").info("hello")
    when, _, rest = capsys.readouterr().err.partition(" ")
    assert rest == "INFO x: hello\n"
    assert abs((datetime.fromisoformat(when) - before).total_seconds()) < 60
