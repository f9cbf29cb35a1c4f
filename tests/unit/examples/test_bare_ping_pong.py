"""The rival "bare C" of the benches calls as often as it is asked to, over every carrier."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from geartrain.ams.values.errors import ConfigError

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def bare() -> Iterator[Any]:
    if shutil.which("g++") is None:
        pytest.skip("there is no g++ here")
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module("_bare_ping_pong")
    sys.path.remove(str(BENCHMARKS))


@pytest.mark.parametrize("carrier", ["shared_memory", "tcp"])
def test_every_client_has_every_call_timed(bare: Any, carrier: str) -> None:
    seconds = bare.compile_and_run(carrier, 800 + bare.HEADER_BYTES, 6_400 + bare.HEADER_BYTES, 50, 3)
    assert [len(calls) for calls in seconds] == [50] * 3
    assert all(second > 0 for calls in seconds for second in calls)
    assert bare.calls_per_second(seconds) > 0


@pytest.mark.parametrize("spin", [0, 50])
def test_each_side_may_spin_or_sleep(bare: Any, spin: int) -> None:
    for server_spin in (0, 50):
        seconds = bare.compile_and_run(
            "shared_memory", 8, 8, 2_000, 2, caller_spin_microseconds=spin, server_spin_microseconds=server_spin
        )
        assert [len(calls) for calls in seconds] == [2_000] * 2


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("tcp", 7, 8, 1), "request_bytes is 7"),
        (("tcp", 8, 8, 0), "calls is 0"),
        (("tcp", 8, 8, 1, 0), "clients is 0"),
        (("pigeon", 8, 8, 1), "carrier is 'pigeon'"),
    ],
)
def test_what_cannot_be_asked_for_is_named(bare: Any, arguments: tuple[Any, ...], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        bare.compile_and_run(*arguments)
