"""``geartrain worker ctr --set mode=async``, and workers that ``--join`` it: each sample is trained on once."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import geartrain as gt
from geartrain.ams.values.errors import ConfigError, SnapshotFailed
from geartrain.workers.ctr import shared, trainer
from geartrain.workers.ctr.recipe import recipe_for
from geartrain.workers.ctr.trainer import ClickTrainer
from geartrain.workers.job.job import run_job
from geartrain.workers.job.options import JobOptions
from geartrain.workers.job.snapshots import JobSnapshots
from geartrain.workers.job.state import JobState
from tests.support.command_line import typed
from tests.support.forkserver import FORKSERVER

pa = pytest.importorskip("pyarrow", reason="needs pip install 'geartrain[data]'")
pq = pytest.importorskip("pyarrow.parquet", reason="needs pip install 'geartrain[data]'")
COUNT = 3000


@pytest.fixture
def data(tmp_path: Path) -> Path:
    at = np.arange(COUNT)
    pq.write_table(pa.table({"click": at % 2, "user": at % 9, "at": at}), tmp_path / "a.parquet", row_group_size=200)
    return tmp_path / "a.parquet"


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[str]:
    with ExitStack() as stack:
        settings = {"listen": "127.0.0.1:0", "num_shards": 2, "data": str(tmp_path / "state")}
        role = stack.enter_context(gt.ops.Role("scheduler", stream_lease_seconds=6.0, **settings))
        for number in range(2):
            stack.enter_context(gt.ops.Role("server", scheduler=role.address, shard=number, heartbeat_seconds=0.05))
        yield role.address


def join(out: Path, batches: Connection) -> None:
    """A worker that joins when it is told to, tells of its batches, and waits before it trains on the first."""
    make = shared.click_batch
    batches.send("ready")
    batches.recv()

    def told(design: Any, batch: Any, negatives: float) -> Any:
        batches.send(batch["at"].tolist())
        if shared.click_batch is told:
            batches.recv()
            shared.click_batch = told_only
        return make(design, batch, negatives)

    def told_only(design: Any, batch: Any, negatives: float) -> Any:
        batches.send(batch["at"].tolist())
        return make(design, batch, negatives)

    shared.click_batch = told
    done = typed("worker", "ctr", "--join", str(out), "--logger=none")
    assert done.returncode == 0, done.stderr
    batches.send(None)


def options_of(data: Path, scheduler: str | None, **changed: Any) -> JobOptions:
    given = {"dim": 4, "hidden": (8,), "batch_size": 50, "epochs": 1, "patience": 0, "mode": "async", **changed}
    where = {"out": data.parent / "run", "data": str(data), "scheduler": scheduler}
    return JobOptions(job="ctr", recipe=recipe_for(None, **given), loggers=(), **where)


@pytest.mark.parametrize("mode", ["async", "ssp:2"])
def test_a_worker_that_joins_takes_a_share(
    data: Path, scheduler: str, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    ours: list[int] = []
    first: list[int] = []
    make = shared.click_batch
    here, there = FORKSERVER.Pipe()
    other = FORKSERVER.Process(target=join, args=(data.parent / "run", there))
    other.start()
    assert here.recv() == "ready"

    def counted(design: Any, batch: Any, negatives: float) -> Any:
        if len(ours) == 100:
            here.send("join")
        if len(ours) >= 100 and not first and here.poll(1):  # a second a batch: it takes streams that this one releases
            first.extend(here.recv())
            here.send("go on")
        ours.extend(batch["at"].tolist())
        return make(design, batch, negatives)

    monkeypatch.setattr(shared, "click_batch", counted)
    result = run_job(ClickTrainer, options_of(data, scheduler, mode=mode), Console(quiet=True))
    counts = Counter(ours)
    counts.update(first)
    while (batch := here.recv()) is not None:
        counts.update(batch)
    assert result.finished and len(counts) == COUNT * 4 // 5
    assert set(counts.values()) == {1}
    assert first and result.report is not None and result.report["held_out"]["samples"] > 400


def test_a_validation_may_last_longer_than_a_lease(data: Path, scheduler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, scored, ours, looks = shared.click_batch, trainer.scored, Counter[int](), [True]

    def counted(design: Any, batch: Any, negatives: float) -> Any:
        ours.update(batch["at"].tolist())
        return make(design, batch, negatives)

    def slow(batches: Any) -> Any:
        for batch in batches:
            time.sleep(0.5 if looks else 0.0)
            yield batch
        looks.clear()

    monkeypatch.setattr(shared, "click_batch", counted)
    monkeypatch.setattr(
        trainer, "scored", lambda network, fields, batches, user: scored(network, fields, slow(batches), user)
    )
    began = time.monotonic()
    run_job(ClickTrainer, options_of(data, scheduler), Console(quiet=True))
    assert not looks and time.monotonic() - began > 6.0
    assert len(ours) == COUNT * 4 // 5 and set(ours.values()) == {1}


def test_a_last_snapshot_that_one_of_the_scheduler_has_ended_is_taken_again(
    data: Path, scheduler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    confirm, failures = JobSnapshots.confirm, [True]

    def confirmed(snapshots: JobSnapshots, state: JobState) -> None:
        if state.progress.step and failures:
            failures.pop()
            raise SnapshotFailed("another one of the same tables was begun")
        confirm(snapshots, state)

    monkeypatch.setattr(JobSnapshots, "confirm", confirmed)
    result = run_job(ClickTrainer, options_of(data, scheduler, batch_size=200), Console(quiet=True))
    assert result.finished and not failures


def test_a_run_goes_on_elsewhere_though_another_worker_pushed_while_its_snapshot_began(
    data: Path, scheduler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = ClickTrainer.start_snapshot

    def pushed(trainer: ClickTrainer, *where: Any, **state: Any) -> Any:
        assert trainer.cluster is not None
        trainer.cluster.table(f"{trainer.progress.table}/user").push([3], np.ones((1, 4), np.float32))
        return start(trainer, *where, **state)

    monkeypatch.setattr(ClickTrainer, "start_snapshot", pushed)
    first = options_of(data, scheduler, steps=2)
    assert run_job(ClickTrainer, first, Console(quiet=True)).step == 2
    again = replace(first, scheduler="none", resume=True, resume_steps=2)
    assert run_job(ClickTrainer, again, Console(quiet=True)).step == 4


def test_a_run_of_one_worker_cannot_be_joined(data: Path) -> None:
    run_job(ClickTrainer, options_of(data, None, mode="sync", steps=2), Console(quiet=True))
    run = str(data.parent / "run")
    for flags, sentence in (
        ((), "is of one worker; begin one that others join with --scheduler"),
        (("--set", "lr=1"), f"--join {run} takes all from that run; leave --out,"),
    ):
        done = typed("worker", "ctr", "--join", run, *flags)
        assert done.returncode == 2 and sentence in " ".join(done.stderr.split()), done.stderr
    with pytest.raises(ConfigError, match="mode is 'ssp'; it must be sync, async, or ssp:N"):
        options_of(data, None, mode="ssp")
