"""Rows that client and shard share: what is in no message, what is refused, and what is left when one of them dies."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import grpc
import numpy as np
import pytest

from geartrain.ams.client.cluster import connect
from geartrain.ams.client.table import Table
from geartrain.ams.pb.v1 import shard_pb2, types_pb2
from geartrain.ams.rpc.carrier import AttemptFailed
from geartrain.ams.rpc.client import shard as grpc_client
from geartrain.ams.rpc.client.shard import GrpcCarrier
from geartrain.ams.rpc.payload import shared_memory
from geartrain.ams.rpc.payload.shared_memory import (
    HeldSegments,
    Segment,
    SegmentPool,
    arrays_in,
    bytes_needed,
)
from geartrain.ams.rpc.services import SHARD
from geartrain.ams.server.service import ShardService
from geartrain.ams.values import errors
from geartrain.ams.values.config import ClientConfig
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.shard_messages import CallContext, Pull
from geartrain.ams.values.specs import Constant
from tests.integration.conftest import ServedCluster, carriers_of, fill, without_method
from tests.integration.one_table import DIM, IDS, NUM_ROWS, ONES, Served, connected, stub

FLOAT = np.dtype(np.float32)


def segments_of(cluster: ServedCluster) -> HeldSegments:
    return cluster.servers[0]._held[0].service.segments


def test_rows_of_a_shard_on_this_machine_are_in_no_message(served: Served, messages: list[int]) -> None:
    with connected(served(1)) as ours:
        table = ours.table("t")
        fill(carriers_of(ours)[0])
        table.push(IDS, ONES)
        table.assign(IDS[:2_000], 5 * ONES[:2_000])
        np.testing.assert_array_equal(table.pull(IDS)[:, 0], np.repeat([5.0, -1.0], 2_000))
    assert len(messages) == 6 and max(messages) < 300


def test_rows_travel_in_messages_where_the_client_says_so(served: Served, messages: list[int]) -> None:
    cluster = served(1)
    with connected(cluster, shared_memory=False) as ours:
        for _ in range(3):
            ours.table("t").push(IDS, ONES)
        assert (ours.table("t").pull(IDS) == -3).all()
        assert carriers_of(ours)[0].num_segments == 0
    assert max(messages) > ONES.nbytes
    assert len(segments_of(cluster)) == 0


def test_the_first_rows_do_not_wait_for_shared_memory_and_later_ones_use_it(
    served: Served, messages: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, opened = threading.Event(), threading.Event()
    whole, accept = HeldSegments.open, shared_memory.SegmentPool.accept

    def late(self: HeldSegments, *arguments: object) -> str | None:
        go_on.wait(20)
        return whole(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(HeldSegments, "open", late)
    monkeypatch.setattr(
        shared_memory.SegmentPool, "accept", lambda self, segment: (accept(self, segment), opened.set())
    )
    with connected(served(1)) as ours:
        table = ours.table("t")
        table.push(IDS, ONES)  # the offer is made, and unanswered
        assert (table.pull(IDS) == -1).all()
        assert max(messages) > ONES.nbytes
        go_on.set()
        assert opened.wait(10)
        messages.clear()
        assert (table.pull(IDS) == -1).all()
    assert max(messages) < 300


@pytest.mark.parametrize("way", ["refusal", "older shard"])
def test_a_shard_that_cannot_share_is_asked_once(
    served: Served, messages: list[int], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    asked = []
    if way == "refusal":
        monkeypatch.setattr(HeldSegments, "open", lambda *_: "on another machine")
    else:
        monkeypatch.setattr(ShardService, "bound", without_method("ShareMemory"))
    offer, ended = GrpcCarrier._offer, threading.Event()
    monkeypatch.setattr(GrpcCarrier, "_offer", lambda self, segment: (asked.append(segment.name), offer(self, segment)))
    end = shared_memory.SegmentPool.end_offer
    monkeypatch.setattr(shared_memory.SegmentPool, "end_offer", lambda self: (end(self), ended.set()))
    with connected(served(1)) as ours:
        table = ours.table("t")
        table.push(IDS, ONES)
        assert ended.wait(10)
        for _ in range(3):
            table.push(IDS, ONES)
        assert (table.pull(IDS) == -4).all()
    assert len(asked) == 1
    assert min(messages[0::2]) > 8 * NUM_ROWS


CHILD = f"""
import sys
import numpy as np
from geartrain.ams.client.cluster import connect

with connect(sys.argv[1]) as cluster:
    table, ids = cluster.table("t"), np.arange({NUM_ROWS})
    carrier = cluster._calls._carriers[0]
    for _ in range(1000):  # until an offer is accepted
        table.pull(ids)
        if carrier._segments._free:
            break
    table.push(ids, np.full(({NUM_ROWS}, {DIM}), 2, np.float32))
    assert (table.pull(ids) == -3).all()
    print(carrier.num_segments, flush=True)
    sys.stdin.read()
"""


def test_another_process_shares_its_memory_and_when_it_is_killed_the_shard_lets_go_of_it(served: Served) -> None:
    cluster = served(1)
    with connected(cluster, shared_memory=False) as ours:
        ours.table("t").push(IDS, ONES)
        with subprocess.Popen(
            [sys.executable, "-c", CHILD, cluster.address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as child:
            try:
                assert child.stdout is not None
                shared = int(child.stdout.readline())
                segments = segments_of(cluster)
                segments.forget_closed()
                assert len(segments) == shared >= 1
            finally:
                child.kill()
        segments.forget_closed()
        assert len(segments) == 0
        assert (ours.table("t").pull(IDS) == -3).all()


def test_the_heartbeat_lets_go_of_closed_memory(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = served(1)
    swept = threading.Semaphore(0)
    whole = HeldSegments.forget_closed
    with connected(cluster) as ours:
        fill(carriers_of(ours)[0])
        assert len(segments_of(cluster)) == 2
    monkeypatch.setattr(HeldSegments, "forget_closed", lambda self: (whole(self), swept.release()))
    for _ in range(2):  # the first may have begun before the client had closed
        assert swept.acquire(timeout=10)
    assert len(segments_of(cluster)) == 0


def test_a_call_without_a_reply_leaves_its_memory_to_the_shard(served: Served) -> None:
    cluster = served(1)
    with connected(cluster) as ours:
        table = ours.table("t")
        carrier = carriers_of(ours)[0]
        fill(carrier, 2)
        table.push(IDS, ONES)
        shard = cluster.servers[0]._held[0].shard
        assert shard is not None
        out = np.full((NUM_ROWS, DIM), 77, np.float32)
        with shard._writer.turn:  # the shard is at work
            pull = Pull(table="t", ids=IDS, out=out)
            with pytest.raises(AttemptFailed, match="no reply in time"):
                carrier.submit(CallContext(), pull, 0.2).result(10)
            assert carrier.num_segments == 1
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
        fill(carriers_of(ours)[0])
        address = ours.status().shards[0].address
    (line,) = [record.getMessage() for record in caplog.records if record.name == carrier_log]
    assert line == f"rows of the shard at {address} go through shared memory"
    caplog.clear()
    monkeypatch.setattr(HeldSegments, "open", lambda *_: "on another machine")
    with connected(cluster) as ours, pytest.raises(AssertionError):  # there are none
        fill(carriers_of(ours)[0], 1)
    assert "go in messages, not through shared memory: on another machine" in caplog.text


def test_a_call_that_arrives_twice_is_answered_once(served: Served) -> None:
    with connected(served(1)) as ours:
        segment = Segment(1 << 20)
        with grpc.insecure_channel(ours.status().shards[0].address) as channel:
            ask = shard_pb2.ShareMemoryRequest(
                name=segment.name, process=os.getpid(), descriptor=segment.descriptor
            ).SerializeToString()
            assert shard_pb2.ShareMemoryReply.FromString(stub(channel, "ShareMemory")(ask)).shared
            arrays = arrays_in(segment.memory, NUM_ROWS, DIM, FLOAT)
            arrays.ids[:] = IDS
            pull = shard_pb2.PullRequest(
                table="t", shared=shard_pb2.SharedBytes(name=segment.name, num_ids=NUM_ROWS, use=1, dim=DIM)
            ).SerializeToString()
            stub(channel, "Pull")(pull)
            arrays.rows[:] = 5  # the next call's
            with pytest.raises(grpc.RpcError) as refused:
                stub(channel, "Pull")(pull)
            assert "arrived twice" in str(refused.value)
            assert (arrays.rows == 5).all()


def test_the_parts_of_a_write_wait_for_each_other_outside_of_shared_memory(served: Served) -> None:
    with connected(served(1)) as ours, grpc.insecure_channel(ours.status().shards[0].address) as channel:
        carrier = carriers_of(ours)[0]
        fill(carrier, 1)
        assert carrier._segments is not None
        for index in range(2):
            segment = carrier._segments.take(bytes_needed(100, DIM, FLOAT) + shared_memory.MIN_SHARED_BYTES)
            assert segment is not None
            arrays = arrays_in(segment.memory, 100, DIM, FLOAT)
            arrays.ids[:] = np.arange(100 * index, 100 * (index + 1))
            arrays.rows[:] = index + 1
            push = shard_pb2.PushRequest(
                context=types_pb2.CallContext(stream="s", sequence=1),
                table="t",
                part=shard_pb2.Part(index=index, count=2),
                shared=shard_pb2.SharedBytes(name=segment.name, num_ids=100, use=segment.num_uses, dim=DIM),
            )
            stub(channel, "Push")(push.SerializeToString())
            carrier._segments.give_back(segment)
        np.testing.assert_array_equal(ours.table("t").pull(np.arange(200))[:, 0], np.repeat([-1.0, -2.0], 100))


def test_calls_side_by_side_do_not_mix(served: Served) -> None:
    """Each of four threads owns a quarter of the rows: pushes to it, and reads what it pushed."""
    rounds, quarter = 15, NUM_ROWS // 4
    with connected(served(2)) as ours:
        table = ours.table("t")
        for carrier in carriers_of(ours):
            fill(carrier, 3)  # fewer than calls: some travel in messages

        def work(thread: int) -> None:
            ids = np.random.default_rng(thread).permutation(quarter) + quarter * thread
            gradients = (ids % 7 + 1).astype(np.float32)[:, None] * np.ones((1, DIM), np.float32)
            for done in range(1, rounds + 1):
                table.push(ids, gradients)
                np.testing.assert_array_equal(table.pull(ids), -done * gradients)

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(work, range(4)))


@pytest.mark.parametrize(
    ("shared", "error"),
    [
        ({"name": "geartrain-" + "0" * 32, "num_ids": 1, "use": 1}, "MemoryNotShared"),
        ({"num_ids": 2**40, "use": 1}, "ProtocolError"),
        ({"num_ids": 2**64 - 1, "use": 1}, "ProtocolError"),
        ({"num_ids": 1, "use": 0}, "MemoryNotShared"),
        ({"num_ids": 1, "use": 1, "dim": DIM // 2}, "InvalidRows"),
        ({"num_ids": 1, "use": 1, "dtype": types_pb2.DTYPE_BFLOAT16}, "InvalidRows"),
    ],
)
def test_a_wrong_place_in_shared_memory_is_a_typed_error(served: Served, shared: dict[str, object], error: str) -> None:
    with connected(served(1)) as ours, grpc.insecure_channel(ours.status().shards[0].address) as channel:
        fill(carriers_of(ours)[0], 1)
        pool = carriers_of(ours)[0]._segments
        assert pool is not None
        context = types_pb2.CallContext(stream="s", sequence=1)
        for number, (method, request) in enumerate(
            (
                ("Pull", shard_pb2.PullRequest(table="t")),
                ("Push", shard_pb2.PushRequest(table="t", context=context)),
                ("Assign", shard_pb2.AssignRequest(table="t", context=context)),
            )
        ):
            use = shared["use"] and number + 1
            request.shared.CopyFrom(
                shard_pb2.SharedBytes(**{"name": pool._free[0].name, "dim": DIM, **shared, "use": use})
            )  # type: ignore[arg-type]
            with pytest.raises(grpc.RpcError) as refused:
                stub(channel, method)(request.SerializeToString())
            assert dict(refused.value.trailing_metadata())["geartrain-error"] == error  # type: ignore[attr-defined]
        assert not ours.table("t").present(IDS).any()


def test_a_shard_that_was_restarted_says_so_and_not_that_memory_is_missing(served: Served) -> None:
    cluster = served(1)
    with connected(cluster) as ours:
        table = ours.table("t")
        fill(carriers_of(ours)[0])
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
        fill(carriers_of(ours)[0])
        other.drop_table("t")
        anew = other.create_table("t", dim=DIM // 2, optimizer=SGD(1.0), num_rows=NUM_ROWS, initializer=Constant(0))
        for call in (lambda: table.push(IDS, ONES), lambda: table.pull(IDS), lambda: table.assign(IDS, ONES)):
            with pytest.raises(errors.InvalidRows, match="width"):
                call()
        assert not anew.present(IDS).any()


def test_a_shard_that_lost_the_memory_gets_the_rows_in_a_message(served: Served, messages: list[int]) -> None:
    cluster = served(1)
    with connect(cluster.address, config=ClientConfig(recovery_timeout_seconds=0)) as ours:
        table = ours.create_table("t", dim=DIM, optimizer=SGD(1.0), num_rows=NUM_ROWS, initializer=Constant(0))
        carrier = carriers_of(ours)[0]
        fill(carrier)
        for done in (1, 2):
            segments_of(cluster)._held.clear()
            table.push(IDS, ONES)
            assert max(messages) > ONES.nbytes
            fill(carrier)
            segments_of(cluster)._held.clear()
            assert (table.pull(IDS) == -done).all()
            fill(carrier)
            messages.clear()
            assert (table.pull_async(IDS).result(10) == -done).all()
            assert max(messages) < 300


def test_memory_of_a_refused_call_is_used_again(served: Served) -> None:
    with connected(served(1)) as ours:
        carrier = carriers_of(ours)[0]
        fill(carrier, 1)
        for _ in range(3):
            with pytest.raises(errors.NonFinite):
                ours.table("t").push(IDS, np.inf * ONES)
        assert carrier._segments is not None and len(carrier._segments._free) == 1


def test_what_was_left_in_the_memory_is_not_taken_for_presence(served: Served) -> None:
    with connected(served(1)) as ours:
        table = ours.table("t")
        table.push(np.arange(10), ONES[:10])
        carrier = carriers_of(ours)[0]
        fill(carrier, 1)
        assert carrier._segments is not None
        carrier._segments._free[0].memory[:] = 1
        np.testing.assert_array_equal(table.present(IDS), IDS < 10)


def test_ids_are_read_once(served: Served) -> None:
    cluster = served(1)
    with connected(cluster) as ours, grpc.insecure_channel(ours.status().shards[0].address) as channel:
        carrier = carriers_of(ours)[0]
        fill(carrier, 1)
        ours.table("t").push(IDS, IDS[:, None].astype(np.float32) * ONES)
        assert carrier._segments is not None
        segment = carrier._segments.take(bytes_needed(NUM_ROWS, DIM, FLOAT))
        assert segment is not None
        arrays = arrays_in(segment.memory, NUM_ROWS, DIM, FLOAT)
        arrays.ids[:] = IDS
        shared = shard_pb2.SharedBytes(name=segment.name, num_ids=NUM_ROWS, use=segment.num_uses, dim=DIM)
        pull = shard_pb2.PullRequest(table="t", shared=shared).SerializeToString()
        shard = cluster.servers[0]._held[0].shard
        assert shard is not None
        queued, run = threading.Event(), shard.run
        with pytest.MonkeyPatch.context() as patch, shard._writer.turn:  # the shard is at work
            patch.setattr(shard, "run", lambda *call: (run(*call), queued.set())[0])
            call = channel.unary_unary(f"/{SHARD.name}/Pull").future(pull, timeout=10)
            assert queued.wait(10)
            arrays.ids[:] = -(2**62)
        call.result()
        np.testing.assert_array_equal(arrays.rows[:, 0], -IDS)


def test_an_offer_that_fails_leaves_nothing(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise errors.StateFailed("no")

    gc.disable()  # what is closed is closed at once
    try:
        monkeypatch.setattr(HeldSegments, "open", fail)
        with connected(served(1)) as ours:
            pool, ended = carriers_of(ours)[0]._segments, threading.Semaphore(0)
            assert pool is not None
            monkeypatch.setattr(pool, "end_offer", lambda: (SegmentPool.end_offer(pool), ended.release()))
            for _ in range(6):  # more than may be under way
                assert pool.take(1 << 20) is None
                assert ended.acquire(timeout=10)
            assert pool.num_segments == 0
    finally:
        gc.enable()


def test_an_offer_without_an_answer_does_not_cost_the_connection(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(grpc_client, "_OFFER_SECONDS", 0.1)
    monkeypatch.setattr(HeldSegments, "open", lambda *_: go_on.wait(20))
    try:
        with connected(served(1)) as ours:
            carrier, ended = carriers_of(ours)[0], threading.Event()
            pool, connection = carrier._segments, carrier._connection
            assert pool is not None
            monkeypatch.setattr(pool, "end_offer", lambda: (SegmentPool.end_offer(pool), ended.set()))
            ours.table("t").push(IDS, ONES)
            assert ended.wait(10)
            assert carrier._connection is connection
            assert (ours.table("t").pull(IDS) == -1).all()
    finally:
        go_on.set()


def test_memory_is_left_where_the_connection_is_closed(served: Served) -> None:
    with connected(served(1)) as ours:
        carrier = carriers_of(ours)[0]
        fill(carrier, 2)
        carrier._connection.channel.close()
        for alone in (True, False):
            pull = Pull(table="t", ids=IDS, out=np.empty((NUM_ROWS, DIM), np.float32))
            with pytest.raises(AttemptFailed, match="connection is closed"):
                carrier.submit(CallContext(), pull, 1.0, alone=alone).result(10)
        assert carrier.num_segments == 0


FORK = f"""
import os, sys
import numpy as np
from geartrain.ams.client.cluster import connect

with connect(sys.argv[1]) as cluster:
    table, ids = cluster.table("t"), np.arange({NUM_ROWS})
    pool = cluster._calls._carriers[0]._segments
    for _ in range(1000):  # until an offer is accepted
        table.pull(ids)
        if pool._free:
            break
    segment = pool._free[0]
    segment.memory[:] = 5
    child = os.fork()
    if child == 0:  # takes what it can, and writes all over it
        found = pool.take({NUM_ROWS * DIM * 4})
        if found is not None:
            found.memory[:] = 9
        os._exit(0)
    os.waitpid(child, 0)
    assert (segment.memory == 5).all()
    table.push(ids, np.ones(({NUM_ROWS}, {DIM}), np.float32))
    assert (table.pull(ids) == -1).all()
print("whole", flush=True)
os._exit(0)
"""


def test_a_forked_child_does_not_disturb_the_memory_of_its_parent(served: Served) -> None:
    cluster = served(1)
    with connected(cluster, shared_memory=False):
        done = subprocess.run([sys.executable, "-c", FORK, cluster.address], capture_output=True, text=True, timeout=60)
    assert done.stdout == "whole\n", done.stderr
