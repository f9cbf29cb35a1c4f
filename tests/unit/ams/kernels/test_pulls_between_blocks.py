"""What a shard's thread does between two blocks of a large request: brief pulls of others, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from geartrain.ams.kernels import _core
from tests.support.frame_calls import ask, begin, dial, expected, pull, push

SOON = 10.0
LATER = 0.05
"""Seconds in which what must not happen would have happened."""
MANY = range(100_000)
"""Rows of more than a block."""


class Busy:
    """A toy shard that is at work on a long push of somebody."""

    def __init__(self, way: str) -> None:
        self.way = way
        self.handler = _core.ToyHandler()
        self.server = _core.DataServer(self.handler, host="127.0.0.1", uses_tls=way == "tls")
        self.pusher = self.connect()
        self.others = [self.connect() for _ in range(3)]
        self.under_way = begin(self.pusher, [push("long", [1])])[0]
        assert self.handler.await_held(SOON)

    def connect(self) -> _core.DataConnection:
        return dial(self.way, *self.server.offer())

    def is_answered(self, call: Any, seconds: float = LATER) -> bool:
        return bool(call.wait(seconds))


@pytest.fixture(params=["ring", "tcp", "tls"])
def shard(request: pytest.FixtureRequest) -> Iterator[Busy]:
    busy = Busy(request.param)
    yield busy
    busy.handler.release()
    busy.server.close()


def test_brief_pulls_of_others_are_answered(shard: Busy) -> None:
    for number in range(20):
        (pulled,) = ask(shard.others[number % 2], pull("rows", [number, 7]))
        assert pulled["rows"] == expected([number, 7])
    several = ask(shard.others[0], pull("rows", [1]), pull("rows", [2]))
    assert [item["rows"] for item in several] == [expected([1]), expected([2])]
    assert not shard.is_answered(shard.under_way, 0)


def test_somebody_new_is_greeted_and_served(shard: Busy) -> None:
    assert ask(shard.connect(), pull("rows", [3]))[0]["rows"] == expected([3])


def test_nothing_else_is_begun_before_the_end(shard: Busy) -> None:
    first, second, third = shard.others
    waiting = [
        begin(first, [push("rows", [1, 2])])[0],
        begin(second, [pull("rows", MANY)])[0],
        begin(third, [pull("rows", [1]), push("rows", [2])])[0],
        begin(shard.pusher, [pull("rows", [4])])[0],  # it is to see what it pushes
    ]
    for call in waiting:
        assert not shard.is_answered(call)
    behind = begin(first, [pull("rows", [5])])[0]  # and this one, too
    assert not shard.is_answered(behind)
    assert shard.handler.num_writes == 0
    assert ask(shard.connect(), pull("rows", [6]))[0]["rows"] == expected([6])
    shard.handler.release()
    for call in [shard.under_way, *waiting, behind]:
        assert shard.is_answered(call, SOON)
    assert shard.handler.num_writes == 3


def test_a_caller_who_has_gone_meanwhile_gets_nothing_done(shard: Busy) -> None:
    gone = begin(shard.others[0], [push("rows", [1])])[0]
    assert not shard.is_answered(gone)  # it is held by now
    del gone
    shard.others.pop(0).close()
    shard.handler.release()
    assert shard.is_answered(shard.under_way, SOON)
    ask(shard.others[0], push("rows", [1]))
    assert shard.handler.num_writes == 2
