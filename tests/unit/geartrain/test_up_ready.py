"""What 'geartrain up' shows a person at a terminal once its cluster is ready, and when its log lines were written."""

from __future__ import annotations

import logging
from datetime import UTC, datetime

import pytest

from geartrain.cli.cluster.up import _print_ready
from geartrain.launch.logs import log_to_stderr
from geartrain.launch.up import ClusterFacts

LINK = f"http://127.0.0.1:7080/?key={'k' * 60}"


def shown(scheduler: str, capsys: pytest.CaptureFixture[str], dashboard: str | None) -> str:
    pids = {"scheduler": 1, "server 0": 2}
    _print_ready(ClusterFacts(scheduler, ("127.0.0.1:9",), pids, {}, dashboard=dashboard))
    return capsys.readouterr().out


def test_what_to_type_and_the_link_stand_whole_below_a_narrow_box(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    lines = shown("[fd00::5]:7123", capsys, LINK).splitlines()
    assert lines[-3:-1] == [LINK, "geartrain top --scheduler [fd00::5]:7123"]
    lines = shown("127.0.0.1:7000", capsys, None).splitlines()
    assert lines[-3:-1] == ["geartrain dashboard", "geartrain top"]


def test_the_link_and_what_to_type_stand_in_the_box_where_it_has_room(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    lines = shown("127.0.0.1:7000", capsys, LINK).splitlines()
    assert f"dashboard  {LINK} " in lines[2] and "geartrain top " in lines[3] and "worker ctr" in lines[4]
    assert lines[-1].startswith("╰")


def test_a_line_of_a_log_has_a_time_that_other_programs_read(capsys: pytest.CaptureFixture[str]) -> None:
    log_to_stderr("info")
    before = datetime.now(UTC)
    logging.getLogger("x").info("hello")
    when, _, rest = capsys.readouterr().err.partition(" ")
    assert rest == "INFO x: hello\n"
    assert abs((datetime.fromisoformat(when) - before).total_seconds()) < 60
