"""Groups of ranks as compiled: what counts as another push, and which groups are remembered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from geartrain.ams.kernels._core import SyncGroups
from geartrain.ams.values.errors import Busy, InvalidArgument, MessageTooLarge, StepMismatch
from geartrain.ams.values.shard_messages import CallContext, HostedInputs, Push, SyncGroup, UpdateHosted


def member(rank: int, world_size: int, *, job: str = "j", sequence: int = 1, samples: int = 1) -> SyncGroup:
    return SyncGroup(job=job, world_size=world_size, rank=rank, sequence=sequence, sample_count=samples)


def join_all(groups: SyncGroups, *writes: Push | UpdateHosted) -> None:
    for rank, write in enumerate(writes):
        _, callers = groups.join(CallContext(stream=f"rank{rank}", sequence=1, incarnation=1), write)
    assert len(callers) == len(writes)


def test_a_step_is_pushed_by_all_ranks_or_updated_by_hosted_models_of_all() -> None:
    push = Push(table="t", ids=np.arange(2), gradients=np.ones((2, 2), np.float32), group=member(0, 2))
    update = UpdateHosted(table="t", model="m", inputs=(), group=member(1, 2))
    groups = SyncGroups(1.0)
    join_all(groups, push, update)
    with pytest.raises(StepMismatch, match="some ranks push gradients to table 't', others update it by a hosted"):
        groups.updates(update)


WIDTH = 61
"""So that gradients are more than two KiB, and no whole number of those or of blocks."""


def plain_push() -> Push:
    gradients = np.arange(9 * WIDTH, dtype=np.float32).reshape(9, WIDTH)
    scalars = {"momentum": 0.5, "beta": 0.25}
    return Push(table="t", ids=np.arange(9), gradients=gradients, lr=0.1, optimizer_scalars=scalars, group=member(0, 1))


def plain_update() -> UpdateHosted:
    arrays = {"x": np.arange(100, dtype=np.float32), "y": np.arange(3, dtype=np.int64)}
    inputs = HostedInputs(arrays=arrays, settings={"scale": 2.0}, seed=3, step=4, weight=0.5)
    return UpdateHosted(table="t", model="m", inputs=(inputs, inputs), group=member(0, 1))


def with_inputs(**changes: Any) -> UpdateHosted:
    update = plain_update()
    return replace(update, inputs=(update.inputs[0], replace(update.inputs[1], **changes)))


def test_any_other_byte_or_number_is_another_part_of_a_step() -> None:
    push = plain_push()
    others = [
        replace(push, lr=0.2),
        replace(push, lr=None),
        replace(push, scale=2.0),
        replace(push, step_goes_on=True),
        replace(push, group=member(0, 1, samples=2)),
        replace(push, optimizer_scalars={"momentum": 0.25, "beta": 0.5}),
        replace(push, optimizer_scalars={"momentum": 0.5}),
        replace(push, optimizer_scalars={"momentum": 0.5, "alpha": 0.25}),
        replace(push, gradients=push.gradients.astype(np.float16)),
        replace(push, ids=push.ids[:8], gradients=push.gradients[:8]),
    ]
    for place in range(9 * WIDTH * 4):
        gradients = push.gradients.copy()
        gradients.reshape(-1).view(np.uint8)[place] ^= 1
        others.append(replace(push, gradients=gradients))
    for place in range(9 * 8):
        ids = push.ids.copy()
        ids.view(np.uint8)[place] ^= 16
        others.append(replace(push, ids=ids))
    groups = SyncGroups(1.0)
    join_all(groups, push)
    groups.complete(push)
    again = replace(push, ids=push.ids.copy(), optimizer_scalars={"beta": 0.25, "momentum": 0.5})
    assert groups.is_applied(again)
    for other in others:
        with pytest.raises(StepMismatch, match="with other gradients of rank 0"):
            groups.is_applied(other)


def test_any_other_input_of_a_hosted_model_is_another_part_of_a_step() -> None:
    update = plain_update()
    arrays = dict(update.inputs[0].arrays)
    others = [
        replace(update, model="n"),
        replace(update, inputs=update.inputs[:1]),
        replace(update, lr=1.0),
        with_inputs(settings={"scale": 3.0}),
        with_inputs(seed=4),
        with_inputs(step=5),
        with_inputs(weight=1.0),
        with_inputs(arrays={"x": arrays["x"]}),
        with_inputs(arrays={"x": arrays["x"], "z": arrays["y"]}),
        with_inputs(arrays={**arrays, "x": arrays["x"].reshape(10, 10)}),
        with_inputs(arrays={**arrays, "y": arrays["y"] + 1}),
    ]
    groups = SyncGroups(1.0)
    join_all(groups, update)
    assert groups.updates(update) == [update]
    groups.complete(update)
    assert groups.is_applied(plain_update())
    for other in others:
        with pytest.raises(StepMismatch, match="with other gradients of rank 0"):
            groups.is_applied(other)


def test_groups_run_out_of_time_in_the_order_in_which_they_began_to_wait() -> None:
    now = 0.0
    groups = SyncGroups(10.0, clock=lambda: now)

    def part(job: str, rank: int) -> Push:
        return replace(plain_push(), group=member(rank, 2, job=job))

    def join(job: str, rank: int) -> list[CallContext]:
        return groups.join(CallContext(stream=f"{job}/{rank}", sequence=1, incarnation=1), part(job, rank))[1]

    for job in ("a", "b", "c"):
        join(job, 0)
        now += 1
    join("a", 0)  # once more: it waits since its first
    assert groups.next_deadline() == 10
    assert len(join("b", 1)) == 2
    groups.complete(part("b", 0))
    now = 10.0
    assert [caller.stream for caller, _ in groups.expire()] == ["a/0"]
    assert groups.next_deadline() == 12
    join("a", 0)
    assert groups.fence("c", 1, forget=False) == []  # nobody is below it
    assert [caller.stream for caller, _ in groups.fence("c", 2, forget=False)] == ["c/0"]
    assert groups.next_deadline() == 20
    assert [caller.stream for caller in groups.drop_table("t")] == ["a/0"]
    assert groups.next_deadline() is None


def test_a_group_begins_anew_under_a_name_that_many_others_have_followed() -> None:
    groups = SyncGroups(1.0, max_groups=1)
    pushes = [replace(plain_push(), group=member(0, 1, job=f"job{number}")) for number in range(7)]
    for push in pushes:
        assert not groups.is_applied(push)
    for push in pushes[2:6]:
        with pytest.raises(StepMismatch, match="pushed nothing to table 't' while 1 other groups did"):
            groups.is_applied(push)
    assert not groups.is_applied(pushes[0])


@pytest.mark.parametrize(("rank", "world_size"), [(0, 0), (-1, 2), (2, 2), (0, 65_537)])
def test_a_rank_that_no_group_can_have_is_refused(rank: int, world_size: int) -> None:
    push = replace(plain_push(), group=member(rank, world_size))
    with pytest.raises(InvalidArgument, match=f"rank {rank} of world_size {world_size} is impossible"):
        SyncGroups(1.0).is_applied(push)
    with pytest.raises(InvalidArgument, match="sequence 0 of job 'j' must lie in"):
        SyncGroups(1.0).is_applied(replace(push, group=member(0, 1, sequence=0)))


def test_a_group_that_has_begun_stays_at_its_step_and_a_forgotten_one_goes_on_at_a_restored_one() -> None:
    groups = SyncGroups(1.0, max_groups=1)
    groups.is_applied(replace(plain_push(), group=member(0, 1, job="mine", sequence=4)))
    groups.restore(("t", "mine", 1, 9))
    assert groups.steps() == [("t", "mine", 1, 4)]
    groups.is_applied(replace(plain_push(), group=member(0, 1, job="other")))
    groups.restore(("t", "mine", 1, 9))
    assert groups.steps() == [("t", "mine", 1, 9)]
    assert not groups.is_applied(replace(plain_push(), group=member(0, 1, job="mine", sequence=9)))


def test_the_group_that_pushed_last_is_forgotten_last() -> None:
    groups = SyncGroups(1.0, max_groups=2)
    first, second, third = (replace(plain_push(), group=member(0, 1, job=job)) for job in "abc")
    for push in (first, second, first, third):
        assert not groups.is_applied(push)
    assert [job for _, job, _, _ in groups.steps()] == ["a", "c"]
    groups.join(CallContext(), replace(first, group=member(0, 2, job="waits")))
    for push in (replace(first, group=member(0, 1, job=job)) for job in "de"):
        assert not groups.is_applied(push)
    assert {job for _, job, _, _ in groups.steps()} == {"waits", "e"}


@pytest.mark.parametrize("hosted", [False, True])
def test_ranks_that_wait_have_room_until_they_wait_no_more_and_others_are_told_that_the_shard_is_busy(
    hosted: bool,
) -> None:
    """Each part takes 2,268 or 848 bytes, and a KiB."""
    now = 0.0
    groups = SyncGroups(10.0, clock=lambda: now, max_waiting_bytes=8 << 10)

    def join(rank: int, job: str, stream: str = "s") -> int:
        write = replace(plain_update() if hosted else plain_push(), group=member(rank, 20, job=job))
        return len(groups.join(CallContext(stream=f"{job}/{stream}", sequence=1, incarnation=1), write)[1])

    fitting = 4 if hosted else 2
    for _ in range(2):
        for rank in range(fitting):
            assert join(rank, "a") == 0
            assert join(rank, "a") == 0  # in its own place
        with pytest.raises(Busy, match="this shard keeps at most 8192") as busy:
            join(0, "b")
        assert busy.value.retry_after_seconds > 0
        with pytest.raises(MessageTooLarge, match=r"step of job 'a' in table 't' has .* bytes of pushes that wait"):
            join(8, "a")
        now += 10.0
        assert len(groups.expire()) == fitting
    for leave in (lambda: groups.fence("a", 2, forget=False), lambda: groups.drop_table("t")):
        join(0, "a")
        join(0, "b")
        leave()
    for rank in range(fitting):
        assert join(rank, "c") == 0


def test_ranks_that_wait_in_several_tables_complete_one_though_one_rank_has_taken_all_room() -> None:
    """As ranks push all tables of a step at once: nothing would go before their time were over."""
    groups = SyncGroups(10.0, max_waiting_bytes=8 << 10)

    def join(rank: int, job: str) -> bool:
        write = replace(plain_push(), group=member(rank, 3, job=job))
        _, callers = groups.join(CallContext(stream=f"{job}/s", sequence=1, incarnation=1), write)
        if callers:
            groups.complete(write)
        return bool(callers)

    waiting = []
    with pytest.raises(Busy):
        for job in "abcdef":
            join(0, job)
            waiting.append(job)
    for job in waiting:
        assert not join(1, job)
        with pytest.raises(Busy):
            join(0, "g")
        assert join(2, job)


def test_a_part_without_bytes_needs_room_too() -> None:
    groups = SyncGroups(10.0, max_waiting_bytes=1 << 20)
    empty = Push(table="t", ids=np.arange(0), gradients=np.ones((0, 2), np.float32))
    with pytest.raises(MessageTooLarge):
        for rank in range(2000):
            groups.join(CallContext(), replace(empty, group=member(rank, 65_536)))
