"""A shard of the caller's own process, whose requests' arrays are the caller's again once it was interrupted."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from geartrain.ams.server.shard import Shard
from geartrain.ams.values.errors import ShardUnavailable
from geartrain.ams.values.interrupts import BufferLease
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.placement import buckets_of_shard, even_placement
from geartrain.ams.values.shard_messages import CallContext, CreateTable, Pull, Push, SyncGroup
from geartrain.ams.values.specs import Constant, TableSpec

IDS = np.arange(4)
ONES = np.ones((4, 2), np.float32)


@pytest.fixture
def shard() -> Iterator[Shard]:
    one = Shard(0, buckets_of_shard(even_placement(1), 0), incarnation=1)
    spec = TableSpec(name="t", dim=2, optimizer=SGD(1.0), num_rows=4, initializer=Constant(0))
    one.submit(CallContext(), CreateTable(spec=spec)).result(20)
    yield one
    one.close()


def rows(shard: Shard) -> np.ndarray:
    out = np.empty_like(ONES)
    shard.submit(CallContext(), Pull(table="t", ids=IDS, out=out)).result(20)
    return out


def test_a_joint_push_does_not_read_what_an_interrupted_rank_holds_by_now(shard: Shard) -> None:
    buffer_lease, gradients = BufferLease(), ONES.copy()

    def push(rank: int, gradients: np.ndarray, buffer_lease: BufferLease | None = None) -> Push:
        group = SyncGroup(job="j", rank=rank, world_size=2, sequence=1, sample_count=1)
        return Push(table="t", ids=IDS, gradients=gradients, group=group, buffer_lease=buffer_lease)

    contexts = [CallContext(stream=f"j/rank{rank}", incarnation=1, sequence=1) for rank in range(2)]
    first = shard.submit(contexts[0], push(0, gradients, buffer_lease))
    rows(shard)  # it waits for the other rank
    buffer_lease.end()
    gradients[:] = 1000
    second = shard.submit(contexts[1], push(1, ONES))
    for one in (first, second):
        one.result(20)
    assert (rows(shard) == -1).all()  # of what it pushed


def test_a_rank_whose_caller_has_gone_joins_nothing(shard: Shard) -> None:
    buffer_lease = BufferLease()
    buffer_lease.end()
    group = SyncGroup(job="j", rank=0, world_size=1, sequence=1, sample_count=1)
    push = Push(table="t", ids=IDS, gradients=ONES, group=group, buffer_lease=buffer_lease)
    refused = shard.submit(CallContext(stream="j", incarnation=1, sequence=1), push)
    with pytest.raises(ShardUnavailable, match="the caller has gone"):
        refused.result(20)
    assert (rows(shard) == 0).all()
