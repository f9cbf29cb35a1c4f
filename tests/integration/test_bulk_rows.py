"""Rows over bulk connections: what is in no message, and what happens when a connection or its call is lost."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import grpc
import ml_dtypes
import numpy as np
import pytest

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.pb.v1 import shard_pb2
from geartrain.ams.rpc.carrier import AttemptFailed
from geartrain.ams.rpc.client import shard as grpc_client
from geartrain.ams.rpc.client.shard import GrpcCarrier
from geartrain.ams.rpc.codec import framing
from geartrain.ams.rpc.codec import specs as codec
from geartrain.ams.rpc.payload import bulk
from geartrain.ams.rpc.payload.bulk import BulkConnection, BulkPort
from geartrain.ams.rpc.services import context_to_pb
from geartrain.ams.rpc.status import error_from
from geartrain.ams.server.data_plane import DataPlanePort
from geartrain.ams.server.service import ShardService
from geartrain.ams.values import errors
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.shard_messages import CallContext, DataPlaneOffer, Pull, Push
from geartrain.ams.values.specs import Constant
from tests.integration.conftest import ServedCluster, carriers_of, connect_bulk, without_method
from tests.integration.one_table import DIM, IDS, NUM_ROWS, ONES, Served, connected, stub

NUMBERS = ONES * IDS[:, None].astype(np.float32)


@pytest.fixture
def cluster(served: Served, messages: list[int], monkeypatch: pytest.MonkeyPatch) -> ServedCluster:  # noqa: ARG001 - messages are measured from its start
    monkeypatch.setattr(bulk, "MIN_BULK_BYTES", 1)
    return served(1)


@pytest.fixture
def ours(cluster: ServedCluster) -> Iterator[Cluster]:
    with connected(cluster, shared_memory=False) as client:
        connect_bulk(carriers_of(client)[0])
        yield client


def port_of(cluster: ServedCluster) -> BulkPort:
    return cluster.servers[0]._bulk


def num_connections(cluster: Cluster) -> int:
    pool = carriers_of(cluster)[0]._bulk
    assert pool is not None
    return pool.num_connections


def test_rows_are_in_no_message(ours: Cluster, messages: list[int]) -> None:
    table = ours.table("t")
    table.push(IDS, ONES)
    table.assign(IDS[:2_000], 5 * ONES[:2_000])
    np.testing.assert_array_equal(table.pull(IDS)[:, 0], np.repeat([5.0, -1.0], 2_000))
    assert len(messages) == 6 and max(messages) < IDS.nbytes + 300
    assert table.present(IDS).all()
    assert num_connections(ours) == 2


def test_rows_travel_in_messages_where_the_client_says_so(cluster: ServedCluster, messages: list[int]) -> None:
    with connected(cluster, shared_memory=False, bulk_connections=False) as ours:
        for _ in range(3):
            ours.table("t").push(IDS, ONES)
        assert (ours.table("t").pull(IDS) == -3).all()
    assert max(messages) > ONES.nbytes
    assert len(port_of(cluster)) == 0


def test_shared_memory_goes_first(cluster: ServedCluster) -> None:
    with connected(cluster) as ours:
        for _ in range(3):
            ours.table("t").push(IDS, ONES)
        assert num_connections(ours) == 0


def test_a_shard_that_shares_no_memory_has_bulk_connections(
    cluster: ServedCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, messages: list[int]
) -> None:
    log = "geartrain.ams.rpc.client.shard"
    caplog.set_level("INFO", logger=log)
    elsewhere = DataPlaneOffer(socket="of-another-machine", secret=bytes(32))
    monkeypatch.setattr(DataPlanePort, "offer", lambda _: elsewhere)
    with connected(cluster) as ours:
        carrier = carriers_of(ours)[0]
        assert carrier.data_plane is not None
        carrier.data_plane._begin = lambda work: work()
        carrier.data_plane._making_since = -math.inf
        carrier.data_plane._open_connection()
        assert carrier.data_plane.is_off
        connect_bulk(carrier)
        messages.clear()
        ours.table("t").push(IDS, ONES)
        assert (ours.table("t").pull(IDS) == -1).all()
        address = ours.status().shards[0].address
    assert max(messages) < IDS.nbytes + 300
    assert [record.getMessage() for record in caplog.records if record.name == log][-1] == (
        f"rows of the shard at {address} go over bulk connections"
    )


@pytest.mark.parametrize("way", ["refusal", "older shard", "no way there"])
def test_a_shard_without_bulk_connections_is_asked_once(
    cluster: ServedCluster,
    messages: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    way: str,
) -> None:
    caplog.set_level("INFO", logger="geartrain.ams.rpc.client.shard")
    asked: list[object] = []
    open_bulk = GrpcCarrier._open_bulk
    monkeypatch.setattr(GrpcCarrier, "_open_bulk", lambda self: (asked.append(self), open_bulk(self))[1])
    with ExitStack() as stack:
        if way == "refusal":
            taken = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            port_of(cluster)._address = taken.getsockname()
            reason = "cannot listen for bulk connections"
        elif way == "older shard":
            monkeypatch.setattr(ShardService, "bound", without_method("OpenBulk"))
            cluster.servers[0].stop(0)
            cluster.servers[0] = cluster.start_server(0)
            reason = "does not speak this protocol"
        else:
            monkeypatch.setattr(grpc_client, "connect", lambda *_: socket.create_connection(("127.0.0.1", 1)))
            reason = "refused"
        ours = stack.enter_context(connected(cluster, shared_memory=False))
        pool = carriers_of(ours)[0]._bulk
        assert pool is not None
        pool._begin = lambda work: work()
        for _ in range(3):
            ours.table("t").push(IDS, ONES)
        assert (ours.table("t").pull(IDS) == -3).all()
        assert len(asked) == 1 and num_connections(ours) == 0
    assert max(messages) > ONES.nbytes
    assert "go in messages, not over bulk connections" in caplog.text and reason in caplog.text


def test_what_the_shard_refuses_costs_the_connection_and_nothing_else(
    ours: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = BulkConnection.receive
    monkeypatch.setattr(BulkConnection, "receive", lambda self, use, rows, *_: whole(self, use, rows))  # no time-out
    table = ours.table("t")
    table.push(IDS, ONES)
    wrong = ONES.copy()
    wrong[17, 3] = np.nan
    for _ in range(3):
        with pytest.raises(errors.NonFinite):
            table.push(IDS, wrong)
        table.push(IDS, ONES)
        assert num_connections(ours) >= 1
    other = ours.create_table("gone", dim=DIM, optimizer=SGD(1.0), num_rows=NUM_ROWS, initializer=Constant(0))
    ours.drop_table("gone")
    carrier, before = carriers_of(ours)[0], num_connections(ours)
    assert before
    few = Push(table="gone", ids=IDS[:10], gradients=ONES[:10])
    with pytest.raises(errors.TableNotFound):
        carrier.submit(CallContext(), few, 10, alone=True).result(10)
    assert num_connections(ours) == before - 1  # what was sent is still on it
    for _ in range(3):
        with pytest.raises(errors.TableNotFound):
            other.push(IDS, ONES)
        with pytest.raises(errors.TableNotFound):
            other.pull(IDS)
        assert (table.pull(IDS) == -4).all()


def test_rows_whose_connection_is_lost_travel_in_a_message(ours: Cluster, cluster: ServedCluster) -> None:
    table = ours.table("t")
    for done in range(1, 4):
        for taken in list(port_of(cluster)._taken.values()):
            taken.connection.abort()  # the shard's end: a reset, as a proxy or a restart makes it
        table.push(IDS, ONES)
        assert (table.pull(IDS) == -done).all()


@pytest.mark.parametrize("lost", ["send", "receive"])
def test_rows_that_are_lost_on_the_way_travel_in_a_message(
    ours: Cluster, monkeypatch: pytest.MonkeyPatch, messages: list[int], lost: str
) -> None:
    """Half of the rows come; the shard has then begun nothing, and what the client has is overwritten."""
    whole = getattr(BulkConnection, lost)
    failures = iter([True])

    def fail(self: BulkConnection, use: int, rows: np.ndarray, *seconds: float | None) -> None:
        if next(failures, False):
            self.abort()
        whole(self, use, rows, *seconds)

    monkeypatch.setattr(BulkConnection, lost, fail)
    table = ours.table("t")
    table.push(IDS, ONES)
    assert (table.pull(IDS) == -1).all()
    assert sum(size > ONES.nbytes for size in messages) <= 2  # other connections are not trusted either, and made anew


def test_rows_that_never_arrive_though_the_reply_does_travel_in_a_message(
    cluster: ServedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connected(cluster, shared_memory=False) as ours:
        ours._calls.config = ours._calls.config.model_copy(update={"attempt_timeout_seconds": 0.3})
        connect_bulk(carriers_of(ours)[0])
        ours.table("t").push(IDS, ONES)
        monkeypatch.setattr(
            BulkConnection,
            "send",
            lambda self, use, rows: self._socket.sendall(bulk._HEAD.pack(use, rows.nbytes) + rows.tobytes()[:1000]),
        )
        assert (ours.table("t").pull(IDS) == -1).all()


def test_a_call_without_a_reply_ends_its_connection(ours: Cluster, cluster: ServedCluster) -> None:
    table = ours.table("t")
    carrier = carriers_of(ours)[0]
    table.push(IDS, ONES)
    shard = cluster.servers[0]._held[0].shard
    assert shard is not None
    out = np.full((NUM_ROWS, DIM), 77, np.float32)
    with shard.engine.turn:  # the shard is at work
        pull = Pull(table="t", ids=IDS, out=out)
        for alone in (True, False):
            with pytest.raises(AttemptFailed, match="no reply in time"):
                carrier.submit(CallContext(), pull, 0.2, alone=alone).result(10)
    assert num_connections(ours) <= 1
    table.push(IDS, ONES)
    assert (table.pull(IDS) == -2).all()
    assert (out == 77).all()


def test_a_call_that_arrives_again_is_refused(ours: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A late pull would send rows that the next call takes for its own."""
    sent: list[tuple[str, bytes]] = []
    whole = GrpcCarrier._call

    def call(self: GrpcCarrier, method: str, data: bytes, *arguments: Any, **keywords: Any) -> Any:
        sent.append((method, data))
        return whole(self, method, data, *arguments, **keywords)

    monkeypatch.setattr(GrpcCarrier, "_call", call)
    table = ours.table("t")
    table.push(IDS, ONES)
    table.pull(IDS)
    monkeypatch.undo()
    with grpc.insecure_channel(ours.status().shards[0].address) as channel:
        for method, data in sent:
            with pytest.raises(grpc.RpcError) as refused:
                stub(channel, method)(data)
            assert "arrived twice" in str(refused.value)
    assert (table.pull(IDS) == -1).all()


def test_ctrl_c_while_rows_travel_leaves_the_client_usable(ours: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    table = ours.table("t")
    for name in ("send", "receive"):
        with monkeypatch.context() as patch:
            whole = getattr(BulkConnection, name)
            interrupts = iter([KeyboardInterrupt])

            def interrupted(
                self: BulkConnection,
                use: int,
                rows: np.ndarray,
                *seconds: float | None,
                whole: Any = whole,
                interrupts: Any = interrupts,
            ) -> None:
                if self.num_uses and next(interrupts, None):  # the client's end
                    half = memoryview(bulk._HEAD.pack(use, rows.nbytes))
                    self._socket.sendall(half[:8])
                    self.close()
                    raise KeyboardInterrupt
                whole(self, use, rows, *seconds)

            patch.setattr(BulkConnection, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                table.push(IDS, ONES)
                table.pull(IDS)
        table.assign(IDS, ONES)
        assert (table.pull(IDS) == 1).all()
    assert carriers_of(ours)[0]._connection.calls == 0


def test_more_rows_than_a_message_may_have_are_refused(ours: Cluster, cluster: ServedCluster) -> None:
    """As for rows in messages: before memory is taken for them."""
    for held in cluster.servers[0]._held:
        held.service._max_message_bytes = ONES.nbytes
    table = ours.table("t")
    with pytest.raises(errors.MessageTooLarge, match=r"4000 rows take .* send, or ask for, at most"):
        table.push(IDS, ONES)
    table.push(IDS[:2_000], ONES[:2_000])
    with pytest.raises(errors.MessageTooLarge, match="4000 rows take"):
        table.pull(IDS)
    assert (table.pull(IDS[:2_000]) == -1).all()


def test_rows_of_other_kinds_and_into_parts_of_arrays(ours: Cluster) -> None:
    narrow = ours.create_table(
        "narrow", dim=DIM, optimizer=SGD(1.0), num_rows=NUM_ROWS, initializer=Constant(0), dtype="bfloat16"
    )
    narrow.push(IDS, ONES.astype(ml_dtypes.bfloat16))
    assert (narrow.pull(IDS) == -1).all()
    narrow.push(IDS, ONES)
    assert (narrow.pull(IDS) == -2).all()
    table = ours.table("t")
    table.assign(IDS, NUMBERS)
    out = np.full((NUM_ROWS + 2, DIM), 77, np.float32)
    table.pull_into(IDS[::-1].copy(), out[1:-1])
    np.testing.assert_array_equal(out[1:-1, 0], IDS[::-1])
    assert (out[[0, -1]] == 77).all()


def test_calls_side_by_side_do_not_mix(ours: Cluster) -> None:
    table = ours.table("t")
    table.assign(IDS, NUMBERS)
    rng = np.random.default_rng(0)

    def look(ids: np.ndarray) -> bool:
        return bool((table.pull(ids) == ids[:, None]).all())

    with ThreadPoolExecutor(6) as executor:
        assert all(executor.map(look, [rng.permutation(NUM_ROWS)[: rng.integers(1, NUM_ROWS)] for _ in range(60)]))
    assert num_connections(ours) <= bulk.MOST_POOL_CONNECTIONS


def test_a_foreign_client_can_have_a_bulk_connection(ours: Cluster) -> None:
    """By the proto file alone."""
    ours.table("t").push(IDS, ONES)
    address = ours.status().shards[0].address
    with grpc.insecure_channel(address) as channel:
        offer = shard_pb2.OpenBulkReply.FromString(stub(channel, "OpenBulk")(b""))
        with socket.create_connection((address.rsplit(":", 1)[0], offer.port)) as rows:
            rows.sendall(offer.secret)
            assert rows.recv(16, socket.MSG_WAITALL) == b"geartrain bulk 1"
            pull = shard_pb2.PullRequest(
                table="t",
                bulk=shard_pb2.BulkBytes(connection=offer.connection, use=1),
                ids=np.array([3, 5]).tobytes(),
            )
            reply = stub(channel, "Pull")(pull.SerializeToString())
            assert framing.parse(reply, shard_pb2.PullReply) == shard_pb2.PullReply()
            size = 2 * DIM * 4
            assert rows.recv(16, socket.MSG_WAITALL) == (1).to_bytes(8, "little") + size.to_bytes(8, "little")
            assert (np.frombuffer(rows.recv(size, socket.MSG_WAITALL), np.float32) == -1).all()


def test_a_write_without_a_deadline_whose_rows_never_come_is_given_up(
    ours: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "SILENCE_SECONDS", 0.2)
    with grpc.insecure_channel(ours.status().shards[0].address) as channel:
        offer = shard_pb2.OpenBulkReply.FromString(stub(channel, "OpenBulk")(b""))
        connection = bulk.connect(("127.0.0.1", offer.port), offer.connection, offer.secret)
        push = shard_pb2.PushRequest(
            context=context_to_pb(CallContext(stream="s", sequence=1, incarnation=1)),
            table="t",
            gradient_dtype=codec.dtype_to_pb(ONES.dtype),
            bulk=shard_pb2.BulkBytes(connection=offer.connection, use=1),
        )
        call = stub(channel, "Push").future(framing.encode_framed(push, [(14, IDS)]))
        assert isinstance(error_from(call.exception(timeout=20), "shard"), errors.BulkConnectionLost)
        connection.close()
