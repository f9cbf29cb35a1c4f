"""A job says that it trains, until it is done."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from geartrain.ams.client.job_reporter import JobReporter
from geartrain.ams.values.scheduler_messages import JobReport, JobReportReply

SECONDS = 60.0
LATER = 0.2


class Scheduler:
    """Hears what is told; a word that a job trains takes its time."""

    def __init__(self) -> None:
        self.heard: list[bool] = []
        self.pause_seconds = 0.0
        self.is_asked, self.is_done = threading.Event(), threading.Event()

    def call(self, tell: Any, _: float) -> JobReportReply:
        if not tell.done:
            self.is_asked.set()
            self.is_done.wait(LATER)
        self.heard.append(tell.done)
        if tell.done:
            self.is_done.set()
        return JobReportReply(pause_seconds=self.pause_seconds)

    def close(self) -> None:
        """Nothing to close."""


def test_that_a_job_is_done_is_its_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("geartrain.ams.client.job_reporter._REPORT_SECONDS", 0.01)
    scheduler = Scheduler()
    watch = JobReporter(scheduler, "j", 1)  # type: ignore[arg-type]
    assert scheduler.heard == [False]  # it is known from the first moment on
    scheduler.is_asked.clear()
    assert scheduler.is_asked.wait(SECONDS)
    watch.done()
    watch.done()
    assert scheduler.heard[-1]
    assert scheduler.heard.count(True) == 1


def test_a_report_that_fails_keeps_nobody_from_hearing_that_the_job_trains(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("geartrain.ams.client.job_reporter._REPORT_SECONDS", 0.01)
    scheduler = Scheduler()
    watch = JobReporter(scheduler, "j", 1, lambda: JobReport(step=1 // 0))  # type: ignore[arg-type]
    scheduler.is_asked.clear()
    assert scheduler.is_asked.wait(SECONDS)
    watch.done()
    assert scheduler.heard[-1]
    assert caplog.text.count("cannot report its progress: ZeroDivisionError") == 1


def test_a_job_is_silent_for_as_long_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("geartrain.ams.client.job_reporter._REPORT_SECONDS", 0.001)
    scheduler = Scheduler()
    scheduler.is_done.set()  # it answers at once
    scheduler.pause_seconds = 0.5
    watch = JobReporter(scheduler, "j", 1)  # type: ignore[arg-type]
    began = time.monotonic()
    scheduler.is_asked.clear()
    assert scheduler.is_asked.wait(SECONDS)
    assert time.monotonic() - began > 0.4
    watch.done()
