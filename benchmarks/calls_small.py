"""Calls of 100 rows of 16 floats: how long one takes, and how many a second one shard answers to four processes.

The rival is bare C: a ping-pong of the same bytes over the same carrier, with nothing done to them. Sides take turns.
Quantiles are of one turn's calls; of the turns, the median. A target of 0.67 means "at most 1.5 times bare C". In
shared memory bare C sleeps while it waits: to spin costs it nothing, for it has no work of its own.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
from _bare_ping_pong import HEADER_BYTES, Carrier, calls_per_second, compile_and_run
from _calls import SPINS, WAYS, client_process, draws, fill, tables
from _common import result
from _up import running_cluster

import geartrain as gt
from geartrain.ams.client.table import Table
from geartrain.launch.bench import Result

NUM_IDS, DIM, NUM_ROWS = 100, 16, 1_000_000
REQUEST_BYTES = NUM_IDS * 8 + HEADER_BYTES
REPLY_BYTES = NUM_IDS * DIM * 4 + HEADER_BYTES
CARRIERS: dict[str, Carrier] = {"same host": "shared_memory", "TCP": "tcp"}
ASLEEP = {"caller_spin_microseconds": 0, "server_spin_microseconds": 0}
ASLEEP_RIVAL = "bare C that sleeps"
ROUNDS, CALLS, UNCOUNTED = 7, 1_000, 100
EMBEDDED_MICROSECONDS = 20.0
CLIENTS, SECONDS, BARE_CALLS = 4, 2.0, 10_000
PULL = f"pull of {NUM_IDS} rows, D={DIM}"
Quantiles = tuple[float, float]
"""The median and the 99th percentile of calls, in µs."""


def results(full: bool = False) -> Iterator[Result]:
    """Yield the cases of ``geartrain bench calls`` about small calls; ``full`` takes five times as many turns."""
    rounds = ROUNDS * (5 if full else 1)
    yield from _latency(rounds)
    yield from _throughput(max(3, rounds // 2))


def _latency(rounds: int) -> Iterator[Result]:
    with tables(num_rows=NUM_ROWS, dim=DIM, optimizer=gt.SGD(lr=0.1)) as ours:
        turns: list[dict[str, Quantiles]] = []
        for _ in range(rounds + 1):
            turn = {way: _pull_times(table) for way, table in ours.items()}
            turn |= {"bare TCP": _bare_times("tcp", SPINS), "asleep": _bare_times("shared_memory", ASLEEP)}
            turns.append(turn)
    p50, p99 = ({side: statistics.median(turn[side][i] for turn in turns[1:]) for side in turns[0]} for i in (0, 1))
    embedded = "in the process"
    yield result(f"{PULL}, {embedded}, p50", p50[embedded], "budget", EMBEDDED_MICROSECONDS, "µs", target=1.0)
    for way, rival, side, target in (
        ("same host", ASLEEP_RIVAL, "asleep", 1 / 1.5),
        ("TCP", "bare C", "bare TCP", 1 / 2),
    ):
        yield result(f"{PULL}, {way}, p50", p50[way], f"{rival}, p50", p50[side], "µs", target=target)
    for way in CARRIERS:
        yield result(f"{PULL}, {way}, p99", p99[way], "its p50", p50[way], "µs", target=1 / 4)


def _pull_times(table: Table) -> Quantiles:
    draw, seconds = draws(NUM_ROWS, NUM_IDS), []
    for _ in range(UNCOUNTED + CALLS):
        ids = draw()
        began = time.perf_counter()
        table.pull(ids)
        seconds.append(time.perf_counter() - began)
    return _quantiles(seconds)


def _bare_times(carrier: Carrier, spins: dict[str, int]) -> Quantiles:
    (seconds,) = compile_and_run(carrier, REQUEST_BYTES, REPLY_BYTES, UNCOUNTED + CALLS, **spins)
    return _quantiles(seconds)


def _quantiles(seconds: list[float]) -> Quantiles:
    p50, p99 = np.percentile(seconds[UNCOUNTED:], [50, 99]) * 1e6
    return float(p50), float(p99)


def _throughput(rounds: int) -> Iterator[Result]:
    rivals: list[tuple[str, str, dict[str, int], float | None]] = [
        ("same host", ASLEEP_RIVAL, ASLEEP, 0.4),
        ("TCP", "bare C", SPINS, None),
    ]
    ours: dict[str, list[float]] = {way: [] for way in WAYS}
    theirs: dict[tuple[str, str], list[float]] = {(way, rival): [] for way, rival, _, _ in rivals}
    with running_cluster() as up, ExitStack() as ends:
        with gt.connect(up["scheduler"]) as cluster:
            fill(cluster.create_table("bench", dim=DIM, optimizer=gt.SGD(lr=0.1), num_rows=NUM_ROWS))
        commands = {way: [sys.executable, __file__, up["scheduler"], way] for way in WAYS}
        clients = {way: [ends.enter_context(client_process(commands[way])) for _ in range(CLIENTS)] for way in WAYS}
        for number in range(rounds + 1):
            answered = {way: _calls_a_second(clients[way]) for way in WAYS}
            bare = {
                (way, rival): calls_per_second(
                    compile_and_run(CARRIERS[way], REQUEST_BYTES, REPLY_BYTES, BARE_CALLS, CLIENTS, **spins)
                )
                for way, rival, spins, _ in rivals
            }
            if number:
                for way in WAYS:
                    ours[way].append(answered[way])
                for side, reached in bare.items():
                    theirs[side].append(reached)
    for way, rival, _, target in rivals:
        yield result(
            f"calls of {NUM_IDS} rows, D={DIM}, {CLIENTS} client processes, one shard, {way}",
            statistics.median(ours[way]),
            rival,
            statistics.median(theirs[way, rival]),
            "calls/s",
            target=target,
            more_is_better=True,
        )


def _calls_a_second(clients: list[subprocess.Popen[str]]) -> float:
    for client in clients:
        assert client.stdin is not None
        print(SECONDS, file=client.stdin, flush=True)
    return sum(json.loads(client.stdout.readline()) for client in clients if client.stdout is not None)


def _serve_turns(address: str, way: str) -> None:
    """A client process: for each line, pull for so many seconds and print the calls a second."""
    with gt.connect(address, config=WAYS[way]) as cluster:
        table, draw = cluster.table("bench"), draws(NUM_ROWS, NUM_IDS)
        table.pull(draw())
        print("ready", flush=True)
        for line in sys.stdin:
            calls, began = 0, time.perf_counter()
            while time.perf_counter() - began < float(line):
                table.pull(draw())
                calls += 1
            print(json.dumps(calls / (time.perf_counter() - began)), flush=True)


if __name__ == "__main__":
    _serve_turns(*sys.argv[1:])
