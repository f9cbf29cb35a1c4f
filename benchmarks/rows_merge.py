"""Merging repeated ids of a push, when they are the ids of one shard of many, against ``numpy.unique``.

Ids of a hashed table in no order, as a shard gets them after routing. They all share the bits of their hash that chose
the shard: what it costs to merge them must not grow with the number of shards, so the last cases compare each with the
ids of an only shard.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
from _turns import median_seconds

from geartrain.ams.kernels import ops
from geartrain.ams.values.placement import bucket_of, even_placement
from geartrain.ams.values.specs import Ids
from geartrain.launch.bench import Result

NUM_IDS = 50_000
SHARDS = (1, 8, 128)
ROUNDS, CALLS, UNCOUNTED = 4, 8, 2


@functools.cache
def ids_of_a_shard(num_shards: int) -> Ids:
    """Ids [NUM_IDS] of shard 0 of so many, each four times on average."""
    generator = np.random.default_rng(num_shards)
    drawn = generator.integers(0, 2**62, NUM_IDS // 4 * num_shards * 2)
    mine = drawn[even_placement(num_shards)[bucket_of(drawn, dense=False)] == 0][: NUM_IDS // 4]
    return generator.choice(mine, NUM_IDS)


def results(full: bool = False) -> Iterator[Result]:  # noqa: ARG001
    """The cases of ``geartrain bench rows_merge``."""
    sides = [functools.partial(_merge, shards) for shards in SHARDS]
    *ours, rival = median_seconds([*sides, _unique], lambda: None, rounds=ROUNDS, calls=CALLS, uncounted=UNCOUNTED)
    for shards, seconds in zip(SHARDS, ours, strict=True):
        yield _result(shards, seconds, "numpy.unique(return_inverse=True)", rival, 3.0)
    for shards, seconds in zip(SHARDS[1:], ours[1:], strict=True):
        yield _result(shards, seconds, "ours, the ids of an only shard", ours[0], 0.7)


def _merge(num_shards: int, _: None) -> None:
    ops.merge_duplicates(ids_of_a_shard(num_shards))


def _unique(_: None) -> None:
    np.unique(ids_of_a_shard(1), return_inverse=True)


def _result(shards: int, ours: float, rival: str, theirs: float, target: float) -> Result:
    return Result(
        case=f"merge {NUM_IDS} ids of one of {shards} {'shard' if shards == 1 else 'shards'}, hashed, 1 thread",
        ours=ours * 1e3,
        rival=rival,
        theirs=theirs * 1e3,
        unit="ms",
        ratio=theirs / ours,
        target=target,
    )
