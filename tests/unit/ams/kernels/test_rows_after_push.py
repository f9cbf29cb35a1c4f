"""A push and a pull of its rows in one frame answer what a pull after the push does, of every kind of table."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from geartrain.ams.kernels import _core
from geartrain.ams.kernels.ops import DTYPE_CODES
from geartrain.ams.server.shard import Shard
from geartrain.ams.values.optimizers.registry import SGD, SparseMomentum
from geartrain.ams.values.shard_messages import CallContext, CreateTable, Push
from geartrain.ams.values.specs import DTYPES, Constant, TableSpec
from tests.support import frame_calls, frame_codec
from tests.support.frame_calls import pull, push

DIM = 64


@pytest.fixture
def shard() -> Iterator[Shard]:
    made = Shard(0, np.arange(4096), incarnation=1)
    yield made
    made.close()


def _pushed(shard: Shard, push: Push) -> None:
    shard.submit(CallContext(stream="s", incarnation=1, sequence=1), push).result(20)


def ask(connection: _core.DataConnection, *operations: dict, sizes: list[int]) -> list[dict]:
    call, number = frame_calls.begin(connection, operations)
    assert call.wait(20.0)
    return frame_codec.parsed_reply(call.reply(), number, sizes)


@pytest.mark.parametrize("way", ["ring", "tcp", "tls"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("untouched", ["freeze", "elapsed"])
def test_rows_are_those_of_a_pull_alone(shard: Shard, way: str, dtype: str, untouched: str) -> None:
    optimizer = SparseMomentum(0.1, momentum=0.9, untouched=untouched)  # type: ignore[arg-type]
    spec = TableSpec(name="t", dim=DIM, optimizer=optimizer, dtype=dtype)  # type: ignore[arg-type]
    shard.submit(CallContext(), CreateTable(spec=spec)).result(10)
    server = _core.DataServer(_core.EngineHandler(shard.engine), host="127.0.0.1", uses_tls=way == "tls")
    try:
        connection = frame_calls.dial(way, *server.offer())
        code, ids = DTYPE_CODES[DTYPES[dtype]], list(range(0, 800, 2))
        size = len(ids) * DIM * DTYPES[dtype].itemsize
        write = {"stream": "s", "incarnation": 1, "dim": DIM}
        for sequence in (1, 2):
            both = push("t", ids, **write, sequence=sequence), pull("t", ids, DIM, dtype=code)
            replies = ask(connection, *both, sizes=[0, size])
            (alone,) = ask(connection, pull("t", ids, DIM, dtype=code), sizes=[size])
            assert [reply.get("error") for reply in replies] == [None, None]
            assert replies[1]["rows"] == alone["rows"]
            assert len(alone["rows"]) == size
    finally:
        server.close()


def test_a_brief_pull_between_the_blocks_of_a_push_is_never_infinite(shard: Shard) -> None:
    spec = TableSpec(name="t", dim=DIM, optimizer=SGD(1.0), initializer=Constant(0.0))
    shard.submit(CallContext(), CreateTable(spec=spec)).result(10)
    server = _core.DataServer(_core.EngineHandler(shard.engine), host="127.0.0.1")
    many = np.arange(60_000)
    gradients = np.full((len(many), DIM), -1e6, np.float32)
    code = DTYPE_CODES[DTYPES["float16"]]
    try:
        connection = frame_calls.dial("tcp", *server.offer())
        with ThreadPoolExecutor(1) as threads:
            pushed = threads.submit(_pushed, shard, Push(table="t", ids=many, gradients=gradients))
            ids = list(range(0, 60_000, 4000))
            refused = False
            while not refused:
                was_pushed = pushed.done()
                (one,) = ask(connection, pull("t", ids, DIM, dtype=code), sizes=[len(ids) * DIM * 2])
                refused = one.get("error") == "NonFinite"
                assert refused or np.isfinite(np.frombuffer(one["rows"], np.float16)).all()
                assert refused or not was_pushed
            pushed.result(20)
    finally:
        server.close()
