"""A large request is done in blocks: who pulls little comes between two of them and sees whole rows; all else waits."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from geartrain.ams.kernels import _core
from geartrain.ams.server.shard import Shard
from geartrain.ams.values.errors import GeartrainError
from geartrain.ams.values.optimizers.registry import SGD, RowOptimizerSpec, SparseMomentum
from geartrain.ams.values.shard_messages import Assign, CallContext, CreateTable, Done, Pull, Push, SyncGroup
from geartrain.ams.values.specs import Constant, TableSpec
from tests.support import frame_calls

DIM, NUM_IDS = 128, 24_000
"""12 MB: 11 blocks."""
IDS = np.random.default_rng(0).permutation(np.arange(0, 3 * NUM_IDS, 3))
FEW = IDS[:: NUM_IDS // 40]
ONES = np.ones((NUM_IDS, DIM), np.float32)
SECONDS = 60.0
"""In which what must happen has happened, however busy the machine."""
Rows = np.ndarray[tuple[int, int], np.dtype[np.float32]]


class Side:
    """A caller of a shard: threads of one process, or a connection of its own."""

    def __init__(self, shard: Shard, server: _core.DataServer, way: str, name: str) -> None:
        self._shard, self._name, self._sequence = shard, name, 0
        self._connection = None if way == "process" else frame_calls.dial(way, *server.offer())

    def pull(self, ids: np.ndarray) -> Rows:
        if self._connection is None:
            out = np.empty((len(ids), DIM), np.float32)
            self._shard.pull(CallContext(), Pull(table="t", ids=ids, out=out))
            return out
        (pulled,) = frame_calls.ask(self._connection, frame_calls.pull("t", list(ids), DIM), seconds=SECONDS)
        return np.frombuffer(pulled["rows"], np.float32).reshape(-1, DIM)

    def write(self, kind: str, rows: Rows, ids: np.ndarray = IDS) -> int:
        """Push or assign; returns how many rows that created."""
        self._sequence += 1
        context: dict[str, Any] = {"stream": self._name, "incarnation": 1, "sequence": self._sequence}
        if self._connection is None:
            written = (
                Push(table="t", ids=ids, gradients=rows) if kind == "push" else Assign(table="t", ids=ids, rows=rows)
            )
            done = self._shard.write(CallContext(**context), written)
            assert isinstance(done, Done)
            return done.created
        frame = frame_calls.push("t", list(ids), DIM, kind=kind, **context) | {"rows": rows.tobytes()}
        (told,) = frame_calls.ask(self._connection, frame, seconds=SECONDS)
        return int(told["created"])


Connect = Callable[[str], Side]


@pytest.fixture(
    params=[("process", 1), ("process", 3), ("ring", 3), ("tcp", 1)], ids=lambda given: f"{given[0]}-{given[1]}"
)
def way(request: pytest.FixtureRequest) -> tuple[str, int]:
    """How callers come to the shard, and how many threads a large request has."""
    given: tuple[str, int] = request.param
    return given


@pytest.fixture
def shard(way: tuple[str, int]) -> Iterator[Shard]:
    shard = Shard(0, np.arange(4096), incarnation=1, threads=way[1])
    yield shard
    shard.close()


@pytest.fixture
def connect(way: tuple[str, int], shard: Shard) -> Iterator[Connect]:
    server = _core.DataServer(_core.EngineHandler(shard.engine), host="127.0.0.1")
    yield lambda name: Side(shard, server, way[0], name)
    server.close()


def create(shard: Shard, optimizer: RowOptimizerSpec | None = None, *, num_rows: int | None = None) -> None:
    spec = TableSpec(name="t", dim=DIM, optimizer=optimizer or SGD(1.0), initializer=Constant(0), num_rows=num_rows)
    shard.submit(CallContext(), CreateTable(spec=spec)).result(10)


def beside(work: Callable[[], object], look: Callable[[], bool]) -> None:
    """Do ``work`` again and again on a thread, until ``look()`` is true."""
    stop, errors = threading.Event(), []

    def again() -> None:
        try:
            while not stop.is_set():
                work()
        except Exception as exc:
            errors.append(exc)

    thread = threading.Thread(target=again)
    thread.start()
    deadline = time.monotonic() + SECONDS
    try:
        while not look():
            assert time.monotonic() < deadline
            assert not errors, errors
    finally:
        stop.set()
        thread.join(SECONDS)
    assert not errors, errors


@pytest.mark.parametrize("kind", ["push", "assign"])
def test_who_pulls_little_during_a_write_sees_each_row_before_or_after_it(
    shard: Shard, connect: Connect, kind: str
) -> None:
    create(shard)
    writer, reader = connect("writer"), connect("reader")
    writes, between, last = [0], [0], np.zeros(len(FEW), np.float32)

    def write() -> None:
        writes[0] += 1
        writer.write(kind, -ONES if kind == "push" else np.full_like(ONES, writes[0]))

    def look() -> bool:
        rows = reader.pull(FEW)
        assert (rows == rows[:, :1]).all()  # whole
        assert (rows[:, 0] >= last).all()
        last[:] = rows[:, 0]
        assert (
            last.max() - last.min() <= 1
        )  # of two moments at most: before the one write that is under way, and after it
        between[0] += last.max() != last.min()
        return between[0] == 3

    beside(write, look)
    assert (reader.pull(IDS) == writes[0]).all()


def test_a_row_is_there_for_others_when_it_is_written(shard: Shard, connect: Connect) -> None:
    create(shard)
    writer, reader = connect("writer"), connect("reader")
    batch = [0]
    found = [0]

    def write() -> None:
        batch[0] += 1
        assert writer.write("push", -ONES, IDS + batch[0] * 3 * NUM_IDS) == NUM_IDS

    def look() -> bool:
        rows = reader.pull(FEW + batch[0] * 3 * NUM_IDS)[:, 0]
        found[0] += 0 < rows.sum() < len(FEW)
        assert ((rows == 0) | (rows == 1)).all()
        return found[0] == 2 or batch[0] == 12

    beside(write, look)


def test_large_requests_do_not_mix(way: tuple[str, int]) -> None:
    attack(*way)


def attack(way: str, threads: int, rounds: int = 3) -> None:
    """Assign all rows by two callers at once, while a third pulls a few: who pulls all of them finds one assign's."""
    shard = Shard(0, np.arange(4096), incarnation=1, threads=threads)
    server = _core.DataServer(_core.EngineHandler(shard.engine), host="127.0.0.1")
    create(shard, SparseMomentum(1.0, momentum=0.5), num_rows=3 * NUM_IDS)
    sides = [Side(shard, server, way, f"side {number}") for number in range(2)]
    sides[0].write("assign", ONES)
    stop = threading.Event()
    mixed: list[Rows] = []

    def work(side: Side, number: int) -> None:
        for value in range(rounds):
            if mixed:
                break
            side.write("assign", np.full_like(ONES, 10 * number + value))
            rows = side.pull(IDS)
            if not (rows == rows[0, 0]).all():
                mixed.append(rows)
        stop.set()

    reader = Side(shard, server, way, "reader")
    callers = [threading.Thread(target=work, args=(side, number)) for number, side in enumerate(sides)]
    for caller in callers:
        caller.start()
    while not stop.is_set():
        reader.pull(FEW)
    for caller in callers:
        caller.join(SECONDS)
    server.close()
    shard.close()
    assert not mixed


def test_a_pull_of_a_step_waits_for_the_whole_step_before() -> None:
    shard = Shard(0, np.arange(4096), incarnation=1)
    create(shard)
    steps = [0]

    def group(sequence: int) -> SyncGroup:
        return SyncGroup(job="j", world_size=1, rank=0, sequence=sequence, sample_count=1)

    def write() -> None:
        context = CallContext(stream="w", incarnation=1, sequence=steps[0] + 1)
        shard.write(context, Push(table="t", ids=IDS, gradients=-ONES, group=group(steps[0] + 1)))
        steps[0] += 1

    def look() -> bool:
        out = np.empty((len(FEW), DIM), np.float32)
        try:
            shard.pull(CallContext(), Pull(table="t", ids=FEW, out=out, required_sync=group(steps[0] + 1)))
        except GeartrainError:  # of another step
            return False
        assert (out == out[0, 0]).all()
        return steps[0] >= 6

    beside(write, look)
    shard.close()


def test_blocks_and_helpers_give_the_bits_of_one_thread(connect: Connect, shard: Shard) -> None:
    """Also where rows come into being, and with somebody who pulls all the while."""
    create(shard, SparseMomentum(0.1, momentum=0.9))
    alone = Shard(0, np.arange(4096), incarnation=1)
    create(alone, SparseMomentum(0.1, momentum=0.9))
    writer, reader = connect("writer"), connect("reader")
    random, half = np.random.default_rng(1), NUM_IDS // 2 + 1
    steps = [(random.permutation(IDS)[:half], random.normal(size=(half, DIM)).astype(np.float32)) for _ in range(3)]
    contexts = (CallContext(stream="s", incarnation=1, sequence=n, oldest_unacknowledged=n) for n in itertools.count(1))
    done = threading.Event()
    puller = threading.Thread(target=lambda: [reader.pull(FEW) for _ in iter(done.is_set, True)])
    puller.start()
    try:
        for ids, gradients in steps:
            created = writer.write("push", gradients, ids)
            for begin in range(0, half, 500):  # small ones: no blocks, no helpers
                part = slice(begin, begin + 500)
                told = alone.write(next(contexts), Push(table="t", ids=ids[part], gradients=gradients[part]))
                assert isinstance(told, Done)
                created -= told.created
            assert created == 0
    finally:
        done.set()
        puller.join(SECONDS)
    out = np.empty((NUM_IDS, DIM), np.float32)
    alone.pull(CallContext(), Pull(table="t", ids=IDS, out=out))
    alone.close()
    np.testing.assert_array_equal(reader.pull(IDS), out)
