"""Overload: many clients push 100,000 rows each to one shard, again and again, as fast as it takes them.

Three promises: its memory stays bounded, no push is lost or applied twice, and everyone has a fair share. The default
is 16 clients whose pushes, all at once, are less than half of the bound; ``--full`` is 50, and five times the bound.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from _calls import WAYS, result
from _up import running_cluster

import geartrain as gt
from geartrain.launch.bench import Result

NUM_IDS, NUM_ROWS = 100_000, 400_000
BOUND_MIB = 256.0
"""What a shard may take beyond its rows, however many ask."""
FAIR = 0.5
"""Of a fair share, what the slowest has at least; the fastest has at most its inverse."""


class Load(NamedTuple):
    """Who pushes what."""

    processes: int
    clients_each: int
    dim: int
    seconds: float

    @property
    def clients(self) -> int:
        return self.processes * self.clients_each


DEFAULT, FULL = Load(4, 4, 16, 6.0), Load(5, 10, 64, 40.0)


def results(full: bool = False) -> Iterator[Result]:
    """The overload cases of ``geartrain bench calls``."""
    load = FULL if full else DEFAULT
    for way in WAYS:
        yield from _overloaded(load, way)


def _overloaded(load: Load, way: str) -> Iterator[Result]:
    with running_cluster() as up, gt.connect(up["scheduler"]) as cluster, ExitStack() as ends:
        table = cluster.create_table("bench", dim=load.dim, optimizer=gt.SGD(lr=1.0), num_rows=NUM_ROWS)
        every = np.arange(NUM_ROWS)
        table.assign(every, np.zeros((NUM_ROWS, load.dim), np.float32))
        shard = up["pids"]["server 0"]
        before = _anonymous_mib(shard)
        clients = [ends.enter_context(_process(up["scheduler"], way, load, first)) for first in range(load.processes)]
        ends.enter_context(_ended(peak := _Peak(shard)))
        pushes: list[int] = []
        for client in clients:
            assert client.stdin is not None
            print("go", file=client.stdin, flush=True)
        for client in clients:
            assert client.stdout is not None
            pushes += json.loads(client.stdout.readline() or "[]")
        most = peak.mib - before
        lost = _wrong_rows(table.pull(every), pushes) if len(pushes) == load.clients else NUM_ROWS
    case = f"{load.clients} clients push {NUM_IDS:,} rows, D={load.dim}, to one shard, {way}"
    at_once = load.clients * NUM_IDS * (8 + 4 * load.dim) / 2**20
    yield result(f"{case}: memory beyond its rows", most, "bound", BOUND_MIB, "MiB", target=1.0)
    yield result(f"{case}: memory beyond its rows", most, "all pushes at once", at_once, "MiB", target=None)
    yield result(f"{case}: rows as pushed", NUM_ROWS - lost, "all", NUM_ROWS, "rows", target=1.0, more_is_better=True)
    fair = statistics.mean(pushes) if pushes else 1.0
    slowest, fastest = min(pushes, default=0), max(pushes, default=0) or 1
    yield result(f"{case}: slowest", slowest, "fair share", fair, "pushes", target=FAIR, more_is_better=True)
    yield result(f"{case}: fastest", fastest, "fair share", fair, "pushes", target=FAIR)


def _ids_of(client: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The rows [NUM_IDS] that a client pushes to: they overlap with others'."""
    return np.random.default_rng(client).choice(NUM_ROWS, NUM_IDS, replace=False).astype(np.int64)


def _wrong_rows(rows: np.ndarray[tuple[int, int], np.dtype[np.float32]], pushes: list[int]) -> int:
    """Rows that are not the number of pushes to them; each push adds 1, so that floats say it exactly."""
    expected = np.zeros(NUM_ROWS, np.float32)
    for client, count in enumerate(pushes):
        expected[_ids_of(client)] += count
    return int((rows != expected[:, None]).any(axis=1).sum())


@contextmanager
def _process(address: str, way: str, load: Load, number: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, __file__, address, way, str(number), json.dumps(load)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()  # its clients are connected
        try:
            yield process
        finally:
            process.stdin.close()


class _Peak:
    """Looks at the memory of a process every few milliseconds."""

    def __init__(self, pid: int) -> None:
        self.mib = 0.0
        self._pid = pid
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(0.01):
            self.mib = max(self.mib, _anonymous_mib(self._pid))

    def end(self) -> None:
        self._over.set()
        self._thread.join()


@contextmanager
def _ended(peak: _Peak) -> Iterator[None]:
    try:
        yield
    finally:
        peak.end()


def _anonymous_mib(pid: int) -> float:
    """Memory of its own; what a client shares with it is the client's."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/{pid}/status has no RssAnon")


def _push_until_told(address: str, way: str, number: str, load_text: str) -> None:
    """A process of several clients: when told to, they push; prints how often each did."""
    load = Load(*json.loads(load_text))
    gradients = np.full((NUM_IDS, load.dim), -1, np.float32)
    counts = [0] * load.clients_each
    with ExitStack() as ends:
        first = int(number) * load.clients_each
        sides = []
        for client in range(first, first + load.clients_each):
            cluster = ends.enter_context(gt.connect(address, config=WAYS[way]))
            sides.append((cluster.table("bench"), _ids_of(client)))
        print("ready", flush=True)
        sys.stdin.readline()
        end = time.monotonic() + load.seconds

        def push(mine: int) -> None:
            table, ids = sides[mine]
            while time.monotonic() < end:
                table.push(ids, gradients)
                counts[mine] += 1

        threads = [threading.Thread(target=push, args=(mine,)) for mine in range(load.clients_each)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(json.dumps(counts), flush=True)
        sys.stdin.read()  # until the rows have been looked at


if __name__ == "__main__":
    _push_until_told(*sys.argv[1:])
