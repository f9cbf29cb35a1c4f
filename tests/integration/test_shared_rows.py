"""Calls through memory that client and shard share: what is in no message, and what is left when one of them dies."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.factory import connect
from geartrain.ams.client.table import Table
from geartrain.ams.kernels import _core
from geartrain.ams.rpc.client.patience import Patience
from geartrain.ams.rpc.payload import data_plane
from geartrain.ams.rpc.payload.data_plane import DataPlane
from geartrain.ams.server.data_plane import DataPlanePort
from geartrain.ams.server.service import ShardService
from geartrain.ams.values import errors
from geartrain.ams.values.config import ClientConfig
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.shard_messages import DataPlaneOffer, SyncGroup
from geartrain.ams.values.specs import Constant
from tests.integration.conftest import ServedCluster, carriers_of, connect_data_plane, without_method
from tests.integration.one_table import DIM, IDS, NUM_ROWS, ONES, Served, connected

SOON = 20.0


def impatient(cluster: Cluster) -> ClientConfig:
    """The settings of a client that makes one short attempt."""
    return cluster._calls.config.model_copy(update={"attempt_timeout_seconds": 0.2, "recovery_timeout_seconds": 0.0})


def port_of(cluster: ServedCluster) -> DataPlanePort:
    return cluster.servers[0]._held[0].service.data_plane


def test_rows_of_a_shard_on_this_machine_are_in_no_message(served: Served, messages: list[int]) -> None:
    with connected(served(1)) as ours:
        table = ours.table("t")
        plane = connect_data_plane(carriers_of(ours)[0])
        table.push(IDS, ONES)
        table.assign(IDS[:2_000], 5 * ONES[:2_000])
        np.testing.assert_array_equal(table.pull(IDS)[:, 0], np.repeat([5.0, -1.0], 2_000))
        assert (table.pull(IDS[:1]) == 5).all() and table.present(IDS).all()
        assert plane.num_mailboxes
    assert messages == []


def test_rows_travel_in_messages_where_the_client_says_so(served: Served, messages: list[int]) -> None:
    cluster = served(1)
    with connected(cluster, shared_memory=False, bulk_connections=False) as ours:
        for _ in range(3):
            ours.table("t").push(IDS, ONES)
        assert (ours.table("t").pull(IDS) == -3).all()
    assert max(messages) > ONES.nbytes
    assert port_of(cluster).num_connections == 0


def test_the_first_rows_do_not_wait_for_shared_memory_and_later_ones_use_it(
    served: Served, messages: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, is_connected = threading.Event(), threading.Event()
    offer, make = DataPlanePort.offer, DataPlane._connect
    monkeypatch.setattr(DataPlanePort, "offer", lambda self: (go_on.wait(SOON), offer(self))[1])
    monkeypatch.setattr(DataPlane, "_connect", lambda self: (make(self), is_connected.set())[0])
    monkeypatch.setattr("geartrain.ams.rpc.client.shard._OFFER_SECONDS", SOON)
    with connected(served(1)) as ours:
        table = ours.table("t")
        table.push(IDS, ONES)  # the shard is asked, and does not answer
        assert (table.pull(IDS) == -1).all()
        assert max(messages) > ONES.nbytes
        go_on.set()
        assert is_connected.wait(SOON)
        messages.clear()
        assert (table.pull(IDS) == -1).all()
    assert messages == []


@pytest.mark.parametrize("way", ["refusal", "older shard", "another machine"])
def test_a_shard_that_cannot_share_is_asked_once(
    served: Served, messages: list[int], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    offers = {
        "refusal": DataPlaneOffer(reason="there are too many"),
        "another machine": DataPlaneOffer(socket="of-another-machine", secret=bytes(32)),
    }
    if way in offers:
        monkeypatch.setattr(DataPlanePort, "offer", lambda _: offers[way])
    else:
        monkeypatch.setattr(ShardService, "bound", without_method("OpenDataPlane"))
    asked: list[object] = []
    make = DataPlane._connect
    monkeypatch.setattr(DataPlane, "_connect", lambda self: (asked.append(self), make(self))[1])
    monkeypatch.setattr(data_plane, "_in_background", lambda work: work())
    with connected(served(1)) as ours:
        table, plane = ours.table("t"), carriers_of(ours)[0].data_plane
        assert plane is not None
        plane._begin = lambda work: work()
        for _ in range(4):
            table.push(IDS, ONES)
        assert (table.pull(IDS) == -4).all()
    assert len(asked) == 1
    assert min(messages[0::2]) > 8 * NUM_ROWS


CHILD = f"""
import sys
import numpy as np
from geartrain.ams.client.factory import connect

with connect(sys.argv[1]) as cluster:
    table, ids = cluster.table("t"), np.arange({NUM_ROWS})
    plane = cluster._calls._carriers[0].data_plane
    plane._begin = lambda work: work()
    table.pull(ids)
    table.push(ids, np.full(({NUM_ROWS}, {DIM}), 2, np.float32))
    assert (table.pull(ids) == -3).all()
    print(plane.num_mailboxes, flush=True)
    sys.stdin.read()
"""


def test_another_process_shares_its_memory_and_when_it_is_killed_the_shard_lets_go_of_it(served: Served) -> None:
    cluster = served(1)
    port = port_of(cluster)
    with connected(cluster) as ours:
        connect_data_plane(carriers_of(ours)[0])
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


def test_a_call_without_a_reply_leaves_its_memory_to_the_shard(served: Served) -> None:
    cluster = served(1)
    with connected(cluster) as ours:
        table, plane = ours.table("t"), connect_data_plane(carriers_of(ours)[0])
        table.push(IDS, ONES)
        table.pull(IDS)
        before, patient = plane.num_mailboxes, ours._calls.config
        ours._calls.config = impatient(ours)
        shard = cluster.servers[0]._held[0].shard
        assert shard is not None
        out = np.full((NUM_ROWS, DIM), 77, np.float32)
        with shard.engine.turn:  # the shard is at work
            with pytest.raises(errors.ShardUnavailable, match="no reply in time"):
                table.pull_into(IDS, out)
            assert plane.num_mailboxes == before - 1
        ours._calls.config = patient
        table.push(IDS, ONES)
        assert (table.pull(IDS) == -2).all()
        assert (out == 77).all()


def test_the_log_says_once_which_way_rows_go(
    served: Served, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    carrier_log = "geartrain.ams.rpc.client.shard"
    caplog.set_level("INFO", logger=carrier_log)
    cluster = served(1)
    with connected(cluster) as ours:
        connect_data_plane(carriers_of(ours)[0])
        address = ours.status().shards[0].address
    (line,) = [record.getMessage() for record in caplog.records if record.name == carrier_log]
    assert line == f"rows of the shard at {address} go through shared memory"
    caplog.clear()
    monkeypatch.setattr(DataPlanePort, "offer", lambda _: DataPlaneOffer(reason="there are too many"))
    with connected(cluster) as ours, pytest.raises(AssertionError):  # there is none
        connect_data_plane(carriers_of(ours)[0])
    assert "go in messages, not through shared memory or over bulk connections: there are too many" in caplog.text


def test_calls_side_by_side_do_not_mix(served: Served) -> None:
    """Each of four threads owns a quarter of the rows: pushes to it, and reads what it pushed."""
    rounds, quarter = 15, NUM_ROWS // 4
    with connected(served(2)) as ours:
        table = ours.table("t")
        for carrier in carriers_of(ours):
            connect_data_plane(carrier)

        def work(thread: int) -> None:
            ids = np.random.default_rng(thread).permutation(quarter) + quarter * thread
            gradients = (ids % 7 + 1).astype(np.float32)[:, None] * np.ones((1, DIM), np.float32)
            for done in range(1, rounds + 1):
                table.push(ids, gradients)
                np.testing.assert_array_equal(table.pull(ids), -done * gradients)

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(work, range(4)))


def test_ranks_meet_through_shared_memory_and_one_that_waits_long_asks_again(
    served: Served, messages: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = threading.Semaphore(0)
    begin_anew = Patience.begin_anew

    def telling(self: Patience) -> None:  # after StepPending
        told.release()
        begin_anew(self)

    monkeypatch.setattr(Patience, "begin_anew", telling)
    with connected(served(1)) as ours:
        ours._calls.config = ours._calls.config.model_copy(
            update={"attempt_timeout_seconds": 0.3, "recovery_timeout_seconds": 0.0}
        )
        connect_data_plane(carriers_of(ours)[0])
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
    assert messages == []


def test_a_shard_that_was_restarted_says_so_and_not_that_memory_is_missing(served: Served) -> None:
    cluster = served(1)
    with connected(cluster) as ours:
        table = ours.table("t")
        connect_data_plane(carriers_of(ours)[0])
        table.push(IDS, ONES)
        cluster.servers[0].stop(0)
        cluster.servers[0] = cluster.start_server(0)
        with pytest.raises(errors.ShardRestarted):
            table.push(IDS, ONES)


def test_a_table_of_another_width_is_an_error_as_in_messages(served: Served) -> None:
    cluster = served(1)
    with connected(cluster) as ours, connect(cluster.address) as other:
        opened = ours.table("t")
        # A client that does not tell tables of one name apart.
        table = Table(replace(opened.spec, incarnation=0), ours._calls, ours.write_stream)
        connect_data_plane(carriers_of(ours)[0])
        other.drop_table("t")
        anew = other.create_table("t", dim=DIM // 2, optimizer=SGD(1.0), num_rows=NUM_ROWS, initializer=Constant(0))
        for call in (lambda: table.push(IDS, ONES), lambda: table.pull(IDS), lambda: table.assign(IDS, ONES)):
            with pytest.raises(errors.InvalidRows, match="width"):
                call()
        assert not anew.present(IDS).any()


def test_calls_go_in_messages_while_a_lost_connection_is_made_anew(served: Served, messages: list[int]) -> None:
    cluster = served(1)
    with connect(cluster.address, config=ClientConfig(recovery_timeout_seconds=0)) as ours:
        table = ours.create_table("t", dim=DIM, optimizer=SGD(1.0), num_rows=NUM_ROWS, initializer=Constant(0))
        plane = connect_data_plane(carriers_of(ours)[0])
        for done in (1, 2):
            assert plane._connection is not None
            plane._connection.close()
            table.push(IDS, ONES)  # in a message; the next call has a connection
            assert max(messages) > ONES.nbytes
            messages.clear()
            assert (table.pull(IDS) == -done).all()
            assert (table.pull_async(IDS).result(10) == -done).all()
            assert messages == []


def test_memory_of_a_refused_call_is_used_again(served: Served) -> None:
    with connected(served(1)) as ours:
        plane = connect_data_plane(carriers_of(ours)[0])
        for _ in range(3):
            with pytest.raises(errors.NonFinite):
                ours.table("t").push(IDS, np.inf * ONES)
        assert plane.num_mailboxes == 1


def test_calls_that_do_not_fit_shared_memory_travel_in_messages(served: Served, messages: list[int]) -> None:
    with connected(served(1)) as ours:
        plane = connect_data_plane(carriers_of(ours)[0])
        offer = plane._ask()
        plane._connection = _core.connect_ring(offer.socket, offer.secret, SOON, most_pool_bytes=256 << 10)
        table = ours.table("t")
        table.push(IDS, ONES)
        assert max(messages) > ONES.nbytes
        messages.clear()
        assert (table.pull(IDS[:100]) == -1).all()
    assert messages == []


FORK = f"""
import os, sys
import numpy as np
from geartrain.ams.client.factory import connect

with connect(sys.argv[1]) as cluster:
    table, ids = cluster.table("t"), np.arange({NUM_ROWS})
    plane = cluster._calls._carriers[0].data_plane
    plane._begin = lambda work: work()
    table.pull(ids)
    table.push(ids, np.ones(({NUM_ROWS}, {DIM}), np.float32))
    child = os.fork()
    if child == 0:
        assert plane._connection.is_lost and plane.num_mailboxes == 0
        try:
            table.pull(ids)
        except Exception as exc:
            os._exit(0 if "fork" in str(exc) else 2)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert plane.num_mailboxes == 1
    assert (table.pull(ids) == -1).all()
print("whole", flush=True)
os._exit(0)
"""


def test_a_forked_child_does_not_disturb_the_memory_of_its_parent(served: Served) -> None:
    cluster = served(1)
    with connected(cluster, shared_memory=False):
        done = subprocess.run([sys.executable, "-c", FORK, cluster.address], capture_output=True, text=True, timeout=60)
    assert done.stdout == "whole\n", done.stderr


def test_a_shard_that_ends_begins_no_call_while_others_finish(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has left its cluster by then: another process may hold the shard."""
    cluster = served(1)
    with connected(cluster) as ours:
        connect_data_plane(carriers_of(ours)[0])
        port, server = port_of(cluster), cluster.servers[0]._held[0].server
        assert port.num_connections == 1
        finish, connections = server.stop, []

        def stop(grace_seconds: float) -> None:
            connections.append(port.num_connections)
            finish(grace_seconds)

        monkeypatch.setattr(server, "stop", stop)
        cluster.servers[0].stop(0)
    assert connections == [0]
