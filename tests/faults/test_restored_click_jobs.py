"""``geartrain worker ctr --set mode=async`` : whoever is killed, each sample is in the rows once an epoch."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.faults.restored_click_jobs import ClickJob

pytest.importorskip("pyarrow", reason="needs pip install 'geartrain[data]'")


@pytest.mark.parametrize(
    ("role", "mode", "is_topic"),
    [
        ("joined", "async", False),
        ("first", "async", False),
        ("shard", "ssp:2", False),
        ("scheduler", "async", False),
        ("joined", "ssp:2", True),
        pytest.param("shard", "async", True, marks=pytest.mark.slow),
    ],
)
def test_each_sample_is_in_the_rows_once_whoever_is_killed(
    role: str, mode: str, is_topic: bool, tmp_path: Path
) -> None:
    if is_topic:
        pytest.importorskip("confluent_kafka", reason="needs pip install 'geartrain[kafka]'")
    with ExitStack() as stack:
        dies_at = 15 if role == "first" else -1
        job = ClickJob(tmp_path, stack, mode=mode, count=3000, dies_at=dies_at, is_topic=is_topic)
        joined = job.started(5 if role == "joined" else -1, joins=True)
        if role in ("joined", "first"):
            assert (joined if role == "joined" else job.first).exit_code() == -9
        else:
            job.await_batch(joined, 3)
            (job.shards[0] if role == "shard" else job.scheduler).kill()
        if role == "first":
            job.first = job.started(continues=True)
        job.outcome()
