"""A job goes on wherever its snapshots are: on 4 shards, then on 1, then on 3, as if it had never moved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.test_job_recovery import JOB, images, train
from tests.integration.jobs.test_classify_and_predict import assert_same_models, one_thread

__all__ = ["images", "one_thread"]
STEPS = 6


def test_a_job_moves_from_4_shards_to_1_and_to_3(served: Callable[..., Any], images: Path, tmp_path: Path) -> None:
    stayed, moved = tmp_path / "stayed", tmp_path / "moved"
    for stage, num_shards in enumerate((4, 1, 3)):
        go_on = {"resume": stage > 0, "resume_steps": STEPS}
        train(stayed, images, **go_on)
        result, _ = train(moved, images, scheduler=served(num_shards).address, **go_on)
        assert result.step == JOB.steps + STEPS * stage
    assert_same_models(stayed, moved)
