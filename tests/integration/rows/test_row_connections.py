"""Connections for rows, shared memory and TCP: how they come about, and what becomes of a call that loses its own."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
import numpy as np
import pytest

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.factory import connect
from geartrain.ams.client.table import Table
from geartrain.ams.kernels import _core
from geartrain.ams.pb.v1 import shard_pb2
from geartrain.ams.rpc.client import data_plane
from geartrain.ams.rpc.client.backoff import Backoff
from geartrain.ams.rpc.client.data_plane import DataPlane
from geartrain.ams.server.data_plane import DataPlanePort
from geartrain.ams.server.shard import Shard
from geartrain.ams.values import errors
from geartrain.ams.values.config import CLIENT, FOLDER_VARIABLE
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.shard_messages import DataPlaneOffer, SyncGroup
from geartrain.ams.values.specs import Constant
from geartrain.launch.certificates import create_authority, issue
from tests.integration.conftest import ServedCluster, carriers_of, connect_data_plane
from tests.integration.rows.one_table import DIM, IDS, NUM_ROWS, ONES, Served, connected, stub
from tests.support import frame_codec
from tests.support.frame_calls import pull as described

SOON = 20.0
CARRIERS = ["shared memory", "TCP"]


@pytest.fixture
def cluster(served: Served) -> ServedCluster:
    return served(1)


@pytest.fixture(params=[*CARRIERS, "TLS"])
def ours(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    if request.param == "TLS":
        folder = tmp_path_factory.mktemp("certificates")
        create_authority(folder, "test")
        issue(folder, folder, [CLIENT, "scheduler", "server"])
        monkeypatch.setenv(FOLDER_VARIABLE, str(folder))
    cluster = request.getfixturevalue("cluster")
    assert port_of(cluster).offer().uses_tls is (request.param == "TLS")
    with connected(cluster, shared_memory=request.param == "shared memory") as client:
        yield client


def port_of(cluster: ServedCluster) -> DataPlanePort:
    return cluster.servers[0]._held[0].service.data_plane


def plane_of(cluster: Cluster) -> DataPlane:
    return connect_data_plane(carriers_of(cluster)[0])


def is_shared(plane: DataPlane) -> bool:
    return isinstance(plane.connection, _core.RingConnection)


def impatient(cluster: Cluster) -> None:
    """From now on it makes one short attempt."""
    cluster._calls.config = cluster._calls.config.model_copy(
        update={"attempt_timeout_seconds": 0.2, "recovery_timeout_seconds": 0.0}
    )


def test_a_secret_is_in_no_log_of_an_offer() -> None:
    assert "hidden" not in repr(DataPlaneOffer(socket="here", secret=b"hidden"))


def elsewhere(*given: Any, offer: Any = DataPlanePort.offer) -> DataPlaneOffer:
    """What a shard of another machine offers."""
    made = offer(*given)
    return DataPlaneOffer(socket="of-another-machine", secret=made.secret, port=made.port)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_the_log_says_once_how_rows_go(
    cluster: ServedCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, carrier: str
) -> None:
    caplog.set_level(logging.INFO, logger=data_plane.__name__)
    if carrier == "TCP":
        monkeypatch.setattr(DataPlanePort, "offer", elsewhere)
    with connected(cluster) as ours:
        for _ in range(2):
            ours.table("t").push(IDS, ONES)
        assert (ours.table("t").pull(IDS) == -2).all()
        address = ours.status().shards[0].address
    way = "through shared memory" if carrier == "shared memory" else "by TCP"
    assert [record.getMessage() for record in caplog.records if record.name == data_plane.__name__] == [
        f"rows of the shard at {address} go {way}"
    ]


def test_shards_of_a_host_take_one_data_port_after_the_other(served: Served) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        first = taken.getsockname()[1]
        cluster = served(2, data_port=first)  # of two processes, as far as they know
        with connected(cluster, shared_memory=False):
            ports = [server._held[0].service.data_plane.offer().port for server in cluster.servers]
        assert first < ports[0] < ports[1] < first + 64


def test_a_closed_data_port_is_named_with_its_remedy(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr("geartrain.ams.server.data_plane._PORTS_TRIED", 1)
        in_use = served(1, data_port=taken.getsockname()[1])
        with (
            connected(in_use, shared_memory=False) as ours,
            pytest.raises(errors.DataPortClosed, match=r"has no port for rows .* --data-port"),
        ):
            ours.table("t").pull(IDS)
    firewall = lambda host, port, secret, seconds, **_: _core.connect_tcp("127.0.0.1", 1, secret, seconds)  # noqa: ARG005, E731
    monkeypatch.setattr(data_plane, "connect_tcp", firewall)
    open_cluster = served(1)
    with connected(open_cluster, shared_memory=False) as ours:
        port = port_of(open_cluster).offer().port
        for call in (lambda: ours.table("t").pull(IDS), lambda: ours.table("t").push(IDS, ONES)):
            with pytest.raises(
                errors.DataPortClosed,
                match=rf"answers, but its port for rows, 127.0.0.1:{port}, .*firewall.*--data-port",
            ):
                call()
    with connected(open_cluster) as ours:  # on the same machine rows need no port
        assert (ours.table("t").pull(IDS) == 0).all()


@pytest.mark.parametrize("ours", ["TLS"], indirect=True)
def test_under_certificates_rows_go_under_tls_or_not_at_all(
    ours: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger=data_plane.__name__)
    ours.table("t").push(IDS, ONES)
    assert "go by TCP under TLS" in caplog.text
    offer = DataPlanePort.offer
    monkeypatch.setattr(DataPlanePort, "offer", lambda *given: replace(offer(*given), uses_tls=False))
    again = DataPlane(plane_of(ours)._address, plane_of(ours)._ask, shares_memory=False, needs_tls=True)
    with pytest.raises(errors.ConfigError, match="plain text, which this client does not take; start its server with"):
        again.connect()
    plain = DataPlane(plane_of(ours)._address, plane_of(ours)._ask, shares_memory=False)
    with pytest.raises(errors.DataPortClosed):  # who would send the secret in plain text gets nothing for it
        plain.connect()


def test_without_openssl_a_shard_shares_memory_on_loopback_and_starts_nowhere_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing() -> None:
        raise errors.ConfigError("install libssl3")

    monkeypatch.setattr(_core, "load_tls", missing)
    shard = Shard(0, np.arange(4096), incarnation=1)
    port = DataPlanePort(lambda: shard, "127.0.0.1", 0, uses_tls=True)
    offer = port.offer()
    assert offer.socket and offer.port == 0 and "shared memory alone here: install libssl3" in caplog.text
    port.close()
    with pytest.raises(errors.ConfigError, match="libssl3"):
        DataPlanePort(lambda: shard, "10.0.0.1", 0, uses_tls=True)
    shard.close()


def test_a_shard_that_takes_no_connection_says_why(cluster: ServedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    with connected(cluster) as ours:
        impatient(ours)
        monkeypatch.setattr(DataPlanePort, "offer", lambda *_: DataPlaneOffer(reason="there are too many"))
        with pytest.raises(errors.ShardUnavailable, match="takes no connection for rows: there are too many"):
            ours.table("t").pull(IDS)


def test_where_no_memory_can_be_shared_rows_go_by_tcp(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "DataServer", partial(_core.DataServer, max_mailboxes=0))
    with connected(served(1)) as ours:
        assert is_shared(plane_of(ours))
        ours.table("t").push(IDS, ONES)
        assert (ours.table("t").pull(IDS) == -1).all()
        assert not is_shared(plane_of(ours))


def test_calls_larger_than_the_pool_of_shared_memory_are_made_and_leave_none(cluster: ServedCluster) -> None:
    with connected(cluster) as ours:
        plane = plane_of(ours)
        offer = plane._ask(SOON)
        plane._connection = _core.connect_ring(offer.socket, offer.secret, SOON, max_pool_bytes=256 << 10)
        ours.table("t").push(IDS, ONES)
        assert plane.num_mailboxes == 0
        assert (ours.table("t").pull(IDS[:100]) == -1).all()
        assert plane.num_mailboxes == 1


def test_more_threads_than_a_connection_has_room_for_wait_for_each_other(ours: Cluster) -> None:
    table, plane = ours.table("t"), plane_of(ours)
    offer = plane._ask(SOON)
    if is_shared(plane):
        plane._connection = _core.connect_ring(offer.socket, offer.secret, SOON, max_mailboxes=2)
    else:
        plane._connection = _core.connect_tcp(
            "127.0.0.1", offer.port, offer.secret, SOON, uses_tls=offer.uses_tls, max_in_flight_bytes=1
        )
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: table.push(IDS, ONES), range(24)))
    assert (table.pull(IDS) == -24).all()


def test_more_rows_than_one_request_holds_are_pulled_piece_by_piece(
    ours: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = ours.table("t")
    table.assign(IDS, ONES * IDS[:, None].astype(np.float32))
    monkeypatch.setattr("geartrain.ams.client.rows.row_calls._MAX_PULLED_BYTES", 7 * DIM * 4)
    np.testing.assert_array_equal(table.pull(IDS[::-1].copy())[:, 0], IDS[::-1])
    assert table.present(IDS).all()


CHILD = f"""
import sys
import numpy as np
from geartrain.ams.client.factory import connect

with connect(sys.argv[1]) as cluster:
    table, ids = cluster.table("t"), np.arange({NUM_ROWS})
    table.push(ids, np.full(({NUM_ROWS}, {DIM}), 2, np.float32))
    assert (table.pull(ids) == -3).all()
    print(cluster._calls._carriers[0].data_plane.num_mailboxes, flush=True)
    sys.stdin.read()
"""


def test_another_process_shares_its_memory_and_when_it_is_killed_the_shard_lets_go_of_it(
    cluster: ServedCluster,
) -> None:
    port = port_of(cluster)
    with connected(cluster) as ours:
        ours.table("t").push(IDS, ONES)
        ours.table("t").pull(IDS)
        before = port.num_mailboxes
        with subprocess.Popen(
            [sys.executable, "-c", CHILD, cluster.address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as child:
            try:
                assert child.stdout is not None
                shared = int(child.stdout.readline())
                assert port.num_connections == 2 and port.num_mailboxes == before + shared > before
            finally:
                child.kill()
        deadline = time.monotonic() + SOON
        while port.num_connections > 1 or port.num_mailboxes > before:
            assert time.monotonic() < deadline
            assert (ours.table("t").pull(IDS) == -3).all()  # between calls the shard looks who has gone


def test_a_call_without_a_reply_gives_its_memory_or_its_connection_up(ours: Cluster, cluster: ServedCluster) -> None:
    table, plane, patient = ours.table("t"), plane_of(ours), ours._calls.config
    table.push(IDS, ONES)
    table.pull(IDS)
    before, was_shared, connection = plane.num_mailboxes, is_shared(plane), plane.connection
    impatient(ours)
    shard = cluster.servers[0]._held[0].shard
    assert shard is not None and connection is not None
    out = np.full((NUM_ROWS, DIM), 77, np.float32)
    with shard.engine.turn:  # the shard is at work
        with pytest.raises(errors.ShardUnavailable, match="no reply in time"):
            table.pull_into(IDS, out)
        assert plane.num_mailboxes == before - 1 if was_shared else connection.is_lost
    ours._calls.config = patient
    table.push(IDS, ONES)
    assert (table.pull(IDS) == -2).all()
    assert (out == 77).all()


@pytest.mark.parametrize("kind", ["pull", "push"])
def test_a_call_whose_connection_is_lost_is_made_over_another(ours: Cluster, cluster: ServedCluster, kind: str) -> None:
    """At once, and applied once: this client waits for no shard."""
    ours._calls.config = ours._calls.config.model_copy(update={"recovery_timeout_seconds": 0.0})
    table, plane = ours.table("t"), plane_of(ours)
    table.push(IDS, ONES)
    shard, connection = cluster.servers[0]._held[0].shard, plane.connection
    assert shard is not None and connection is not None
    with ThreadPoolExecutor(1) as threads:
        with shard.engine.turn:  # the shard is at work
            call = threads.submit(table.pull, IDS) if kind == "pull" else threads.submit(table.push, IDS, ONES)
            deadline = time.monotonic() + SOON
            while not shard.engine.turn.num_waiting:
                assert time.monotonic() < deadline
            connection.close()
        call.result(SOON)
    assert (table.pull(IDS) == (-1 if kind == "pull" else -2)).all()
    assert plane.connection is not None
    plane.connection.close()
    assert (table.pull_async(IDS).result(SOON) == table.pull(IDS)).all()


def test_ranks_meet_and_one_that_waits_long_asks_again(ours: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    told = threading.Semaphore(0)
    begin_anew = Backoff.reset

    def telling(self: Backoff) -> None:  # after StepPending
        told.release()
        begin_anew(self)

    monkeypatch.setattr(Backoff, "reset", telling)
    ours._calls.config = ours._calls.config.model_copy(
        update={"attempt_timeout_seconds": 0.3, "recovery_timeout_seconds": 0.0}
    )
    first, second = (
        ours.table("t").prepare_push(
            IDS, ONES, group=SyncGroup(job="j", world_size=2, rank=rank, sequence=1, sample_count=1)
        )
        for rank in range(2)
    )
    waiting = ours._calls.background(first.send)
    for _ in range(3):
        assert told.acquire(timeout=SOON)
    second.send()
    waiting.result(SOON)
    assert (ours.table("t").pull(IDS) == -1).all()


def test_a_shard_that_was_restarted_says_so(ours: Cluster, cluster: ServedCluster) -> None:
    table = ours.table("t")
    table.push(IDS, ONES)
    cluster.servers[0].stop(0)
    cluster.servers[0] = cluster.start_server(0)
    with pytest.raises(errors.ShardRestarted):
        table.push(IDS, ONES)


def test_a_table_of_another_width_is_an_error(ours: Cluster, cluster: ServedCluster) -> None:
    with connect(cluster.address) as other:
        # A client that does not tell tables of one name apart.
        table = Table(replace(ours.table("t").spec, incarnation=0), ours._calls, ours.write_stream)
        other.drop_table("t")
        anew = other.create_table("t", dim=DIM // 2, optimizer=SGD(1.0), num_rows=NUM_ROWS, initializer=Constant(0))
        for call in (lambda: table.push(IDS, ONES), lambda: table.pull(IDS), lambda: table.assign(IDS, ONES)):
            with pytest.raises(errors.InvalidRows, match="width"):
                call()
        assert not anew.present(IDS).any()


def test_what_the_shard_refuses_costs_nothing_else(ours: Cluster) -> None:
    table, plane = ours.table("t"), plane_of(ours)
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
    assert plane.num_mailboxes <= 2  # memory of a refused call is used again


def test_a_shard_that_ends_begins_no_call_while_others_finish(
    cluster: ServedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has left its cluster by then: another process may hold the shard."""
    with connected(cluster) as ours:
        plane_of(ours)
        port, server = port_of(cluster), cluster.servers[0]._held[0].server
        assert port.num_connections == 1
        finish, connections = server.stop, []

        def stop(grace_seconds: float) -> None:
            connections.append(port.num_connections)
            finish(grace_seconds)

        monkeypatch.setattr(server, "stop", stop)
        cluster.servers[0].stop(0)
    assert connections == [0]


def test_a_foreign_client_can_have_a_connection_by_tcp(cluster: ServedCluster) -> None:
    """By the proto file and the page about frames alone."""
    with connected(cluster) as ours:
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
