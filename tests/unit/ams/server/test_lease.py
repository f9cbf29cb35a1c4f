"""A process that was stopped past its lease answers nothing until the scheduler has spoken."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import pytest

from geartrain.ams.kernels._core import Lease
from geartrain.ams.pb.v1 import shard_pb2
from geartrain.ams.rpc.codec import specs as codec
from geartrain.ams.server.service import ShardService
from geartrain.ams.server.shard import Shard
from geartrain.ams.values.errors import ShardUnavailable
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.shard_messages import CallContext, DropTable, Reply, Request
from geartrain.ams.values.specs import TableSpec


class Clocked:
    """A lease of 10 s, and its clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.lease = Lease(3, 10.0, clock=lambda: self.now)

    def run_until(self, end: float) -> None:
        while self.now < end:
            self.now = min(end, self.now + 1)
            self.lease.pulse()


@pytest.fixture
def clocked() -> Clocked:
    return Clocked()


def test_a_stop_past_the_lease_refuses_until_a_heartbeat_is_answered(clocked: Clocked) -> None:
    clocked.run_until(105)
    clocked.lease.confirm(began=105)
    clocked.now = 127
    with pytest.raises(ShardUnavailable, match=r"shard 3 was stopped for 22\.0 s, and its lease of 10 s ran out"):
        clocked.lease.check()
    clocked.run_until(130)
    with pytest.raises(ShardUnavailable):
        clocked.lease.check()
    clocked.lease.confirm(began=129)
    clocked.lease.check()


def test_the_answer_to_a_heartbeat_from_before_the_stop_says_nothing(clocked: Clocked) -> None:
    clocked.run_until(105)
    clocked.now = 120
    clocked.lease.confirm(began=105)
    with pytest.raises(ShardUnavailable):
        clocked.lease.check()


def test_a_stop_shorter_than_the_lease_that_outlasts_its_rest_refuses(clocked: Clocked) -> None:
    clocked.run_until(103)
    clocked.now = 110.5
    with pytest.raises(ShardUnavailable):
        clocked.lease.check()


def test_a_stop_within_the_lease_refuses_nothing(clocked: Clocked) -> None:
    clocked.now = 109
    clocked.lease.check()


def test_a_process_that_runs_serves_on_while_the_scheduler_is_silent(clocked: Clocked) -> None:
    clocked.run_until(1000)
    clocked.lease.check()


def test_a_shard_that_was_taken_over_never_answers_again(clocked: Clocked) -> None:
    clocked.lease.revoke("shard 3 was taken over")
    clocked.lease.confirm(began=clocked.now)
    with pytest.raises(ShardUnavailable, match="taken over"):
        clocked.lease.check()


def test_what_was_done_across_a_stop_is_not_acknowledged(clocked: Clocked, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = Shard(3, np.arange(4096), incarnation=1, lease=clocked.lease)
    service = ShardService(1 << 20)
    service.serve(shard)
    whole = shard.run

    def run(context: CallContext, request: Request) -> Future[Reply]:
        future = whole(context, request)
        future.result(10)
        clocked.now += 30
        return future

    monkeypatch.setattr(shard, "run", run)
    spec = codec.spec_to_pb(TableSpec(name="t", dim=2, optimizer=SGD(1.0)))
    request = shard_pb2.CreateTableRequest(spec=spec).SerializeToString()
    try:
        with pytest.raises(ShardUnavailable, match=r"stopped for 30\.0 s"):
            service.bound.methods["CreateTable"](request, None)
        with pytest.raises(ShardUnavailable):  # nor is anything done while it is not sure
            whole(CallContext(), DropTable(table="t")).result(10)
        assert [spec.name for spec in shard.specs] == ["t"]
    finally:
        shard.close()
