"""The client's end of the data plane: when there is a connection, and what becomes of its replies."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

from geartrain.ams.kernels import _core
from geartrain.ams.rpc.carrier import AttemptFailed
from geartrain.ams.rpc.payload import data_plane
from geartrain.ams.rpc.payload.data_plane import DataPlane
from geartrain.ams.values.errors import Busy, InvalidIds, ProtocolError, StepPending
from geartrain.ams.values.interrupts import BrokenOff, BufferLease
from geartrain.ams.values.shard_messages import Assign, CallContext, DataPlaneOffer, Done, Pull, Push, SyncGroup
from tests.support import frame_codec

NOBODY = CallContext()
IDS = np.arange(10)


class Shard:
    """A toy handler, and a client's way to it whose connections are made when :meth:`work` says so."""

    def __init__(self) -> None:
        self.handler = _core.ToyHandler()
        self.server = _core.DataServer(self.handler)
        self.now = 0.0
        self.asked = 0
        self.answer: Callable[[], DataPlaneOffer] = self.offer
        self.begun: list[Callable[[], None]] = []
        self.told: list[str] = []
        self.plane = DataPlane(
            "here:1", self.ask, tell=self.told.append, clock=lambda: self.now, begin=self.begun.append
        )

    def offer(self) -> DataPlaneOffer:
        socket, secret, _ = self.server.offer()
        return DataPlaneOffer(socket=socket, secret=secret)

    def ask(self) -> DataPlaneOffer:
        self.asked += 1
        return self.answer()

    def work(self) -> None:
        """Do what was begun in the background."""
        while self.begun:
            self.begun.pop()()

    def is_connected(self) -> bool:
        return self.plane.submit(NOBODY, pull_of(), 10.0, alone=True) is not None

    def connected(self) -> Shard:
        assert not self.is_connected()
        self.work()
        return self


@pytest.fixture
def shard() -> Iterator[Shard]:
    one = Shard()
    yield one
    one.handler.release()
    one.plane.close()
    one.server.close()


def pull_of(table: str = "rows", dim: int = 4) -> Pull:
    return Pull(table=table, ids=IDS, out=np.full((len(IDS), dim), 77, np.float32))


def expected(ids: np.ndarray, dim: int = 4) -> np.ndarray:
    return (ids[:, None] * 1000 + np.arange(dim)).astype(np.float32)


def test_nobody_waits_for_a_connection_and_later_calls_use_it(shard: Shard) -> None:
    assert not shard.is_connected() and not shard.is_connected()
    assert len(shard.begun) == 1
    shard.work()
    assert shard.is_connected() and shard.asked == 1
    assert shard.plane.num_mailboxes == 1
    assert shard.told == ["through shared memory"]


@pytest.mark.parametrize(
    "answer",
    [
        DataPlaneOffer(reason="no more than these"),
        DataPlaneOffer(socket="nobody-listens-here", secret=bytes(32)),
        ProtocolError("an older shard"),
    ],
)
def test_a_refusal_holds_for_a_while(shard: Shard, answer: DataPlaneOffer | Exception) -> None:
    def refuse() -> DataPlaneOffer:
        if isinstance(answer, Exception):
            raise answer
        return answer

    shard.answer = refuse
    for _ in range(3):
        assert not shard.is_connected()
        shard.work()
    assert shard.asked == 1 and shard.plane.is_off
    assert shard.told[0].startswith("in messages, not through shared memory: ")
    shard.now += data_plane.PAUSE_SECONDS
    shard.answer = shard.offer
    assert shard.connected().is_connected()


def test_an_offer_that_is_lost_is_asked_for_again(shard: Shard) -> None:
    def lose() -> DataPlaneOffer:
        raise AttemptFailed("lost")

    shard.answer = lose
    for asked in range(1, 4):
        assert not shard.is_connected()
        shard.work()
        assert shard.asked == asked
    shard.now += data_plane._LOST_SECONDS + 1
    assert not shard.is_connected()
    shard.begun.clear()  # the thread was lost
    shard.now += data_plane._LOST_SECONDS + 1
    shard.answer = shard.offer
    assert shard.connected().is_connected()


def test_where_no_thread_is_to_be_had_rows_travel_in_messages(shard: Shard) -> None:
    def fail(_: Callable[[], None]) -> None:
        raise RuntimeError("can't start new thread")

    shard.plane._begin = fail
    assert not shard.is_connected()
    assert shard.plane.is_off


def test_a_connection_that_is_lost_is_made_anew(shard: Shard) -> None:
    assert shard.connected().is_connected()
    assert shard.plane._connection is not None
    shard.plane._connection.close()
    assert shard.connected().is_connected()
    assert shard.asked == 2


def test_a_closed_client_has_no_connection(shard: Shard) -> None:
    assert not shard.is_connected()
    shard.plane.close()
    shard.work()  # it was being made
    assert not shard.is_connected() and not shard.begun
    assert shard.plane._connection is not None and shard.plane._connection.is_lost


def test_calls_under_way_fail_when_the_client_is_closed(shard: Shard) -> None:
    reply = shard.connected().plane.submit(NOBODY, pull_of("held"), 10.0, alone=False)
    assert reply is not None and not reply.done()
    shard.plane.close()
    with pytest.raises(AttemptFailed, match="the connection is closed"):
        reply.result()


def test_rows_go_where_the_pull_wants_them(shard: Shard) -> None:
    plane = shard.connected().plane
    out, present = np.full((20, 4), 77, np.float32), np.zeros(20, np.bool_)
    positions = 19 - IDS
    reply = plane.submit(
        NOBODY, Pull(table="rows", ids=IDS, out=out, positions=positions, present=present), 10, alone=False
    )
    assert reply is not None
    assert reply.result(10) == Done()
    np.testing.assert_array_equal(out[positions], expected(IDS))
    assert (out[:10] == 77).all()
    np.testing.assert_array_equal(present[positions], IDS % 2 == 0)
    wide = np.zeros((10, 8), np.float32)  # every second column of it
    flags = np.zeros(20, np.bool_)
    plane.submit(NOBODY, Pull(table="rows", ids=IDS[::2], out=wide[:5, ::2], present=flags[:10:2]), 10, alone=True)
    np.testing.assert_array_equal(wide[:5, ::2], expected(IDS[::2]))
    assert (wide[:, 1::2] == 0).all() and flags[:10:2].all() and not flags[1::2].any()


def test_writes_of_every_type_are_counted(shard: Shard) -> None:
    plane = shard.connected().plane
    ones = np.ones((10, 4), np.float32)
    group = SyncGroup(job="j", world_size=1, rank=0, sequence=1, sample_count=3)
    push = Push(table="rows", ids=IDS, gradients=ones, lr=0.5, optimizer_scalars={"momentum": 0.9}, group=group)
    for request in (
        push,
        Assign(table="rows", ids=IDS[:3], rows=ones[:3]),
        Assign(table="rows", ids=IDS[:2], rows=ones[:4:2]),
    ):
        reply = plane.submit(NOBODY, request, 10, alone=True)
        assert reply is not None and reply.result() == Done(created=len(request.ids))
    assert shard.handler.sum_written == 60.0
    half = Push(table="rows", ids=IDS, gradients=np.ones((10, 8), ml_dtypes.bfloat16))
    assert plane.submit(NOBODY, half, 10, alone=True) is not None


def test_refusals_are_errors_of_their_kind(shard: Shard) -> None:
    plane = shard.connected().plane
    wrong = Pull(table="rows", ids=IDS - 1, out=np.full((10, 4), 77, np.float32))
    reply = plane.submit(NOBODY, wrong, 10, alone=False)
    assert reply is not None and isinstance(reply.exception(), InvalidIds)
    assert (wrong.out == 77).all()
    busy = plane.submit(NOBODY, Push(table="rows", ids=IDS - 1, gradients=np.ones((10, 4), np.float32)), 10, alone=True)
    assert busy is not None
    with pytest.raises(Busy) as refused:
        busy.result()
    assert refused.value.retry_after_seconds == 0.25
    later = plane.submit(NOBODY, Push(table="later", ids=IDS, gradients=np.ones((10, 4), np.float32)), 0.2, alone=True)
    assert later is not None and isinstance(later.exception(), StepPending)
    shard.handler.answer_later()


def test_what_no_frame_can_hold_is_an_error(shard: Shard) -> None:
    plane = shard.connected().plane
    with pytest.raises(ProtocolError, match="longer than 65535 bytes"):
        plane.submit(NOBODY, pull_of("t" * 65536), 10, alone=True)


@pytest.mark.parametrize("alone", [True, False])
def test_a_reply_that_does_not_come_in_time_changes_nothing(shard: Shard, alone: bool) -> None:
    plane, pull = shard.connected().plane, pull_of("held")
    reply = plane.submit(NOBODY, pull, 0.05, alone=alone)
    assert reply is not None
    with pytest.raises(AttemptFailed, match="shard at here:1 does not answer: no reply in time"):
        reply.result()
    assert reply.done() and plane.num_mailboxes == 0  # its memory is the shard's
    assert (pull.out == 77).all()


def test_nothing_touches_the_arrays_of_a_caller_that_has_gone(shard: Shard) -> None:
    plane = shard.connected().plane
    lease = BufferLease()
    pull = Pull(table="rows", ids=IDS, out=np.full((10, 4), 77, np.float32), buffer_lease=lease)
    reply = plane.submit(NOBODY, pull, 10, alone=False)
    lease.end()
    assert reply is not None
    with pytest.raises(BrokenOff):
        reply.result()
    assert (pull.out == 77).all()
    with pytest.raises(BrokenOff):
        plane.submit(NOBODY, pull, 10, alone=False)


def test_a_caller_that_goes_does_not_wait_for_a_shard_that_takes_nothing() -> None:
    lease, over = BufferLease(), threading.Event()
    ids = np.arange(1 << 14)
    write = Assign(table="rows", ids=ids, rows=np.zeros((len(ids), 512), np.float32), buffer_lease=lease)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(2) as threads:
        port = listener.getsockname()[1]

        def serve() -> None:
            there, _ = listener.accept()
            with there:
                there.recv(96, socket.MSG_WAITALL)
                there.sendall(frame_codec.header(3, 0, 0, 0))
                there.recv(1000)  # of the frame
                lease.end()
                over.wait(60)

        threads.submit(serve)
        offer = DataPlaneOffer(secret=bytes(32), port=port)
        plane = DataPlane("127.0.0.1:1", lambda: offer, near=False, far=True, begin=lambda connect: connect())
        try:
            assert plane.submit(NOBODY, write, None, alone=True) is None  # it has connected meanwhile
            sending = threads.submit(plane.submit, NOBODY, write, None, alone=True)
            assert sending.result(10) is None
        finally:
            over.set()
            plane.close()
