"""A job that the scheduler restores: whoever dies when, every sample is in the rows once an epoch."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyarrow", reason="needs pip install 'geartrain[data]'")

from tests.faults.restored_jobs import EPOCHS, ROLES, RestoredJob, run


@pytest.mark.parametrize("role", ["worker", "shard", "scheduler"])
def test_each_sample_counts_once_whoever_is_killed(role: str, tmp_path: Path) -> None:
    run(role, 1, tmp_path)


@pytest.mark.parametrize("place", ["restore.create.after", "restore.publish.before", "restore.publish.after"])
def test_a_scheduler_killed_in_the_middle_of_the_restore_begins_it_anew(place: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        job = RestoredJob(tmp_path, stack, armed=f"{place}=kill")
        job.await_applied(0, 5)
        job.shards[0].kill()
        counts = job.counts()
        assert len(job.scheduler.exit_codes) == 1
    assert np.all(counts == EPOCHS)


def test_shards_lost_once_all_workers_have_ended_lose_nothing(tmp_path: Path) -> None:
    with ExitStack() as stack:
        job = RestoredJob(tmp_path, stack)
        job.counts()
        for shard in job.shards:
            shard.kill()
        counts = job.counts()
    assert np.all(counts == EPOCHS)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 22))
@pytest.mark.parametrize("role", ROLES)
def test_each_sample_counts_once_at_random_moments(role: str, seed: int, tmp_path: Path) -> None:
    run(role, seed, tmp_path)
