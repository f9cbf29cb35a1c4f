"""A connection for rows does what its grant says, of tables that there are and of others alike, and ends with it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from geartrain.ams.kernels import _core
from geartrain.ams.server.shard import Shard
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.shard_messages import CallContext, CreateTable
from geartrain.ams.values.specs import TableSpec
from tests.support import frame_calls, frame_codec
from tests.support.frame_calls import pull, push

READ, WRITE = 1, 2
DIM = 4
WAYS = pytest.mark.parametrize("way", ["ring", "tcp", "tls"])
FOREVER = float("inf")


@pytest.fixture
def shard() -> Iterator[Shard]:
    made = Shard(0, np.arange(4096), incarnation=1)
    for name in ("mine", "other"):
        made.submit(CallContext(), CreateTable(spec=TableSpec(name=name, dim=DIM, optimizer=SGD(1.0)))).result(10)
    yield made
    made.close()


@pytest.fixture
def server(shard: Shard, way: str) -> Iterator[_core.DataServer]:
    made = _core.DataServer(_core.EngineHandler(shard.engine), host="127.0.0.1", uses_tls=way == "tls")
    yield made
    made.close()


def errors(connection: _core.DataConnection, *operations: dict) -> list[str | None]:
    call, number = frame_calls.begin(connection, operations)
    assert call.wait(20.0)
    sizes = [frame_calls.rows_bytes(operation) for operation in operations]
    return [reply.get("error") for reply in frame_codec.parsed_reply(call.reply(), number, sizes)]


@WAYS
def test_each_operation_takes_its_right_to_its_table(server: _core.DataServer, way: str) -> None:
    ids, refused = [1, 2], "AccessDenied"
    write = {"stream": "job/rank0", "incarnation": 1, "dim": DIM}

    def asked(rules: list[tuple[str, int]], table: str, sequence: int) -> list[str | None]:
        connection = frame_calls.dial(way, *server.offer(_core.Grant("job", rules, FOREVER)))
        return errors(connection, push(table, ids, **write, sequence=sequence), pull(table, ids, DIM))

    assert asked([("mine", READ | WRITE)], "mine", 1) == [None, None]
    assert asked([("mine", READ), ("m*", WRITE)], "mine", 2) == [None, None]
    assert asked([("mine", READ)], "mine", 3) == [refused, None]
    # Not by the short way either, on which a push brings the rows of the pull after it.
    assert asked([("mine", WRITE)], "mine", 3) == [None, refused]
    assert asked([("mine", READ | WRITE)], "other", 4) == [refused, refused]
    assert asked([("mine", READ | WRITE)], "none", 4) == [refused, refused]
    assert asked([], "mine", 4) == [refused, refused]


@WAYS
def test_writes_are_of_streams_of_the_job_or_of_none(server: _core.DataServer, way: str) -> None:
    connection = frame_calls.dial(way, *server.offer(_core.Grant("job", [("*", READ | WRITE)], FOREVER)))

    def pushed(stream: str) -> str | None:
        return errors(connection, push("mine", [1, 2], stream=stream, incarnation=1, sequence=1, dim=DIM))[0]

    assert [pushed(stream) for stream in ("job", "job/rank0/table/mine", "0123456789abcdef" * 2)] == [None] * 3
    assert {pushed(stream) for stream in ("jobs", "you/rank0", "jo")} == {"AccessDenied"}


def test_the_name_of_a_job_is_a_pattern_too() -> None:
    for job, own, foreign in (
        ("ads", ["ads", "ads/rank0"], ["ads-1", "adsx", "x/ads", ""]),
        ("ads-*", ["ads-1", "ads-1/rank0"], ["ads", "ads/rank0"]),
        ("*", ["ads", "x/y", ""], []),
    ):
        grant = _core.Grant(job, [], FOREVER)
        assert all(map(grant.owns, own)) and not any(map(grant.owns, foreign))


@WAYS
@pytest.mark.parametrize("how", ["ended", "ran out"])
def test_a_connection_ends_with_its_grant_though_it_says_nothing(server: _core.DataServer, way: str, how: str) -> None:
    grant = _core.Grant("job", [("*", READ)], FOREVER if how == "ended" else time.time() + 1)
    connection = frame_calls.dial(way, *server.offer(grant))
    other = frame_calls.dial(way, *server.offer())
    assert errors(connection, pull("mine", [1, 2], DIM)) == [None]
    assert server.num_connections == 2 and grant.is_in_use
    if how == "ended":
        grant.end()
    until = time.monotonic() + 5
    while server.num_connections != 1:
        assert time.monotonic() < until
        time.sleep(0.02)
    assert errors(other, pull("mine", [1, 2], DIM)) == [None]
    assert grant.is_over and not grant.is_in_use


@pytest.mark.parametrize("way", ["ring"])
def test_what_was_refused_is_told(server: _core.DataServer, way: str) -> None:
    grant = _core.Grant("job", [("mine", READ)], FOREVER)
    connection = frame_calls.dial(way, *server.offer(grant))
    for _ in range(20):
        errors(connection, pull("other", [1, 2], DIM))
    kept, count = grant.pop_refused()
    assert kept == [("other", READ)] * 16 and count == 20
    assert grant.pop_refused() == ([], 0)


@pytest.mark.parametrize(
    ("pattern", "matched", "others"),
    [
        ("*", ["", "a", "faces/a"], []),
        ("faces/*", ["faces/", "faces/a/b"], ["faces", "face/a", "xfaces/a"]),
        ("a*b*c", ["abc", "axbybzc"], ["abcd", "ac", "acb"]),
        ("a?", ["a?"], ["ab"]),
        ("", [""], ["a"]),
    ],
)
def test_a_star_stands_for_any_characters_and_nothing_else_does(
    pattern: str, matched: list[str], others: list[str]
) -> None:
    grant = _core.Grant("job", [(pattern, READ)], FOREVER)
    assert {grant.rights(table) for table in matched} == {READ}
    assert {grant.rights(table) for table in others} <= {0}
