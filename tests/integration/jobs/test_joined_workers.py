"""``geartrain worker ctr --set mode=async``, and workers that ``--join`` it: each sample is trained on once."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from io import StringIO
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor
from torch.nn.utils import parameters_to_vector

import geartrain as gt
from geartrain.ams.values.errors import Busy, ConfigError, ShardRestarted, SnapshotFailed
from geartrain.ams.values.optimizers.registry import Adam
from geartrain.bridge.dense.dense_table import attach
from geartrain.workers.ctr import shared, trainer
from geartrain.workers.ctr.designs import Design, SampleLayout
from geartrain.workers.ctr.recipe import CtrRecipe, recipe_for
from geartrain.workers.ctr.shared import SharedBatches
from geartrain.workers.ctr.trainer import ClickTrainer
from geartrain.workers.data.streams import NUM_STREAMS
from geartrain.workers.job import job
from geartrain.workers.job.folder import read_run
from geartrain.workers.job.job import run_job
from geartrain.workers.job.options import JobOptions, SnapshotSettings
from geartrain.workers.job.snapshots import JobSnapshots
from geartrain.workers.job.state import JobState, newest_snapshot
from tests.faults.test_elastic import launched
from tests.integration.jobs.small_job import StopWhen
from tests.support.command_line import typed
from tests.support.forkserver import FORKSERVER

pa = pytest.importorskip("pyarrow", reason="needs pip install 'geartrain[data]'")
pq = pytest.importorskip("pyarrow.parquet", reason="needs pip install 'geartrain[data]'")
COUNT = 3000


@pytest.fixture
def data(tmp_path: Path) -> Path:
    at = np.arange(COUNT)
    rows = pa.table({"click": at % 2, "user": at % 9, "item": at % 7, "at": at, "time": at})
    pq.write_table(rows, tmp_path / "a.parquet", row_group_size=200)
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
    make, is_first = SharedBatches.trained, True
    batches.send("ready")
    batches.recv()

    def told(read: SharedBatches, step: int) -> Any:
        nonlocal is_first
        batches.send(numbers_of(read))
        if is_first:
            batches.recv()
        is_first = False
        return make(read, step)

    SharedBatches.trained = told  # type: ignore[method-assign]
    done = typed("worker", "ctr", "--join", str(out), "--logger=none")
    assert done.returncode == 0, done.stderr
    batches.send(None)


def numbers_of(read: SharedBatches) -> list[int]:
    """The samples of the next batch."""
    batch = read._next
    assert batch is not None
    return np.asarray(batch["at" if "at" in batch else "number"]).tolist()


def options_of(data: Path, scheduler: str | None, **changed: Any) -> JobOptions:
    given = {"dim": 4, "hidden": (8,), "batch_size": 50, "epochs": 1, "patience": 0, "mode": "async", **changed}
    where = {"out": data.parent / "run", "data": str(data), "scheduler": scheduler}
    return JobOptions(job="ctr", recipe=recipe_for(None, **given), loggers=(), **where)


class Joined:
    """A process that joins the run of this one, which waits, a second a batch, until the other one has samples."""

    def __init__(self, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ours: list[int] = []
        self.first: list[int] = []
        make, (self._here, there) = SharedBatches.trained, FORKSERVER.Pipe()
        FORKSERVER.Process(target=join, args=(run, there)).start()
        assert self._here.recv() == "ready"

        def counted(read: SharedBatches, step: int) -> Any:
            if len(self.ours) == 100:
                self._here.send("join")
            if len(self.ours) >= 100 and not self.first and self._here.poll(1):  # it takes streams that are released
                self.first.extend(self._here.recv())
                self._here.send("go on")
            self.ours.extend(numbers_of(read))
            return make(read, step)

        monkeypatch.setattr(SharedBatches, "trained", counted)

    def counts(self) -> Counter[int]:
        """How often each sample was trained on, once the other process has ended in good order."""
        counts = Counter([*self.ours, *self.first])
        while (batch := self._here.recv()) is not None:
            counts.update(batch)
        return counts


@pytest.mark.parametrize(
    "recipe", [{"mode": "async"}, {"mode": "ssp:2"}, {"mode": "async", "model": "din", "history": 5}], ids=str
)
def test_a_worker_that_joins_takes_a_share(
    data: Path, scheduler: str, monkeypatch: pytest.MonkeyPatch, recipe: dict[str, Any]
) -> None:
    joined = Joined(data.parent / "run", monkeypatch)
    result = run_job(ClickTrainer, options_of(data, scheduler, **recipe), Console(quiet=True))
    counts = joined.counts()
    assert result.finished and len(counts) == COUNT * 4 // 5
    assert set(counts.values()) == {1}
    assert joined.first and result.report is not None and result.report["held_out"]["samples"] > 400


def test_workers_that_joined_end_with_a_first_one_that_ends_early(
    data: Path, scheduler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined, between = Joined(data.parent / "run", monkeypatch), ClickTrainer.between

    def ended(trainer: ClickTrainer) -> None:
        between(trainer)
        if joined.first:  # as after looks that are not better
            trainer.progress = replace(trainer.progress, stage_steps=trainer.progress.part[0])

    monkeypatch.setattr(ClickTrainer, "between", ended)
    result = run_job(ClickTrainer, options_of(data, scheduler, epochs=100), Console(quiet=True))
    assert result.finished and joined.first and 0 < joined.counts().total() < 100 * COUNT * 4 // 5
    late = typed("worker", "ctr", "--join", str(data.parent / "run"), "--logger=none")
    assert late.returncode == 0 and "has ended" in late.stdout, late
    in_json = typed("worker", "ctr", "--join", str(data.parent / "run"), "--logger=none", "--json")
    assert json.loads(in_json.stdout) is None and "has ended" in in_json.stderr


def test_workers_that_joined_train_on_after_the_first_one_was_stopped(
    data: Path, scheduler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined = Joined(data.parent / "run", monkeypatch)
    options = options_of(data, scheduler)
    with monkeypatch.context() as patch:
        patch.setattr(job, "interruption", lambda: nullcontext(StopWhen(lambda: bool(joined.first))))
        assert not run_job(ClickTrainer, options, Console(quiet=True)).finished
    theirs = joined.counts()
    assert theirs.total() == COUNT * 4 // 5 and set(theirs.values()) == {1}
    result = run_job(ClickTrainer, replace(options, resume=True), Console(quiet=True))
    assert result.finished and result.report is not None


def test_a_first_worker_that_stops_leaves_the_rows_to_others_though_they_hold_no_lease(
    data: Path, scheduler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, jobs = SharedBatches.trained, list[str]()

    def beside_another(read: SharedBatches, step: int) -> Any:
        if not jobs:
            jobs.append(read._job)
            with gt.connect(scheduler) as cluster:
                streams = cluster.streams(read._job, worker="another", num_streams=NUM_STREAMS)
                streams.lease()
                streams.release()
        return make(read, step)

    monkeypatch.setattr(SharedBatches, "trained", beside_another)
    monkeypatch.setattr(job, "interruption", lambda: nullcontext(StopWhen(lambda: bool(jobs))))
    told = Console(record=True, file=StringIO())
    assert not run_job(ClickTrainer, options_of(data, scheduler), told).finished
    assert "other workers may train on them" in told.export_text()
    with gt.connect(scheduler) as cluster:
        assert f"{jobs[0]}/user" in cluster.table_incarnations()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("has_others", [False, True])
def test_a_run_that_ends_before_its_first_snapshot_leaves_no_tables_but_those_of_others(
    data: Path, scheduler: str, error: type[BaseException], has_others: bool
) -> None:
    class Failing(ClickTrainer):
        def start(self, _: Any) -> None:
            assert self.cluster is not None and self.cluster.table_incarnations()
            if has_others:
                with gt.connect(scheduler) as cluster:
                    cluster.streams(self.attempt.progress.table, worker="another", num_streams=NUM_STREAMS).lease()
            raise error

    with pytest.raises(error):
        run_job(Failing, options_of(data, scheduler), Console(quiet=True))
    with gt.connect(scheduler) as cluster:
        assert bool(cluster.table_incarnations()) == has_others


def test_a_first_worker_that_fails_releases_its_samples(
    data: Path, scheduler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[str] = []

    def failing(read: SharedBatches, _: int) -> Any:
        jobs.append(read._job)
        raise RuntimeError("own code fails")

    monkeypatch.setattr(SharedBatches, "trained", failing)
    with pytest.raises(RuntimeError, match="own code fails"):
        run_job(ClickTrainer, options_of(data, scheduler), Console(quiet=True))
    with gt.connect(scheduler) as cluster:
        streams = cluster.streams(jobs[0], worker="another", num_streams=NUM_STREAMS)
        assert set(streams.holders().holders) == {None}


def of_torchrun(data: Path, scheduler: str, restarted: bool) -> list[int]:
    """The samples of a rank; the first one waits, a second a batch, until the other one has some. If they are to be
    ``restarted``, the other one dies then.
    """
    seen: list[int] = []
    make, is_first, has_joined = SharedBatches.trained, os.environ["RANK"] == "0", threading.Event()
    dies = restarted and not is_first and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    place = data.parent / f"joined-{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    if is_first:
        listener = Listener(str(place))
        threading.Thread(target=lambda: (listener.accept(), has_joined.set()), daemon=True).start()

    def noted(read: SharedBatches, step: int) -> Any:
        if is_first and len(seen) >= 200:
            has_joined.wait(1)
        elif not is_first and not seen:
            Client(str(place)).close()
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
        seen.extend(numbers_of(read))
        return make(read, step)

    SharedBatches.trained = noted  # type: ignore[method-assign]
    assert run_job(ClickTrainer, options_of(data, scheduler), Console(quiet=True)).finished
    return seen


@pytest.mark.parametrize("restarted", [False, True])
def test_ranks_of_torchrun_share_a_run(data: Path, scheduler: str, restarted: bool) -> None:
    first, other = launched(2, of_torchrun, data, scheduler, restarted, restarts=1).values()
    assert first and other
    if not restarted:
        assert len({*first, *other}) == len(first) + len(other) == COUNT * 4 // 5
    assert read_run(data.parent / "run").ended


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


class Watched(ClickTrainer):
    """A worker beside which another one trains the network before it validates or saves, and a row before it restores
    the best step.
    """

    theirs: Tensor | None = None
    """Weights of the other worker during a validation."""
    at_save: Tensor
    """Those at the last snapshot."""
    waits: ClassVar[list[int]] = []
    """Steps at which it waited for a snapshot."""

    def trained_elsewhere(self) -> Tensor:
        """Train as the other worker; return its weights."""
        assert self.cluster is not None
        network = self.design.network()
        name = f"{self.progress.table}/network"
        optimizer = attach(network, self.cluster, name=name, optimizer=Adam(self.recipe.lr), reuse=True)
        for weights in network.parameters():
            weights.grad = torch.ones_like(weights)
        optimizer.step()
        return parameters_to_vector(network.parameters()).detach()

    def require_left(self) -> None:
        assert self.fields.worker_steps is not None
        assert self.fields.worker_steps._renewal is None, "others wait for this one's steps"

    def trained(self) -> None:
        wait = self.samples.wait_alone

        def checked() -> None:
            self.require_left()
            wait()

        self.samples.wait_alone = checked  # type: ignore[method-assign]
        super().trained()

    def alone(self) -> Any:
        type(self).at_save = self.trained_elsewhere()
        return super().alone()

    def start_snapshot(self, *where: Any, **state: Any) -> Any:
        pending, is_late = super().start_snapshot(*where, **state), [True]
        done = pending.done
        pending.done = lambda: not (is_late and is_late.pop()) and done()  # type: ignore[method-assign]
        return pending

    def keep_lease(self) -> None:
        super().keep_lease()
        self.waits.append(self.progress.step)
        self.require_left()

    def _validate(self) -> None:
        self.theirs = self.trained_elsewhere()
        super()._validate()
        self.theirs = None

    def _scored(self, batches: Any) -> Any:
        if self.theirs is not None:
            self.require_left()
            assert torch.equal(parameters_to_vector(self.network.parameters()), self.theirs)
        return super()._scored(batches)

    def _restore_best(self) -> int:
        assert self.cluster is not None
        name, ones = f"{self.progress.table}/user", np.ones((1, 4), np.float32)
        before = self.cluster.table(name).pull([3])
        self.cluster.table(name).push([3], ones)
        step = super()._restore_best()
        assert step == self.progress.step and np.array_equal(self.cluster.table(name).pull([3]), before)
        return step


def test_the_ends_of_a_run_have_what_others_trained_and_hold_up_none(
    data: Path, scheduler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer.BestValidation, "compare", lambda *_: True)  # the best step is the last
    options = options_of(data, scheduler, mode="ssp:2", steps=15, snapshots=SnapshotSettings(steps=13))
    assert run_job(Watched, options, Console(quiet=True)).finished  # it validates at 12 and 15
    assert 13 in Watched.waits  # for the snapshot of 12
    state = JobState.read(newest_snapshot(data.parent / "run" / "snapshots"), "ctr", CtrRecipe)
    network = Design(state.recipe, SampleLayout.from_json(state.data)).network()
    network.load_state_dict(state.tensors["network"])
    assert torch.equal(parameters_to_vector(network.parameters()), Watched.at_save)


def test_a_further_stage_keeps_its_steps_when_the_scheduler_has_restored_the_job(data: Path, scheduler: str) -> None:
    class Ending(ClickTrainer):
        def between(self) -> None:
            if self.progress.step == 2:
                self.progress = replace(self.progress, stage_steps=2)  # as after looks that are not better
            elif self.progress.step == 3 and lost:
                raise lost.pop()

    lost = [ShardRestarted("a shard was lost")]
    options = options_of(data, scheduler, epochs=3)
    assert run_job(Ending, options, Console(quiet=True)).step == 2
    further = run_job(Ending, replace(options, resume=True, resume_steps=3), Console(quiet=True))
    assert not lost and (further.finished, further.step) == (True, 5)


def test_a_run_does_not_end_with_rows_that_were_restored_before_its_last_snapshot(
    data: Path, scheduler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Restored(ClickTrainer):
        is_restored_yet = goes_on = False

        def start_snapshot(self, *where: Any, **state: Any) -> Any:
            if self.samples.has_ended() and not type(self).is_restored_yet:
                type(self).is_restored_yet = True
                self.have_restored()
            return super().start_snapshot(*where, **state)

        def have_restored(self) -> None:
            with gt.connect(scheduler) as cluster:
                streams = cluster.streams(self.progress.table, worker="other", num_streams=NUM_STREAMS)
                streams.lease()
                streams.release(lost=True)
                while True:
                    with suppress(Busy):
                        streams.lease()
                        return streams.release()

        def goes_on_restored(self) -> bool:
            type(self).goes_on = True
            return super().goes_on_restored()

    monkeypatch.setattr(SharedBatches, "require_alone", lambda _: None)  # as if the cursors had been the same
    assert run_job(Restored, options_of(data, scheduler, steps=4), Console(quiet=True)).finished
    assert Restored.goes_on


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
