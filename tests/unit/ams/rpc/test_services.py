"""Every RPC is declared once: name, messages, value and codec belong together, and a mismatch is found at once."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from geartrain.ams.pb.v1 import gear_pb2, graph_pb2, scheduler_pb2, shard_pb2
from geartrain.ams.rpc.codec.messages import MessageCodec
from geartrain.ams.rpc.server.binding import bind
from geartrain.ams.rpc.services import GEAR, GRAPH, SCHEDULER, SHARD, Service
from geartrain.ams.values.errors import InvalidArgument, ProtocolError
from geartrain.ams.values.gear_messages import GearAccount, HandOver
from geartrain.ams.values.graph_messages import GraphInfo, SelectClasses, WriteGraphs
from geartrain.ams.values.optimizers.momentum import SGD
from geartrain.ams.values.placement import BucketMap
from geartrain.ams.values.rpc import Rpc
from geartrain.ams.values.scheduler_messages import (
    AlterClusterTable,
    CheckCaller,
    ClusterView,
    CreateClusterTable,
    Cursor,
    DescribeCluster,
    DescribeHolders,
    DescribeStreams,
    IssueIncarnation,
    JobWorker,
    Register,
    Registration,
    RenewStreams,
    ShardEntry,
    StreamHolders,
)
from geartrain.ams.values.shard_messages import (
    AlterTable,
    CallContext,
    CreateTable,
    Describe,
    Done,
    Freeze,
    Push,
    ShardState,
    TableState,
)
from geartrain.ams.values.specs import TableSpec

SPEC = TableSpec(name="t", dim=3, optimizer=SGD(0.1), num_rows=7)
CALLER = CallContext(stream="job/rank0", incarnation=7, sequence=3, table_incarnation=2**63)
SERVICES = {"Shard": SHARD, "Scheduler": SCHEDULER, "Graph": GRAPH, "Gear": GEAR}


def view(bucket_shards: Any) -> ClusterView:
    entry = ShardEntry(shard=1, address="h:1", incarnation=5, state="silent", heartbeat_age_seconds=0.5)
    return ClusterView(
        cluster_version=3,
        num_shards=2,
        ready=True,
        shards=(entry,),
        tables=(SPEC,),
        bucket_shards=bucket_shards,
        map_version=6,
        incomplete_tables=("a", "b"),
    )


@pytest.mark.parametrize(
    ("service", "request_"),
    [
        (SHARD, CreateTable(spec=SPEC, for_restore=True)),
        (SHARD, AlterTable(spec=SPEC)),
        (SHARD, Freeze(snapshot_id="0" * 32, tables=("t", "u"), parent_id="")),
        (SCHEDULER, Register(address="h:1", shard=None, incarnation=2**63 - 1, tables=(SPEC,), heartbeat_seconds=0.5)),
        (SCHEDULER, Register(address="h:1", shard=0, incarnation=1)),
        (SCHEDULER, CreateClusterTable(spec=SPEC, reuse=True, caller=CALLER)),
        (SCHEDULER, CreateClusterTable(spec=SPEC)),
        (SCHEDULER, AlterClusterTable(spec=SPEC, settings=("max_bytes", "expiry"), caller=CALLER)),
        (SCHEDULER, CheckCaller(caller=CALLER)),
        (SCHEDULER, RenewStreams(reader=JobWorker("j", "w", 4), cursors={3: Cursor(1, 2), 0: Cursor(0, 0)})),
        (GRAPH, WriteGraphs(snapshot_id="x", folder="/f", tables={"t": 9, "u": 0})),
        (GEAR, HandOver(name="n", process="p", accounts={"s": GearAccount(received=4, applied=4)})),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_request_comes_as_it_was_sent_and_says_who_calls(service: Service, request_: Rpc[Any]) -> None:
    method = service[type(request_)]
    decoded, context = method.decode(method.encode(request_, CALLER))
    assert decoded == request_
    assert context == (CALLER if service is SHARD else CallContext())


@pytest.mark.parametrize(
    ("service", "kind", "reply"),
    [
        (SHARD, Push, Done(created=3, duplicate=True)),
        (
            SHARD,
            Describe,
            ShardState(
                shard=1,
                incarnation=2,
                cluster_version=3,
                uptime_seconds=4.5,
                tables=(TableState(spec=SPEC, rows=1, memory_bytes=2, writes=3, next_step=4),),
            ),
        ),
        (SCHEDULER, CreateClusterTable, SPEC),
        (SCHEDULER, IssueIncarnation, 2**63),
        (SCHEDULER, CheckCaller, None),
        (SCHEDULER, DescribeStreams, {0: Cursor(1, 2)}),
        (SCHEDULER, DescribeHolders, StreamHolders(lease_seconds=1.5, holders=("w", None), incarnations={"w": 3})),
        (GRAPH, WriteGraphs, ("a", "b")),
    ],
)
def test_a_reply_comes_as_it_was_sent(service: Service, kind: type[Rpc[Any]], reply: Any) -> None:
    codec = service[kind].reply
    assert codec.decode(codec.encode(reply)) == reply


def test_a_bucket_map_comes_as_it_was_sent() -> None:
    held = BucketMap(3, np.arange(4096, dtype=np.uint16))
    register = SCHEDULER[Register]
    came, _ = register.decode(register.encode(Register(address="h:1", shard=0, incarnation=1, bucket_map=held)))
    assert came.bucket_map.is_as(held)
    given = Registration(shard=1, num_shards=2, cluster_version=3, lease_seconds=0.5, bucket_map=held)
    assert register.reply.decode(register.reply.encode(given)).bucket_map.is_as(held)


def test_arrays_come_as_they_were_sent() -> None:
    sent = view(np.arange(4096, dtype=np.uint16))
    codec = SCHEDULER[DescribeCluster].reply
    came = codec.decode(codec.encode(sent))
    assert (came.bucket_shards.tolist(), came.map_version) == (list(range(4096)), 6)
    assert (came.shards, came.tables, came.incomplete_tables) == (sent.shards, sent.tables, sent.incomplete_tables)
    labels = np.array([5, 2**62], np.int64)
    select = GRAPH[SelectClasses]
    asked, _ = select.decode(select.encode(SelectClasses(table="t", labels=labels, budget=9, seed=2**64 - 1, step=0)))
    assert asked.labels.tolist() == labels.tolist() and (asked.seed, asked.version) == (2**64 - 1, None)


def test_what_a_message_leaves_out_is_the_default_of_the_value() -> None:
    push = SHARD[Push].header.from_message(shard_pb2.PushRequest(table="t"), ids=None, gradients=None)
    assert (push.lr, push.scale, push.group, push.step_goes_on) == (None, 1.0, None, False)
    assert SHARD[Push].header.from_message(shard_pb2.PushRequest(scale=0.0), ids=None, gradients=None).scale == 0.0
    info: GraphInfo = MessageCodec(GraphInfo, graph_pb2.GraphInfo.DESCRIPTOR).from_message(graph_pb2.GraphInfo())
    assert info.age_writes is None and info.shard_bytes == ()


def test_a_number_that_no_message_holds_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match=r"Register cannot be sent: .*-1"):
        SCHEDULER[Register].encode(Register(address="h:1", shard=-1, incarnation=1))


def test_a_state_or_a_placement_that_nobody_knows_is_no_reply() -> None:
    codec = SCHEDULER[DescribeCluster].reply
    whole = scheduler_pb2.DescribeClusterReply(bucket_shards=bytes(8192))
    assert codec.decode(whole.SerializeToString()).bucket_shards.tolist() == [0] * 4096
    short = scheduler_pb2.DescribeClusterReply(bucket_shards=bytes(8191))
    strange = scheduler_pb2.DescribeClusterReply(
        bucket_shards=bytes(8192),
        shards=[scheduler_pb2.ShardEntry(state=99)],  # type: ignore[arg-type]
    )
    for reply, complaint in ((short, "places 4095 buckets"), (strange, "has code 99; known are")):
        with pytest.raises(ProtocolError, match=complaint):
            codec.decode(reply.SerializeToString())


@pytest.mark.parametrize("name", SERVICES)
def test_every_rpc_of_a_service_has_a_value_and_needs_a_handler(name: str) -> None:
    files = {"Shard": shard_pb2, "Scheduler": scheduler_pb2, "Graph": graph_pb2, "Gear": gear_pb2}
    described = files[name].DESCRIPTOR.services_by_name[name]
    service = SERVICES[name]
    assert {method.name for _, method in service.items()} == set(described.methods_by_name)
    handlers = {kind: lambda *_: None for kind, _ in service.items()}
    bound = bind(service, handlers, handlers)
    assert {*bound.methods, *bound.streams} == set(described.methods_by_name)
    for kind, method in service.items():
        lacking = {name: handler for name, handler in handlers.items() if name is not kind}
        with pytest.raises(TypeError, match=f"{method.path} has no handler"):
            bind(service, lacking, lacking)


def declared(**values: type) -> ModuleType:
    module = ModuleType("values")
    vars(module).update(values)
    return module


def test_a_value_without_an_rpc_and_an_rpc_without_a_value_are_found() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Sing(Rpc[None]):
        pass

    with pytest.raises(TypeError, match=r"'CancelBuild'.*'Sing'.*must be both an RPC and a value"):
        Service(graph_pb2.DESCRIPTOR.services_by_name["Graph"], declared(Sing=Sing))


def test_a_field_that_only_one_side_has_is_found() -> None:
    @dataclass(frozen=True, kw_only=True)
    class CancelBuild:
        table: str
        colour: str

    @dataclass(frozen=True, kw_only=True)
    class Bare:
        pass

    request = graph_pb2.CancelBuildRequest.DESCRIPTOR
    with pytest.raises(TypeError, match=r"CancelBuild\.colour has no field in the message .*CancelBuildRequest"):
        MessageCodec(CancelBuild, request)
    with pytest.raises(TypeError, match=r"CancelBuildRequest\.table has no field in the value Bare"):
        MessageCodec(Bare, request)


def test_what_only_the_caller_knows_does_not_travel() -> None:
    codec = MessageCodec(GearAccount, gear_pb2.GearAccount.DESCRIPTOR, outside_header=("lost",))
    assert codec.decode(codec.encode(GearAccount(received=3, lost=3))) == GearAccount(received=3)
