"""SIGKILL to real processes at seeded moments, counted in pushes. The oracle is outside: the job's own synced log, and
integer gradients whose sums are exact.
"""

from __future__ import annotations

import itertools
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.factory import connect
from geartrain.ams.client.table import Table
from geartrain.ams.storage.snapshot.folder import list_snapshots
from geartrain.ams.values.placement import bucket_of
from tests.faults.pusher import AT_ONCE, CONFIG, DIM, PUSHES, SPEC, WAIT_WHEN_FROZEN, content

ROLES = ("shard", "worker", "scheduler", "all", "shard during a snapshot")
SHARDS = 2
_UP = (sys.executable, "-m", "geartrain", "up", "--json", "--scheduler-listen=127.0.0.1:0")


@dataclass(frozen=True)
class Outcome:
    """What happened, where nothing was lost."""

    role: str
    seed: int
    moment: str
    """What the job had said last when the process was killed."""
    pushes_repeated: int
    """Pushes since the snapshot that the job went back to; 0 if it did not."""
    seconds: float


class Up:
    """``geartrain up`` with its roles."""

    def __init__(self, num_shards: int) -> None:
        self.num_shards = num_shards
        self._process = subprocess.Popen(
            [*_UP, f"--shards={num_shards}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout is not None
        facts = json.loads(self._process.stdout.readline())
        self.scheduler: str = facts["scheduler"]
        self._seen = [psutil.Process(pid) for pid in facts["pids"].values()]

    def kill(self, role: str) -> None:
        """Kill the first live process of a role, as ``server`` or ``--shard=1``."""
        for child in psutil.Process(self._process.pid).children():
            if child.status() != psutil.STATUS_ZOMBIE and role in child.cmdline():
                child.kill()
                return
        raise AssertionError(f"no {role} lives")

    def close(self) -> None:
        """Kill everything at once."""
        processes = [*self._seen, *psutil.Process(self._process.pid).children()]
        self._process.kill()
        for process in processes:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self._process.communicate()
        psutil.wait_procs(processes, 20)


class JobProcess:
    """The job, and what it says."""

    def __init__(self, address: str, folder: Path, seed: int, how: str) -> None:
        self.waits_when_frozen = (folder / WAIT_WHEN_FROZEN).exists()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.pusher", address, str(folder), str(seed), how],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def next(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the job ended by itself ({self._process.wait(10)})"
        event: dict[str, Any] = json.loads(line)
        return event

    def until(self, is_it: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        while not is_it(event := self.next()):
            assert "lost" not in event, event
        return event

    def go_on(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def suspend(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class Oracle:
    """What the rows must be, from the log alone."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._log, self._seed = folder / "log.jsonl", seed

    def furthest(self) -> int:
        """Return the last push that was acknowledged, ever."""
        return max((event.get("ack", 0) for event in self._events()), default=0)

    def since_the_last_start(self) -> tuple[set[int], set[int]]:
        """Return the pushes that are acknowledged, and those that may have been applied."""
        acknowledged: set[int] = set()
        begun: set[int] = set()
        for event in self._events():
            if "back" in event:
                acknowledged, begun = set(range(1, event["back"] + 1)), set()
            acknowledged |= {event["ack"]} if "ack" in event else set()
            begun |= {event["begin"]} if "begin" in event else set()
        return acknowledged, begun - acknowledged

    def _events(self) -> list[dict[str, Any]]:
        lines = self._log.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]

    def sum_of(self, numbers: Any) -> np.ndarray:
        assert SPEC.num_rows is not None
        total = np.zeros((SPEC.num_rows, DIM), np.float64)
        for number in numbers:
            ids, gradients = content(self._seed, number)
            total[ids] -= gradients
        return total

    def require_exact(self, rows: np.ndarray, numbers: Any) -> None:
        np.testing.assert_array_equal(rows, self.sum_of(numbers))

    def require_nothing_lost_or_doubled(self, rows: np.ndarray, ids: np.ndarray) -> None:
        """Check one shard, whose ids are given: every acknowledged push once, of those under way each at most once."""
        acknowledged, open_ones = self.since_the_last_start()
        assert len(open_ones) <= AT_ONCE
        least = self.sum_of(acknowledged)[ids]
        for count in range(len(open_ones) + 1):
            for some in itertools.combinations(sorted(open_ones), count):
                if np.array_equal(rows, least + self.sum_of(some)[ids]):
                    return
        raise AssertionError(
            f"acknowledged {sorted(acknowledged)}, under way {sorted(open_ones)}: the rows are no such sum"
        )


def run_kill(role: str, seed: int, folder: Path) -> Outcome:
    """Run the job on two shards, kill ``role`` once at a random moment, and see the job through to its exact end.

    Raises AssertionError if an acknowledged push was lost or doubled, or a restored row is not what its snapshot held.
    """
    start = time.monotonic()
    chance = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    oracle = Oracle(folder, seed)
    with ExitStack() as stack:
        running = Up(SHARDS)
        stack.callback(lambda: running.close())  # the one there is by then
        if role == "shard during a snapshot":
            (folder / WAIT_WHEN_FROZEN).touch()
        job = JobProcess(running.scheduler, folder, seed, "new")
        stack.callback(lambda: job.close())
        moment = _await_moment(role, job, chance)
        if role == "all":
            job.close()
            running.close()
            running = Up(chance.choice([1, 2, 3]))
            job = JobProcess(running.scheduler, folder, seed, "resume")
        elif role == "worker":
            job.close()
            with _client(running) as cluster:
                for shard in range(SHARDS):
                    _require_shard(oracle, cluster, shard)
            job = JobProcess(running.scheduler, folder, seed, "resume")
        elif role == "scheduler":
            running.kill("scheduler")
        else:
            _kill_a_shard(running, job, oracle, chance, is_frozen=role != "shard")
        repeated = _see_through(running, job, oracle, goes_back=role != "scheduler")
        _require_snapshots(folder)
    return Outcome(role, seed, moment, repeated, time.monotonic() - start)


def _await_moment(role: str, job: JobProcess, chance: random.Random) -> str:
    if role == "shard during a snapshot":
        number = chance.randrange(1, 5)
        for _ in range(number):
            job.until(lambda event: "frozen" in event)
            job.go_on()
        return str(job.until(lambda event: "frozen" in event))
    number = chance.randrange(2, PUSHES - AT_ONCE)
    kind = chance.choice(["begin", "ack"])
    return str(job.until(lambda event: event.get(kind) == number))


def _kill_a_shard(running: Up, job: JobProcess, oracle: Oracle, chance: random.Random, *, is_frozen: bool) -> None:
    killed = chance.randrange(SHARDS)
    is_writing = is_frozen and chance.random() < 0.5
    if is_writing:
        job.go_on()
    running.kill(f"--shard={killed}")
    if is_frozen and not is_writing:
        job.go_on()
    while "lost" not in (event := job.next()):
        assert "done" not in event, "the job ended without noticing"
        if "frozen" in event and job.waits_when_frozen:
            job.go_on()
    with _client(running) as cluster:
        _require_shard(oracle, cluster, 1 - killed)
    job.go_on()


def _see_through(running: Up, job: JobProcess, oracle: Oracle, *, goes_back: bool) -> int:
    repeated = 0
    while "done" not in (event := job.next()):
        if "lost" in event:  # a call had still been under way to the process that was killed
            job.go_on()
        if "frozen" in event and job.waits_when_frozen:
            job.go_on()
        if "back" in event:
            assert goes_back
            repeated = oracle.furthest() - int(event["back"])
            with _client(running) as cluster:
                oracle.require_exact(rows_of(cluster), range(1, int(event["back"]) + 1))
            job.go_on()
    with _client(running) as cluster:
        oracle.require_exact(rows_of(cluster), range(1, PUSHES + 1))
    return repeated


def _require_snapshots(folder: Path) -> None:
    for listed in list_snapshots(folder / "snapshots"):
        assert listed.snapshot is not None, listed.damage
        assert listed.snapshot.verify() == []


@contextmanager
def _client(running: Up) -> Iterator[Cluster]:
    with connect(running.scheduler, config=CONFIG) as cluster:
        yield cluster


def rows_of(cluster: Cluster, ids: np.ndarray | None = None) -> np.ndarray:
    """Return the rows of some ids, or all of them."""
    table = Table(SPEC, cluster._calls, cluster._stream)
    assert SPEC.num_rows is not None
    return np.asarray(table.pull(np.arange(SPEC.num_rows) if ids is None else ids))


def _require_shard(oracle: Oracle, cluster: Cluster, shard: int) -> None:
    assert SPEC.num_rows is not None
    every = np.arange(SPEC.num_rows)
    ids = every[cluster._calls.view.bucket_shards[bucket_of(every, dense=True)] == shard]
    oracle.require_nothing_lost_or_doubled(rows_of(cluster, ids), ids)
