"""One small real scenario for each failpoint; a test runs one seed of each, a campaign runs many.

A job pushes integers whose exact sum is known, takes snapshots, checks every row as it goes, and once goes back on
purpose. Somewhere on the way the failpoint fires; the process that died is started again; the job goes back to the
last snapshot if rows were lost, and on to its end. The oracle is outside the system: the sums are computed here, and
a job in another process keeps a log of what was acknowledged.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.factory import connect
from geartrain.ams.client.table import Table
from geartrain.ams.observe.failpoints import EXIT_CODE, FAILPOINTS, armed
from geartrain.ams.scheduler.service import SchedulerServer
from geartrain.ams.server.role import ShardServer
from geartrain.ams.storage.snapshot.folder import latest, list_snapshots, prune
from geartrain.ams.values.config import ClientConfig, SchedulerConfig, ServerConfig
from geartrain.ams.values.errors import (
    InternalError,
    ShardRestarted,
    SnapshotDamaged,
    SnapshotFailed,
    StaleCluster,
    StateFailed,
    Unavailable,
)
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.placement import split_by_shard
from geartrain.ams.values.specs import Constant

NUM_ROWS, DIM = 4096, 16
STEPS, SNAPSHOT_EVERY, GO_BACK_AT = 9, 3, 5
KEEP = 2
LOST = (ShardRestarted, Unavailable, StaleCluster)
STALL_SECONDS = 0.6
PATIENT = ClientConfig(
    attempt_timeout_seconds=5.0,
    recovery_timeout_seconds=60.0,
    connect_timeout_seconds=30.0,
    refused_timeout_seconds=30.0,
    part_bytes=64 << 10,
)
HASTY = PATIENT.model_copy(update={"attempt_timeout_seconds": 0.25})
"""Sends again while a stalled shard still works on the first attempt."""
IDS = np.arange(NUM_ROWS)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one scenario."""

    name: str
    seed: int
    armed: str
    """What was armed."""
    fired: bool
    """Whether it happened: the process died of it, or its count says so."""
    acknowledged: int
    """Pushes that were acknowledged, also those that were made again after going back."""
    recoveries: int
    wrong_rows: int
    """Rows that at any check were not the exact sum; 0 unless updates were lost or doubled."""
    snapshots: int
    damage: tuple[str, ...]
    """Of snapshots that a listing shows."""

    @property
    def held(self) -> bool:
        """Whether the failpoint fired and every guarantee held."""
        return self.fired and self.wrong_rows == 0 and not self.damage and self.snapshots > 0


def gradients_of(seed: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """The push of a step: ids [N] and integers [N, DIM]; every third is large enough to travel in parts."""
    own = np.random.default_rng([seed, step])
    ids = np.sort(own.choice(NUM_ROWS, NUM_ROWS if step % 3 == 0 else 100, replace=False))
    return ids, own.integers(-3, 4, (len(ids), DIM)).astype(np.float32)


def rows_at(seed: int, step: int) -> np.ndarray:
    """The exact rows after the first ``step`` pushes, [NUM_ROWS, DIM]."""
    rows = np.zeros((NUM_ROWS, DIM), np.float32)
    for earlier in range(step):
        ids, gradients = gradients_of(seed, earlier)
        rows[ids] -= gradients
    return rows


@dataclass
class Job:
    """Pushes, takes snapshots, checks, goes back; what a worker does, without the network to train."""

    seed: int
    address: str
    root: Path
    config: ClientConfig = PATIENT
    table: str = "t"
    stream: str | None = None
    """Named, it numbers its pushes by its steps, anew when it goes back."""
    log: Callable[[str], object] = lambda _: None
    """Told ``push N`` once N pushes are acknowledged, and ``back`` before the rows are replaced."""
    acknowledged: int = 0
    recoveries: int = 0
    wrong_rows: int = 0
    went_back: bool = False
    damage: list[str] = field(default_factory=list)
    """Why it could not go back."""
    _opened: ExitStack = field(default_factory=ExitStack)

    def run(self) -> None:
        """From the last snapshot, if there is one, to the end; or until that snapshot cannot be read."""
        deadline = time.monotonic() + PATIENT.recovery_timeout_seconds
        try:
            step = -1
            while True:
                try:
                    if step < 0:
                        cluster, table, step = self._begin()
                    elif step < STEPS:
                        step = self._step(cluster, table, step)
                    else:
                        self._check(table, STEPS)  # a role may die here, too
                        break
                except (*LOST, InternalError, StateFailed):
                    self.recoveries += 1
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.02)  # the role may not be back yet
                    step = -1
        except SnapshotDamaged as exc:
            self.damage.append(str(exc))
        finally:
            self._opened.close()

    def _begin(self) -> tuple[Cluster, Table, int]:
        self._opened.close()
        cluster = self._opened.enter_context(connect(self.address, config=self.config, stream=self.stream))
        self.log("back")
        if self.stream is not None:
            cluster.fence(self.stream, cluster.write_stream.incarnation)
        if not list_snapshots(self.root):
            cluster.drop_table(self.table)
            create = {"dim": DIM, "optimizer": SGD(1.0), "num_rows": NUM_ROWS, "initializer": Constant(0)}
            return cluster, cluster.create_table(self.table, **create), 0  # type: ignore[arg-type]
        step = cluster.restore(latest(self.root).path, replace=True).manifest.step  # whatever was left of it
        table = cluster.table(self.table)
        self._check(table, step)
        return cluster, table, step

    def _step(self, cluster: Cluster, table: Table, step: int) -> int:
        """One step; returns the next one, or -1 to go back."""
        sequence = None
        if self.stream is not None:
            cluster.acknowledge(sequence := step + 1)
        write = table.prepare_push(*gradients_of(self.seed, step), sequence=sequence)
        try:
            write.send()
        except Unavailable:
            write.send()  # the same write: whoever applied it already says so
        step += 1
        self.acknowledged += 1
        self.log(f"push {step}")
        if step % SNAPSHOT_EVERY == 0:
            self._check(table, step)
            self._snapshot(cluster, step)
        if step == GO_BACK_AT and not self.went_back:
            self.went_back = True
            return -1
        return step

    def _snapshot(self, cluster: Cluster, step: int) -> None:
        if any(listed.name == f"step-{step:09}" for listed in list_snapshots(self.root)):
            return  # from before this job went back
        try:
            cluster.snapshot(self.root, step=step, tables=[self.table]).result(60)
            prune(self.root, KEEP)
        except SnapshotFailed:
            pass  # training goes on; what is listed is checked at the end

    def _check(self, table: Table, step: int) -> None:
        self.wrong_rows += int((table.pull(IDS) != rows_at(self.seed, step)).any(axis=1).sum())


def work(pipe: Connection, seed: int, address: str, root: str, log: str, **settings: Any) -> None:
    """:class:`Job` in a process of its own."""
    with Path(log).open("ab", buffering=0) as file:
        Job(seed, address, Path(root), log=lambda line: file.write(f"{line}\n".encode()), **settings).run()
    pipe.close()


@contextmanager
def served(num_shards: int = 2, *, scheduler: str | None = None, shards: list[int] | None = None) -> Iterator[Served]:
    """Roles on threads of this process, behind real sockets; those that are given run elsewhere."""
    roles = Served(num_shards, scheduler)
    try:
        for shard in range(num_shards) if shards is None else shards:
            roles.start_shard(shard)
        yield roles
    finally:
        roles.stop()


class Served:
    """The roles of this process."""

    def __init__(self, num_shards: int, scheduler: str | None) -> None:
        self._scheduler = None
        if scheduler is None:
            self._scheduler = SchedulerServer(SchedulerConfig(**SCHEDULER, num_shards=num_shards))
            scheduler = self._scheduler.start()
        self.address = scheduler
        self._servers: dict[int, ShardServer] = {}
        self._addresses: dict[int, str] = {}

    def start_shard(self, shard: int) -> None:
        """Start a shard, at its old port if it had one."""
        listen = self._addresses.get(shard, "127.0.0.1:0")
        while True:
            server = ShardServer(ServerConfig(**shard_settings(self.address, shard), listen=listen))
            try:
                self._addresses[shard] = server.start()[0]
                break
            except (InternalError, StateFailed):  # an armed failpoint of the scheduler: tried again, as by 'up'
                continue
        self._servers[shard] = server

    def replace_shard(self, shard: int) -> None:
        """Lose a shard and its rows, and start it again."""
        self._servers.pop(shard).stop(0)
        self.start_shard(shard)

    def stop(self) -> None:
        """End all of them."""
        for server in self._servers.values():
            server.stop(0)
        if self._scheduler is not None:
            self._scheduler.stop(0)


SCHEDULER = {"listen": "127.0.0.1:0", "lease_seconds": 30.0}


def shard_settings(scheduler: str, shard: int) -> dict[str, object]:
    """Settings of one shard."""
    return {"scheduler": scheduler, "shard": shard, "heartbeat_seconds": 0.05}


# Failpoint -> the role that is armed, and how often it is passed there at least.
SHARD, CLIENT, SCHEDULER_ROLE, WORKER = "shard", "client", "scheduler", "worker"
PLACES: dict[str, tuple[str, int]] = {
    "client.send.before": (CLIENT, STEPS),
    "client.reply.after": (CLIENT, STEPS),
    "shard.apply.before": (SHARD, STEPS),
    "shard.apply.after": (SHARD, STEPS),
    "shard.mark.before": (SHARD, STEPS),
    "shard.mark.after": (SHARD, STEPS),
    "shard.reply.before": (SHARD, STEPS),
    "freeze.before": (SHARD, 3),
    "freeze.after": (SHARD, 3),
    "thaw.before": (SHARD, 3),
    "block.write.before": (SHARD, 3),
    "block.write.after": (SHARD, 3),
    "file.sync.before": (SHARD, 3),
    "file.rename.before": (SHARD, 3),
    "folder.sync.before": (CLIENT, 6),
    "manifest.write.before": (CLIENT, 3),
    "manifest.write.after": (CLIENT, 3),
    "snapshot.rename.before": (CLIENT, 3),
    "snapshot.rename.after": (CLIENT, 3),
    "snapshot.commit.after": (CLIENT, 3),
    "prune.before": (CLIENT, 1),
    "restore.create.after": (CLIENT, 1),
    "restore.block.before": (SHARD, 1),
    "restore.block.after": (SHARD, 1),
    "restore.publish.before": (CLIENT, 1),
    "restore.publish.after": (CLIENT, 1),
    "lease.heartbeat.before": (SHARD, 1),
    "lease.heartbeat.after": (SHARD, 1),
    "scheduler.register.before": (SCHEDULER_ROLE, 2),
    "scheduler.version.before": (SCHEDULER_ROLE, 1),
    "scheduler.version.after": (SCHEDULER_ROLE, 1),
    "state.write.before": (SCHEDULER_ROLE, 6),
    "state.write.after": (SCHEDULER_ROLE, 6),
    "table.create.before": (SCHEDULER_ROLE, 2),
    "table.create.after": (SCHEDULER_ROLE, 2),
    "table.publish.before": (SCHEDULER_ROLE, 1),
    "table.publish.after": (SCHEDULER_ROLE, 1),
    "job.save.before": (WORKER, 3),
    "job.save.after": (WORKER, 3),
}

ELSEWHERE = {
    "graph.part.after": "tests/integration/graph/test_graph_role.py",
    "shard.parts.before": "tests/integration/head/test_hosted_retries.py",
    "model.publish.before": "tests/unit/bridge/checkpoint/test_saved_models.py",
    **dict.fromkeys(
        (f"job.{part}.before" for part in ("torch", "data", "connect", "restore", "step", "report")),
        "tests/faults/test_sigterm_of_workers.py",
    ),
}
"""Failpoints that the jobs of this file do not come to, and the file that tests them."""


def actions_of(name: str) -> tuple[str, ...]:
    """What scenarios do at a failpoint; seed S does the (S mod n)-th."""
    role, _ = PLACES[name]
    if role == WORKER:
        return ("kill",)
    stalls = (f"sleep({STALL_SECONDS})",) if name.startswith(("shard.", "lease.")) else ()
    errors = ("error",) if FAILPOINTS[name] is not None else ()
    return ("kill", *errors, *stalls, "exit")


def run_scenario(name: str, seed: int, folder: Path) -> Outcome:
    """Run the scenario of failpoint ``name``; the seed decides its data, the action and at which pass it is taken.

    ``folder`` is empty, or does not exist. Raises nothing for a guarantee that did not hold: see :attr:`Outcome.held`.
    """
    role, most = PLACES[name]
    actions = actions_of(name)
    action = actions[seed % len(actions)]
    nth = int(np.random.default_rng([seed, *name.encode()]).integers(1, most + 1))
    text = f"{name}={action}@{nth}"
    folder.mkdir(parents=True, exist_ok=True)
    if role == WORKER:
        from tests.faults.worker_scenario import worker_dies

        return worker_dies(seed, name, text, folder)
    root = folder / "snapshots"
    if action not in ("kill", "exit"):
        return _goes_on(name, seed, text, root)
    return {SHARD: _shard_dies, CLIENT: _client_dies, SCHEDULER_ROLE: _scheduler_dies}[role](name, seed, text, root)


def _goes_on(name: str, seed: int, text: str, root: Path) -> Outcome:
    """Nobody dies: something fails or stalls, in this process."""
    with served() as roles, armed(text) as passes:
        if PLACES[name][0] == SCHEDULER_ROLE and not name.startswith("table."):
            roles.replace_shard(1)
            roles.replace_shard(0)
        job = Job(seed, roles.address, root, HASTY if "sleep" in text else PATIENT)
        job.run()
    return _outcome(name, seed, text, job, passes.fired[name] == 1)


def _shard_dies(name: str, seed: int, text: str, root: Path) -> Outcome:
    from tests.faults.children import Supervised

    with served(shards=[1]) as roles:
        shard = Supervised("server", {**shard_settings(roles.address, 0), "listen": "127.0.0.1:0"}, text)
        try:
            job = Job(seed, roles.address, root, PATIENT)
            job.run()
        finally:
            shard.end()
    return _outcome(name, seed, text, job, died_of(text, shard.exit_codes[:1]))


def _scheduler_dies(name: str, seed: int, text: str, root: Path) -> Outcome:
    from tests.faults.children import Supervised

    settings = {**SCHEDULER, "num_shards": 2, "data": str(root.with_name("scheduler"))}
    scheduler = Supervised("scheduler", settings, text)
    try:
        with served(scheduler=scheduler.address) as roles:
            if name.startswith("scheduler.version"):
                roles.replace_shard(1)
            job = Job(seed, roles.address, root)
            job.run()
    finally:
        scheduler.end()
    return _outcome(name, seed, text, job, died_of(text, scheduler.exit_codes[:1]))


def _client_dies(name: str, seed: int, text: str, root: Path) -> Outcome:
    from tests.faults.children import Child

    log = root.with_suffix(".log")
    with served() as roles:
        child = Child(work, seed, roles.address, str(root), str(log), armed=text)
        code = child.exit_code()
        child.end()
        lines = log.read_text().splitlines()
        wrong = _wrong_after_death(seed, roles.address, lines)
        job = Job(seed, roles.address, root, went_back=True)
        job.run()
    job.wrong_rows += wrong
    job.recoveries += 1
    job.acknowledged += sum(line.startswith("push") for line in lines)
    return _outcome(name, seed, text, job, died_of(text, [code]))


def _wrong_after_death(seed: int, address: str, lines: list[str]) -> int:
    """Rows that hold neither what the dead job's log says nor, shard by shard, one push more: the one under way."""
    if not lines[-1].startswith("push"):
        return 0  # it died while its rows were replaced
    step = int(lines[-1].removeprefix("push "))
    before, after = rows_at(seed, step), rows_at(seed, min(step + 1, STEPS))
    wrong = 0
    with connect(address, config=PATIENT) as cluster:
        rows = cluster.table("t").pull(IDS)
        view = cluster._scheduler.describe()
        for _, positions in split_by_shard(IDS, view.bucket_shards, view.num_shards, dense=True):
            own = slice(None) if positions is None else positions
            wrong += min(int((rows[own] != either[own]).any(axis=1).sum()) for either in (before, after))
    return wrong


def died_of(text: str, exit_codes: list[int | None]) -> bool:
    """Whether the armed process ended by what was armed."""
    return exit_codes == [-signal.SIGKILL if "=kill" in text else EXIT_CODE]


def _outcome(name: str, seed: int, text: str, job: Job, fired: bool) -> Outcome:
    listed = list_snapshots(job.root)
    damage = [*job.damage]
    for item in listed:
        damage += [str(item.damage)] if item.snapshot is None else map(str, item.snapshot.verify())
    shown = {child.name for child in job.root.iterdir() if not child.name.startswith((".staging-", ".trash-"))}
    damage += [f"{extra} is no snapshot" for extra in shown - {item.name for item in listed}]
    return Outcome(
        name=name,
        seed=seed,
        armed=text,
        fired=fired,
        acknowledged=job.acknowledged,
        recoveries=job.recoveries,
        wrong_rows=job.wrong_rows,
        snapshots=len(listed),
        damage=tuple(damage),
    )
