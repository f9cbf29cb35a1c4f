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

from geartrain.ams.storage.features.factory import open_store
from geartrain.ams.values.errors import InvalidArgument, InvalidIds, InvalidRows
from geartrain.bridge.gear.dense_cache import AGE_EDGES, DenseFeatures, SharedCache, WorkerCache
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


def features(ids: list[int], version: int = 0, time: float = 100.0) -> DenseFeatures:
    vectors = torch.tensor([[one + 1000.0 * version] * DIM for one in ids]).reshape(-1, DIM)
    return DenseFeatures(vectors, np.full(len(ids), version), np.full(len(ids), time))


def ids_of(*ids: int) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.int64)


def hits(cache: Cache, *ids: int, now: float = 100.0, dense_version: int = 0) -> list[bool]:
    found, hit = cache.lookup(ids_of(*ids), now=now, dense_version=dense_version)
    assert found.vectors.shape == (len(ids), DIM) and found.vectors.dtype == torch.float32
    return hit.tolist()


def test_what_was_inserted_is_found(make: Any) -> None:
    cache = make()
    cache.insert(ids_of(5, 6), features([5, 6], version=3, time=90.0))
    found, hit = cache.lookup(np.array([6, 1, 5, 6]), now=100.0, dense_version=4)
    assert hit.tolist() == [True, False, True, True]
    assert found.vectors[torch.from_numpy(hit)].tolist() == [[3006.0] * DIM, [3005.0] * DIM, [3006.0] * DIM]
    assert found.versions.tolist() == [3, -1, 3, 3] and found.times.tolist() == [90.0, -np.inf, 90.0, 90.0]
    assert hits(cache) == []


def test_the_last_of_a_repeated_id_counts(make: Any) -> None:
    cache = make()
    both = features([7, 8, 7])
    both.vectors[2] = 9.0
    cache.insert(ids_of(7, 8, 7), both)
    assert cache.lookup(ids_of(7), now=100.0, dense_version=0)[0].vectors.tolist() == [[9.0] * DIM]


def test_an_entry_expires(make: Any) -> None:
    cache = make(expire_seconds=20.0)
    cache.insert(ids_of(1), features([1], time=100.0))
    assert [hits(cache, 1, now=now)[0] for now in (100.0, 119.9, 120.0, 500.0)] == [True, True, False, False]


def test_expiry_zero_is_never_a_hit(make: Any) -> None:
    cache = make(expire_seconds=0.0)
    cache.insert(ids_of(1), features([1]))
    assert hits(cache, 1) == [False]


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


def test_the_clock_is_injected(make: Any) -> None:
    now = 100.0
    cache = make(clock=lambda: now)
    cache.insert(ids_of(1), features([1], time=100.0))
    assert cache.lookup(ids_of(1), dense_version=0)[1].tolist() == [True]
    now = 130.0
    assert cache.lookup(ids_of(1), dense_version=0)[1].tolist() == [False]


def test_the_report_says_why_and_how_old(make: Any) -> None:
    cache = make(expire_seconds=20.0, max_version_lag=3)
    cache.insert(ids_of(1, 2, 3), DenseFeatures(torch.ones(3, DIM), np.array([9, 5, 9]), np.array([99.0, 99.0, 50.0])))
    hits(cache, 1, 1, 2, 3, 4, now=100.0, dense_version=10)
    report = cache.report()
    assert [report[name] for name in ("hits", "misses", "absent", "expired", "lagging")] == [2, 3, 1, 1, 1]
    assert report["hit_rate"] == 0.4
    ages = report["age_seconds"]
    assert len(ages["counts"]) == len(ages["edges"]) + 1 == len(AGE_EDGES) + 1
    assert ages["counts"][AGE_EDGES.index(1.0) + 1] == 2 == sum(ages["counts"])
    assert report["version_lag"]["counts"][:3] == [0, 2, 0]


def test_wrong_arguments_are_refused(make: Any) -> None:
    cache = make()
    with pytest.raises(InvalidIds, match="id -3"):
        cache.insert(ids_of(-3), features([1]))
    with pytest.raises(InvalidIds, match="one-dimensional"):
        cache.lookup(torch.zeros(2, 2, dtype=torch.int64), dense_version=0)
    with pytest.raises(InvalidRows, match=r"vectors have shape \(1, 4\); 2 ids of dim 4 need \(2, 4\)"):
        cache.insert(ids_of(1, 2), features([1]))
    with pytest.raises(InvalidRows, match=r"versions have shape \(1,\)"):
        cache.insert(ids_of(1, 2), DenseFeatures(torch.zeros(2, DIM), np.zeros(1, np.int64), np.zeros(2)))
    with pytest.raises(InvalidArgument, match="expire_seconds is -1"):
        make(expire_seconds=-1)
    with pytest.raises(InvalidArgument, match="max_version_lag is -1"):
        make(max_version_lag=-1)


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


def test_features_of_another_width_are_misses_and_counted() -> None:
    store = open_store("memory")
    SharedCache(store, DIM + 1, expire_seconds=20.0).insert(
        ids_of(1), DenseFeatures(torch.ones(1, DIM + 1), np.zeros(1, np.int64), np.full(1, 100.0))
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
        cache.insert(ids_of(*ids), features(ids, version=version))
        model |= {one: one + 1000.0 * version for one in ids}
    found, hit = cache.lookup(ids_of(*looked_up), now=100.0, dense_version=0)
    for one, is_hit, vector in zip(looked_up, hit.tolist(), found.vectors.tolist(), strict=True):
        assert not is_hit or vector == [model[one]] * DIM
    assert len({one for one, is_hit in zip(looked_up, hit, strict=True) if is_hit}) <= 6


def test_an_insert_that_fails_half_way_leaves_no_answer_of_another_id(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = WorkerCache(2, DIM, expire_seconds=20.0)
    cache.insert(ids_of(1, 2), features([1, 2]))
    full = torch.from_numpy
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(torch, "from_numpy", lambda array: full(array) if len(array) > 1 else raised())
        cache.insert(np.array([7]), features([7]))
    assert hits(cache, 1, 7, 2) == [False, False, True]
    wrong = features([8])
    wrong.times = np.array(["now"])
    with pytest.raises(ValueError, match="now"):
        cache.insert(ids_of(8), wrong)
    assert hits(cache, 2, 7, 8) == [True, False, False]


def raised() -> torch.Tensor:
    raise MemoryError


def test_threads_never_see_a_vector_of_another_id() -> None:
    cache = WorkerCache(50, DIM, expire_seconds=20.0)
    wrong = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(200):
            ids = rng.integers(0, 100, 30)
            cache.insert(ids, features(ids.tolist()))
            found, hit = cache.lookup(ids, now=100.0, dense_version=0)
            wrong.append(int((found.vectors[:, 0].numpy()[hit] != ids[hit]).sum()))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(wrong) == 0 and len(wrong) == 800


@pytest.mark.cuda
def test_a_cache_on_a_device_answers_there() -> None:
    cache = WorkerCache(10, DIM, expire_seconds=20.0, device="cuda")
    cache.insert(ids_of(1).cuda(), features([1]))
    found, hit = cache.lookup(ids_of(1, 2).cuda(), now=100.0, dense_version=0)
    assert found.vectors.device.type == "cuda" and hit.tolist() == [True, False]
