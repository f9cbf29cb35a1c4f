"""A shard's process that was stopped past its lease and replaced does no harm when it goes on."""

from __future__ import annotations

from pathlib import Path

from tests.faults.stops import run_stop


def test_a_process_that_goes_on_after_it_was_replaced_loses_and_doubles_nothing(tmp_path: Path) -> None:
    assert run_stop(2, tmp_path).zombie_refused == 5
