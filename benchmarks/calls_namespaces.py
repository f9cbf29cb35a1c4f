"""Rows between two hosts, as far as one machine has two: network namespaces, joined by a link; against a raw socket.

Pulls that take 1 to 16 MB, and pushes of 4, four in flight. The rival is a socket in C that carries the same bytes.
Needs root and ``ip``.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

import numpy as np
from _bare_ping_pong import HEADER_BYTES, Namespaces, compile_and_run, two_namespaces
from _calls import WAYS, client_process, draws, fill, result
from _up import running_cluster

import geartrain as gt
from geartrain.launch.bench import Result

DIM, NUM_ROWS, IN_FLIGHT, ROUNDS = 128, 200_000, 4, 5
CASES = (("pull", 1), ("pull", 4), ("pull", 16), ("push", 4))
"""Operations and the MB of their rows."""
TURN_MEGABYTES = 256
TARGET = 0.7


def results(full: bool = False) -> Iterator[Result]:
    """The cases of ``geartrain bench calls`` between hosts; ``full`` takes five times as many turns."""
    with ExitStack() as ends:
        try:
            between = ends.enter_context(two_namespaces())
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"Without namespaces: {error}")
            return
        for name in (between.server, between.client):
            subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
        up = ends.enter_context(
            running_cluster(
                host=between.host,
                flags=["--insecure"],
                settings={"GEARTRAIN_SERVER__LISTEN": f"{between.host}:0"},
                prefix=["ip", "netns", "exec", between.server],
            )
        )
        command = ["ip", "netns", "exec", between.client, sys.executable, __file__, up["scheduler"]]
        client = ends.enter_context(client_process(command))
        for operation, megabytes in CASES:
            yield _compare(client, between, operation, megabytes, ROUNDS * (5 if full else 1))


def _compare(client: subprocess.Popen[str], between: Namespaces, operation: str, megabytes: int, rounds: int) -> Result:
    num_ids, calls = _num_ids(megabytes), TURN_MEGABYTES // megabytes
    request, reply = num_ids * 8 + HEADER_BYTES, num_ids * DIM * 4 + HEADER_BYTES
    if operation == "push":
        request, reply = request + reply - HEADER_BYTES, HEADER_BYTES
    ours, theirs = [], []
    for number in range(rounds + 1):
        assert client.stdin is not None and client.stdout is not None
        print(operation, megabytes, file=client.stdin, flush=True)
        seconds = json.loads(client.stdout.readline())
        (bare,) = compile_and_run("tcp", request, reply, calls, in_flight=IN_FLIGHT, between=between)
        if number:
            ours.append(seconds / calls)
            theirs.append(sum(bare) / calls)
    size = num_ids * DIM * 4 / 1e6
    return result(
        f"{operation} of {num_ids:,} rows, D={DIM}, {size:.1f} MB, {IN_FLIGHT} in flight, between namespaces by TCP",
        size / statistics.median(ours),
        "raw socket in C",
        size / statistics.median(theirs),
        "MB/s",
        target=TARGET,
        more_is_better=True,
    )


def _num_ids(megabytes: int) -> int:
    return megabytes * 1_000_000 // (DIM * 4)


def _serve_turns(address: str) -> None:
    """The client process: for each line "OPERATION MEGABYTES", a turn of such calls; prints its seconds."""
    with gt.connect(address, config=WAYS["TCP"]) as cluster:
        table = cluster.create_table("bench", dim=DIM, optimizer=gt.SGD(lr=0.1), num_rows=NUM_ROWS)
        fill(table)
        print("ready", flush=True)
        for line in sys.stdin:
            operation, megabytes = line.split()
            print(json.dumps(_turn(table, operation, int(megabytes))), flush=True)


def _turn(table: gt.Table, operation: str, megabytes: int) -> float:
    num_ids = _num_ids(megabytes)
    draw = draws(NUM_ROWS, num_ids, batches=4)
    rows = [np.ones((num_ids, DIM), np.float32) for _ in range(IN_FLIGHT)]
    begin: Callable[[Any, Any], Future[Any]] = table.pull_into_async if operation == "pull" else table.push_async
    under_way: deque[Future[Any]] = deque()
    began = time.perf_counter()
    for number in range(TURN_MEGABYTES // megabytes):
        if len(under_way) == IN_FLIGHT:
            under_way.popleft().result()
        under_way.append(begin(draw(), rows[number % IN_FLIGHT]))
    for one in under_way:
        one.result()
    return time.perf_counter() - began


if __name__ == "__main__":
    _serve_turns(*sys.argv[1:])
