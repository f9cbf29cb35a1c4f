"""Rows of a float32 table that travel in 16 bits, against the same in 32: pulls and pushes of 10,000 and of 100,000.

Pushes are with SparseMomentum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from _calls import WAYS, draws, result, tables
from _turns import median_seconds

import geartrain as gt
from geartrain.ams.values.specs import Ids
from geartrain.launch.bench import Result

DIM, NUM_ROWS, ROUNDS = 128, 200_000, 5
CALLS = {10_000: 16, 100_000: 6}
"""In a turn, by the rows of each."""
WIDE = "in float32"
TARGET = 1.0
"""Half the bytes must not take longer by TCP."""


def results(full: bool = False) -> Iterator[Result]:
    """The cases of ``geartrain bench calls`` about the type of rows on the way; ``full`` takes three times as long."""
    with tables(num_rows=NUM_ROWS, dim=DIM, optimizer=gt.SparseMomentum(lr=0.1), embedded=False) as ours:
        for num_ids, calls in CALLS.items():
            for way in WAYS:
                yield from _compare(ours[way], way, num_ids, calls, ROUNDS * (3 if full else 1))


def _compare(table: gt.Table, way: str, num_ids: int, calls: int, rounds: int) -> Iterator[Result]:
    out = np.empty((num_ids, DIM), np.float32)
    gradients = np.random.default_rng(1).normal(size=(num_ids, DIM)).astype(np.float32)

    def pull(one: gt.Table) -> Callable[[Ids], Any]:
        return lambda ids: one.pull_into(ids, out)

    def push(one: gt.Table) -> Callable[[Ids], Any]:
        return lambda ids: one.push(ids, gradients)

    handles = {WIDE: table, **{f"in {dtype}": table.with_wire(dtype) for dtype in ("bfloat16", "float16")}}
    for operation, of_table in {"pull": pull, "push": push}.items():
        sides = {side: of_table(each) for side, each in handles.items()}
        seconds = median_seconds(
            list(sides.values()), draws(NUM_ROWS, num_ids), rounds=rounds, calls=calls, uncounted=2
        )
        millis = {side: 1e3 * one for side, one in zip(sides, seconds, strict=True)}
        for side in list(sides)[1:]:
            case = f"{operation} of {num_ids:,} rows, D={DIM}, {side}, {way}"
            yield result(case, millis[side], WIDE, millis[WIDE], "ms", target=TARGET if way == "TCP" else None)
