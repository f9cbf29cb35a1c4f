"""Pushes of ranks as a shard applies them: one push, to the bit the weighted sum in rank order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.ams.kernels import ops
from geartrain.ams.pb.v1 import shard_pb2, types_pb2
from geartrain.ams.rpc.codec import framing
from geartrain.ams.server.service import ShardService
from geartrain.ams.server.shard import Shard
from geartrain.ams.values.admission.rules import MinCount
from geartrain.ams.values.errors import InvalidRows, StepMismatch
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.placement import buckets_of_shard, even_placement
from geartrain.ams.values.shard_messages import BatchFacts, CallContext, CreateTable, Done, Pull, Push, SyncGroup
from geartrain.ams.values.specs import Constant, TableSpec

DTYPES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
NUM_IDS, MAX_WIDTH, LR = 12, 40, 0.5
NUMBERS = itertools.count(1)


@pytest.fixture(scope="module")
def shard() -> Iterator[Shard]:
    made = Shard(0, buckets_of_shard(even_placement(1), 0), incarnation=1, sync_timeout_seconds=30)
    for width in range(1, MAX_WIDTH + 1):
        spec = TableSpec(name=f"t{width}", dim=width, optimizer=SGD(1.0), initializer=Constant(0.0))
        made.submit(CallContext(), CreateTable(spec=spec)).result(10)
    yield made
    made.close()


def part(table: str, ids: npt.NDArray[np.int64], gradients: npt.NDArray[Any], scale: float, group: SyncGroup) -> Push:
    return Push(table=table, ids=ids, gradients=gradients, lr=LR, scale=scale, group=group)


def sent(shard: Shard, push: Push) -> Any:
    """Send one rank's part on this thread; a future of the reply if others are missing."""
    assert push.group is not None
    number = next(NUMBERS)
    who = CallContext(
        stream=f"{push.group.job}/{push.group.rank}", incarnation=1, sequence=number, oldest_unacknowledged=number
    )
    bits, code = ops.as_bits(push.gradients)
    return shard.engine.push(
        who, push.table, push.ids, bits, code, push.lr, push.scale, {}, push.group, False, push.batch, True, None, False
    )


def rows_of(shard: Shard, table: str, ids: npt.NDArray[np.int64], width: int) -> npt.NDArray[np.float32]:
    out = np.empty((len(ids), width), np.float32)
    shard.submit(CallContext(), Pull(table=table, ids=ids, out=out)).result(10)
    return out


def sums_of(pushes: list[Push], width: int) -> dict[int, npt.NDArray[np.float32]]:
    """The specification: float32 products, summed in rank order."""
    total = sum(push.group.sample_count for push in pushes if push.group)
    sums: dict[int, npt.NDArray[np.float32]] = {}
    for push in pushes:
        assert push.group is not None
        weight = np.float32((push.group.sample_count / total if total else 0.0) * push.scale)
        for item, gradient in zip(push.ids.tolist(), push.gradients.astype(np.float32) * weight, strict=True):
            sums[item] = sums[item] + gradient if item in sums else gradient
    assert all(item.shape == (width,) for item in sums.values())
    return sums


@settings(deadline=None)
@given(st.data())
def test_a_joint_push_is_to_the_bit_the_weighted_sum_in_rank_order(shard: Shard, data: st.DataObject) -> None:
    number = next(NUMBERS)
    world_size, width = data.draw(st.integers(1, 4)), data.draw(st.integers(1, MAX_WIDTH))
    draw = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    all_ids, pushes = np.arange(NUM_IDS) + NUM_IDS * number, []
    for rank in range(world_size):
        ids = draw.permutation(all_ids)[: data.draw(st.integers(0, NUM_IDS))]
        if data.draw(st.booleans()):
            ids = np.sort(ids)
        gradients = (draw.standard_normal((len(ids), width)) * 100).astype(DTYPES[data.draw(st.integers(0, 2))])
        samples = data.draw(st.integers(0, 5))
        group = SyncGroup(job=f"j{number}", world_size=world_size, rank=rank, sequence=1, sample_count=samples)
        pushes.append(part(f"t{width}", ids, gradients, data.draw(st.floats(-9, 9)), group))
    replies = []
    for rank in data.draw(st.permutations(range(world_size))):
        copies = pushes[rank].ids.copy(), pushes[rank].gradients.copy()
        group = pushes[rank].group
        assert group is not None
        replies.append(sent(shard, part(f"t{width}", *copies, pushes[rank].scale, group)))
        copies[0][:] = -1  # its caller goes on, and uses them for something else
        copies[1][:] = 7
    sums = sums_of(pushes, width)
    done = [reply.result(10) if isinstance(reply, Future) else reply for reply in replies]
    assert done == [Done(created=len(sums))] * world_size
    expected = [-np.float32(LR) * sums.get(item, np.zeros(width, np.float32)) for item in all_ids.tolist()]
    np.testing.assert_array_equal(rows_of(shard, f"t{width}", all_ids, width), np.array(expected))


@pytest.mark.parametrize("count", [2, 0])
def test_a_rank_whose_gradients_have_another_width_than_the_table_is_refused_alone(shard: Shard, count: int) -> None:
    ids = np.arange(2) - 2 + 2**40
    job = f"width{count}"
    first, second = (SyncGroup(job=job, world_size=2, rank=rank, sequence=1, sample_count=1) for rank in (0, 1))
    waiting = sent(shard, part("t2", ids, np.ones((2, 2), np.float32), 1.0, first))
    with pytest.raises(InvalidRows, match="rows of width 3; they must be of width 2"):
        sent(shard, part("t2", ids[:count], np.ones((count, 3), np.float32), 1.0, second))
    assert sent(shard, part("t2", ids[:0], np.ones((0, 2), np.float32), 1.0, second)) == waiting.result(10)


def test_an_id_occurs_as_often_as_on_all_ranks_together(shard: Shard) -> None:
    spec = TableSpec(name="admitted", dim=1, optimizer=SGD(1.0), admission=MinCount(4), initializer=Constant(0.0))
    shard.submit(CallContext(), CreateTable(spec=spec)).result(10)
    ids = np.array([[1, 2], [2, 3]])
    said: list[BatchFacts | None] = [BatchFacts(occurrences=np.array([1, 3], np.uint32)), None]
    for rank, created in ((0, None), (1, 1)):
        group = SyncGroup(job="admitted", world_size=2, rank=rank, sequence=1, sample_count=1)
        push = Push(
            table="admitted", ids=ids[rank], gradients=np.ones((2, 1), np.float32), group=group, batch=said[rank]
        )
        done = sent(shard, push)
        assert created is None or done == Done(created=created)  # of id 2: three times on a rank, once on the other
    np.testing.assert_array_equal(rows_of(shard, "admitted", np.arange(1, 4), 1)[:, 0], [0.0, -1.0, 0.0])


def test_a_rank_that_begins_anew_may_tell_another_time_but_no_other_step_or_occurrences(shard: Shard) -> None:
    shard.submit(
        CallContext(), CreateTable(spec=TableSpec(name="told", dim=1, optimizer=SGD(1.0), admission=MinCount(2)))
    ).result(10)
    one = np.array([5])

    def told(rank: int, **facts: Any) -> Any:
        group = SyncGroup(job="told", world_size=2, rank=rank, sequence=1, sample_count=1)
        batch = BatchFacts(**{"step": 7, "unix_seconds": 1e9, **facts})
        return sent(shard, Push(table="told", ids=one, gradients=np.ones((1, 1), np.float32), group=group, batch=batch))

    told(0)
    assert told(1) == Done(created=1)
    assert told(0, unix_seconds=1.5e9).duplicate
    for other in ({"step": 8}, {"occurrences": np.array([2], np.uint32)}):
        with pytest.raises(StepMismatch):
            told(0, **other)


@pytest.mark.parametrize(("told", "rows"), [([1, 1, 1], [0.0, 0.0]), ([2, 1, 2], [-2.0, 0.0]), (None, [0.0, 0.0])])
def test_equal_ids_of_a_rank_that_sends_messages_are_summed_with_their_occurrences(
    shard: Shard, told: list[int] | None, rows: list[float]
) -> None:
    name = f"equal{told}"
    spec = TableSpec(name=name, dim=1, optimizer=SGD(1.0), admission=MinCount(4), initializer=Constant(0.0))
    shard.submit(CallContext(), CreateTable(spec=spec)).result(10)
    service = ShardService(1 << 20)
    service.serve(shard)
    header = shard_pb2.PushRequest(
        table=name,
        context=types_pb2.CallContext(stream=name, sequence=1),
        group=types_pb2.SyncGroup(job=name, world_size=1, sequence=1, sample_count=1),
    )
    if told is not None:
        header.batch.occurrences = np.array(told, np.uint32).tobytes()
    data = framing.encode_framed(header, [(14, np.array([1, 2, 1])), (15, np.ones((3, 1), np.float32))])
    service.start_push(bytes(data), None).reply.result(10)  # type: ignore[arg-type]
    np.testing.assert_array_equal(rows_of(shard, name, np.array([1, 2]), 1)[:, 0], rows)
