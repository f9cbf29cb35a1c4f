"""Both layers of the dense-feature cache: what is a hit, and what is never one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.ams.observe.metrics import Buckets
from geartrain.ams.storage.features.factory import open_store
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.gear_messages import FeatureReply
from geartrain.ams.values.specs import Ids
from geartrain.bridge.gear.dense_cache import AGE_EDGES, SharedCache, WorkerCache
from tests.redis_child import running_redis

DIM = 4
Cache = WorkerCache | SharedCache


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with running_redis() as child:
        yield child.url


@pytest.fixture(params=["worker", "memory", "lmdb", "redis"])
def make(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[Any]:
    """Makes an empty cache of one kind."""
    stores = []

    def make_one(**settings: Any) -> Cache:
        settings.setdefault("expire_seconds", 20.0)
        if request.param == "worker":
            return WorkerCache(100, DIM, **settings)
        if request.param == "redis":
            url = request.getfixturevalue("redis_url")
        else:
            url = "memory" if request.param == "memory" else f"lmdb:{tmp_path}/{len(stores)}"
        stores.append(
            open_store(url, namespace=f"{request.node.name[:60].replace('[', '-').rstrip(']')}/{len(stores)}")
        )
        return SharedCache(stores[-1], DIM, **settings)

    yield make_one
    for store in stores:
        store.close()


def features(ids: list[int], version: int = 0, time: float = 100.0) -> FeatureReply:
    vectors = np.array([[number + 1000.0 * version] * DIM for number in ids], np.float32).reshape(-1, DIM)
    return reply_of(vectors, np.full(len(ids), version), np.full(len(ids), time))


def reply_of(vectors: Any, versions: Any, times: Any) -> FeatureReply:
    return FeatureReply(vectors_KD=vectors, versions=versions, times=times, failures={}, dense_version=0)


def ids_of(*ids: int) -> Ids:
    return np.array(ids, np.int64)


def hits(cache: Cache, *ids: int, now: float = 100.0, dense_version: int = 0) -> list[bool]:
    found, hit = cache.lookup(ids_of(*ids), now=now, dense_version=dense_version)
    assert found.vectors_KD.shape == (len(ids), DIM) and found.vectors_KD.dtype == np.float32
    return hit.tolist()


@pytest.mark.parametrize("settings", [{"expire_seconds": -1.0}, {"max_version_lag": -1}])
def test_wrong_settings_are_named(make: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=r"(expire_seconds|max_version_lag) is -1"):
        make(**settings)


def test_what_was_inserted_is_found(make: Any) -> None:
    cache = make()
    cache.insert(ids_of(5, 6), features([5, 6], version=3, time=90.0))
    found, hit = cache.lookup(np.array([6, 1, 5, 6]), now=100.0, dense_version=4)
    assert hit.tolist() == [True, False, True, True]
    assert found.vectors_KD[hit].tolist() == [[3006.0] * DIM, [3005.0] * DIM, [3006.0] * DIM]
    assert found.versions.tolist() == [3, -1, 3, 3] and found.times.tolist() == [90.0, -np.inf, 90.0, 90.0]
    assert hits(cache) == []


def test_an_entry_expires(make: Any) -> None:
    cache = make(expire_seconds=20.0)
    cache.insert(ids_of(1), features([1], time=100.0))
    assert [hits(cache, 1, now=now)[0] for now in (100.0, 119.9, 120.0, 500.0)] == [True, True, False, False]
    never = make(expire_seconds=0.0)
    never.insert(ids_of(1), features([1]))
    assert hits(never, 1) == [False]


def test_a_clock_set_back_makes_nothing_immortal(make: Any) -> None:
    cache = make(expire_seconds=20.0)
    cache.insert(ids_of(1), features([1], time=100.0))
    assert hits(cache, 1, now=81.0) == [True], "a small step is forgiven"
    assert hits(cache, 1, now=80.0) == [False], "from further ahead than an entry may be behind"
    assert hits(cache, 1, now=-1e9) == [False]


def test_an_entry_lags(make: Any) -> None:
    cache = make(expire_seconds=np.inf, max_version_lag=2)
    cache.insert(ids_of(1), features([1], version=5))
    lags = {version: hits(cache, 1, now=1e12, dense_version=version)[0] for version in (2, 3, 5, 7, 8)}
    assert lags == {2: False, 3: True, 5: True, 7: True, 8: False}
    unbounded = make(expire_seconds=np.inf)
    unbounded.insert(ids_of(1), features([1], version=5))
    assert hits(unbounded, 1, dense_version=10**9) == [True]


def test_the_report_says_why_and_how_old(make: Any) -> None:
    cache = make(expire_seconds=20.0, max_version_lag=3)
    cache.insert(
        ids_of(1, 2, 3), reply_of(np.ones((3, DIM), np.float32), np.array([9, 5, 9]), np.array([99.0, 99.0, 50.0]))
    )
    hits(cache, 1, 1, 2, 3, 4, now=100.0, dense_version=10)
    report = cache.report()
    assert [report[name] for name in ("hits", "misses", "absent", "expired", "lagging")] == [2, 3, 1, 1, 1]
    assert report["hit_rate"] == 0.4
    ages = report["age_seconds"]
    assert len(ages["counts"]) == len(ages["edges"]) + 1 == len(AGE_EDGES) + 1
    assert ages["counts"][AGE_EDGES.index(1.0) + 1] == 2 == sum(ages["counts"])
    assert report["version_lag"]["counts"][:3] == [0, 2, 0]
    told = {metric.name: list(metric.samples) for metric in cache.metrics()}
    assert [value for _, value in told["cache_hits_total"] + told["cache_misses_total"]] == [2, 3]
    ((_, age),), ((_, lag),) = told["feature_age_seconds"], told["feature_lag_updates"]
    assert isinstance(age, Buckets) and isinstance(lag, Buckets)
    assert age.bounds[age.counts.index(2) - 1] == 1.0 and lag.bounds[lag.counts.index(2)] == 1


def test_a_full_worker_cache_forgets_what_was_used_least_recently() -> None:
    cache = WorkerCache(3, DIM, expire_seconds=20.0)
    cache.insert(ids_of(1, 2, 3), features([1, 2, 3]))
    hits(cache, 1)
    cache.insert(ids_of(4), features([4]))
    assert hits(cache, 1, 2, 3, 4) == [True, False, True, True]
    cache.insert(ids_of(*range(10, 20)), features(list(range(10, 20))))
    assert hits(cache, *range(16, 20)) == [False, True, True, True]
    assert cache.report()["entries"] == 3 and cache.report()["evicted"] == 4
    cache.clear()
    assert hits(cache, 17, 18) == [False, False]


def test_a_cache_that_came_to_a_device_in_inference_takes_what_training_inserts() -> None:
    cache, device = WorkerCache(3, DIM, expire_seconds=20.0), torch.device("meta")
    with torch.inference_mode():
        cache.vectors(ids_of(1), device, now=100.0, dense_version=0)
    cache.insert(ids_of(1, 2), features([1, 2]))
    vectors, judged = cache.vectors(ids_of(1, 3), device, now=100.0, dense_version=0)
    assert (vectors.device, judged.hits.tolist()) == (device, [True, False])


def test_features_of_another_width_are_misses_and_counted() -> None:
    store = open_store("memory")
    SharedCache(store, DIM + 1, expire_seconds=20.0).insert(
        ids_of(1), reply_of(np.ones((1, DIM + 1), np.float32), np.zeros(1, np.int64), np.full(1, 100.0))
    )
    cache = SharedCache(store, DIM, expire_seconds=20.0)
    assert hits(cache, 1, 2) == [False, False]
    assert cache.report()["foreign"] == 1 and cache.report()["absent"] == 2


@settings(max_examples=60, deadline=None)
@given(
    inserts=st.lists(st.tuples(st.lists(st.integers(0, 12), max_size=8), st.integers(0, 9)), max_size=12),
    looked_up=st.lists(st.integers(0, 12), max_size=20),
)
def test_a_hit_is_always_what_was_inserted_last(inserts: list[tuple[list[int], int]], looked_up: list[int]) -> None:
    cache = WorkerCache(6, DIM, expire_seconds=20.0)
    model: dict[int, float] = {}
    for ids, version in inserts:
        ids = list(dict.fromkeys(ids))
        cache.insert(ids_of(*ids), features(ids, version=version))
        model |= {number: number + 1000.0 * version for number in ids}
    found, hit = cache.lookup(ids_of(*looked_up), now=100.0, dense_version=0)
    for number, is_hit, vector in zip(looked_up, hit.tolist(), found.vectors_KD.tolist(), strict=True):
        assert not is_hit or vector == [model[number]] * DIM
    assert len({number for number, is_hit in zip(looked_up, hit, strict=True) if is_hit}) <= 6


def test_threads_never_see_a_vector_of_another_id() -> None:
    cache = WorkerCache(50, DIM, expire_seconds=20.0)
    wrong = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(200):
            ids = rng.permutation(100)[:30]
            cache.insert(ids, features(ids.tolist()))
            found, hit = cache.lookup(ids, now=100.0, dense_version=0)
            wrong.append(int((found.vectors_KD[:, 0][hit] != ids[hit]).sum()))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(wrong) == 0 and len(wrong) == 800
