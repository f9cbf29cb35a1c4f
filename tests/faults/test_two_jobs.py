"""A job on a cluster does not notice what becomes of another; see ``two_jobs.py``."""

from __future__ import annotations

from pathlib import Path

from tests.faults.two_jobs import DEATHS, run_two_jobs


def test_a_job_does_not_notice_that_another_dies_and_goes_back(tmp_path: Path) -> None:
    assert run_two_jobs(1, tmp_path) == DEATHS
