"""What only a server can do to a feature store: be shared, be full, be gone, answer nothing."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
import yaml

from geartrain.ams.storage.features.factory import open_store
from geartrain.ams.storage.features.redis_features import refusal
from geartrain.ams.storage.features.store import FeatureStore
from geartrain.ams.values.errors import ConfigError, InvalidArgument, StateFailed, StoreUnavailable
from tests.redis_child import RedisChild, running_redis

COMPOSE = Path(__file__).resolve().parents[4] / "docker-compose.yml"
IDS = np.arange(5)
VALUES = [b"value %d" % item for item in range(5)]


@pytest.fixture
def child() -> Iterator[RedisChild]:
    with running_redis() as server:
        yield server


@pytest.fixture
def store(child: RedisChild) -> Iterator[FeatureStore]:
    one = open_store(child.url)
    one.write(IDS, VALUES)
    yield one
    one.close()


def client(child: RedisChild) -> Any:
    import redis

    return redis.Redis(unix_socket_path=str(child.path))


def key(one: int) -> bytes:
    return b"geartrain:features:" + one.to_bytes(8, "little")


def test_a_changed_cut_or_moved_record_is_a_counted_miss(child: RedisChild, store: FeatureStore) -> None:
    raw = client(child)
    whole = raw.get(key(0))
    for bad in (whole[:-1], whole + b"x", whole[:3], b"", bytes([whole[0] ^ 1]) + whole[1:], whole[:-1] + b"1"):
        raw.set(key(0), bad)
        assert store.read(IDS) == [None, *VALUES[1:]]
    assert store.counts().damaged == store.counts().misses == 6
    raw.set(key(0), raw.get(key(1)))
    assert store.read(IDS[:1]) == [None]
    other = open_store(child.url, namespace="other")
    raw.set(key(0).replace(b"features", b"other"), whole)
    assert other.read(IDS[:1]) == [None] and other.counts().damaged == 1
    other.close()
    raw.set(key(0), whole)
    assert store.read(IDS) == VALUES
    raw.delete(key(2))
    raw.rpush(key(2), "a list")
    assert store.read(IDS)[2] is None
    raw.close()


def test_records_go_after_record_seconds(child: RedisChild, store: FeatureStore) -> None:
    raw = client(child)
    assert 86_300_000 < raw.pttl(key(0)) <= 86_400_000
    for seconds, expected in ((0.25, range(1, 251)), (None, [-1])):
        other = open_store(child.url, record_seconds=seconds)
        other.write(IDS, VALUES)
        assert raw.pttl(key(4)) in expected
        other.close()
    raw.pexpire(key(3), 0)
    assert store.read(IDS) == [*VALUES[:3], None, VALUES[4]]
    raw.close()


def test_a_full_server_evicts_records_and_spares_what_must_stay() -> None:
    with running_redis("--maxmemory", "8mb", "--maxmemory-policy", "volatile-lru") as child:
        store, raw = open_store(child.url), client(child)
        raw.set("stays", b"x" * 100_000)
        for start in range(0, 40_000, 1000):
            store.write(np.arange(start, start + 1000), [bytes(400)] * 1000)
        assert raw.info("memory")["used_memory"] < 9 << 20
        assert len(raw.get("stays")) == 100_000
        there = [value is not None for value in store.read(np.arange(40_000))]
        assert 1000 < sum(there) < 30_000
        assert sum(there[30_000:]) > 3 * sum(there[:10_000]), "the oldest go first, as nearly as Redis does it"
        store.close()
        raw.close()


def test_a_full_server_that_may_not_evict_is_a_typed_error() -> None:
    with running_redis("--maxmemory", "3mb", "--maxmemory-policy", "noeviction") as child:
        store = open_store(child.url)
        with pytest.raises(StateFailed, match=r"unix://.* refused: .*maxmemory.*volatile-lru"):
            for start in range(0, 40_000, 1000):
                store.write(np.arange(start, start + 1000), [bytes(400)] * 1000)
        assert store.read(np.arange(1)) == [bytes(400)], "the replies that were left are not the next call's"
        store.close()


def test_a_server_that_is_gone_is_a_typed_error_and_found_again(child: RedisChild, store: FeatureStore) -> None:
    child.stop()
    for call in (lambda: store.read(IDS), lambda: store.write(IDS, VALUES), lambda: store.remove(IDS)):
        with pytest.raises(StoreUnavailable, match=r"Redis server unix://.*redis.sock.* does not answer.*try again"):
            call()
    with pytest.raises(StoreUnavailable, match="does not answer"):
        open_store(child.url)
    child.start()
    store.write(IDS, VALUES)
    assert store.read(IDS) == VALUES


def test_a_connection_that_breaks_in_between_costs_no_error(
    store: FeatureStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    from geartrain.ams.storage.features import redis_features as feature_redis

    whole, breaks = feature_redis._exchange, [True]

    def breaking(connection: Any, command: bytes, num_replies: int) -> Any:
        if breaks and breaks.pop():
            connection.disconnect()
            raise feature_redis.redis.ConnectionError("broken")
        return whole(connection, command, num_replies)

    monkeypatch.setattr(feature_redis, "_exchange", breaking)
    assert store.read(IDS) == VALUES


def test_a_server_that_answers_nothing_is_waited_for_once(child: RedisChild, store: FeatureStore) -> None:
    impatient = open_store(child.url, timeout_seconds=0.5)
    with child.paused():
        start = time.monotonic()
        with pytest.raises(StoreUnavailable, match="does not answer"):
            impatient.read(IDS[:1])
        assert 0.4 < time.monotonic() - start < 5
    assert store.read(IDS) == VALUES, "it is awake again"
    for item in range(5):
        assert impatient.read(IDS[item:]) == VALUES[item:], "a late reply is not the next call's"
    impatient.close()


def test_processes_share_a_server(child: RedisChild, store: FeatureStore) -> None:
    code = f"""
import numpy as np
from geartrain.ams.storage.features.factory import open_store
store = open_store({child.url!r})
print(store.read(np.arange(2)))
store.write(np.array([1, 77]), [b"theirs", b"new"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == str(VALUES[:2])
    assert store.read(np.array([1, 77])) == [b"theirs", b"new"]


def test_wrong_settings_name_the_remedy(child: RedisChild) -> None:
    with pytest.raises(InvalidArgument, match=r"max_bytes is 5; .* --maxmemory BYTES --maxmemory-policy volatile-lru"):
        open_store(child.url, max_bytes=5)
    with pytest.raises(InvalidArgument, match="record_seconds is 0"):
        open_store(child.url, record_seconds=0)
    with pytest.raises(InvalidArgument, match="timeout_seconds is -1"):
        open_store(child.url, timeout_seconds=-1)
    with pytest.raises(ConfigError, match="is no Redis URL"):
        open_store("redis://host:port/0")


def test_the_redis_of_the_containers_does_what_a_store_asks_and_runs_no_script() -> None:
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    with running_redis(*services["redis"]["command"][1:]) as child:
        store = open_store(child.url)
        store.write(IDS, VALUES)
        assert store.read(IDS) == VALUES
        store.remove(IDS)
        assert store.read(IDS) == [None] * len(IDS)
        store.close()
        stranger = client(child)
        for command in (("EVAL", "return 1", 0), ("CONFIG", "GET", "dir"), ("SET", "other", 1), ("FLUSHALL",)):
            with pytest.raises(redis.exceptions.NoPermissionError):
                stranger.execute_command(*command)
        stranger.close()


def test_every_container_has_a_limit_of_memory_and_redis_a_full_version() -> None:
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    assert [name for name, service in services.items() if "mem_limit" not in service] == []
    assert re.fullmatch(r"redis:\d+\.\d+\.\d+", services["redis"]["image"])


@pytest.mark.parametrize("password", ["secret", "se%23cret", "se#cret", "se/cret", "se?cret", "se@cret", "6379#secret"])
@pytest.mark.parametrize(
    "form", ["redis://user:{}@127.0.0.1:1/0", "redis://127.0.0.1:1/0?password={}", "rediss://{}@h:x/0", "redi://{}@h"]
)
def test_a_password_is_not_shown(form: str, password: str) -> None:
    with pytest.raises((StoreUnavailable, ConfigError)) as caught:
        open_store(form.format(password), timeout_seconds=1.0)
    assert "cret" not in str(caught.value).replace("/run/secrets", "")


def test_a_password_comes_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("se/cr#t?\n")
    rights = ["~geartrain:*", "-@all", "+ping", "+mget", "+set", "+del"]
    user = ["--user", "gear", "on", ">se/cr#t?", *rights, "--user", "default", "off"]
    with running_redis(*user) as child:
        with pytest.raises(StateFailed, match="refused"):
            open_store(child.url)
        store = open_store(f"unix://gear@{child.path}?db=0&password_file={file}")
        store.write(IDS, VALUES)
        assert store.read(IDS) == VALUES
        store.remove(IDS)
        store.close()
    file.write_text("\nsecret")
    for path, complaint in ((file, "first line is empty"), (tmp_path / "absent", "cannot be read")):
        with pytest.raises(ConfigError, match=complaint):
            open_store(f"redis://127.0.0.1:1/0?password_file={path}")


def test_a_missing_package_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    monkeypatch.delitem(sys.modules, "geartrain.ams.storage.features.redis_features", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'geartrain\[redis\]'"):
        open_store("redis://127.0.0.1:1/0")


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("DENIED Redis is running in protected mode because … you may adopt", "protected mode, .* --protected-mode no"),
        ("OOM command not allowed when used memory > 'maxmemory'.", "OOM .*; raise its maxmemory"),
        ("ERR unknown command 'HSETNX2'", "^ERR unknown command 'HSETNX2'$"),
    ],
)
def test_a_refusal_says_what_to_do(said: str, shown: str) -> None:
    words = refusal(redis.ResponseError(said))
    assert re.search(shown, words) and "you may adopt" not in words
