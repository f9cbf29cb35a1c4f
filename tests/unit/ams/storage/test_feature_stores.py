"""One contract for every feature store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.ams.storage.features.factory import open_store
from geartrain.ams.storage.features.store import FeatureStore, StoreCounts
from geartrain.ams.values.errors import ConfigError, InvalidArgument, InvalidIds
from tests.redis_child import RedisChild, running_redis

Open = Callable[..., FeatureStore]


@pytest.fixture(scope="module")
def redis_child() -> Iterator[RedisChild]:
    with running_redis() as child:
        yield child


@pytest.fixture(params=["memory", "lmdb", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "redis":
        child: RedisChild = request.getfixturevalue("redis_child")
        return child.url
    return "memory" if request.param == "memory" else f"lmdb:{tmp_path}"


@pytest.fixture
def opened(url: str, request: pytest.FixtureRequest) -> Iterator[Open]:
    """Opens stores of one kind under namespaces of this test, and closes them."""
    stores = []

    def open_one(namespace: str = "a", **others: Any) -> FeatureStore:
        name = request.node.name.replace("[", "-").rstrip("]")
        stores.append(open_store(url, namespace=f"{name}/{namespace}", **others))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()
        store.close()


def array(*ids: int) -> np.ndarray:
    return np.array(ids, np.int64)


def test_no_ids_are_no_work(opened: Open) -> None:
    store = opened()
    store.write(array(), [])
    store.remove(array())
    assert store.read(array()) == []


def test_it_counts_hits_and_misses(opened: Open) -> None:
    store = opened()
    store.write(array(1, 2), [b"1", b"2"])
    store.read(array(1, 3, 3))
    counts = store.counts()
    assert (counts.hits, counts.misses, counts.damaged, counts.written, counts.evicted) == (1, 2, 0, 2, 0)


def test_wrong_arguments_are_refused_and_change_nothing(opened: Open) -> None:
    store = opened()
    with pytest.raises(InvalidIds, match="id -1 is negative"):
        store.write(array(1, -1), [b"1", b"2"])
    with pytest.raises(InvalidIds, match="int64 vector"):
        store.read(np.ones(2))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="1 values were given for 2 ids"):
        store.write(array(1, 2), [b"1"])
    with pytest.raises(InvalidArgument, match="value of id 1 is str; it must be bytes"):
        store.write(array(1), ["1"])  # type: ignore[list-item]
    assert store.read(array(1, 2)) == [None, None]
    with pytest.raises(InvalidArgument, match=r"namespace is .*'; it must be 1 to 100 letters"):
        opened("no spaces")


def test_it_behaves_like_a_dictionary(opened: Open) -> None:
    store = opened()

    @settings(max_examples=25, deadline=None)
    @given(steps=st.lists(st.tuples(st.booleans(), st.dictionaries(st.integers(0, 9), st.binary(max_size=20)))))
    def behaves(steps: list[tuple[bool, dict[int, bytes]]]) -> None:
        store.remove(np.arange(10))
        model: dict[int, bytes] = {}
        for is_write, records in steps:
            ids = array(*records)
            if is_write:
                store.write(ids, list(records.values()))
                model |= records
            else:
                store.remove(ids)
                model = {name: value for name, value in model.items() if name not in records}
            assert store.read(np.arange(10)) == [model.get(item) for item in range(10)]

    behaves()


def test_threads_may_share_it(opened: Open) -> None:
    store = opened()
    wrong = []

    def work(number: int) -> None:
        for turn in range(30):
            ids = np.arange(20, dtype=np.int64) + 10 * number
            store.write(ids, [b"%d" % id_ for id_ in ids])
            values = store.read(ids)
            wrong.extend(value for id_, value in zip(ids, values, strict=True) if value not in (b"%d" % id_, None))
            store.remove(ids[turn % 20 :])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.fixture(params=["memory", "lmdb"])
def bounded(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[int], FeatureStore]]:
    """Stores that evict by themselves."""
    stores = []

    def open_one(max_bytes: int) -> FeatureStore:
        url = "memory" if request.param == "memory" else f"lmdb:{tmp_path}"
        # LMDB counts the seal and the stamp of each record, 16 bytes.
        stores.append(open_store(url, max_bytes=max_bytes * (10 if request.param == "memory" else 26)))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()


def test_the_least_recently_used_records_go_first(bounded: Callable[[int], FeatureStore]) -> None:
    store = bounded(3)
    store.write(array(1, 2, 3), [bytes(10)] * 3)
    store.read(array(1))
    store.write(array(2), [b"2" * 10])
    store.write(array(4), [b"4" * 10])
    assert store.read(array(1, 2, 3, 4)) == [bytes(10), b"2" * 10, None, b"4" * 10]
    assert store.counts().evicted == 1 and store.counts().records == 3


def test_a_bound_holds_whatever_is_written(bounded: Callable[[int], FeatureStore]) -> None:
    store = bounded(100)
    rng = np.random.default_rng(0)
    largest = 0
    for _ in range(20):
        ids = rng.integers(0, 400, 150)
        store.write(ids, [bytes(int(size)) for size in rng.integers(0, 60, 150)])
        counts = store.counts()
        assert counts.stored_bytes is not None
        largest = max(largest, counts.stored_bytes)
        alive = [value for value in store.read(np.arange(400)) if value is not None]
        assert len(alive) == counts.records
    assert 500 < largest <= 2600


def test_a_record_above_the_bound_is_refused(bounded: Callable[[int], FeatureStore]) -> None:
    store = bounded(2)
    with pytest.raises(InvalidArgument, match=r"value of id 9 has 1000 bytes; at most .* fit: raise max_bytes"):
        store.write(array(9), [bytes(1000)])


def test_a_memory_store_that_ran_out_of_memory_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from geartrain.ams.storage.features import byte_lru

    store = open_store("memory")
    store.write(np.arange(1000), [b"old"] * 1000)

    def full(*_: object) -> None:
        raise MemoryError

    many = np.arange(500, 5000)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(byte_lru.np, "zeros", full)
        store.write(many, [b"new"] * len(many))
    assert store.read(many) == [b"old"] * 500 + [None] * 4000
    store.write(many, [b"new"] * len(many))
    assert store.read(many) == [b"new"] * 4500


def test_urls_that_name_no_store_are_refused() -> None:
    for url in ("", "lmdb:", "mysql://x", "folder"):
        with pytest.raises(ConfigError, match=r"names no store; give memory, lmdb:FOLDER or redis://HOST:PORT/DB"):
            open_store(url)
    with pytest.raises(InvalidArgument, match="max_bytes is 0"):
        open_store("memory", max_bytes=0)
    assert open_store("memory").counts() == StoreCounts(records=0, stored_bytes=0)
