"""SIGSTOP past the lease: a shard's process is stopped, replaced by another, and goes on as if nothing had been."""

from __future__ import annotations

import random
import signal
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.cluster_status import cluster_status
from geartrain.ams.client.factory import connect
from geartrain.ams.client.table import Table
from geartrain.ams.values.config import ClientConfig
from geartrain.ams.values.errors import GeartrainError
from geartrain.ams.values.placement import bucket_of
from tests.faults.kills import JobProcess, Oracle, rows_of
from tests.faults.pusher import AT_ONCE, DIM, PUSHES, SPEC
from tests.support.role_process import RoleProcess

GONE_WITHIN_SECONDS = 30.0


@dataclass(frozen=True)
class Outcome:
    """What happened, where nothing was lost."""

    seed: int
    moment: str
    zombie_refused: int
    """Writes that the process refused after it went on; -1 where that is not promised and was not tried."""
    seconds: float


def run_stop(seed: int, folder: Path) -> Outcome:
    """Stop a shard's process at a random moment, replace it, see the job through, and let the old one go on.

    Raises AssertionError if an acknowledged push was lost or doubled, or the old process does not end by itself.
    """
    start = time.monotonic()
    chance = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    oracle = Oracle(folder, seed)
    with ExitStack() as stack:
        scheduler = _role(stack, "scheduler", "--num-shards=2")
        servers = [_server(stack, scheduler, shard) for shard in range(2)]
        old_client = stack.enter_context(connect(scheduler.address, config=_QUICK))
        job = JobProcess(scheduler.address, folder, seed, "new")
        stack.callback(job.close)
        number, kind = chance.randrange(2, PUSHES - AT_ONCE), chance.choice(["begin", "ack"])
        moment = str(job.until(lambda event: event.get(kind) == number))
        stopped = chance.randrange(2)
        servers[stopped].process.send_signal(signal.SIGSTOP)
        while cluster_status(scheduler.address).shards[stopped].state != "lost":
            time.sleep(0.05)
        _server(stack, scheduler, stopped)
        goes_on_early = chance.random() < 0.5
        if goes_on_early:
            servers[stopped].process.send_signal(signal.SIGCONT)
        while "done" not in (event := job.next()):
            if "back" in event:
                with connect(scheduler.address, config=_QUICK) as cluster:
                    oracle.require_exact(rows_of(cluster), range(1, int(event["back"]) + 1))
            if "back" in event or "lost" in event:
                job.go_on()
        if not goes_on_early:
            servers[stopped].process.send_signal(signal.SIGCONT)
        refused = _refused_by_the_zombie(old_client, stopped)
        servers[stopped].process.wait(GONE_WITHIN_SECONDS)  # a process that was replaced serves nobody
        with connect(scheduler.address, config=_QUICK) as cluster:
            oracle.require_exact(rows_of(cluster), range(1, PUSHES + 1))
    return Outcome(seed, moment, refused, time.monotonic() - start)


_QUICK = ClientConfig(
    attempt_timeout_seconds=2.0, recovery_timeout_seconds=0, connect_timeout_seconds=60, refused_timeout_seconds=60
)


def _refused_by_the_zombie(client: Cluster, shard: int) -> int:
    """Write to the old process as one that knows no other; every write must be refused or find nobody."""
    assert SPEC.num_rows is not None
    every = np.arange(SPEC.num_rows)
    ids = every[client._calls.view.bucket_shards[bucket_of(every, dense=True)] == shard]
    table = Table(SPEC, client._calls, client._stream)
    refused = 0
    for _ in range(5):
        try:
            table.push(ids, np.ones((len(ids), DIM), np.float32))
        except GeartrainError:
            refused += 1
    assert refused == 5, "a process that was replaced has acknowledged a write"
    return refused


def _role(stack: ExitStack, *arguments: str) -> RoleProcess:
    quick = {"GEARTRAIN_SCHEDULER__LEASE_SECONDS": "1", "GEARTRAIN_SERVER__HEARTBEAT_SECONDS": "0.2"}
    return stack.enter_context(RoleProcess(*arguments, "--listen=127.0.0.1:0", **quick))


def _server(stack: ExitStack, scheduler: RoleProcess, shard: int) -> RoleProcess:
    return _role(stack, "server", f"--scheduler={scheduler.address}", f"--shard={shard}")
