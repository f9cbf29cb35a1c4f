"""Whatever arrives on the port: a typed error that changes nothing, and a shard that keeps serving."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Callable

import grpc
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from geartrain.ams.client.factory import connect
from geartrain.ams.pb.v1 import shard_pb2, types_pb2
from geartrain.ams.rpc.channel import channel_options
from geartrain.ams.rpc.codec import framing, hosted
from geartrain.ams.rpc.services import SHARD
from geartrain.ams.values import errors
from geartrain.ams.values.config import ClientConfig
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.shard_messages import CallContext, HostedInputs, Push
from tests.support.message_rows import MessageShard, pull_message

MALFORMED = 420


def hosted_inputs(*, update: bool = False) -> HostedInputs:
    ones = np.ones(2, np.float32)
    arrays = {"features": np.eye(2, 4, dtype=np.float32), "labels": np.array([3, 60])}
    settings = {"logit_factor": 8.0, "normalised": 1.0, "sample_rate": 0.5}
    return HostedInputs(
        arrays={**arrays, **({"lse2": ones, "target_weight": -ones} if update else {})}, settings=settings
    )


def valid_requests() -> dict[str, bytes]:
    ids = np.array([1, 2, 3], np.int64)
    rows = np.ones((3, 4), np.float32)
    context = types_pb2.CallContext(stream="s", sequence=1)
    spec = types_pb2.TableSpec(name="other", dim=4, optimizer=types_pb2.Optimizer(name="sgd", scalars={"lr": 0.1}))
    return {
        "Pull": framing.encode_framed(shard_pb2.PullRequest(table="t"), [(14, ids)]),
        "Push": framing.encode_framed(shard_pb2.PushRequest(table="t", context=context), [(14, ids), (15, rows)]),
        "Assign": framing.encode_framed(shard_pb2.AssignRequest(table="t", context=context), [(14, ids), (15, rows)]),
        "Remove": framing.encode_framed(shard_pb2.RemoveRequest(table="t", context=context), [(14, ids)]),
        "ComputeHosted": hosted.in_parts(
            shard_pb2.ComputeHostedRequest(table="t", model="class_head", operation="forward"),
            [hosted_inputs()],
            1 << 20,
        )[0],
        "UpdateHosted": hosted.in_parts(
            shard_pb2.UpdateHostedRequest(table="t", model="class_head", context=context),
            [hosted_inputs(update=True)],
            1 << 20,
        )[0],
        "CreateTable": shard_pb2.CreateTableRequest(spec=spec).SerializeToString(),
        "Describe": shard_pb2.DescribeRequest().SerializeToString(),
    }


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Cut, flip, insert or replace some bytes."""
    body = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        position = chance.randrange(len(body) + 1)
        match chance.randrange(4):
            case 0:
                del body[position:]
            case 1 if body:
                body[position % len(body)] ^= 1 << chance.randrange(8)
            case 2:
                body[position:position] = chance.randbytes(chance.randint(1, 9))
            case _:
                body[position : position + 4] = chance.randbytes(4)
    return bytes(body)


def test_malformed_requests_end_in_typed_errors_and_the_shard_keeps_serving(served: Callable[..., object]) -> None:
    cluster = served(1)
    with connect(cluster.address) as ours:  # type: ignore[attr-defined]
        table = ours.create_table("t", dim=4, optimizer=SGD(1.0), num_rows=100)
        table.assign(np.arange(50), np.ones((50, 4), np.float32))
        address = ours.status().shards[0].address
        requests, chance = valid_requests(), random.Random(11)
        refused = 0
        with grpc.insecure_channel(address) as channel:
            for number in range(MALFORMED):
                method = list(requests)[number % len(requests)]
                before = table.pull(np.arange(100))
                try:
                    channel.unary_unary(f"/{SHARD.name}/{method}")(damaged(requests[method], chance), timeout=20)
                except grpc.RpcError as error:
                    assert isinstance(error, grpc.Call)
                    name = dict(error.trailing_metadata() or ()).get("geartrain-error")
                    assert name in vars(errors) and name != "InternalError", (method, error.details())
                    np.testing.assert_array_equal(table.pull(np.arange(100)), before)
                    refused += 1
                assert np.isfinite(table.pull(np.arange(100))).all()
        assert refused > MALFORMED // 3
        table.push(np.array([60]), np.ones((1, 4), np.float32))
        assert ours.status().ready


def test_garbage_on_the_port_does_not_disturb_the_shard(served: Callable[..., object]) -> None:
    cluster = served(1)
    with connect(cluster.address) as ours:  # type: ignore[attr-defined]
        table = ours.create_table("t", dim=4, optimizer=SGD(1.0))
        host, port = ours.status().shards[0].address.split(":")
        chance = random.Random(5)
        for _ in range(20):
            with socket.create_connection((host, int(port)), timeout=10) as raw:
                raw.sendall(chance.randbytes(chance.randint(1, 4096)))
        assert table.push(np.array([1]), np.ones((1, 4), np.float32)).created == 1


def test_an_oversize_message_names_the_limit(served: Callable[..., object]) -> None:
    cluster = served(1, max_message_bytes=2 << 20)
    with connect(cluster.address) as ours:  # type: ignore[attr-defined]
        table = ours.create_table("t", dim=256, optimizer=SGD(1.0))
        ids, address = np.arange(4000), ours.status().shards[0].address
        push = Push(table="t", ids=ids, gradients=np.ones((4000, 256), np.float32))
        shard = MessageShard(address)
        with pytest.raises(errors.MessageTooLarge, match="part_bytes"):
            shard.write(CallContext(stream="s", sequence=1), push, 20).result(20)
        shard.close()
        pull = pull_message("t", ids, np.dtype(np.float32), CallContext())
        with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError, match="at most"):
            channel.unary_unary(f"/{SHARD.name}/Pull")(pull, timeout=20)
        assert not table.present(np.arange(1000)).any()


def test_the_wrong_role_on_a_port_is_named(served: Callable[..., object]) -> None:
    cluster = served(1)
    with connect(cluster.address) as ours:  # type: ignore[attr-defined]
        shard_address = ours.status().shards[0].address
    with pytest.raises(errors.ProtocolError, match="right role"):
        connect(shard_address, config=ClientConfig(connect_timeout_seconds=1))


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.binary(max_size=200))
def test_no_bytes_break_the_decoder(data: bytes) -> None:
    for kind in (shard_pb2.PushRequest, shard_pb2.PullReply):
        with contextlib.suppress(errors.ProtocolError):
            framing.decode_framed(data, kind)


@settings(max_examples=100, deadline=None)
@given(
    table=st.text(max_size=40),
    ids=st.lists(st.integers(0, 2**63 - 1), max_size=20),
    dim=st.integers(1, 9),
    sequence=st.integers(0, 2**64 - 1),
)
def test_the_fast_path_writes_plain_protobuf(table: str, ids: list[int], dim: int, sequence: int) -> None:
    ids_array = np.array(ids, np.int64)
    rows = np.arange(len(ids) * dim, dtype=np.float32).reshape(len(ids), dim)
    header = shard_pb2.PushRequest(table=table, context=types_pb2.CallContext(sequence=sequence))
    data = framing.encode_framed(header, [(14, ids_array), (15, rows)])
    plain = shard_pb2.PushRequest.FromString(data)
    assert (plain.table, plain.context.sequence) == (table, sequence)
    assert plain.ids == ids_array.tobytes() and plain.gradients == rows.tobytes()
    decoded, raw = framing.decode_framed(plain.SerializeToString(), shard_pb2.PushRequest)
    assert decoded.table == table
    np.testing.assert_array_equal(framing.ids_from(raw.get(14)), ids_array)
    np.testing.assert_array_equal(framing.rows_from(raw.get(15), len(ids), dim, np.dtype(np.float32)), rows)


def test_channel_limits_hold_on_both_ends() -> None:
    options = dict(channel_options(123))
    assert options["grpc.max_send_message_length"] == options["grpc.max_receive_message_length"] == 123
