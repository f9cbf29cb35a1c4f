"""Roles that come, go, and come back."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np
import pytest

from geartrain.ams.client.cluster_status import cluster_status
from geartrain.ams.client.factory import connect
from geartrain.ams.rpc.carrier import AttemptFailed, NotSent
from geartrain.ams.rpc.client.dial import dial
from geartrain.ams.scheduler.service import SchedulerServer
from geartrain.ams.server import role
from geartrain.ams.server.role import ShardServer
from geartrain.ams.values import errors
from geartrain.ams.values.config import ClientConfig, SchedulerConfig, ServerConfig
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.scheduler_messages import DescribeCluster

IMPATIENT = ClientConfig(attempt_timeout_seconds=5, recovery_timeout_seconds=0, connect_timeout_seconds=0.3)
PATIENT = ClientConfig(attempt_timeout_seconds=5, recovery_timeout_seconds=30)


def test_a_server_that_waits_for_its_scheduler_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ends = iter([AttemptFailed("no answer")] * 3 + [errors.ConfigError("enough")])

    def join(*_: object) -> None:
        raise next(ends)

    monkeypatch.setattr("geartrain.ams.server.role._HeldShard.join", join)
    monkeypatch.setattr("geartrain.ams.server.role._RETRY_SECONDS", 0)
    with pytest.raises(errors.ConfigError, match="enough"):
        ShardServer(ServerConfig(scheduler="127.0.0.1:1")).start()
    assert caplog.text.count("no answer; retrying for") == 1


def test_a_dead_shard_is_named(served: Callable[..., object]) -> None:
    cluster = served(2)
    with connect(cluster.address, config=IMPATIENT) as ours:  # type: ignore[attr-defined]
        table = ours.create_table("t", dim=4, optimizer=SGD(1.0), num_rows=4096)
        cluster.servers[1].stop(0)  # type: ignore[attr-defined]
        with pytest.raises(errors.ShardUnavailable, match=r"shard 1 at 127\.0\.0\.1"):
            table.pull(np.arange(4096))
        assert table.pull(np.arange(0, 100, 2)).shape == (50, 4)  # shard 0 still serves its rows
        assert [shard.state for shard in ours.status().shards] == ["up", "lost"]


def test_a_shard_that_came_back_empty_is_not_mistaken_for_the_old_one(served: Callable[..., object]) -> None:
    cluster = served(2)
    with connect(cluster.address, config=PATIENT) as ours:  # type: ignore[attr-defined]
        table = ours.create_table("t", dim=4, optimizer=SGD(1.0), num_rows=4096)
        table.push(np.array([4095]), np.ones((1, 4), np.float32))
        cluster.servers[1].stop(0)  # type: ignore[attr-defined]
        cluster.servers[1] = cluster.start_server(1)  # type: ignore[attr-defined]
        with pytest.raises(errors.ShardRestarted, match="shard 1 was restarted"):
            table.pull(np.array([4095]))
    with connect(cluster.address, config=PATIENT) as anew:  # type: ignore[attr-defined]
        with pytest.raises(errors.ShardRestarted, match=r"lost its rows on shards \[1\]"):
            anew.create_table("t", dim=4, optimizer=SGD(1.0), num_rows=4096, reuse=True)
        anew.drop_table("t")
        anew.create_table("t", dim=4, optimizer=SGD(1.0), num_rows=4096).pull(np.arange(4096))


def test_connecting_waits_for_the_last_shard() -> None:
    scheduler = SchedulerServer(SchedulerConfig(listen="127.0.0.1:0", num_shards=1))
    address = scheduler.start()
    server = ShardServer(ServerConfig(scheduler=address))
    try:
        with pytest.raises(errors.ClusterNotReady, match=r"0 \(missing\)"):
            connect(address, config=IMPATIENT)
        assert not cluster_status(address).ready
        late = threading.Thread(target=server.start)
        late.start()
        with connect(address, config=PATIENT) as ours:
            assert ours.status().ready
        late.join()
    finally:
        server.stop(0)
        scheduler.stop(0)


@contextmanager
def far_away(address: str, seconds: float) -> Iterator[str]:
    """An address where connections to ``address`` are taken, and carried on only after some time."""
    host, port = address.rsplit(":", 1)
    carried: list[threading.Thread] = []

    def pipe(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def carry(near: socket.socket) -> None:
        time.sleep(seconds)  # this is the distance
        with near, socket.create_connection((host, int(port))) as far:
            back = threading.Thread(target=pipe, args=(far, near))
            back.start()
            pipe(near, far)
            back.join()

    def accept() -> None:
        with suppress(OSError):  # it was shut down
            while True:
                near, _ = listener.accept()
                carried.append(threading.Thread(target=carry, args=(near,)))
                carried[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepting = threading.Thread(target=accept)
        accepting.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join()
            for thread in carried:
                thread.join()


def test_a_scheduler_to_which_a_connection_takes_long_is_asked_for_the_status(served: Callable[..., object]) -> None:
    with far_away(served(1).address, 0.6) as address:  # type: ignore[attr-defined]
        assert cluster_status(address).ready
        with pytest.raises(errors.SchedulerUnavailable, match=r"does not answer: no .* in time"):
            cluster_status(address, config=IMPATIENT)


def test_a_short_attempt_ends_with_its_connection_so_that_nothing_is_known_to_be_sent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        scheduler, _ = dial(address, ClientConfig(attempt_timeout_seconds=0.8))
        with pytest.raises(NotSent):
            scheduler.call(DescribeCluster(), 0.8)
        scheduler.close()


def test_a_scheduler_that_is_not_there_is_named() -> None:
    with pytest.raises(errors.SchedulerUnavailable, match=r"127\.0\.0\.1:1"):
        connect("127.0.0.1:1", config=IMPATIENT)


def test_a_shard_is_refused_to_a_process_that_has_the_address_of_its_living_holder(
    served: Callable[..., object],
) -> None:
    cluster = served(1)
    first = cluster.servers[0]  # type: ignore[attr-defined]
    (address,) = first.bound_addresses
    for shard in (0, None):
        double = ShardServer(ServerConfig(scheduler=cluster.address, shard=shard, advertise=address))  # type: ignore[attr-defined]
        with pytest.raises(errors.ShardHeld, match=f"another process serves a shard at {address}, and answers"):
            double.start()
    with connect(cluster.address, config=PATIENT) as ours:  # type: ignore[attr-defined]
        ours.create_table("t", dim=1, optimizer=SGD(1.0)).pull(np.array([0]))
        assert ours.status().cluster_version == 1


def test_a_server_that_may_wait_takes_a_shard_once_its_holder_is_gone(
    served: Callable[..., object], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    cluster = served(1)
    holder, waits = cluster.servers[0], threading.Event()  # type: ignore[attr-defined]
    monkeypatch.setattr("geartrain.ams.server.role._HELD_RETRY_SECONDS", 0.05)
    join = role._HeldShard.join

    def joining(self: role._HeldShard, scheduler: object) -> None:
        try:
            join(self, scheduler)  # type: ignore[arg-type]
        except errors.ShardHeld:
            waits.set()
            raise

    monkeypatch.setattr(role._HeldShard, "join", joining)
    standby = ShardServer(ServerConfig(scheduler=cluster.address, shard=0, wait=True))  # type: ignore[attr-defined]
    cluster.servers.append(standby)  # type: ignore[attr-defined]
    starting = threading.Thread(target=standby.start)
    starting.start()
    assert waits.wait(30)
    holder.stop(0)
    starting.join()
    assert standby.shards == [0]
    assert "waiting: shard 0 is held by a live process" in caplog.text


def test_a_port_in_use_is_named(served: Callable[..., object]) -> None:
    cluster = served(1)
    with pytest.raises(errors.ConfigError, match="another process"):
        SchedulerServer(SchedulerConfig(listen=cluster.address)).start()  # type: ignore[attr-defined]


def test_a_restart_is_noticed_though_another_shard_was_asked_first(served: Callable[..., object]) -> None:
    cluster = served(2)
    with connect(cluster.address, config=PATIENT) as ours:  # type: ignore[attr-defined]
        table = ours.create_table("t", dim=4, optimizer=SGD(1.0), num_rows=4096)
        cluster.servers[1].stop(0)  # type: ignore[attr-defined]
        cluster.servers[1] = cluster.start_server(1)  # type: ignore[attr-defined]
        assert table.pull(np.array([0])).shape == (1, 4)  # shard 0, at the new cluster version
        with pytest.raises(errors.ShardRestarted, match="shard 1 was restarted"):
            table.pull(np.array([4095]))


def test_a_shard_restarted_at_its_old_address_says_so(served: Callable[..., object]) -> None:
    cluster = served(1)
    with connect(cluster.address, config=PATIENT) as ours:  # type: ignore[attr-defined]
        table = ours.create_table("t", dim=4, optimizer=SGD(1.0))
        address = ours.status().shards[0].address
        cluster.servers[0].stop(0)  # type: ignore[attr-defined]
        again = ShardServer(ServerConfig(scheduler=cluster.address, listen=address, heartbeat_seconds=0.05))  # type: ignore[attr-defined]
        again.start()
        cluster.servers[0] = again  # type: ignore[attr-defined]
        with pytest.raises(errors.ShardRestarted, match="restarted"):
            table.pull(np.array([1]))


def test_a_server_whose_rows_lie_by_another_bucket_map_is_told_so_and_ends(served: Callable[..., object]) -> None:
    cluster = served(1)
    address, server = cluster.address, cluster.servers[0]  # type: ignore[attr-defined]
    cluster.scheduler.stop(0)  # type: ignore[attr-defined]
    other = SchedulerServer(SchedulerConfig(listen=address, num_shards=2))  # and without the data of the first
    try:
        other.start()
        assert server.wait(30)
        assert "holds its rows by version 1 of a bucket map, which is not version 1 of this cluster of 2 shards" in str(
            server.stop_reason
        )
        assert {entry.state for entry in cluster_status(address).shards} == {"missing"}
    finally:
        other.stop(0)
