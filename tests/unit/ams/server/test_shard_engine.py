"""A shard's engine beside Python: threads without an interpreter, one order for all, and the words of refusals."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from geartrain.ams.kernels import _core
from geartrain.ams.kernels._core import Waiter, exercise_engine
from geartrain.ams.programs.hosted import Gradients
from geartrain.ams.server.shard import Shard
from geartrain.ams.values.errors import (
    InvalidArgument,
    InvalidRows,
    RankMissing,
    ShardUnavailable,
    StepMismatch,
    TableBeingRestored,
    being_restored,
)
from geartrain.ams.values.expiry.rules import Unseen
from geartrain.ams.values.optimizers.registry import OPTIMIZERS, SGD, Momentum, RowOptimizerSpec, SparseMomentum
from geartrain.ams.values.shard_messages import (
    Assign,
    BatchFacts,
    CallContext,
    CreateTable,
    Describe,
    Done,
    Expire,
    Freeze,
    Pull,
    Push,
    Remove,
    ShardState,
    SyncGroup,
    Thaw,
    UpdateHosted,
)
from geartrain.ams.values.specs import Constant, TableSpec
from tests.support import frame_calls

DIM = 4
IDS = np.arange(0, 80, 2)
ONES = np.ones((len(IDS), DIM), np.float32)


@pytest.fixture
def shard() -> Iterator[Shard]:
    shard = Shard(0, np.arange(4096), incarnation=1)
    create(shard, "t")
    yield shard
    shard.close()


def create(shard: Shard, name: str, optimizer: RowOptimizerSpec | None = None, *, for_restore: bool = False) -> None:
    spec = TableSpec(name=name, dim=DIM, optimizer=optimizer or SGD(1.0), initializer=Constant(0))
    shard.submit(CallContext(), CreateTable(spec=spec, for_restore=for_restore)).result(10)


def rows(shard: Shard, table: str = "t") -> np.ndarray:
    out = np.empty((len(IDS), DIM), np.float32)
    shard.pull(CallContext(), Pull(table=table, ids=IDS, out=out))
    return out


def test_rows_are_pushed_and_pulled_while_the_interpreter_is_held_elsewhere(shard: Shard) -> None:
    rows(shard)  # in its turn: the shard's own thread, which needs the interpreter to leave its turn, has left it
    told = exercise_engine(shard.engine, "t", IDS, ONES, 20, 2, holds_interpreter=True, seconds=20)
    assert told == (40, 0)
    assert (rows(shard) == -40).all()


def test_what_all_kinds_of_callers_do_at_once_adds_up(shard: Shard) -> None:
    """Threads of C++ and of Python, requests that are queued, and freezes."""
    rounds = 60
    mixed: list[np.ndarray] = []

    def of_python(number: int) -> None:
        out = np.empty((len(IDS), DIM), np.float32)
        for sequence in range(1, rounds + 1):
            context = CallContext(stream=f"s{number}", incarnation=1, sequence=sequence)
            push = Push(table="t", ids=IDS, gradients=ONES)
            done = shard.write(context, push) if sequence % 2 else shard.submit(context, push).result(30)
            assert isinstance(done, Done) and not done.duplicate
            shard.pull(CallContext(), Pull(table="t", ids=IDS, out=out))
            if not (out == out[0, 0]).all():
                mixed.append(out.copy())

    def of_snapshots() -> None:
        for number in range(rounds):
            shard.run(CallContext(), Freeze(snapshot_id=str(number))).result(30)
            shard.submit(CallContext(), Thaw(snapshot_id=str(number), kept=False)).result(30)

    with ThreadPoolExecutor(5) as pool:
        work = [pool.submit(of_python, number) for number in range(3)] + [pool.submit(of_snapshots)]
        native = pool.submit(
            lambda: exercise_engine(shard.engine, "t", IDS, ONES, rounds, 2, holds_interpreter=False, seconds=60)
        )
        for item in work:
            item.result(60)
        assert native.result(60) == (2 * rounds, 0)
    assert not mixed
    assert (rows(shard) == -5 * rounds).all()
    state = shard.submit(CallContext(), Describe()).result(10)
    assert isinstance(state, ShardState)
    assert state.tables[0].writes == 5 * rounds


def test_equal_ids_of_a_push_are_merged_and_those_of_an_assign_refused(shard: Shard) -> None:
    create(shard, "m", Momentum(1.0, momentum=0.5))  # unlike SGD, it tells one gradient from two
    ids = np.array([4, 2, 4, 2, 4])
    values = np.arange(20, dtype=np.float32).reshape(5, 4)
    shard.write(CallContext(stream="s", incarnation=1, sequence=1), Push(table="m", ids=ids, gradients=values))
    expected = np.zeros_like(ONES)
    np.subtract.at(expected, ids // 2, values)
    np.testing.assert_array_equal(rows(shard, "m"), expected)
    again = CallContext(stream="s", incarnation=1, sequence=2)
    with pytest.raises(InvalidRows, match="5 ids to assign hold 3 duplicates"):
        shard.write(again, Assign(table="m", ids=ids, rows=values))
    np.testing.assert_array_equal(rows(shard, "m"), expected)
    shard.write(again, Assign(table="m", ids=IDS, rows=ONES))  # the number was not used up
    assert (rows(shard, "m") == 1).all()


def test_nothing_is_begun_for_a_caller_who_left_before_an_idle_shard_was_asked(shard: Shard) -> None:
    gone = Waiter()
    gone.leave()
    push = Push(table="t", ids=IDS, gradients=ONES)
    with pytest.raises(ShardUnavailable, match="the caller stopped waiting"):
        shard.write(CallContext(stream="s", incarnation=1, sequence=1), push, gone)
    out = np.full((len(IDS), DIM), 7, np.float32)
    with pytest.raises(ShardUnavailable, match="the caller stopped waiting"):
        shard.pull(CallContext(), Pull(table="t", ids=IDS, out=out), gone)
    assert (out == 7).all()
    assert (rows(shard) == 0).all()


def until_waiting(shard: Shard, count: int) -> None:
    deadline = time.monotonic() + 30
    while shard.engine.turn.num_waiting < count:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_closed_shard_refuses_what_comes_and_finishes_what_waited(shard: Shard) -> None:
    push = Push(table="t", ids=IDS, gradients=ONES)
    first, second, late = (CallContext(stream=name, incarnation=1, sequence=1) for name in ("first", "second", "late"))
    with ThreadPoolExecutor(3) as pool:
        with shard.engine.turn:
            before = pool.submit(shard.write, first, push)
            until_waiting(shard, 1)
            closing = pool.submit(shard.close)
            until_waiting(shard, 2)
            with pytest.raises(ShardUnavailable, match="shard 0 is shut down"):
                shard.write(late, push)
            place = shard.engine.turn.enter()  # one that was in the line when it began to close
        assert before.result(10) == Done(created=len(IDS))
        closing.result(10)
        place.wait()
        with pytest.raises(ShardUnavailable, match="shard 0 is shut down"):
            shard.write(second, push, ids_are_distinct=True, has_turn=True)
        place.leave()


def test_a_caller_who_leaves_before_the_turn_has_come_gets_nothing_done(shard: Shard) -> None:
    waiter = Waiter()
    push = Push(table="t", ids=IDS, gradients=ONES)
    context = CallContext(stream="s", incarnation=1, sequence=1)
    with ThreadPoolExecutor(1) as pool, shard.engine.turn:
        written = pool.submit(shard.write, context, push, waiter)
        until_waiting(shard, 1)
        waiter.leave()
        with pytest.raises(ShardUnavailable, match="the caller stopped waiting"):
            written.result(10)
    assert (rows(shard) == 0).all()
    assert shard.write(context, push) == Done(created=len(IDS))


@pytest.mark.parametrize("kind", OPTIMIZERS.values(), ids=list(OPTIMIZERS))
def test_a_push_may_carry_the_numbers_that_its_optimizer_can_be_made_with(
    shard: Shard, kind: type[RowOptimizerSpec]
) -> None:
    for number, optimizer in enumerate({kind(lr=0.1), SparseMomentum(lr=0.1, untouched="elapsed")}):
        name = f"t{number}"
        create(shard, name, optimizer)
        values = [-1.0, 0.0, 0.25, 1.0, 2.0, 1e-45, 1e30, np.inf, np.nan]
        numbers = itertools.product([*optimizer.scalars(), "none such"], values)
        for sequence, (scalar, value) in enumerate(numbers, 1):
            context = CallContext(stream=name, incarnation=1, sequence=sequence)
            push = Push(table=name, ids=IDS, gradients=0 * ONES, optimizer_scalars={scalar: value})
            try:
                optimizer.for_push({scalar: value})
            except InvalidArgument:
                with pytest.raises(InvalidArgument, match=scalar):
                    shard.write(context, push)
            else:
                shard.write(context, push)


def test_a_table_that_is_restored_says_so_as_python_does(shard: Shard) -> None:
    create(shard, "r", for_restore=True)
    with pytest.raises(TableBeingRestored) as raised:
        shard.pull(CallContext(), Pull(table="r", ids=IDS, out=ONES.copy()))
    assert str(raised.value) == str(being_restored("r"))


def test_numbers_out_of_range_change_nothing_and_use_up_no_number(shard: Shard) -> None:
    context = CallContext(stream="s", incarnation=1, sequence=1)
    for settings, why in (
        ({"lr": -1.0}, r"lr is -1.0; it must be finite"),
        ({"lr": float("nan")}, r"lr is nan"),
        ({"lr": 1e39}, r"lr is 1e\+39"),
        ({"scale": float("inf")}, r"scale is inf"),
    ):
        with pytest.raises(InvalidArgument, match=why):
            shard.write(context, Push(table="t", ids=IDS, gradients=ONES, **settings))
    with pytest.raises(InvalidRows, match="gradients of table 't' has rows of width 2; they must be of width 4"):
        shard.write(context, Push(table="t", ids=IDS, gradients=ONES[:, :2]))
    with pytest.raises(InvalidRows, match="rows of table 't' is float16; it must be float32"):
        shard.write(context, Assign(table="t", ids=IDS, rows=ONES.astype(np.float16)))
    assert shard.write(context, Push(table="t", ids=IDS, gradients=ONES)) == Done(created=len(IDS))


def test_what_comes_through_shared_memory_needs_no_interpreter_and_counts_once(shard: Shard) -> None:
    server = _core.DataServer(_core.EngineHandler(shard.engine))
    try:
        ours = _core.connect_ring(*server.offer()[:2], 10.0)
        write = {"stream": "ring", "incarnation": 1, "sequence": 1}
        frame = frame_calls.push("t", [*range(10), 3], **write), frame_calls.pull("t", range(10), with_present=True)
        for is_repeated in (False, True):
            pushed, pulled = frame_calls.ask(ours, *frame)
            assert (pushed["created"], pushed["duplicate"]) == (10, is_repeated)
            expected = np.full((10, DIM), -1, np.float32)
            expected[3] = -2
            assert (pulled["rows"], pulled["present"]) == (expected.tobytes(), b"\1" * 10)
        (refused,) = frame_calls.ask(ours, frame_calls.push("t", [1, 1], kind="assign", **(write | {"sequence": 2})))
        assert refused["error"] == "InvalidRows" and "2 ids to assign hold 1 duplicate;" in refused["message"]
        (restarted,) = frame_calls.ask(ours, frame_calls.pull("t", [1], shard_incarnation=7))
        assert restarted["error"] == "ShardRestarted"
    finally:
        server.close()


def part(rank: int) -> Push:
    group = SyncGroup(job="j", world_size=2, rank=rank, sequence=1, sample_count=1)
    return Push(table="t", ids=IDS, gradients=(rank + 1) * ONES, group=group)


def test_ranks_that_write_on_their_own_threads_are_applied_together(shard: Shard) -> None:
    contexts = [CallContext(stream=f"j/{rank}", incarnation=1, sequence=1) for rank in range(2)]
    first_push = part(0)
    first = shard.write(contexts[0], first_push)
    assert isinstance(first, Future)
    first_push.gradients[:] = 1000  # it was copied
    joined = shard.write(contexts[0], part(0))  # the same once more, as clients repeat a call
    assert isinstance(joined, Future)
    assert not first.done()
    assert shard.write(contexts[1], part(1)) == Done(created=len(IDS))
    assert first.result(10) == joined.result(10) == Done(created=len(IDS))
    assert (rows(shard) == -1.5).all()
    assert shard.write(contexts[1], part(1)) == Done(created=len(IDS), duplicate=True)
    sync = SyncGroup(job="j", world_size=2, rank=0, sequence=2, sample_count=1)
    shard.pull(CallContext(), Pull(table="t", ids=IDS, out=ONES.copy(), required_sync=sync))
    with pytest.raises(StepMismatch, match=r"at step 3 .* its group at 2"):
        later = replace(sync, sequence=3)
        shard.pull(CallContext(), Pull(table="t", ids=IDS, out=ONES.copy(), required_sync=later))


def test_a_rank_that_waits_in_vain_is_told_by_the_shards_own_thread() -> None:
    shard = Shard(0, np.arange(4096), incarnation=1, sync_timeout_seconds=0.2)
    try:
        create(shard, "t")
        waiting = shard.write(CallContext(stream="j/1", incarnation=1, sequence=1), part(1))
        assert isinstance(waiting, Future)
        with pytest.raises(RankMissing, match=r"ranks \[0\]"):
            waiting.result(30)
    finally:
        shard.close()


class OnesForTwo:
    """A hosted model that pushes ones to ids 1 and 2."""

    def compute(self, *_: Any) -> Any:
        raise NotImplementedError

    def gradients(self, *_: Any) -> Gradients:
        return Gradients(
            chunks=[0], ids=lambda _: np.array([1, 2]), make=lambda _: ONES[:2], num_rows=2, largest=1.0, batch=None
        )


def test_every_change_of_a_row_leaves_through_one_exit_in_the_order_of_the_calls() -> None:
    shard = Shard(0, np.arange(4096), incarnation=1, models={"ones": OnesForTwo()})
    spec = TableSpec(name="t", dim=DIM, optimizer=SGD(1.0), max_bytes=20_000, expiry=Unseen(steps=10**6))
    shard.submit(CallContext(), CreateTable(spec=spec)).result(10)
    seen: list[tuple[str, str, int, int]] = []
    _core.observe_writes(shard.engine, lambda *change: seen.append(change))
    numbers = itertools.count(1)

    def write(*requests: Any) -> None:
        number = next(numbers)
        for stream, request in enumerate(requests):
            context = CallContext(stream=f"job/{stream}", incarnation=1, sequence=number, oldest_unacknowledged=number)
            for _ in range(2):  # a write that comes twice leaves once
                waiting.append(shard.submit(context, request))
        while waiting:
            waiting.pop().result(10)

    waiting: list[Future[Any]] = []
    push = Push(table="t", ids=np.array([1]), gradients=ONES[:1], batch=BatchFacts(step=1))
    hosted = UpdateHosted(table="t", model="ones", inputs=())
    groups = [SyncGroup(job="job", world_size=2, rank=rank, sequence=1, sample_count=1) for rank in range(2)]
    write(push)
    write(Assign(table="t", ids=np.array([3]), rows=ONES[:1]))
    write(hosted)
    write(Remove(table="t", ids=np.array([1, 3, 9])))
    write(*(replace(hosted, group=group) for group in groups))
    write(*(replace(push, group=replace(group, sequence=2), batch=BatchFacts(step=9)) for group in groups))
    shard.submit(CallContext(), Expire(table="t", expiry=Unseen(steps=2))).result(10)
    state = shard.submit(CallContext(), Describe()).result(10)
    assert isinstance(state, ShardState)
    for step in range(3, 7):  # 208 rows have room
        ids, ones = np.arange(100 * step, 100 * step + 100), np.ones((100, DIM), np.float32)
        write(Push(table="t", ids=ids, gradients=ones, batch=BatchFacts(step=step)))
    kinds = [(kind, rows) for kind, _, rows, _ in seen[:7]]
    assert kinds[:6] == [("push", 1), ("assign", 1), ("hosted", 1), ("remove", 2), ("hosted", 1), ("push", 0)]
    assert kinds[6] == ("expire", 1) and state.tables[0].writes == 7
    assert [evicted > 0 for *_, evicted in seen] == [False] * 9 + [True] * 2
    shard.close()
