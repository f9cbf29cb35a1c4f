"""Processes of a real cluster are killed, or stopped and replaced, at random moments; logs say what must be there."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.faults.kills import ROLES, Oracle, run_kill
from tests.faults.pusher import SPEC
from tests.faults.stops import run_stop
from tests.faults.two_jobs import DEATHS, run_two_jobs


@pytest.mark.parametrize("role", ROLES)
def test_nothing_acknowledged_is_lost_or_doubled_by_the_death_of(role: str, tmp_path: Path) -> None:
    outcome = run_kill(role, 1, tmp_path)
    assert role != "scheduler" or outcome.pushes_repeated == 0, outcome


def test_the_oracle_finds_what_is_lost_or_doubled(tmp_path: Path) -> None:
    events = [{"begin": 1}, {"begin": 2}, {"ack": 1}, {"begin": 3}, {"ack": 3}]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events) + '{"ac', "utf-8")
    oracle = Oracle(tmp_path, seed=7)
    assert SPEC.num_rows is not None
    ids = np.arange(0, SPEC.num_rows, 2)
    for legal in ([1, 3], [1, 2, 3]):  # the second was sent, and nobody knows more
        oracle.require_nothing_lost_or_doubled(oracle.sum_of(legal)[ids], ids)
    for wrong in ([1], [3], [1, 2], [1, 1, 3], [1, 2, 2, 3]):
        with pytest.raises(AssertionError, match="no such sum"):
            oracle.require_nothing_lost_or_doubled(oracle.sum_of(wrong)[ids], ids)


def test_a_process_that_goes_on_after_it_was_replaced_loses_and_doubles_nothing(tmp_path: Path) -> None:
    assert run_stop(2, tmp_path).zombie_refused == 5


def test_a_job_does_not_notice_that_another_dies_and_goes_back(tmp_path: Path) -> None:
    assert run_two_jobs(1, tmp_path) == DEATHS
