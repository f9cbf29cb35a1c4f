"""The client's end of the data plane: when there is a connection."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from geartrain.ams.kernels import _core
from geartrain.ams.rpc.carrier import AttemptFailed
from geartrain.ams.rpc.payload import data_plane
from geartrain.ams.rpc.payload.data_plane import DataPlane
from geartrain.ams.values.errors import ProtocolError
from geartrain.ams.values.shard_messages import DataPlaneOffer
from tests.support.frame_calls import ask, begin, pull


class Shard:
    """A toy handler, and a client's way to it whose connections are made when :meth:`work` says so."""

    def __init__(self) -> None:
        self.handler = _core.ToyHandler()
        self.server = _core.DataServer(self.handler, host="127.0.0.1")
        self.now = 0.0
        self.asked = 0
        self.answer: Callable[[], DataPlaneOffer] = self.offer
        self.begun: list[Callable[[], None]] = []
        self.told: list[str] = []
        self.plane = DataPlane(
            "127.0.0.1:1", self.ask, tell=self.told.append, clock=lambda: self.now, begin=self.begun.append
        )

    def offer(self) -> DataPlaneOffer:
        socket, secret, port = self.server.offer()
        return DataPlaneOffer(socket=socket, secret=secret, port=port)

    def ask(self) -> DataPlaneOffer:
        self.asked += 1
        return self.answer()

    def work(self) -> None:
        """Do what was begun in the background."""
        while self.begun:
            self.begun.pop()()

    def is_connected(self) -> bool:
        self.plane.want()
        return self.plane.connection is not None

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


def test_nobody_waits_for_a_connection_and_later_calls_use_it(shard: Shard) -> None:
    assert not shard.is_connected() and not shard.is_connected()
    assert len(shard.begun) == 1
    shard.work()
    assert shard.is_connected() and shard.asked == 1
    assert shard.plane.num_mailboxes == 0
    assert shard.plane.connection is not None
    ask(shard.plane.connection, pull("rows", [1]))
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
    shard.now += data_plane.FIRST_PAUSE_SECONDS
    shard.answer = shard.offer
    assert shard.connected().is_connected()


def test_a_shard_that_refuses_again_and_again_is_asked_less_and_less_often(shard: Shard) -> None:
    shard.answer = lambda: DataPlaneOffer(reason="no more than these")
    seconds = []
    for _ in range(12):
        shard.connected()
        before = shard.now
        while shard.plane.is_off:
            shard.now += 0.5
        seconds.append(shard.now - before)
    assert seconds == [*(2.0**n for n in range(10)), 600.0, 600.0]
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


def test_calls_under_way_are_lost_when_the_client_is_closed(shard: Shard) -> None:
    connection = shard.connected().plane.connection
    assert connection is not None
    call, _ = begin(connection, [pull("held", [1])])
    shard.plane.close()
    with pytest.raises(_core.ConnectionLost):
        call.wait(10)


def test_a_call_without_an_answer_ends_a_connection_by_tcp_alone(shard: Shard) -> None:
    connection = shard.connected().plane.connection
    assert connection is not None
    shard.plane.had_no_answer(connection)
    assert shard.is_connected() and not shard.plane.is_off
    shard.plane._near, shard.plane._far = False, True
    connection.close()
    connection = shard.connected().plane.connection
    assert connection is not None
    shard.plane.had_no_answer(connection)
    assert not shard.is_connected() and not shard.begun and shard.plane.is_off
    shard.now += data_plane.DISTRUST_SECONDS
    assert shard.connected().is_connected()
