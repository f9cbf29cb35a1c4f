"""Calls for rows by TCP, as between machines: what is in no message, and what becomes of a call that loses its way."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import grpc
import ml_dtypes
import numpy as np
import pytest

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.kernels import _core
from geartrain.ams.pb.v1 import shard_pb2
from geartrain.ams.rpc.payload import data_plane
from geartrain.ams.rpc.payload.data_plane import DataPlane
from geartrain.ams.server.data_plane import DataPlanePort
from geartrain.ams.server.service import ShardService
from geartrain.ams.values import errors
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.shard_messages import DataPlaneOffer
from geartrain.ams.values.specs import Constant
from tests.integration.conftest import ServedCluster, carriers_of, connect_data_plane, without_method
from tests.integration.one_table import DIM, IDS, NUM_ROWS, ONES, Served, connected, stub
from tests.support import frame_codec
from tests.support.frame_calls import pull as described

NUMBERS = ONES * IDS[:, None].astype(np.float32)


@pytest.fixture
def cluster(served: Served, messages: list[int]) -> ServedCluster:  # noqa: ARG001 - messages are measured from its start
    return served(1)


@pytest.fixture
def ours(cluster: ServedCluster) -> Iterator[Cluster]:
    with connected(cluster, shared_memory=False) as client:
        connect_data_plane(carriers_of(client)[0])
        yield client


def port_of(cluster: ServedCluster) -> DataPlanePort:
    return cluster.servers[0]._held[0].service.data_plane


def plane_of(cluster: Cluster) -> DataPlane:
    plane = carriers_of(cluster)[0].data_plane
    assert plane is not None
    return plane


def test_rows_are_in_no_message(ours: Cluster, messages: list[int]) -> None:
    table = ours.table("t")
    table.push(IDS, ONES)
    table.assign(IDS[:2_000], 5 * ONES[:2_000])
    np.testing.assert_array_equal(table.pull(IDS)[:, 0], np.repeat([5.0, -1.0], 2_000))
    assert (table.pull(IDS[:1]) == 5).all() and table.present(IDS).all()
    assert messages == []
    assert plane_of(ours).num_mailboxes == 0


def test_rows_travel_in_messages_where_the_client_says_so(cluster: ServedCluster, messages: list[int]) -> None:
    with connected(cluster, shared_memory=False, bulk_connections=False) as ours:
        for _ in range(3):
            ours.table("t").push(IDS, ONES)
        assert (ours.table("t").pull(IDS) == -3).all()
    assert max(messages) > ONES.nbytes
    assert port_of(cluster).num_connections == 0


def test_shared_memory_goes_first(cluster: ServedCluster) -> None:
    with connected(cluster) as ours:
        assert isinstance(connect_data_plane(carriers_of(ours)[0])._connection, _core.RingConnection)


def test_a_shard_that_shares_no_memory_has_bulk_connections(
    cluster: ServedCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, messages: list[int]
) -> None:
    log = "geartrain.ams.rpc.client.shard"
    caplog.set_level("INFO", logger=log)
    whole = DataPlanePort.offer

    def elsewhere(self: DataPlanePort) -> DataPlaneOffer:
        offer = whole(self)
        return DataPlaneOffer(socket="of-another-machine", secret=offer.secret, port=offer.port)

    monkeypatch.setattr(DataPlanePort, "offer", elsewhere)
    with connected(cluster) as ours:
        connect_data_plane(carriers_of(ours)[0])
        ours.table("t").push(IDS, ONES)
        assert (ours.table("t").pull(IDS) == -1).all()
        address = ours.status().shards[0].address
    assert messages == []
    assert [record.getMessage() for record in caplog.records if record.name == log] == [
        f"rows of the shard at {address} go over bulk connections"
    ]


def test_shards_of_a_host_take_one_data_port_after_the_other(served: Served) -> None:
    with ExitStack() as stack:
        taken = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        first = taken.getsockname()[1]
        cluster = served(2, data_port=first)  # of two processes, as far as they know
        stack.enter_context(connected(cluster, shared_memory=False))
        ports = [server._held[0].service.data_plane.offer().port for server in cluster.servers]
        assert first < ports[0] < ports[1] < first + 64


@pytest.mark.parametrize("way", ["port in use", "refusal", "older shard", "no way there"])
def test_a_shard_without_bulk_connections_is_asked_once(
    served: Served,
    messages: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    way: str,
) -> None:
    caplog.set_level("INFO", logger="geartrain.ams.rpc.client.shard")
    settings: dict[str, int] = {}
    asked: list[object] = []
    make = DataPlane._connect
    monkeypatch.setattr(DataPlane, "_connect", lambda self: (asked.append(self), make(self))[1])
    with ExitStack() as stack:
        if way == "port in use":
            taken = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            settings["data_port"] = taken.getsockname()[1]
            monkeypatch.setattr("geartrain.ams.server.data_plane._PORTS_TRIED", 1)
            reason = "no place and secret"
        elif way == "refusal":
            monkeypatch.setattr(DataPlanePort, "offer", lambda _: DataPlaneOffer(reason="there are too many"))
            reason = "there are too many"
        elif way == "older shard":
            monkeypatch.setattr(ShardService, "bound", without_method("OpenDataPlane"))
            reason = "does not speak this protocol"
        else:
            monkeypatch.setattr(data_plane, "connect_tcp", lambda *_: _core.connect_tcp("127.0.0.1", 1, bytes(32), 1.0))
            reason = "refused"
        ours = stack.enter_context(connected(served(1, **settings), shared_memory=False))
        plane_of(ours)._begin = lambda work: work()
        for _ in range(3):
            ours.table("t").push(IDS, ONES)
        assert (ours.table("t").pull(IDS) == -3).all()
        assert len(asked) == 1
    assert max(messages) > ONES.nbytes
    assert "go in messages, not over bulk connections" in caplog.text and reason in caplog.text


def test_what_the_shard_refuses_costs_nothing_else(ours: Cluster, messages: list[int]) -> None:
    table = ours.table("t")
    wrong = ONES.copy()
    wrong[17, 3] = np.nan
    other = ours.create_table("gone", dim=DIM, optimizer=SGD(1.0), num_rows=NUM_ROWS, initializer=Constant(0))
    ours.drop_table("gone")
    for done in range(1, 4):
        with pytest.raises(errors.NonFinite):
            table.push(IDS, wrong)
        with pytest.raises(errors.TableNotFound):
            other.push(IDS, ONES)
        with pytest.raises(errors.TableNotFound):
            other.pull(IDS)
        table.push(IDS, ONES)
        assert (table.pull(IDS) == -done).all()
    assert messages == []


@pytest.mark.parametrize("kind", ["pull", "push"])
def test_a_call_whose_connection_is_lost_travels_in_a_message(
    ours: Cluster, cluster: ServedCluster, messages: list[int], kind: str
) -> None:
    """Within the same attempt: this client waits for no shard."""
    ours._calls.config = ours._calls.config.model_copy(update={"recovery_timeout_seconds": 0.0})
    table, plane = ours.table("t"), plane_of(ours)
    table.push(IDS, ONES)
    shard = cluster.servers[0]._held[0].shard
    assert shard is not None and plane._connection is not None and messages == []
    with ThreadPoolExecutor(1) as threads:
        with shard.engine.turn:  # the shard is at work
            call = threads.submit(table.pull, IDS) if kind == "pull" else threads.submit(table.push, IDS, ONES)
            deadline = time.monotonic() + 20
            while not shard.engine.turn.num_waiting:
                assert time.monotonic() < deadline
            plane._connection.close()
        call.result(20)
    assert (table.pull(IDS) == (-1 if kind == "pull" else -2)).all()
    assert max(messages) > ONES.nbytes


def test_a_call_without_a_reply_ends_its_connection(ours: Cluster, cluster: ServedCluster, messages: list[int]) -> None:
    table, plane, patient = ours.table("t"), plane_of(ours), ours._calls.config
    shard = cluster.servers[0]._held[0].shard
    assert shard is not None
    out = np.full((NUM_ROWS, DIM), 77, np.float32)
    ours._calls.config = patient.model_copy(update={"attempt_timeout_seconds": 0.2, "recovery_timeout_seconds": 0.0})
    with shard.engine.turn, pytest.raises(errors.ShardUnavailable, match="no reply in time"):  # the shard is at work
        table.pull_into(IDS, out)
    assert plane._connection is not None and plane._connection.is_lost and plane.is_off
    ours._calls.config = patient
    table.push(IDS, ONES)
    assert (table.pull(IDS) == -1).all()
    assert (out == 77).all() and max(messages) > ONES.nbytes


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


def test_calls_side_by_side_do_not_mix(ours: Cluster, cluster: ServedCluster) -> None:
    table = ours.table("t")
    table.assign(IDS, NUMBERS)
    rng = np.random.default_rng(0)

    def look(ids: np.ndarray) -> bool:
        return bool((table.pull(ids) == ids[:, None]).all())

    with ThreadPoolExecutor(6) as executor:
        assert all(executor.map(look, [rng.permutation(NUM_ROWS)[: rng.integers(1, NUM_ROWS)] for _ in range(60)]))
    assert port_of(cluster).num_connections == 1


def test_a_foreign_client_can_have_a_bulk_connection(ours: Cluster) -> None:
    """By the proto file and the page about frames alone."""
    ours.table("t").push(IDS, ONES)
    address = ours.status().shards[0].address
    with grpc.insecure_channel(address) as channel:
        offer = shard_pb2.OpenDataPlaneReply.FromString(stub(channel, "OpenDataPlane")(b""))
    with socket.create_connection((address.rsplit(":", 1)[0], offer.port)) as there:
        there.sendall(frame_codec.header(3, 0, 0, 32) + offer.secret)
        assert there.recv(64, socket.MSG_WAITALL) == frame_codec.header(3, 0, 0, 0)
        there.sendall(frame_codec.request(7, 10.0, [described("t", [3, 5], DIM)]))
        head = there.recv(64, socket.MSG_WAITALL)
        body = there.recv(frame_codec.HEADER.unpack(head[:56])[6], socket.MSG_WAITALL)
        (reply,) = frame_codec.parsed_reply(head + body, 7, [2 * DIM * 4])
        assert (np.frombuffer(reply["rows"], np.float32) == -1).all()
