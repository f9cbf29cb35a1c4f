"""``geartrain worker ctr --set mode=async`` : whoever is killed, each sample is in the rows once an epoch."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from geartrain.workers.job.folder import read_report, read_run
from tests.faults.restored_click_jobs import ClickJob, Outcome

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
        job = ClickJob(tmp_path, stack, mode=mode, count=3000, is_topic=is_topic, dies_at=dies_at)
        joined = job.started(joins=True, dies_at=5 if role == "joined" else -1)
        if role in ("joined", "first"):
            assert (joined if role == "joined" else job.first).exit_code() == -9
        else:
            job.await_batch(joined, 3)
            (job.shards[0] if role == "shard" else job.scheduler).kill()
        if role == "first":
            job.first = job.started(continues=True)
        job.outcome()


@pytest.mark.parametrize("place", ["look", "snapshot", "report"])
def test_the_end_of_a_run_is_done_again_after_a_restore(place: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        armed = f"restore.publish.before=pause({tmp_path / 'go on'})"
        job = ClickJob(tmp_path, stack, mode="async", count=3000, armed=armed, halts_at=place)
        job.started(joins=True)
        job.await_word(job.first, place)
        job.shards[1].kill()  # the other one says that tables are being restored
        job.await_restore()
        job.first.pipe.send("go on")
        job.await_word(job.first, "lost")
        (tmp_path / "go on").touch()
        job.outcome()
    assert read_run(tmp_path / "run").ended and read_report(tmp_path / "run")


def test_a_shard_lost_while_the_best_model_is_tested_is_made_good(tmp_path: Path) -> None:
    with ExitStack() as stack:
        job = ClickJob(tmp_path, stack, mode="async", count=3000, halts_at="predict")
        job.await_word(job.first, "predict")
        job.shards[0].kill()
        job.first.pipe.send("go on")
        job.outcome()
    assert read_run(tmp_path / "run").ended and read_report(tmp_path / "run")


@pytest.mark.parametrize("loses_cluster", [False, True])
def test_a_run_that_is_stopped_while_others_train_goes_on_with_each_batch_once(
    loses_cluster: bool, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        job = ClickJob(tmp_path, stack, mode="async", count=3000)
        joined = job.started(joins=True, pauses_at=2)
        job.await_batch(joined, 2)
        os.kill(job.first.pid, signal.SIGTERM)
        job.await_word(job.first, "done")
        joined.pipe.send("go on")
        if loses_cluster:
            os.kill(joined.pid, signal.SIGTERM)
            assert joined.exit_code() == 0
            job.end_cluster()
            job.start_cluster(tmp_path / "new state")
        job.first = job.started(continues=True)
        job.outcome()


def test_a_worker_paused_before_its_snapshot_while_the_job_goes_back_saves_no_mixture(tmp_path: Path) -> None:
    with ExitStack() as stack:
        job = ClickJob(tmp_path, stack, mode="async", count=3000, halts_at="freeze")
        joined = job.started(joins=True, pauses_at=40)
        job.await_word(job.first, "freeze")
        job.await_batch(joined, 40)  # the first worker's lease has ended, and the job gone back
        job.first.pipe.send("go on")
        assert isinstance(job.first.receive(), int)  # it trains again
        for worker in (job.first, joined):
            worker.end()
        job.end_cluster()
        job.start_cluster(tmp_path / "new state")
        job.first = job.started(continues=True)
        job.outcome()


def test_a_superseded_worker_ends_and_its_successor_trains_on(tmp_path: Path) -> None:
    with ExitStack() as stack:
        job = ClickJob(tmp_path, stack, mode="async", count=3000)
        before = job.first
        os.kill(before.pid, signal.SIGSTOP)
        job.first = job.continued_elsewhere()
        job.await_batch(job.first, 20)
        os.kill(before.pid, signal.SIGCONT)
        job.require_failed(before)
        job.outcome()


def test_a_superseded_worker_does_not_drop_the_tables_of_its_successor(tmp_path: Path) -> None:
    with ExitStack() as stack:
        job = ClickJob(tmp_path, stack, mode="async", count=3000, halts_at="report")
        before = job.first
        job.await_word(before, "report")
        job.first = job.continued_elsewhere(halts_at="snapshot")
        job.await_word(job.first, "snapshot")
        before.pipe.send("go on")
        job.require_failed(before)
        job.first.pipe.send("go on")
        assert isinstance(job.first.receive(), Outcome)  # it did not go back
