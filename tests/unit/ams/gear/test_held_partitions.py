"""Partitions of slow gears, leased from the scheduler's own decisions under a clock of the test's."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest

from geartrain.ams.gear.held_partitions import HeldPartitions, Ticker
from geartrain.ams.gear.partitions import NUM_PARTITIONS, job_of, partitions_of
from geartrain.ams.scheduler.data_streams import StreamLeases
from geartrain.ams.storage.kv.store import MemoryStore
from geartrain.ams.values.errors import NotHolder, SchedulerUnavailable, StaleClient
from geartrain.ams.values.scheduler_messages import StreamLease, StreamRenewal

LEASE = 60.0
IDS = np.arange(10_000)


class Scheduler:
    def __init__(self) -> None:
        self.now = 0.0
        self.streams = StreamLeases(MemoryStore(), LEASE, lambda: self.now)
        self.is_down = False

    def gear(self, name: str, incarnation: int = 1, flushed: list[str] | None = None) -> HeldPartitions:
        def before_release() -> None:
            if flushed is not None:
                flushed.append(name)

        return HeldPartitions(_Leases(self, name, incarnation), before_release=before_release, clock=lambda: self.now)


class _Leases:
    def __init__(self, scheduler: Scheduler, worker: str, incarnation: int) -> None:
        self._scheduler = scheduler
        self._who = job_of("image"), worker, incarnation

    def _streams(self) -> StreamLeases:
        if self._scheduler.is_down:
            raise SchedulerUnavailable("no reply")
        return self._scheduler.streams

    def lease(self) -> StreamLease:
        return self._streams().lease(*self._who)

    def commit(self) -> StreamRenewal:
        return self._streams().renew(*self._who, {})

    def release(self, streams: Sequence[int] | None = None) -> None:
        self._streams().release(*self._who, {}, streams)


def splitmix64(value: int) -> int:
    """As Steele, Lea and Flood published it, on Python's integers."""
    x = (value + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def settled(*gears: HeldPartitions) -> None:
    """Tick until nothing moves."""
    quiet = 0
    for _ in range(50):
        before = [gear.now for gear in gears]
        for gear in gears:
            gear.tick()
            if gear._applying is not None:
                gear._applying.result(10)
        is_quiet = [gear.now for gear in gears] == before and all(gear._applying is None for gear in gears)
        quiet = quiet + 1 if is_quiet else 0
        if quiet == 3:  # a tick to hear of it, one to apply, one to take
            return
    raise AssertionError("partitions never come to rest")


def test_partitions_follow_the_bucket_of_an_id() -> None:
    parts = partitions_of(IDS)
    assert parts.min() == 0 and parts.max() == NUM_PARTITIONS - 1
    assert np.bincount(parts).min() > 100  # about 156 each
    some = [0, 1, 12345, 2**62]
    assert partitions_of(np.array(some)).tolist() == [(splitmix64(number) >> 52) // 64 for number in some]


def test_every_partition_is_with_one_gear_as_they_come_and_go() -> None:
    scheduler, flushed = Scheduler(), []
    gears = [scheduler.gear(name, flushed=flushed) for name in "abc"]
    settled(gears[0])
    assert len(gears[0].now) == NUM_PARTITIONS
    for number in (2, 3):
        settled(*gears[:number])
        held = [gear.now for gear in gears[:number]]
        assert sorted(part for some in held for part in some) == list(range(NUM_PARTITIONS))
        assert max(map(len, held)) - min(map(len, held)) <= 1
    assert flushed[0] == "a"  # what waited there was applied before it went
    gears[1].release_all()
    settled(gears[0], gears[2])
    assert len(gears[0].now) + len(gears[2].now) == NUM_PARTITIONS and not gears[1].now
    gears[1].tick()
    assert not gears[1].now  # who has left stays away


def test_a_partition_is_released_only_when_what_waits_is_applied() -> None:
    scheduler, go = Scheduler(), threading.Event()
    first = HeldPartitions(
        _Leases(scheduler, "a", 1), before_release=lambda: go.wait(30) and None, clock=lambda: scheduler.now
    )
    second = scheduler.gear("b")
    first.tick()
    second.tick()
    first.tick()  # asked to release 32: refused from now on, and applied behind
    assert len(first.now) == 32 and first.tick_seconds < 0.1
    second.tick()
    assert not second.now
    go.set()
    settled(first, second)
    assert len(second.now) == 32


def test_it_answers_for_its_own_ids_alone() -> None:
    scheduler = Scheduler()
    gears = [scheduler.gear(name) for name in "ab"]
    settled(*gears)
    parts = partitions_of(IDS)
    for gear in gears:
        gear.require(IDS[np.isin(parts, sorted(gear.now))])
        with pytest.raises(NotHolder, match=r"partition \d+ \(of id \d+\)"):
            gear.require(IDS)
    gears[0].refuse()
    with pytest.raises(NotHolder, match="leaving"):
        gears[0].require(np.empty(0, np.int64))


def test_it_stops_answering_before_the_scheduler_gives_its_partitions_away() -> None:
    scheduler = Scheduler()
    gear, other = scheduler.gear("a"), scheduler.gear("b")
    gear.tick()
    scheduler.is_down = True
    scheduler.now = LEASE * 0.94
    gear.tick()
    assert len(gear.now) == NUM_PARTITIONS
    scheduler.now = LEASE * 0.96
    assert not gear.now
    scheduler.is_down = False
    scheduler.now = LEASE * 1.01
    other.tick()
    assert len(other.now) == NUM_PARTITIONS
    gear.tick()  # it was away too long: it leases anew
    settled(gear, other)
    assert len(gear.now) == len(other.now) == 32


def test_one_whose_address_another_process_has_cannot_go_on() -> None:
    scheduler = Scheduler()
    old, new = scheduler.gear("a", 1), scheduler.gear("a", 2)
    old.tick()
    new.tick()
    with pytest.raises(StaleClient, match="superseded by 2"):
        old.tick()
    assert not old.now and len(new.now) == NUM_PARTITIONS


def test_a_ticker_says_why_it_cannot_go_on_and_survives_the_rest() -> None:
    ticks, ended = [0], threading.Event()
    said: list[str] = []

    def tick() -> None:
        ticks[0] += 1
        if ticks[0] < 3:
            raise SchedulerUnavailable("no reply")
        if ticks[0] < 5:
            raise RuntimeError("the user's module, in what is applied before partitions go")
        raise StaleClient("superseded")

    def on_stale(reason: str) -> None:
        said.append(reason)
        ended.set()

    ticker = Ticker(tick, lambda: 0.0, on_stale)
    assert ended.wait(30)
    ticker.stop()
    assert ticks == [5] and said == ["superseded"]
