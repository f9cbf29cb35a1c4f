"""A click model's run of several workers, of which each sample adds one, and its click, to its row of one more table.

``run`` kills one of its processes at a random moment, or has workers join and leave; nobody calls restore().
"""

from __future__ import annotations

import json
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
from geartrain.ams.client.cluster_status import cluster_status
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
_MAX_AUC = 0.002
"""By which it may differ from the same run undisturbed."""
_DEADLINE_SECONDS = 120.0


class Outcome(NamedTuple):
    """The end of a run, as its first worker tells it."""

    counts: np.ndarray
    """How often each sample is in the rows."""
    clicks: np.ndarray
    """Sum of the clicks of each sample in the rows."""
    auc: float
    """Of what is held out; of a topic nothing is: NaN."""


def serve_topic(pipe: Connection, count: int) -> None:
    """Be the brokers of ``count`` impressions in four partitions, every other four clicked 40 seconds later."""
    import confluent_kafka as kafka

    producer = kafka.Producer({"test.mock.num.brokers": 1, "log_level": 0})
    (broker,) = producer.list_topics(timeout=20).brokers.values()
    producer.list_topics("clicks", timeout=20)

    def send(partition: int, **row: Any) -> None:
        producer.produce("clicks", value=json.dumps(row).encode(), partition=partition)

    for at in range(count):
        send(at % 4, impression=at, time=at, click=0, user=at % 9, at=at)
        if at >= 40 and at % 8 > 3:
            send(at % 4, impression=at - 40, time=at, click=1)
    assert producer.flush(30) == 0
    pipe.send(f"kafka:clicks@{broker.host}:{broker.port}")
    pipe.recv()


class CountedTrainer(ClickTrainer):
    """Says what it has trained on, and at the end how often each sample is in the rows."""

    pipe: Connection
    count: int
    """Of samples, those held out among them."""
    dies_at = -1
    """The batch after whose pushes, and before whose commit, it is killed."""
    pauses_at = -1
    """The batch after whose pushes, and before whose commit, it waits until others want to be alone, or it is told."""
    halts_at = ""
    """The part of its end before which it waits until it is told."""

    def __init__(self, attempt: Any, data: Any) -> None:
        self._done = 0
        self._counts = attempt.cluster.create_table(
            f"{attempt.progress.table}/counts",
            dim=2,
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
        clicks = np.asarray(batch["click"], np.float32)
        self._seen = np.stack([np.ones_like(clicks), clicks], axis=1)
        return super().loss(step)

    def update(self) -> None:
        super().update()
        self._counts.push(self._ids, -self._seen)
        self._done += 1
        self.pipe.send(self._done)
        if self._done == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._done == self.pauses_at:
            streams = self.samples._leased._streams  # type: ignore[attr-defined]
            while not (streams.commit().pause or self.pipe.poll(0.05)):
                pass

    def _halt(self, place: str) -> None:
        if place == self.halts_at:
            CountedTrainer.halts_at = ""
            self.pipe.send(place)
            self.pipe.recv()

    def _validate(self) -> None:
        if self.samples.has_ended():
            self._halt("look")
        super()._validate()

    def trained(self) -> None:
        super().trained()
        self._halt("snapshot")

    def start_snapshot(self, *place: Any, **more: Any) -> Any:
        if self.samples.has_ended():
            self._halt("last freeze")
        elif self._done:
            self._halt("freeze")
        return super().start_snapshot(*place, **more)

    def goes_on_restored(self) -> bool:
        self.pipe.send("lost")
        return super().goes_on_restored()

    def predict(self) -> Any:
        self._halt("predict")
        return super().predict()

    def report(self) -> dict[str, Any]:
        self._halt("report")
        counts, clicks = np.asarray(self._counts.pull(np.arange(self.count))).T
        report = super().report()
        self.pipe.send(Outcome(counts, clicks, report.get("held_out", {}).get("auc", float("nan"))))
        return report


def work(
    pipe: Connection,
    data: str,
    out: Path,
    count: int,
    scheduler: str,
    mode: str,
    more: dict[str, Any],
    at: dict[str, Any],
) -> None:
    """Train, as the worker that begins the run, joins it (``joins``) or goes on with it (``continues``). ``at``:
    attributes of its trainer, when it dies or waits.
    """
    CountedTrainer.pipe, CountedTrainer.count = pipe, count
    for name, value in at.items():
        setattr(CountedTrainer, name, value)
    given: dict[str, Any] = {"dim": 4, "hidden": (8,), "dropout": 0.0, "epochs": EPOCHS, "patience": 0, "mode": mode}
    given |= {"batch_size": _RANDOM_BATCH if count == _RANDOM_COUNT else 50, "lr": 0.005, "row_lr": 0.005}
    if data.startswith("kafka:"):
        given["features"] = {"user": {"kind": "int64"}, "at": {"kind": "int64"}}
        given["kafka"] = {"until": "now", "label_window_seconds": 50}
        given["snapshots"] = SnapshotSettings(minutes=0.05)  # each makes all workers ask the brokers anew
    else:
        given["features"] = {"at": FeatureSettings(admission=1000.0)}  # a number of a sample: nothing is learned of it
        given["snapshots"] = SnapshotSettings(minutes=0.03)
    options = JobOptions(
        job="ctr",
        recipe=recipe_for(None, **given),
        loggers=(),
        out=out,
        data=data,
        scheduler=scheduler,
        cache=out.parent,
        **more,
    )
    run_job(CountedTrainer, options, Console())
    pipe.send("done")


class ClickJob:
    """Scheduler, shards and the first worker as processes; the data are clicks of a file or a topic."""

    def __init__(
        self,
        folder: Path,
        stack: ExitStack,
        *,
        mode: str,
        count: int,
        is_topic: bool = False,
        armed: str = "",
        **at: Any,
    ) -> None:
        """``armed``: failpoints of the scheduler's first life; ``at``: when the first worker dies or waits."""
        folder.mkdir(exist_ok=True)
        self._out, self._count, self._mode, self._stack = folder / "run", count, mode, stack
        self._is_topic = is_topic
        if is_topic:
            brokers = Child(serve_topic, count)
            stack.callback(brokers.end)
            self._data = brokers.receive()
        else:
            self._data = str(_write_clicks(folder / "a.parquet", count))
        self.start_cluster(folder / "state", armed)
        self._workers: list[Child] = []
        self.first = self.started(**at)
        self.await_batch(self.first, 1)  # there is a run to join

    def start_cluster(self, state: Path, armed: str = "") -> None:
        """Start scheduler and shards, which know of the run what ``state`` says."""
        settings = {"listen": "127.0.0.1:0", "num_shards": SHARDS, "data": str(state)}
        settings |= {"lease_seconds": 30.0, "stream_lease_seconds": 2.0}
        self.scheduler = Supervised("scheduler", settings, armed)
        self._stack.callback(self.scheduler.end)
        self.shards = []
        for number in range(SHARDS):
            self.shards.append(Supervised("server", {"scheduler": self.scheduler.address, "shard": number}, ""))
            self._stack.callback(self.shards[-1].end)

    def end_cluster(self) -> None:
        """Kill scheduler and shards for good."""
        for role in (self.scheduler, *self.shards):
            role.end()

    def started(self, *, joins: bool = False, continues: bool = False, **at: Any) -> Child:
        """One more worker: it ``joins`` the run, or ``continues`` it."""
        more = {"joins": joins, "continues": continues}
        worker = Child(work, self._data, self._out, self._count, self.scheduler.address, self._mode, more, at)
        self._stack.callback(worker.end)
        self._workers.append(worker)
        return worker

    def continued_elsewhere(self, **at: Any) -> Child:
        """One more worker: it continues the run as on another machine, which does not know this one's locks."""
        before = self._out.rename(self._out.with_name("as on the first machine"))
        self._out.mkdir()
        for path in before.iterdir():
            path.rename(self._out / path.name)
        return self.started(continues=True, **at)

    def await_batch(self, worker: Child, number: int) -> None:
        """Wait until it has trained on so many, or the run has ended."""
        while isinstance(done := worker.receive(_DEADLINE_SECONDS), int) and done < number:
            pass

    def await_word(self, worker: Child, word: str) -> None:
        """Wait until it says so."""
        while worker.receive(_DEADLINE_SECONDS) != word:
            pass

    def require_failed(self, worker: Child) -> None:
        """Wait until a worker has ended with an error."""
        assert worker.exit_code(_DEADLINE_SECONDS) == 1
        self._workers.remove(worker)

    def await_restore(self) -> None:
        """Wait until the scheduler restores the tables."""
        deadline = time.monotonic() + _DEADLINE_SECONDS
        while not cluster_status(self.scheduler.address).restoring_tables:
            assert time.monotonic() < deadline, "no table is being restored"

    def outcome(self) -> Outcome:
        """See the run to its end. Raises AssertionError if a sample is not in the rows once an epoch (of a topic:
        once, with its late click), or a worker ended with an error.
        """
        while not isinstance(outcome := self.first.receive(_DEADLINE_SECONDS), Outcome):
            pass
        trained = outcome.counts > 0
        if self._is_topic:
            at = np.arange(self._count)
            assert np.all(outcome.counts == 1), np.unique(outcome.counts, return_counts=True)
            assert np.all(outcome.clicks == ((at + 40) % 8 > 3) * (at + 40 < self._count))
            return outcome
        assert trained.sum() == self._count * 4 // 5, np.unique(outcome.counts, return_counts=True)
        assert np.all(outcome.counts[trained] == EPOCHS), np.unique(outcome.counts, return_counts=True)
        codes = [worker.exit_code(_DEADLINE_SECONDS) for worker in self._workers]
        assert set(codes) <= {0, -signal.SIGKILL}, codes
        return outcome


def _write_clicks(path: Path, count: int) -> Path:
    """Write clicks that depend on user and item."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    at, chance = np.arange(count), np.random.default_rng(0)
    user, item = chance.integers(0, 9, count), chance.integers(0, 7, count)
    odds = chance.normal(size=9)[user] + chance.normal(size=7)[item] - 1
    click = (chance.random(count) < 1 / (1 + np.exp(-odds))).astype(np.int64)
    table = pa.table({"click": click, "user": user, "item": item, "at": at})
    pq.write_table(table, path, row_group_size=200)
    return path


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
        assert abs(auc - undisturbed) <= _MAX_AUC, f"{role}: AUC {auc:.4f}, and undisturbed {undisturbed:.4f}"
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
