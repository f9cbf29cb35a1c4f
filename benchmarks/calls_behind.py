"""Pulls of 100 rows by one client while another one pushes 1,000,000 rows to the same shard, again and again.

One pull is due every few milliseconds, whether the one before it is back or not, and waits from then on: who waits long
is counted as often as who does not. The rival is the time that such a push takes alone.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
from _calls import WAYS, draws, fill, result
from _up import running_cluster

import geartrain as gt
from geartrain.launch.bench import Result

NUM_ROWS, NUM_PUSHED, NUM_PULLED, DIM = 1_500_000, 1_000_000, 100, 16
SECONDS, ROUNDS, PERIOD = 3.0, 3, 0.004
SHARE = 0.05
"""Of a push: what all but one of 100 pulls may take."""


def results(full: bool = False) -> Iterator[Result]:
    """The cases of ``geartrain bench calls`` about a small call behind a large one; ``full``: three times as long."""
    for way in WAYS:
        yield from _behind_pushes(way, ROUNDS * (3 if full else 1))


def _behind_pushes(way: str, rounds: int) -> Iterator[Result]:
    alone: list[float] = []
    beside: list[float] = []
    p50s, p99s = [], []
    with running_cluster() as up, ExitStack() as ends:
        cluster = ends.enter_context(gt.connect(up["scheduler"], config=WAYS[way]))
        table = cluster.create_table("bench", dim=DIM, optimizer=gt.SGD(lr=0.1), num_rows=NUM_ROWS)
        fill(table)
        pusher = ends.enter_context(_pusher(up["scheduler"], way))
        for _ in range(rounds):
            _begin(pusher, SECONDS)
            alone += _end(pusher)
            _begin(pusher, SECONDS)
            waits = _pull_for(table, SECONDS * 0.9)
            beside += _end(pusher)
            p50, p99 = np.percentile(waits, [50, 99]) * 1e3
            p50s.append(float(p50))
            p99s.append(float(p99))
    push = statistics.median(alone) * 1e3
    case = f"pull of {NUM_PULLED} rows, D={DIM}, while another client pushes {NUM_PUSHED:,}, {way}"
    yield result(f"{case}, p50", statistics.median(p50s), "the push", push, "ms", target=None)
    yield result(f"{case}, p99", statistics.median(p99s), f"{SHARE:.0%} of the push", SHARE * push, "ms", target=1.0)
    yield result(
        f"push of {NUM_PUSHED:,} beside those, {way}", statistics.median(beside) * 1e3, "alone", push, "ms", target=0.5
    )


def _pull_for(table: gt.Table, seconds: float) -> list[float]:
    draw, waits = draws(NUM_ROWS, NUM_PULLED), []
    due = time.perf_counter()
    end = due + seconds
    while due < end:
        time.sleep(max(0.0, due - time.perf_counter()))
        table.pull(draw())
        waits.append(time.perf_counter() - due)
        due += PERIOD
    return waits


@contextmanager
def _pusher(address: str, way: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, __file__, address, way]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None and client.stdin is not None
        client.stdout.readline()  # it is connected
        try:
            yield client
        finally:
            client.stdin.close()


def _begin(pusher: subprocess.Popen[str], seconds: float) -> None:
    assert pusher.stdin is not None
    print(seconds, file=pusher.stdin, flush=True)


def _end(pusher: subprocess.Popen[str]) -> list[float]:
    assert pusher.stdout is not None
    taken: list[float] = json.loads(pusher.stdout.readline())
    return taken


def _serve_turns(address: str, way: str) -> None:
    """The client that pushes: for each line, for so many seconds; prints how long each push took."""
    with gt.connect(address, config=WAYS[way]) as cluster:
        table, draw = cluster.table("bench"), draws(NUM_ROWS, NUM_PUSHED, batches=3)
        gradients = np.ones((NUM_PUSHED, DIM), np.float32)
        table.push(draw(), gradients)
        print("ready", flush=True)
        for line in sys.stdin:
            taken, end = [], time.perf_counter() + float(line)
            while (began := time.perf_counter()) < end:
                table.push(draw(), gradients)
                taken.append(time.perf_counter() - began)
            print(json.dumps(taken), flush=True)


if __name__ == "__main__":
    _serve_turns(*sys.argv[1:])
