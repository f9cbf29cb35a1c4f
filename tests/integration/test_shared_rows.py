"""Rows that client and shard share: what is in no message, what is refused, and what is left when one of them dies."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import numpy as np
import pytest

from geartrain.ams import errors
from geartrain.ams.cluster import Cluster, connect
from geartrain.ams.config import ClientConfig
from geartrain.ams.messages import CallContext, Pull
from geartrain.ams.pb.v1 import shard_pb2, types_pb2
from geartrain.ams.server.service import ShardService
from geartrain.ams.specs import SGD, Constant
from geartrain.ams.transport import shared_memory
from geartrain.ams.transport.carrier import AttemptFailed
from geartrain.ams.transport.grpc_client import SHARD_SERVICE, GrpcCarrier
from geartrain.ams.transport.shared_memory import OpenedSegments, Segment, arrays_in, bytes_needed
from tests.integration.conftest import ServedCluster, carriers_of, fill

NUM_ROWS, DIM = 4_000, 32
IDS = np.arange(NUM_ROWS)
ONES = np.ones((NUM_ROWS, DIM), np.float32)
FLOAT = np.dtype(np.float32)
Served = Callable[..., ServedCluster]


@contextmanager
def connected(cluster: ServedCluster, **settings: object) -> Iterator[Cluster]:
    config = ClientConfig(attempt_timeout_seconds=10.0, recovery_timeout_seconds=20.0, **settings)  # type: ignore[arg-type]
    with connect(cluster.address, config=config) as ours:
        ours.create_table("t", dim=DIM, optimizer=SGD(1.0), num_rows=NUM_ROWS, initializer=Constant(0), reuse=True)
        yield ours


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the requests and replies of pulls and pushes, as they travel."""
    sizes: list[int] = []

    def measured(name: str) -> None:
        whole = getattr(ShardService, name)

        def measuring(self: ShardService, data: bytes, servicer_context: grpc.ServicerContext) -> bytes:
            reply: bytes = whole(self, data, servicer_context)
            sizes.extend((len(data), len(reply)))
            return reply

        monkeypatch.setattr(ShardService, name, measuring)

    for name in ("pull", "push", "assign"):
        measured(name)
    return sizes


def segments_of(cluster: ServedCluster) -> OpenedSegments:
    return cluster.servers[0]._held[0].service.segments


def stub(channel: grpc.Channel, method: str) -> Callable[[bytes], bytes]:
    return channel.unary_unary(f"/{SHARD_SERVICE}/{method}")  # type: ignore[return-value]


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
    whole, accept = OpenedSegments.open, shared_memory.SegmentPool.accept

    def late(self: OpenedSegments, *arguments: object) -> str | None:
        go_on.wait(20)
        return whole(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(OpenedSegments, "open", late)
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
        monkeypatch.setattr(OpenedSegments, "open", lambda *_: "on another machine")
    else:
        methods = ShardService.methods.fget
        assert methods is not None
        older = property(lambda self: {n: m for n, m in methods(self).items() if n != "ShareMemory"})
        monkeypatch.setattr(ShardService, "methods", older)
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
from geartrain.ams.cluster import connect

with connect(sys.argv[1]) as cluster:
    table, ids = cluster.table("t"), np.arange({NUM_ROWS})
    carrier = cluster._calls._carriers[0]
    while carrier.num_segments == 0 or not carrier._segments._free:  # until an offer is accepted
        table.pull(ids)
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
    whole = OpenedSegments.forget_closed
    with connected(cluster) as ours:
        fill(carriers_of(ours)[0])
        assert len(segments_of(cluster)) == 2
    monkeypatch.setattr(OpenedSegments, "forget_closed", lambda self: (whole(self), swept.release()))
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
        with shard._turn:  # the shard is at work
            pull = Pull(table="t", ids=IDS, out=out)
            with pytest.raises(AttemptFailed, match="no reply in time"):
                carrier.submit(CallContext(), pull, 0.2).result(10)
            assert carrier.num_segments == 1
        table.push(IDS, ONES)
        assert (table.pull(IDS) == -2).all()
        assert (out == 77).all()


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
                table="t", shared=shard_pb2.SharedBytes(name=segment.name, num_ids=NUM_ROWS, use=1)
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
                shared=shard_pb2.SharedBytes(name=segment.name, num_ids=100, use=segment.num_uses),
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
        ({"name": "geartrain-" + "0" * 32, "num_ids": 1, "use": 1}, "ShardUnavailable"),
        ({"num_ids": 2**40, "use": 1}, "ProtocolError"),
        ({"num_ids": 2**64 - 1, "use": 1}, "ProtocolError"),
        ({"num_ids": 1, "use": 0}, "ShardUnavailable"),
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
            request.shared.CopyFrom(shard_pb2.SharedBytes(**{"name": pool._free[0].name, **shared, "use": use}))  # type: ignore[arg-type]
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
