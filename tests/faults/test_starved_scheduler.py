"""A scheduler that has more to do than threads to do it gives no live shard away."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.factory import connect
from geartrain.ams.observe import failpoints
from geartrain.ams.pb.v1.wire import WIRE
from geartrain.ams.rpc.client.scheduler import GrpcSchedulerCarrier
from geartrain.ams.rpc.server import server as grpc_server
from geartrain.ams.scheduler import service as scheduler_service
from geartrain.ams.scheduler.scheduler import Scheduler
from geartrain.ams.scheduler.service import SchedulerServer
from geartrain.ams.server.role import ShardServer
from geartrain.ams.values import errors
from geartrain.ams.values.config import ClientConfig, SchedulerConfig, ServerConfig
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.scheduler_messages import HeartbeatResult, Register, Registration
from geartrain.ams.values.specs import Constant
from tests.support.role_process import RoleProcess

DEADLINE_SECONDS = 30.0
LEASE_SECONDS = 1.0
THREADS = 4
CHANGES = 2 * THREADS
IDS = np.arange(64)
PATIENT = ClientConfig(attempt_timeout_seconds=60, recovery_timeout_seconds=60)


def poll(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"not within {DEADLINE_SECONDS:g} s: {what}"
        time.sleep(0.02)


def outlast_a_lease() -> None:
    ends = time.monotonic() + 1.5 * LEASE_SECONDS
    poll(lambda: time.monotonic() > ends, "a lease is over")


@dataclass
class Heard:
    """What the scheduler was told and asked."""

    beats: list[int] = field(default_factory=list)
    """Incarnations of the shards that said that they live."""
    changes: list[str] = field(default_factory=list)
    """Tables to make."""


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Heard:
    heard = Heard()
    heartbeat, create = Scheduler.heartbeat, Scheduler.create_table

    def noted_heartbeat(self: Scheduler, shard: int, incarnation: int, *told: Any, **more: Any) -> HeartbeatResult:
        heard.beats.append(incarnation)
        return heartbeat(self, shard, incarnation, *told, **more)

    def noted_create(self: Scheduler, spec, **arguments):  # type: ignore[no-untyped-def]
        heard.changes.append(spec.name)
        return create(self, spec, **arguments)

    monkeypatch.setattr(Scheduler, "heartbeat", noted_heartbeat)
    monkeypatch.setattr(Scheduler, "create_table", noted_create)
    return heard


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """One of few threads."""
    monkeypatch.setattr(grpc_server, "MAX_CONCURRENT_CALLS", THREADS)
    monkeypatch.setattr(scheduler_service, "_TABLE_THREADS", CHANGES + 1)
    monkeypatch.setattr(scheduler_service, "_MEMBERSHIP_THREADS", 1)
    server = SchedulerServer(SchedulerConfig(listen="127.0.0.1:0", num_shards=1, lease_seconds=LEASE_SECONDS))
    yield server.start()
    server.stop(0)


def busy_server(scheduler: str, free: Path) -> RoleProcess:
    """A server process whose replies to changes wait, from the third on, until the file ``free`` exists."""
    return RoleProcess(
        "server",
        f"--scheduler={scheduler}",
        "--shard=0",
        GEARTRAIN_SERVER__HEARTBEAT_SECONDS="0.1",
        GEARTRAIN_FAILPOINTS=f"shard.reply.before=pause({free})@3",
    )


def test_heartbeats_are_heard_while_every_change_of_tables_waits_for_a_busy_shard(
    scheduler: str, heard: Heard, tmp_path: Path
) -> None:
    free = tmp_path / "free"
    with ExitStack() as stack:
        stack.callback(free.touch)
        stack.enter_context(busy_server(scheduler, free))
        ours = stack.enter_context(connect(scheduler, config=PATIENT))
        table = ours.create_table("t", dim=2, optimizer=SGD(1.0), num_rows=64, initializer=Constant(0))
        table.push(IDS, np.full((64, 2), -1, np.float32))
        callers = stack.enter_context(ThreadPoolExecutor(CHANGES))
        made = [callers.submit(make, ours, f"u{number}") for number in range(CHANGES)]
        poll(lambda: len(heard.changes) > THREADS, "more changes of tables wait than there are threads for calls")
        beats = len(heard.beats)
        outlast_a_lease()
        poll(lambda: len(heard.beats) > beats + 5, "heartbeats are heard meanwhile")
        newcomer = ShardServer(ServerConfig(scheduler=scheduler, shard=0, heartbeat_seconds=0.1))
        with pytest.raises(errors.ConfigError, match="shard 0 is held by a live process"):
            newcomer.start()
        assert [shard.state for shard in ours.status().shards] == ["up"]
        assert ours.create_table(
            "t", dim=2, optimizer=SGD(1.0), num_rows=64, initializer=Constant(0), reuse=True
        )  # waits for no change of another table
        assert healthy(scheduler)
        free.touch()
        for future in made:
            future.result(DEADLINE_SECONDS)
        np.testing.assert_array_equal(table.pull(IDS), np.ones((64, 2), np.float32))


def test_heartbeats_that_waited_for_the_scheduler_cost_no_shard_its_place(
    scheduler: str, heard: Heard, tmp_path: Path
) -> None:
    free = tmp_path / "free"
    with ExitStack() as stack:
        server = ShardServer(ServerConfig(scheduler=scheduler, shard=0, heartbeat_seconds=0.1))
        server.start()
        stack.callback(server.stop, 0)
        beats = len(heard.beats)
        poll(lambda: len(heard.beats) > beats, "the shard is heard")
        callers = stack.enter_context(ThreadPoolExecutor())
        carrier = GrpcSchedulerCarrier(scheduler)
        stack.callback(carrier.close)
        stack.callback(free.touch)
        with failpoints.armed(f"scheduler.register.before=pause({free})") as passes:
            stuck: list[Future[Registration]] = []
            for incarnation in range(1, THREADS + 1):  # enough for every thread that hears heartbeats
                request = Register(address=f"h:{incarnation}", shard=0, incarnation=incarnation, wire=WIRE)
                stuck.append(callers.submit(carrier.call, request, DEADLINE_SECONDS))
            poll(lambda: passes.fired["scheduler.register.before"] >= 1, "a request holds the thread of heartbeats")
            outlast_a_lease()
            free.touch()
            for item in stuck:
                with pytest.raises(errors.ConfigError, match="shard 0 is held by a live process"):
                    item.result(DEADLINE_SECONDS)
        assert server.stop_reason is None


def make(cluster: Cluster, name: str) -> None:
    cluster.create_table(name, dim=1, optimizer=SGD(1.0))


def healthy(address: str) -> bool:
    with grpc.insecure_channel(address) as channel:
        reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_SECONDS)
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
