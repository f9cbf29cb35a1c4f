"""A process with several shards: what happens to one costs the others nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import grpc
import numpy as np
import pytest

from geartrain.ams.client.cluster_status import cluster_status
from geartrain.ams.client.factory import connect
from geartrain.ams.scheduler.scheduler import Scheduler
from geartrain.ams.scheduler.service import SchedulerServer
from geartrain.ams.server.role import ShardServer, _HeldShard
from geartrain.ams.values.config import ClientConfig, SchedulerConfig, ServerConfig
from geartrain.ams.values.errors import InternalError
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.scheduler_messages import HeartbeatResult
from geartrain.ams.values.shard_messages import CallContext, Describe
from geartrain.ams.values.specs import Constant

DEADLINE_SECONDS = 30.0
LEASE_SECONDS = 1.0
PATIENT = ClientConfig(attempt_timeout_seconds=5, recovery_timeout_seconds=30)


def poll(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"not within {DEADLINE_SECONDS:g} s: {what}"
        time.sleep(0.02)


@pytest.fixture
def scheduler() -> Iterator[str]:
    server = SchedulerServer(SchedulerConfig(listen="127.0.0.1:0", num_shards=2, lease_seconds=LEASE_SECONDS))
    yield server.start()
    server.stop(0)


@pytest.fixture
def both(scheduler: str) -> Iterator[ShardServer]:
    """One server with both shards."""
    server = ShardServer(ServerConfig(scheduler=scheduler, shards=2, heartbeat_seconds=0.05))
    server.start()
    yield server
    server.stop(0)


def states(scheduler: str) -> list[str]:
    return [shard.state for shard in cluster_status(scheduler).shards]


@pytest.mark.parametrize("trouble", ["silence", "an error", "a defect"])
def test_a_shard_whose_heartbeats_fail_costs_its_neighbour_nothing(
    scheduler: str, both: ShardServer, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    whole, over = _HeldShard.beat, threading.Event()

    def beat(held: _HeldShard, *arguments: object) -> bool:
        if held.number == 0 and not over.is_set():
            if trouble == "silence":
                over.wait(DEADLINE_SECONDS)
            raise InternalError("no beat") if trouble == "an error" else ValueError("no beat")
        return whole(held, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(_HeldShard, "beat", beat)
    try:
        poll(lambda: states(scheduler)[0] == "lost", "the shard without heartbeats counts as lost")
        assert states(scheduler) == ["lost", "up"]
        over.set()
        poll(lambda: states(scheduler) == ["up", "up"], "heartbeats are tried again")
        assert both.stop_reason is None
    finally:
        over.set()


def test_a_shard_that_was_taken_over_ends_alone(
    scheduler: str, both: ShardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect(scheduler, config=PATIENT) as ours:
        table = ours.create_table("t", dim=1, optimizer=SGD(1.0), num_rows=4096, initializer=Constant(0))
        ids = np.arange(4096)
        table.push(ids, np.full((4096, 1), -1, np.float32))
        before = ours.status().shards
        whole = Scheduler.heartbeat

        def heartbeat(self: Scheduler, shard: int, incarnation: int, *told: Any, **more: Any) -> HeartbeatResult:
            if shard == 0 and incarnation == first:
                return HeartbeatResult(cluster_version=1, replaced=True)
            return whole(self, shard, incarnation, *told, **more)

        first, second = (shard.incarnation for shard in before)
        monkeypatch.setattr(Scheduler, "heartbeat", heartbeat)
        poll(lambda: both.shards == [1], "the server serves one shard less")
        assert both.stop_reason is None and not both.wait(0)
        successor = ShardServer(ServerConfig(scheduler=scheduler, shard=0, heartbeat_seconds=0.05))
        poll(lambda: states(scheduler)[0] == "lost", "the lease of the shard that ended is over")
        successor.start()
        try:
            status = cluster_status(scheduler).shards
            assert [shard.state for shard in status] == ["up", "up"]
            assert status[0].incarnation != first and status[1].incarnation == second
            assert [shard.rows for shard in status] == [0, before[1].rows] != [0, 0]
        finally:
            successor.stop(0)


def test_a_server_ends_with_its_last_shard_and_says_why(both: ShardServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "heartbeat", lambda *_, **__: HeartbeatResult(cluster_version=1, replaced=True))
    assert both.wait(DEADLINE_SECONDS)
    assert both.stop_reason is not None
    for shard in (0, 1):
        assert f"shard {shard} was taken over by another process" in both.stop_reason


def test_a_shard_whose_writer_has_ended_is_served_no_more_and_the_process_ends_with_the_last(
    scheduler: str, both: ShardServer
) -> None:
    def ended(*_: object) -> None:
        raise SystemExit(3)

    for number, left in ((0, ["lost", "up"]), (1, ["lost", "lost"])):
        writer = next(held.shard._writer for held in both._held if held.shard and held.number == number)
        writer._next_entry = ended  # type: ignore[assignment]
        writer.submit(CallContext(), Describe())
        if number == 0:
            poll(lambda: both.shards == [1], "the shard is served no more")
        poll(lambda left=left: states(scheduler) == left, "it counts as lost")  # type: ignore[misc]
    assert both.wait(DEADLINE_SECONDS)
    assert "shard 1 is broken: the writer of shard 1 has ended: SystemExit(3)" in (both.stop_reason or "")


def test_strangers_who_begin_heartbeats_and_send_none_keep_no_shard_out_and_no_dead_one_up(
    scheduler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()

    def no_message() -> Iterator[bytes]:
        over.wait(2 * DEADLINE_SECONDS)
        yield from ()

    with ExitStack() as stack:
        stack.callback(over.set)
        strangers = []
        for number in range(64):
            if number % 16 == 0:
                options = [("grpc.use_local_subchannel_pool", 1)]
                channel = stack.enter_context(grpc.insecure_channel(scheduler, options))
            method = "/geartrain.ams.v1.Scheduler/" + ("Register" if number % 2 else "Heartbeat")
            strangers.append(channel.stream_unary(method).future(no_message()))
        server = ShardServer(ServerConfig(scheduler=scheduler, shards=2, heartbeat_seconds=0.05))
        stack.callback(server.stop, 0)
        server.start()
        assert states(scheduler) == ["up", "up"]
        dead = threading.Event()
        monkeypatch.setattr(_HeldShard, "beat", lambda *_: dead.wait(2 * DEADLINE_SECONDS))
        stack.callback(dead.set)
        poll(lambda: states(scheduler) == ["lost", "lost"], "those without heartbeats count as lost")
        assert len(strangers) == 64
