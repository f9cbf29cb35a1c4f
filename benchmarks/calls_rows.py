"""Pull and push of 10,000 rows of 128 floats from a shard of another process, against one in the process and Redis.

A target of 0.5 means "at most twice the time in the process". The rows are pulled into an array that the caller keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from _calls import WAYS, draws, tables
from _common import median_seconds, result
from _redis_server import redis_client

import geartrain as gt
from geartrain.ams.client.table import Table
from geartrain.ams.values.specs import Ids
from geartrain.launch.bench import Result

NUM_IDS, DIM, NUM_ROWS, ROUNDS = 10_000, 128, 200_000, 5
EMBEDDED = "in the process"
OF_EMBEDDED = {"same host": 1 / 2, "TCP": 1 / 4.5}
OF_REDIS = {"pull": {"same host": 7.0, "TCP": 3.0}, "push": {"same host": None, "TCP": None}}
Side = Callable[[Ids], object]


def results(full: bool = False) -> Iterator[Result]:
    """Yield the cases of ``geartrain bench calls`` about many rows; ``full`` takes five times as many turns."""
    rounds = ROUNDS * (5 if full else 1)
    out = np.empty((NUM_IDS, DIM), np.float32)
    gradients = np.random.default_rng(1).normal(size=(NUM_IDS, DIM)).astype(np.float32)
    with tables(num_rows=NUM_ROWS, dim=DIM, optimizer=gt.SparseMomentum(lr=0.1)) as ours, redis_client() as redis:
        pulls: dict[str, Side] = {way: _pull_of(table, out) for way, table in ours.items()}
        pushes: dict[str, Side] = {way: _push_of(table, gradients) for way, table in ours.items()}
        if redis is not None:
            rows = {i.to_bytes(8, "little"): bytes(DIM * 4) for i in range(NUM_IDS)}
            keys = list(rows)
            redis.mset(rows)
            pulls["Redis MGET"] = lambda _: redis.mget(keys)
            pushes["Redis MSET"] = lambda _: redis.mset(rows)
        yield from _compare("pull", pulls, rounds)
        yield from _compare("push", pushes, rounds)


def _pull_of(table: Table, out: np.ndarray[Any, Any]) -> Side:
    return lambda ids: table.pull_into(ids, out)


def _push_of(table: Table, gradients: np.ndarray[Any, Any]) -> Side:
    return lambda ids: table.push(ids, gradients)


def _compare(operation: str, sides: dict[str, Side], rounds: int) -> Iterator[Result]:
    seconds = median_seconds(list(sides.values()), draws(NUM_ROWS, NUM_IDS), rounds=rounds)
    millis = {side: 1e3 * duration for side, duration in zip(sides, seconds, strict=True)}
    kind = "with SparseMomentum, " if operation == "push" else ""
    for way in WAYS:
        case = f"{operation} of {NUM_IDS:,} rows, D={DIM}, {kind}{way}"
        yield result(case, millis[way], EMBEDDED, millis[EMBEDDED], "ms", target=round(OF_EMBEDDED[way], 2))
        for rival in sides:
            if rival.startswith("Redis"):
                yield result(
                    case, millis[way], f"{rival} (unix socket)", millis[rival], "ms", target=OF_REDIS[operation][way]
                )
