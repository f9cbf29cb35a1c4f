"""A click model's run of several workers, of which each sample adds one to its row of one more table of the run.

``run`` kills one of its processes at a random moment, or has workers join and leave; nobody calls restore().
"""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

import geartrain as gt
from geartrain.workers.ctr.recipe import recipe_for
from geartrain.workers.ctr.samples.settings import FeatureSettings
from geartrain.workers.ctr.trainer import ClickTrainer
from geartrain.workers.job.job import run_job
from geartrain.workers.job.options import JobOptions, SnapshotSettings
from tests.faults.children import Child, Supervised

EPOCHS, SHARDS = 2, 2
ROLES = ("worker", "shard", "scheduler", "members")
"""What is killed; "members": nobody is, but workers join and leave."""
MODES = ("async", "ssp:4")
_RANDOM_COUNT, _RANDOM_BATCH = 20_000, 250
"""Of a random run: it lasts for seconds, and its AUC is settled."""
_MOST_AUC = 0.002
"""By which it may differ from the same run undisturbed."""
_DEADLINE_SECONDS = 120.0


class Outcome(NamedTuple):
    """The end of a run, as its first worker tells it."""

    counts: np.ndarray
    """How often each sample is in the rows."""
    auc: float
    """Of what is held out."""


class CountedTrainer(ClickTrainer):
    """Says what it has trained on, and at the end how often each sample is in the rows."""

    pipe: Connection
    count: int
    """Of samples, those held out among them."""
    dies_at = -1
    """The batch after whose pushes, and before whose commit, it is killed."""

    def __init__(self, attempt: Any, data: Any) -> None:
        self._done = 0
        self._counts = attempt.cluster.create_table(
            f"{attempt.progress.table}/counts",
            dim=1,
            num_rows=self.count,
            optimizer=gt.SGD(1.0),
            initializer=gt.Constant(0.0),
            reuse=attempt.state is not None,
        )
        super().__init__(attempt, data)

    def tables(self) -> list[str]:
        return [*super().tables(), self._counts.spec.name]

    def loss(self, step: int) -> Any:
        batch = self.samples._next  # type: ignore[attr-defined]
        self._ids = np.asarray(batch["at"])
        return super().loss(step)

    def update(self) -> None:
        super().update()
        self._counts.push(self._ids, -np.ones((len(self._ids), 1), np.float32))
        self._done += 1
        self.pipe.send(self._done)
        if self._done == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def report(self) -> dict[str, Any]:
        counts = np.asarray(self._counts.pull(np.arange(self.count)))[:, 0]
        report = super().report()
        self.pipe.send(Outcome(counts, report["held_out"]["auc"]))
        return report


def work(
    pipe: Connection, data: Path, count: int, scheduler: str, mode: str, more: dict[str, Any], dies_at: int
) -> None:
    """Train, as the worker that begins the run, joins it (``joins``) or goes on with it (``continues``)."""
    CountedTrainer.pipe, CountedTrainer.count, CountedTrainer.dies_at = pipe, count, dies_at
    recipe = recipe_for(
        None,
        dim=4,
        hidden=(8,),
        dropout=0.0,
        batch_size=_RANDOM_BATCH if count == _RANDOM_COUNT else 50,
        epochs=EPOCHS,
        lr=0.005,
        row_lr=0.005,
        patience=0,
        mode=mode,
        features={"at": FeatureSettings(admission=1000.0)},  # a number of a sample, which nothing is learned of
        snapshots=SnapshotSettings(minutes=0.03),
    )
    out = data.parent / "run"
    options = JobOptions(
        job="ctr", recipe=recipe, loggers=(), out=out, data=str(data), scheduler=scheduler, cache=data.parent, **more
    )
    run_job(CountedTrainer, options, Console())
    pipe.send("done")


class ClickJob:
    """Scheduler, shards and the first worker as processes; the data are clicks that depend on user and item."""

    def __init__(self, folder: Path, stack: ExitStack, *, mode: str, count: int, dies_at: int = -1) -> None:
        """``dies_at``: the batch after which the first worker is killed."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        folder.mkdir(exist_ok=True)
        self._data, self._count, self._mode, self._stack = folder / "a.parquet", count, mode, stack
        at, chance = np.arange(count), np.random.default_rng(0)
        user, item = chance.integers(0, 9, count), chance.integers(0, 7, count)
        odds = chance.normal(size=9)[user] + chance.normal(size=7)[item] - 1
        click = (chance.random(count) < 1 / (1 + np.exp(-odds))).astype(np.int64)
        table = pa.table({"click": click, "user": user, "item": item, "at": at})
        pq.write_table(table, self._data, row_group_size=200)
        settings = {"listen": "127.0.0.1:0", "num_shards": SHARDS, "data": str(folder / "state")}
        settings |= {"lease_seconds": 30.0, "stream_lease_seconds": 2.0}
        self.scheduler = Supervised("scheduler", settings, "")
        stack.callback(self.scheduler.end)
        self.shards = []
        for number in range(SHARDS):
            self.shards.append(Supervised("server", {"scheduler": self.scheduler.address, "shard": number}, ""))
            stack.callback(self.shards[-1].end)
        self._workers: list[Child] = []
        self.first = self.started(dies_at)
        self.await_batch(self.first, 1)  # there is a run to join

    def started(self, dies_at: int = -1, **more: Any) -> Child:
        """One more worker: it ``joins`` the run, or ``continues`` it."""
        worker = Child(work, self._data, self._count, self.scheduler.address, self._mode, more, dies_at)
        self._stack.callback(worker.end)
        self._workers.append(worker)
        return worker

    def await_batch(self, worker: Child, number: int) -> None:
        """Wait until it has trained on so many, or the run has ended."""
        while isinstance(done := worker.receive(_DEADLINE_SECONDS), int) and done < number:
            pass

    def outcome(self) -> Outcome:
        """See the run to its end. Raises AssertionError if a sample is not in the rows once an epoch, or a worker
        ended with an error.
        """
        while not isinstance(outcome := self.first.receive(_DEADLINE_SECONDS), Outcome):
            pass
        trained = outcome.counts > 0
        assert trained.sum() == self._count * 4 // 5, np.unique(outcome.counts, return_counts=True)
        assert np.all(outcome.counts[trained] == EPOCHS), np.unique(outcome.counts, return_counts=True)
        codes = [worker.exit_code(_DEADLINE_SECONDS) for worker in self._workers]
        assert set(codes) <= {0, -signal.SIGKILL}, codes
        return outcome


def run(seed: int, folder: Path) -> int:
    """Have a run of two workers disturbed by each of ROLES at a random moment; return how many were. Raises
    AssertionError if a sample is not in the rows once an epoch, or the AUC is not that of the run undisturbed.
    """
    mode, undisturbed = MODES[seed % len(MODES)], 0.0
    for role in ("", *ROLES):
        with ExitStack() as stack:
            job = ClickJob(folder / (role or "undisturbed"), stack, mode=mode, count=_RANDOM_COUNT)
            _disturb(job, role, random.Random(f"{seed} {role}"))
            auc = job.outcome().auc
        undisturbed = undisturbed or auc
        print(f"{mode}, seed {seed}, {role or 'undisturbed'}: AUC {auc:.4f}", flush=True)
        assert abs(auc - undisturbed) <= _MOST_AUC, f"{role}: AUC {auc:.4f}, and undisturbed {undisturbed:.4f}"
    return len(ROLES)


def _disturb(job: ClickJob, role: str, chance: random.Random) -> None:
    joined = job.started(joins=True)
    if not role:
        return
    if role == "members":
        members = [joined]
        for _ in range(chance.randint(0, 2)):
            time.sleep(chance.uniform(0, 0.5))
            members.append(job.started(joins=True))
        for member in members:
            job.await_batch(member, chance.randrange(1, 12))
            if member.process.is_alive():  # else it has seen the end of the run
                os.kill(member.pid, chance.choice((signal.SIGTERM, signal.SIGINT)))
        return
    job.await_batch(joined, chance.randrange(1, 30))
    time.sleep(chance.uniform(0, 0.1))  # where in a step, a snapshot, a commit
    if role == "worker" and chance.random() < 0.5:
        joined.process.kill()
    elif role == "worker":
        job.first.process.kill()
        job.first.exit_code()
        job.first = job.started(continues=True)
    elif role == "shard":
        job.shards[chance.randrange(SHARDS)].kill()
    elif role == "scheduler":
        job.scheduler.kill()
