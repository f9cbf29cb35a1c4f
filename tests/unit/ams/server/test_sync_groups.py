"""Synchronous pushes of a shard: joint, in rank order, all or none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from geartrain.ams.kernels._core import SyncGroups
from geartrain.ams.server.shard import Shard
from geartrain.ams.values.errors import InvalidArgument, NonFinite, RankMissing, StaleClient, StepMismatch
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.placement import buckets_of_shard, even_placement
from geartrain.ams.values.shard_messages import CallContext, CreateTable, Done, Fence, Pull, Push, SyncGroup
from geartrain.ams.values.specs import Constant, TableSpec

SPEC = TableSpec(name="t", dim=2, optimizer=SGD(1.0), initializer=Constant(0.0))


@pytest.fixture
def shard() -> Iterator[Shard]:
    made = Shard(0, buckets_of_shard(even_placement(1), 0), incarnation=1, sync_timeout_seconds=30)
    made.submit(CallContext(), CreateTable(spec=SPEC)).result()
    yield made
    made.close()


def push(rank: int, sequence: int, ids: list[int], value: float, samples: int = 1, world_size: int = 2) -> Push:
    group = SyncGroup(job="j", world_size=world_size, rank=rank, sequence=sequence, sample_count=samples)
    gradients = np.full((len(ids), 2), value, np.float32)
    return Push(table="t", ids=np.array(ids, np.int64), gradients=gradients, group=group)


def context(rank: int, sequence: int) -> CallContext:
    return CallContext(stream=f"rank{rank}", sequence=sequence, incarnation=1)


def pulled(shard: Shard, ids: list[int]) -> list[float]:
    out = np.empty((len(ids), 2), np.float32)
    shard.submit(CallContext(), Pull(table="t", ids=np.array(ids), out=out)).result()
    return out[:, 0].tolist()


@pytest.mark.parametrize("sequence", [0, 2**62 + 1])
def test_a_step_that_has_no_next_one_is_refused(shard: Shard, sequence: int) -> None:
    with pytest.raises(InvalidArgument, match=rf"sequence {sequence} of job 'j' must lie in \[1, 2\^62\]"):
        shard.submit(context(0, 1), push(0, sequence, [1], 1.0, world_size=1)).result(10)
    assert shard.submit(context(0, 1), push(0, 2**62, [1], 1.0, world_size=1)).result(10).created == 1


def test_a_retried_rank_joins_and_a_late_retry_is_a_duplicate(shard: Shard) -> None:
    first = shard.submit(context(0, 1), push(0, 1, [1], 1.0))
    again = shard.submit(context(0, 1), push(0, 1, [1], 1.0))
    shard.submit(context(1, 1), push(1, 1, [1], 1.0)).result(10)
    assert first.result(10) == again.result(10)
    late = shard.submit(context(0, 9), push(0, 1, [1], 1.0)).result(10)
    assert isinstance(late, Done) and late.duplicate
    assert pulled(shard, [1]) == [-1.0]


def test_a_rank_that_repeats_an_applied_step_with_other_gradients_is_told(shard: Shard) -> None:
    for rank in (0, 1):
        done = shard.submit(context(rank, 1), push(rank, 1, [1], 1.0))
    done.result(10)
    for other in (push(0, 1, [1], 2.0), push(0, 1, [2], 1.0), push(0, 1, [1], 1.0, samples=2)):
        with pytest.raises(StepMismatch, match=r"step 1 of job 'j' was applied .* with other gradients of rank 0"):
            shard.submit(context(0, 9), other).result(10)
    assert pulled(shard, [1]) == [-1.0]


def test_ranks_agree_on_the_numbers_of_the_optimizer(shard: Shard) -> None:
    other = {"weight_decay": 0.5}
    shard.submit(context(0, 1), push(0, 1, [1], 1.0))
    message = "rank 1 of job 'j' pushes with weight_decay 0.5, another rank with weight_decay as the table's"
    with pytest.raises(StepMismatch, match=message):
        shard.submit(context(1, 1), replace(push(1, 1, [1], 1.0), optimizer_scalars=other)).result(10)
    shard.submit(context(1, 2), push(1, 1, [1], 1.0)).result(10)
    with pytest.raises(
        StepMismatch, match=r"was applied .* with other gradients of rank 0"
    ):  # a repetition has them, too
        shard.submit(context(0, 9), replace(push(0, 1, [1], 1.0), optimizer_scalars=other)).result(10)


def test_a_shard_looks_at_the_numbers_of_the_optimizer_for_itself(shard: Shard) -> None:
    gradients = np.ones((1, 2), np.float32)
    for number, wrong in enumerate(
        [{"weight_decay": -1.0}, {"weight_decay": float("nan")}, {"momentum": 0.9}, {"lr": 1.0}]
    ):
        bad = Push(table="t", ids=np.array([1]), gradients=gradients, optimizer_scalars=wrong)
        with pytest.raises(InvalidArgument, match=next(iter(wrong))):
            shard.submit(context(5, number + 1), bad).result(10)
    assert pulled(shard, [1]) == [0.0]


def test_a_rank_that_gave_its_push_up_may_send_another_one(shard: Shard) -> None:
    given_up = replace(push(0, 1, [5], 1.0), lr=0.5)
    shard.submit(context(0, 1), given_up)
    replaced = [shard.submit(context(rank, 2), push(rank, 1, [5], 2.0)) for rank in range(2)]
    for future in replaced:
        future.result(timeout=10)
    assert pulled(shard, [5]) == [-2.0]


def test_a_push_that_another_of_its_rank_replaced_is_answered(shard: Shard) -> None:
    older = shard.submit(context(0, 1), push(0, 1, [5], 1.0))
    other = CallContext(stream="another process", sequence=1, incarnation=1)
    newer = [shard.submit(other, push(0, 1, [5], 2.0)), shard.submit(context(1, 1), push(1, 1, [5], 2.0))]
    with pytest.raises(StepMismatch, match="rank 0 of job 'j' pushed step 1 of table 't' again"):
        older.result(timeout=10)
    for future in newer:
        future.result(timeout=10)
    assert pulled(shard, [5]) == [-2.0]


def test_a_rank_at_another_step_is_told(shard: Shard) -> None:
    for rank in (0, 1):
        done = shard.submit(context(rank, 1), push(rank, 1, [1], 1.0))
    done.result(10)
    with pytest.raises(StepMismatch, match="at step 3"):
        shard.submit(context(0, 2), push(0, 3, [1], 1.0)).result(10)
    wanted = SyncGroup(job="j", world_size=2, rank=0, sequence=1, sample_count=0)
    with pytest.raises(StepMismatch):
        pull = Pull(table="t", ids=np.array([1]), out=np.empty((1, 2), np.float32), required_sync=wanted)
        shard.submit(CallContext(), pull).result(10)


def test_a_rank_that_believes_in_another_group_is_told(shard: Shard) -> None:
    waiting = shard.submit(context(0, 1), push(0, 1, [1], 1.0))
    with pytest.raises(StepMismatch, match="world_size 3"):
        shard.submit(context(1, 1), push(1, 1, [1], 1.0, world_size=3)).result(10)
    with pytest.raises(InvalidArgument, match="rank 5"):
        shard.submit(context(2, 1), push(5, 1, [1], 1.0)).result(10)
    assert not waiting.done()


def test_a_non_finite_rank_fails_the_step_for_all_and_changes_nothing(shard: Shard) -> None:
    first = shard.submit(context(0, 1), push(0, 1, [1], 1.0))
    second = shard.submit(context(1, 1), push(1, 1, [2], float("nan")))
    for future in (first, second):
        with pytest.raises(NonFinite):
            future.result(10)
    assert pulled(shard, [1, 2]) == [0, 0]
    first = shard.submit(context(0, 2), push(0, 1, [1], 1.0))
    shard.submit(context(1, 2), push(1, 1, [2], 1.0)).result(10)
    assert pulled(shard, [1, 2]) == [-0.5, -0.5]


def test_a_missing_rank_ends_in_an_error_and_the_step_can_be_tried_again() -> None:
    shard = Shard(0, buckets_of_shard(even_placement(1), 0), incarnation=1, sync_timeout_seconds=0.01)
    try:
        shard.submit(CallContext(), CreateTable(spec=SPEC)).result()
        with pytest.raises(RankMissing, match=r"ranks \[1\] of job 'j'"):
            shard.submit(context(0, 1), push(0, 1, [1], 1.0)).result(10)
        assert pulled(shard, [1]) == [0]
    finally:
        shard.close()


def test_closing_the_shard_answers_those_who_wait(shard: Shard) -> None:
    waiting = shard.submit(context(0, 1), push(0, 1, [1], 1.0))
    shard.close()
    with pytest.raises(ConnectionError, match="shut down"):
        waiting.result(10)


def test_a_busy_shard_still_tells_the_ranks_that_wait() -> None:
    now = 0.0
    shard = Shard(0, buckets_of_shard(even_placement(1), 0), incarnation=1, sync_timeout_seconds=30, clock=lambda: now)
    try:
        shard.submit(CallContext(), CreateTable(spec=SPEC)).result()
        waiting = shard.submit(context(0, 1), push(0, 1, [1], 1.0))
        pulled(shard, [1])
        now = 31.0
        pulled(shard, [1])  # a call is always there, so the queue never runs empty
        with pytest.raises(RankMissing):
            waiting.result(10)
    finally:
        shard.close()


def test_a_fence_drops_what_waits_of_the_job_and_lets_the_next_begin_at_its_own_step(shard: Shard) -> None:
    def of(rank: int, sequence: int, incarnation: int) -> CallContext:
        return CallContext(stream=f"job/rank{rank}", sequence=sequence, incarnation=incarnation)

    for rank in (0, 1):
        done = shard.submit(of(rank, 1, 1), push(rank, 1, [1], 1.0))
    done.result(10)
    waits = shard.submit(of(0, 2, 1), push(0, 2, [1], 1.0))
    shard.submit(CallContext(), Fence(job="job", incarnation=2)).result(10)
    with pytest.raises(StaleClient, match="took over while this push waited"):
        waits.result(10)
    for rank in (0, 1):
        done = shard.submit(of(rank, 1, 2), push(rank, 1, [1], 1.0))
    done.result(10)
    assert pulled(shard, [1]) == [-2.0]


def test_ranks_end_a_step_together(shard: Shard) -> None:
    first = shard.submit(context(0, 1), push(0, 1, [1], 1.0))
    going_on = replace(push(1, 1, [2], 1.0), step_goes_on=True)
    with pytest.raises(StepMismatch, match="an earlier piece of a step of table 't', another rank the last"):
        shard.submit(context(1, 1), going_on).result()
    shard.submit(context(1, 2), push(1, 1, [2], 1.0)).result()
    assert first.result() == Done(created=2)


def test_a_group_that_was_silent_for_too_many_others_is_refused_rather_than_begun_anew() -> None:
    groups = SyncGroups(30.0, max_groups=2)

    def of(job: str, sequence: int = 1) -> Push:
        return replace(
            push(0, sequence, [1], 1.0),
            group=SyncGroup(job=job, world_size=1, rank=0, sequence=sequence, sample_count=1),
        )

    for job in ("first", "second", "third"):
        assert not groups.is_applied(of(job))
        assert groups.join(context(0, 1), of(job)) == (None, [context(0, 1)])
        groups.complete(of(job))
        assert groups.is_applied(of(job))
    assert [job for _, job, _, _ in groups.steps()] == ["second", "third"]
    with pytest.raises(StepMismatch, match="'first' pushed nothing to table 't' while 2 other groups did"):
        groups.is_applied(of("first"))
    groups.drop_table("t")
    assert not groups.is_applied(of("first"))
