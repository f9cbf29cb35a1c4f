"""Who takes over a name is decided by the scheduler, whatever the clocks of the machines say."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from geartrain.ams.client.factory import connect
from geartrain.ams.pb.v1 import shard_pb2, types_pb2
from geartrain.ams.scheduler.service import SchedulerServer
from geartrain.ams.server.role import ShardServer
from geartrain.ams.values.config import ClientConfig, SchedulerConfig, ServerConfig
from geartrain.ams.values.errors import InvalidArgument, StaleClient
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.specs import Constant
from tests.support import frame_calls

HOUR_NS = 3600 * 10**9
PATIENT = ClientConfig(attempt_timeout_seconds=5, recovery_timeout_seconds=30)
IDS = np.arange(8)
ONES = np.full((8, 1), -1, np.float32)


class Roles:
    """A scheduler that can be restarted, and two shards that stay."""

    def __init__(self, data: str | None) -> None:
        self.data = data
        self.scheduler = SchedulerServer(SchedulerConfig(listen="127.0.0.1:0", num_shards=2, data=data))
        self.address = self.scheduler.start()
        self.server = ShardServer(ServerConfig(scheduler=self.address, shards=2, heartbeat_seconds=0.05))
        self.server.start()

    def restart_scheduler(self) -> None:
        self.scheduler.stop(0)
        self.scheduler = SchedulerServer(SchedulerConfig(listen=self.address, num_shards=2, data=self.data))
        self.scheduler.start()

    def stop(self) -> None:
        self.server.stop(0)
        self.scheduler.stop(0)


@pytest.fixture(params=["in memory", "with its state"])
def roles(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Roles]:
    roles = Roles(None if request.param == "in memory" else str(tmp_path / "scheduler"))
    yield roles
    roles.stop()


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("chosen", [False, True])
def test_a_process_whose_clock_was_ahead_does_not_shut_out_its_successor(
    roles: Roles, restart: bool, chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = time.time_ns
    with monkeypatch.context() as ahead:
        ahead.setattr(time, "time_ns", lambda: right() + HOUR_NS)
        given = {"incarnation": time.time_ns()} if chosen else {}
        first = connect(roles.address, config=PATIENT, stream="job/rank0", **given)  # type: ignore[arg-type]
        table = first.create_table("t", dim=1, optimizer=SGD(1.0), num_rows=8, initializer=Constant(0))
        table.push(IDS, ONES)
    if restart:
        roles.restart_scheduler()
    with first, connect(roles.address, config=PATIENT, stream="job/rank0") as second:
        assert second.write_stream.incarnation > first.write_stream.incarnation
        second.table("t").push(IDS, ONES, sequence=1)
        with pytest.raises(StaleClient):
            table.push(IDS, ONES)
        second.streams("job", worker="w", num_streams=1).lease()
        np.testing.assert_array_equal(second.table("t").pull(IDS), np.full((8, 1), 2, np.float32))
        assert second.create_table("u", dim=1, optimizer=SGD(1.0)).spec.incarnation > table.spec.incarnation


def test_an_incarnation_beyond_all_clocks_is_refused_before_it_shuts_anybody_out(roles: Roles) -> None:
    with pytest.raises(InvalidArgument, match=r"incarnation is 9223372036854775807; it must be at most 2\^62"):
        connect(roles.address, config=PATIENT, stream="job", incarnation=2**63 - 1)
    with connect(roles.address, config=PATIENT, stream="job") as ours:
        with pytest.raises(InvalidArgument, match=r"at most 2\^62"):
            ours.fence("job", 2**63 - 1)
        ours.fence("job", ours.write_stream.incarnation)


def call(channel: grpc.Channel, method: str, request: Any, reply: Any) -> Any:
    return channel.unary_unary(
        f"/geartrain.ams.v1.Shard/{method}",
        request_serializer=type(request).SerializeToString,
        response_deserializer=reply.FromString,
    )(request)


def tell_shards(addresses: list[str], way: str, **numbers: int) -> None:
    """Push no rows as somebody of the job's name, or fence it, with whatever numbers. Raises RuntimeError: refused."""
    for address in addresses:
        with grpc.insecure_channel(address) as channel:
            try:
                if way == "fence":
                    request = shard_pb2.FenceRequest(job="job", incarnation=numbers["incarnation"])
                    call(channel, "Fence", request, shard_pb2.WriteReply)
                elif way == "message":
                    context = types_pb2.CallContext(stream="job/rank0", **numbers)
                    call(channel, "Push", shard_pb2.PushRequest(context=context, table="t"), shard_pb2.WriteReply)
            except grpc.RpcError as error:
                raise RuntimeError(error.details()) from error
            if way in ("ring", "tcp"):
                request = shard_pb2.OpenDataPlaneRequest()
                offer = call(channel, "OpenDataPlane", request, shard_pb2.OpenDataPlaneReply)
                connection = frame_calls.dial(way, offer.socket, offer.secret, offer.port)
                push = frame_calls.push("t", [], 1, stream="job/rank0", **numbers)
                (told,) = frame_calls.ask(connection, push)
                if "error" in told:
                    raise RuntimeError(told["message"])


def in_time(work: Callable[[], None]) -> None:
    """Do ``work`` as often as it takes to be allowed: scheduler and shards hear of numbers by heartbeats."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return work()
        except (StaleClient, InvalidArgument, RuntimeError):
            assert time.monotonic() < deadline


def begin_job(address: str) -> None:
    """Take the job over and push."""
    with connect(address, config=PATIENT, stream="job/rank0") as ours:
        ours.fence("job", ours.write_stream.incarnation)
        ours.table("t").push(np.arange(4096), np.zeros((4096, 1), np.float32), sequence=1)


@pytest.mark.parametrize("way", ["message", "ring", "tcp", "fence"])
def test_no_number_that_a_stranger_tells_a_shard_stops_a_job_for_good(roles: Roles, way: str) -> None:
    with connect(roles.address, config=PATIENT) as ours:
        ours.create_table("t", dim=1, optimizer=SGD(1.0), num_rows=4096, initializer=Constant(0))
        addresses = [entry.address for entry in ours.status().shards]
    good = {"sequence": 1, "incarnation": 1, "oldest_unacknowledged": 0}
    for number in (2**62, 2**62 + 2**32, 2**62 + 2**33):  # each the highest that is taken, after the one before
        in_time(partial(tell_shards, addresses, way, **good | {"incarnation": number}))
        in_time(partial(begin_job, roles.address))
    for name in ("incarnation",) if way == "fence" else good:
        with pytest.raises(RuntimeError, match=rf"{name}.* is {2**63 - 1}.*2\^62"):
            tell_shards(addresses, way, **good | {"incarnation": 2**62 + 2**33, name: 2**63 - 1})
    in_time(partial(begin_job, roles.address))
