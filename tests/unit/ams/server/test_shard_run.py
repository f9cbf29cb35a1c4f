"""A request that finds its shard idle runs on the thread that brought it; still one at a time, in one order."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from geartrain.ams.kernels._core import arm_failpoints
from geartrain.ams.observe import failpoints
from geartrain.ams.server.shard import Shard
from geartrain.ams.values.errors import RankMissing
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.shard_messages import (
    CallContext,
    CreateTable,
    Describe,
    Freeze,
    Pull,
    Push,
    ShardState,
    SyncGroup,
)
from geartrain.ams.values.specs import Constant, TableSpec

SPEC = TableSpec(name="t", dim=2, optimizer=SGD(1.0), num_rows=8, initializer=Constant(0))


@pytest.fixture
def shard() -> Iterator[Shard]:
    shard = Shard(0, np.arange(4096), incarnation=1)
    shard.submit(CallContext(), CreateTable(spec=SPEC)).result(timeout=10)
    yield shard
    shard.close()


def push(sequence: int, group: SyncGroup | None = None) -> tuple[CallContext, Push]:
    gradients = -np.ones((8, 2), np.float32)
    context = CallContext(stream=threading.current_thread().name, incarnation=1, sequence=sequence)
    return context, Push(table="t", ids=np.arange(8), gradients=gradients, group=group)


def rows(shard: Shard) -> np.ndarray[Any, Any]:
    out = np.empty((8, 2), np.float32)
    shard.submit(CallContext(), Pull(table="t", ids=np.arange(8), out=out)).result(timeout=10)
    return out


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def before_writes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[], None]], None]]:
    """Call a function whenever a write has its turn, on the thread that makes it."""

    def call(function: Callable[[], None]) -> None:
        monkeypatch.setattr(failpoints, "reach", lambda name: function() if name == "shard.apply.before" else None)
        arm_failpoints(True)

    yield call
    arm_failpoints(False)


@pytest.fixture
def who(before_writes: Callable[[Callable[[], None]], None]) -> list[int]:
    """The threads that pushes run on."""
    seen: list[int] = []
    before_writes(lambda: seen.append(threading.get_ident()))
    return seen


def on_a_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result(timeout=30)


def test_an_idle_shard_is_done_when_run_returns(shard: Shard, who: list[int]) -> None:
    def work() -> tuple[int, bool]:
        future = shard.run(*push(1))
        return threading.get_ident(), future.done()

    ident, done = on_a_thread(work)
    assert done
    assert who == [ident]
    assert (rows(shard) == 1).all()


def test_the_main_thread_which_signals_interrupt_runs_nothing_itself(shard: Shard, who: list[int]) -> None:
    assert threading.current_thread() is threading.main_thread()
    shard.run(*push(1)).result(timeout=10)
    assert who != [threading.get_ident()]


def test_what_arrives_behind_queued_requests_waits_its_turn(
    shard: Shard, before_writes: Callable[[Callable[[], None]], None]
) -> None:
    at_work, go_on = threading.Event(), threading.Event()

    def slow() -> None:
        at_work.set()
        assert go_on.wait(30)

    before_writes(slow)
    queued = [shard.submit(*push(sequence)) for sequence in (1, 2)]
    assert at_work.wait(30)
    outs = [np.zeros((8, 2), np.float32) for _ in range(2)]
    pulls = [Pull(table="t", ids=np.arange(8), out=out) for out in outs]
    later = on_a_thread(lambda: shard.run(CallContext(), pulls[0]))
    with ThreadPoolExecutor(1) as pool:
        on_its_thread = pool.submit(shard.pull, CallContext(), pulls[1])
        until(lambda: shard.engine.turn.num_waiting == 3)
        assert not later.done()
        go_on.set()
        assert [item.result(timeout=10).created for item in queued] == [8, 0]
        later.result(timeout=10)
        on_its_thread.result(timeout=10)
    for out in outs:
        assert (out == 2).all(), "the pull overtook a push"


def until_idle(shard: Shard) -> None:
    with shard.engine.turn:  # behind whatever is at work
        pass


def test_a_freeze_that_ran_on_its_callers_thread_ends_when_nobody_renews_it() -> None:
    """The shard's own thread, which sleeps, is told to look."""
    shard = Shard(0, np.arange(4096), incarnation=1, freeze_lease_seconds=0.3)
    try:
        shard.submit(CallContext(), CreateTable(spec=SPEC)).result(timeout=10)
        until_idle(shard)
        future = on_a_thread(lambda: shard.run(CallContext(), Freeze(snapshot_id="a")))
        assert future.done()
        assert shard.held_snapshots == ("a",)
        until(lambda: not shard.held_snapshots)
    finally:
        shard.close()


def test_threads_that_run_and_submit_at_once_lose_nothing(shard: Shard) -> None:
    def work() -> None:
        for sequence in range(1, 101):
            send = shard.run if sequence % 3 else shard.submit
            send(*push(sequence)).result(timeout=30)

    threads = [threading.Thread(target=work, name=f"stream-{i}") for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (rows(shard) == 400).all()


def test_queued_requests_keep_their_order_while_the_interpreter_is_held_elsewhere(shard: Shard) -> None:
    """The one thread that does them waits for the first of their places: the turn must not go to the second."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(60)  # nobody else has the interpreter but while this thread sleeps
    try:
        with shard.engine.turn:
            queued = [shard.submit(CallContext(), Describe()) for _ in range(2)]
            time.sleep(0.05)  # in which the thread begins to wait
            ends = time.monotonic() + 0.3
            while time.monotonic() < ends:
                pass
    finally:
        sys.setswitchinterval(before)
    for item in queued:
        assert isinstance(item.result(timeout=10), ShardState)


def test_a_deadline_that_is_over_while_requests_are_queued_holds_up_none_of_them() -> None:
    now = 0.0
    shard = Shard(0, np.arange(4096), incarnation=1, clock=lambda: now)
    shard.submit(CallContext(), CreateTable(spec=SPEC)).result(timeout=10)
    alone = shard.submit(*push(1, SyncGroup(job="j", world_size=2, rank=0, sequence=1, sample_count=1)))
    shard.submit(CallContext(), Describe()).result(timeout=10)
    with shard.engine.turn:
        queued = [shard.submit(CallContext(), Describe()) for _ in range(2)]
        now = 1e6
    for item in queued:
        assert isinstance(item.result(timeout=10), ShardState)
    with pytest.raises(RankMissing):
        alone.result(timeout=10)
    shard.close()
