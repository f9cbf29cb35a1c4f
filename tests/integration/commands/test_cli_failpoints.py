"""Failpoints and the mode, as the command line takes them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from geartrain.ams.observe.failpoints import VARIABLE
from tests.integration.commands.test_cli import TIMEOUT_SECONDS, assert_one_line_error, role
from tests.support.command_line import typed

KILL = {VARIABLE: "scheduler.register.before=kill"}


@pytest.mark.parametrize("command", [["scheduler"], ["server"], ["up"], ["worker", "glyphs"]], ids=" ".join)
def test_no_role_starts_with_failpoints_in_production(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "scheduler.register.before=kill")
    monkeypatch.setenv("GEARTRAIN_MODE", "production")
    assert_one_line_error(typed(*command), 2, VARIABLE, "mode is production", "unset")


def test_an_unknown_failpoint_stops_a_role_at_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "scheduler.regster.before=kill")
    assert_one_line_error(typed("scheduler"), 2, "did you mean 'scheduler.register.before'")


def test_an_armed_role_warns_and_dies_where_it_was_told_to() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "geartrain", "scheduler", "--listen=127.0.0.1:0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **KILL},
    )
    try:
        assert process.stdout is not None
        address = json.loads(process.stdout.readline())["address"]
        server = subprocess.Popen(
            [sys.executable, "-m", "geartrain", "server", "--scheduler", address], stderr=subprocess.DEVNULL
        )
        try:
            _, log = process.communicate(timeout=TIMEOUT_SECONDS)
        finally:
            server.kill()
            server.wait()
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert "misbehave on purpose" in log
    assert "failpoint scheduler.register.before: kill" in log


def test_a_role_that_up_starts_again_is_not_armed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "lease.heartbeat.after=kill@2")
    with role("up", "--shards=1", "--scheduler-listen=127.0.0.1:0", "--json") as ready:
        monkeypatch.delenv(VARIABLE)
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(ready["pids"]["server 0"]).wait(TIMEOUT_SECONDS)
        # Armed, the next one would die at its second heartbeat, too: one comes each second.
        uptime, deadline = 0.0, time.monotonic() + TIMEOUT_SECONDS
        while uptime < 3 and time.monotonic() < deadline:
            status = json.loads(typed("status", "--json", "--scheduler", ready["scheduler"]).stdout)
            uptime = status["shards"][0]["uptime_seconds"] if status["ready"] else 0.0
            time.sleep(0.1)
        assert uptime >= 3, status
