"""Layers of the dense-feature cache: 1,000 ids that all hit, D = 64, against a bare fetch of the same bytes.

The worker layer's rival is torch gathering rows whose positions are known already: no index, no stamps, no counts. The
Redis layer's rival is redis-py's MGET of the same keys on the same server (with hiredis where that is installed): no
seals, no decoding.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from _common import median_seconds, result, threads
from _redis_server import redis_client, socket_of

from geartrain.ams.storage.features.factory import open_store
from geartrain.ams.values.gear_messages import FeatureReply
from geartrain.bridge.gear.dense_cache import SharedCache, WorkerCache
from geartrain.launch.bench import Result

NUM_IDS = 1_000
DIM = 64
CAPACITY = 100_000
NUM_BATCHES = 16
ROUNDS = 16
NOW = 1_000.0
Turn = Callable[[int], object]
GATHER_TARGET = 0.25
MGET_TARGET = round(1 / 1.3, 3)


def measure_worker_layer() -> list[Result]:
    """Lookup in the worker's own memory, in turns with a gather in each of torch's two forms.

    On one thread: torch would wake others for these 256 KB, which costs more than they copy.
    """
    with threads(1):
        return _against_gathers()


def _against_gathers() -> list[Result]:
    ids = _ids(CAPACITY)
    cache = WorkerCache(CAPACITY, DIM, expire_seconds=20.0)
    cache.insert(ids, _features(CAPACITY))
    slab = torch.randn(CAPACITY, DIM)
    places = _batches(CAPACITY)
    batches = [ids[place] for place in places]
    positions = [torch.from_numpy(place) for place in places]
    assert all(cache.lookup(batch, now=NOW, dense_version=1)[1].all() for batch in batches)

    def lookup(turn: int) -> object:
        return cache.lookup(batches[turn], now=NOW, dense_version=1)

    case = "worker layer, lookup"
    ours, theirs = _timed(lookup, lambda turn: slab[positions[turn]])
    results = [_result(case, ours, "torch slab[positions]", theirs, GATHER_TARGET)]
    ours, theirs = _timed(lookup, lambda turn: slab.index_select(0, positions[turn]))
    return [*results, _result(case, ours, "torch slab.index_select", theirs, GATHER_TARGET)]


def measure_redis_layer() -> list[Result]:
    """Read and lookup through a Redis server, alternating with MGET; empty where Redis or its client is missing."""
    count = 20 * NUM_IDS
    ids = _ids(count)
    with redis_client() as client:
        if client is None:
            return []
        store = open_store(f"unix://{socket_of(client)}?db=0", namespace="bench")
        cache = SharedCache(store, DIM, expire_seconds=20.0)
        cache.insert(ids, _features(count))
        places = _batches(count)
        batches = [ids[place] for place in places]
        keys = [[b"geartrain:bench:" + int(key).to_bytes(8, "little") for key in batch] for batch in batches]
        assert all(cache.lookup(batch, now=NOW, dense_version=1)[1].all() for batch in batches)
        assert None not in client.mget(keys[0])
        read, mget_beside_read = _timed(lambda turn: store.read(batches[turn]), lambda turn: client.mget(keys[turn]))
        lookup, mget_beside_lookup = _timed(
            lambda turn: cache.lookup(batches[turn], now=NOW, dense_version=1), lambda turn: client.mget(keys[turn])
        )
        store.close()
    return [
        _result("Redis store, read with seals", read, "redis-py MGET", mget_beside_read, MGET_TARGET),
        _result("Redis layer, lookup", lookup, "redis-py MGET", mget_beside_lookup, MGET_TARGET),
    ]


def _ids(count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.random.default_rng(0).permutation(10 * count)[:count].astype(np.int64)


def _batches(count: int) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
    rng = np.random.default_rng(1)
    return [rng.choice(count, NUM_IDS, replace=False) for _ in range(NUM_BATCHES)]


def _features(count: int) -> FeatureReply:
    return FeatureReply(
        vectors_KD=torch.randn(count, DIM).numpy(),
        versions=np.zeros(count, np.int64),
        times=np.full(count, NOW - 1.0),
        failures={},
        dense_version=0,
    )


def _timed(ours: Turn, theirs: Turn) -> tuple[float, float]:
    """Median seconds of a lookup of each side, over one batch after the other."""
    turns = itertools.cycle(range(NUM_BATCHES))
    mine, other = median_seconds([ours, theirs], lambda: next(turns), rounds=ROUNDS)
    return mine, other


def _result(case: str, ours: float, rival: str, theirs: float, target: float | None) -> Result:
    return result(f"{case}, {NUM_IDS:,} ids, D={DIM} fp32", ours * 1e6, rival, theirs * 1e6, "us", target=target)


def results(full: bool = False) -> Iterator[Result]:  # noqa: ARG001
    """Yield the cache cases of ``geartrain bench gear``."""
    yield from measure_worker_layer()
    yield from measure_redis_layer()
