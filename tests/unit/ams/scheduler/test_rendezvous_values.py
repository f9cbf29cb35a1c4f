"""Values by which the processes of a job find each other, in the scheduler."""

from __future__ import annotations

import pytest

from geartrain.ams.scheduler import rendezvous
from geartrain.ams.scheduler.rendezvous import LEASE_SECONDS, MAX_VALUE_BYTES, Rendezvous
from geartrain.ams.values.errors import InvalidArgument, OutOfMemory
from geartrain.ams.values.scheduler_messages import RendezvousValue, WriteRendezvous


def write(key: str, version: int, value: bytes | None = None, job: str = "job", **more: int) -> WriteRendezvous:
    return WriteRendezvous(job=job, key=key, version=version, value=value, **more)


def test_of_two_who_expect_the_same_state_only_the_first_writes() -> None:
    values = Rendezvous()
    assert values.read("job", ["state"]) == (RendezvousValue(),)
    first = values.write(write("state", 7, b"a", expected=0))
    assert first == RendezvousValue(b"a", 7)
    assert values.write(write("state", 8, b"b", expected=0)) == first
    assert values.write(write("state", 9, b"c", expected=7)) == RendezvousValue(b"c", 9)
    assert values.read("other", ["state"]) == (RendezvousValue(),)
    assert values.write(write("state", 10, expected=9)) == RendezvousValue()
    assert values.read("job", ["state"]) == (RendezvousValue(),)


def test_what_comes_twice_is_done_once() -> None:
    values = Rendezvous()
    for _ in range(2):
        assert values.write(write("count", 5, add=3)) == RendezvousValue(b"3", 5)
        assert values.write(write("state", 6, b"a", expected=0)).version == 6
    assert values.write(write("count", 8, add=-4)).value == b"-1"


def test_a_job_that_nobody_asks_about_is_forgotten() -> None:
    now = 0.0
    values = Rendezvous(lambda: now)
    values.write(write("key", 1, b"a", job="asked"))
    values.write(write("key", 1, b"a", job="silent"))
    now += LEASE_SECONDS
    assert values.read("asked", ["key"])[0].value == b"a"
    now += 1.0
    assert values.read("silent", ["key"])[0].value is None
    now += LEASE_SECONDS
    assert values.read("asked", ["key"])[0].value is None
    assert values._bytes == 0


def test_bounds_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    values = Rendezvous()
    for wrong, said in (
        (write("", 1, b""), "key is ''"),
        (write("key", 0, b""), "version is 0"),
        (write("key", 1, bytes(MAX_VALUE_BYTES + 1)), "at most 1048576"),
        (write("key", 1, b"", job="a//b"), "job is"),
    ):
        with pytest.raises(InvalidArgument, match=said):
            values.write(wrong)
    values.write(write("text", 1, b"a"))
    with pytest.raises(InvalidArgument, match="no decimal number"):
        values.write(write("text", 2, add=1))
    with pytest.raises(InvalidArgument, match="5000 keys"):
        values.read("job", ["key"] * 5000)
    monkeypatch.setattr(rendezvous, "MAX_BYTES", 1000)
    with pytest.raises(OutOfMemory, match="expire within 60 s"):
        values.write(write("large", 3, bytes(1000)))
    values.write(write("text", 4))
    assert values._bytes == 0
