"""Groups of ranks as compiled: what the pushes of all ranks make together, and what counts as another push."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from geartrain.ams.kernels.engine import SyncGroups
from geartrain.ams.values.errors import InvalidArgument, InvalidRows, StepMismatch
from geartrain.ams.values.shard_messages import CallContext, HostedInputs, Push, SyncGroup, UpdateHosted

DTYPES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


def member(rank: int, world_size: int, *, job: str = "j", sequence: int = 1, samples: int = 1) -> SyncGroup:
    return SyncGroup(job=job, world_size=world_size, rank=rank, sequence=sequence, sample_count=samples)


def joined(groups: SyncGroups, *writes: Push | UpdateHosted) -> Push | list[UpdateHosted]:
    for rank, write in enumerate(writes):
        _, callers = groups.join(CallContext(stream=f"rank{rank}", sequence=1, incarnation=1), write)
    assert len(callers) == len(writes)
    return groups.joint(writes[-1])


def expected(pushes: list[Push]) -> tuple[list[int], npt.NDArray[np.float32]]:
    """The specification: ids in order of first appearance, float32 products summed in rank order."""
    total = sum(push.group.sample_count for push in pushes if push.group)
    sums: dict[int, npt.NDArray[np.float32]] = {}
    for push in pushes:
        assert push.group is not None
        weight = np.float32((push.group.sample_count / total if total else 0.0) * push.scale)
        for one, gradient in zip(push.ids.tolist(), push.gradients.astype(np.float32) * weight, strict=True):
            sums[one] = sums[one] + gradient if one in sums else gradient
    return list(sums), np.array(list(sums.values()), np.float32).reshape(-1, pushes[0].gradients.shape[1])


@given(st.data())
def test_a_joint_push_is_to_the_bit_the_weighted_sum_in_rank_order(data: st.DataObject) -> None:
    world_size, width = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 40))
    draw = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    pushes = []
    for rank in range(world_size):
        ids = draw.permutation(12)[: data.draw(st.integers(0, 12))].astype(np.int64)
        if data.draw(st.booleans()):
            ids = np.sort(ids)
        gradients = (draw.standard_normal((len(ids), width)) * 100).astype(DTYPES[data.draw(st.integers(0, 2))])
        group = member(rank, world_size, samples=data.draw(st.integers(0, 5)))
        pushes.append(
            Push(table="t", ids=ids, gradients=gradients, lr=0.5, scale=data.draw(st.floats(-9, 9)), group=group)
        )
    groups = SyncGroups(1.0)
    for rank in data.draw(st.permutations(range(world_size))):
        copies = pushes[rank].ids.copy(), pushes[rank].gradients.copy()
        mine = replace(pushes[rank], ids=copies[0], gradients=copies[1])
        _, callers = groups.join(CallContext(stream="s", sequence=1, incarnation=1), mine)
        if not callers:  # its caller goes on, and uses them for something else
            copies[0][:] = -1
            copies[1][:] = 7
    joint = groups.joint(pushes[0])
    assert isinstance(joint, Push)
    ids, sums = expected(pushes)
    assert joint.ids.tolist() == ids
    assert joint.gradients.tobytes() == sums.tobytes()
    assert (joint.lr, joint.scale, joint.group) == (0.5, 1.0, None)


def test_ranks_whose_gradients_differ_in_width_are_refused() -> None:
    wide, narrow = (
        Push(table="t", ids=np.arange(2), gradients=np.ones((2, width), np.float32), group=member(rank, 2))
        for rank, width in enumerate((3, 2))
    )
    with pytest.raises(InvalidRows, match="width 2 on rank 1 and 3 on rank 0"):
        joined(SyncGroups(1.0), wide, narrow)
    nothing = replace(wide, ids=wide.ids[:0], gradients=wide.gradients[:0])
    joint = joined(SyncGroups(1.0), nothing, narrow)
    assert isinstance(joint, Push) and joint.gradients.shape == (2, 2)


def test_a_step_is_pushed_by_all_ranks_or_updated_by_hosted_models_of_all() -> None:
    push = Push(table="t", ids=np.arange(2), gradients=np.ones((2, 2), np.float32), group=member(0, 2))
    update = UpdateHosted(table="t", model="m", inputs=(), group=member(1, 2))
    with pytest.raises(StepMismatch, match="some ranks push gradients to table 't', others update it by a hosted"):
        joined(SyncGroups(1.0), push, update)


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
    joined(groups, push)
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
    joined(groups, update)
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
    with pytest.raises(InvalidArgument, match=f"rank {rank} of world_size {world_size} is not a rank of a group"):
        SyncGroups(1.0).is_applied(push)
    with pytest.raises(InvalidArgument, match="sequence 0 of job 'j' must be >= 1"):
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
