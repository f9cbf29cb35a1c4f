"""What only a server can do to small state: pass from holder to holder, be away for a while, lose it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from geartrain.ams.storage.kv.store import open_state
from geartrain.ams.values.errors import (
    ConfigError,
    InvalidArgument,
    StaleClient,
    StateDamaged,
    StateFailed,
    StoreUnavailable,
)
from tests.redis_child import RedisChild, running_redis


@pytest.fixture
def child() -> Iterator[RedisChild]:
    with running_redis() as server:
        yield server


def opened(child: RedisChild, name: str = "gear/image/7", **settings: Any) -> Any:
    from geartrain.ams.storage.kv.redis_store import RedisStore

    return RedisStore(child.url, name, **settings)


def test_the_next_holder_has_everything_and_the_last_is_shut_out(child: RedisChild) -> None:
    first = opened(child)
    first.write({"a": b"1", "b": b"2"})
    second = opened(child)
    assert second.read_all() == {"a": b"1", "b": b"2"}
    with pytest.raises(StaleClient, match=r"'gear/image/7' in the Redis server .* held by another process now"):
        first.write({"a": b"late", "c": b"late"})
    with pytest.raises(StaleClient):
        first.read_all()
    second.write({"a": None})
    assert second.read_all() == {"b": b"2"}


def test_names_are_apart(child: RedisChild) -> None:
    one, other = opened(child, "one"), opened(child, "other")
    one.write({"a": b"1"})
    assert other.read_all() == {} and one.read_all() == {"a": b"1"}


def test_a_server_that_lost_everything_is_not_written_as_if_nothing_had_happened(child: RedisChild) -> None:
    store = opened(child)
    store.write({"a": b"1"})
    child.stop()
    child.start()
    with pytest.raises(StaleClient, match="or the server has lost it"):
        store.write({"b": b"2"})


def test_who_held_a_name_that_the_server_lost_does_not_share_it_with_the_next(child: RedisChild) -> None:
    before = opened(child)
    child.stop()
    child.start()
    after = opened(child)  # it counts takeovers from the same number as the first did
    after.write({"a": b"1"})
    with pytest.raises(StaleClient):
        before.write({"a": b"late"})
    with pytest.raises(StaleClient):
        before.read_all()
    assert after.read_all() == {"a": b"1"}


def test_a_change_that_arrives_twice_undoes_nothing(child: RedisChild, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(child)
    sent: list[tuple[Any, ...]] = []
    run_script = store._client.eval
    monkeypatch.setattr(store._client, "eval", lambda *script: sent.append(script) or run_script(*script))
    store.write({"a": b"1"})
    run_script(*sent[0])  # sent again at once: its answer was lost
    store.write({"a": None, "b": b"2"})
    assert not run_script(*sent[0])  # it was still on its way
    assert store.read_all() == {"b": b"2"}
    next_holder = opened(child)
    assert not run_script(*sent[1])
    next_holder.write({"c": b"3"})
    assert next_holder.read_all() == {"b": b"2", "c": b"3"}


def test_after_a_change_of_unknown_fate_no_further_one_is_taken(child: RedisChild) -> None:
    store = opened(child, timeout_seconds=0.1, recovery_timeout_seconds=0)
    with child.paused(), pytest.raises(StateFailed, match="whether the last change was made is not known"):
        store.write({"a": b"1"})
    with pytest.raises(StateFailed, match="whether an earlier change was made is not known; open it again"):
        store.write({"b": b"2"})
    again = opened(child)
    again.write({"b": b"2"})
    assert again.read_all() in ({"b": b"2"}, {"a": b"1", "b": b"2"})


def test_a_server_that_is_away_is_waited_for(child: RedisChild) -> None:
    store = opened(child, timeout_seconds=0.2)
    with child.paused():
        resume = threading.Timer(0.8, child.resume)
        resume.start()
        store.write({"a": b"1"})
        resume.join()
    assert store.read_all() == {"a": b"1"}


def test_a_server_that_does_not_come_back_is_a_typed_error(child: RedisChild) -> None:
    store = opened(child, recovery_timeout_seconds=0.3)
    child.stop()
    with pytest.raises(StateFailed, match=r"'gear/image/7' .* cannot be reached: .*whether the last change was made"):
        store.write({"a": b"1"})
    with pytest.raises(StoreUnavailable, match="cannot be reached"):
        store.read_all()
    store.close()
    with pytest.raises(StateFailed, match="was closed"):
        store.write({"a": b"1"})


def test_a_damaged_value_is_named_by_its_key(child: RedisChild) -> None:
    import redis

    store = opened(child)
    store.write({"a": b"1"})
    with redis.Redis(unix_socket_path=str(child.path)) as raw:
        raw.hset("geartrain:state:{gear/image/7}", "a", b"something else")
    with pytest.raises(StateDamaged, match="the value of key 'a' is damaged"):
        store.read_all()


def test_a_server_that_may_evict_state_is_refused() -> None:
    with (
        running_redis("--maxmemory", "50mb", "--maxmemory-policy", "allkeys-lru") as child,
        pytest.raises(ConfigError, match=r"maxmemory-policy allkeys-lru.* --maxmemory-policy volatile-lru"),
    ):
        open_state(child.url, "x")


def test_wrong_arguments_are_refused(child: RedisChild) -> None:
    with pytest.raises(ConfigError, match="names no store"):
        open_state("folder", "x")
    with pytest.raises(InvalidArgument, match="name is ''"):
        opened(child, "")
