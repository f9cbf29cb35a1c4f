"""Sync groups of more ranks than a shard has threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import ExitStack

import numpy as np
import pytest

from geartrain.ams.client.factory import connect
from geartrain.ams.rpc.client.backoff import Backoff
from geartrain.ams.rpc.client.health import is_serving
from geartrain.ams.values.config import ClientConfig
from geartrain.ams.values.errors import RankMissing, StepPending
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.shard_messages import CallContext, Done, Push, SyncGroup
from geartrain.ams.values.specs import Constant
from tests.faults.children import Child, serve
from tests.support.message_rows import MessageShard

CHANNELS = 4
DIM = 2
SYNC_SECONDS = 300.0
LEASE_SECONDS = 600.0


class OneShard:
    """A scheduler and a shard, each a process, with a table ``t``."""

    says_that_it_waits = True

    def __init__(self, stack: ExitStack, sync_timeout_seconds: float) -> None:
        # Ranks here do not retry as clients do: a machine that stalls must not cost the shard its lease.
        settings = {"listen": "127.0.0.1:0", "num_shards": 1, "lease_seconds": LEASE_SECONDS}
        scheduler = Child(serve, "scheduler", settings)
        stack.callback(scheduler.end)
        self.scheduler = scheduler.receive()
        server = Child(
            serve,
            "server",
            {"scheduler": self.scheduler, "listen": "127.0.0.1:0", "sync_timeout_seconds": sync_timeout_seconds},
        )
        stack.callback(server.end)
        self.address = server.receive()
        self.cluster = stack.enter_context(connect(self.scheduler))
        self.table = self.cluster.create_table("t", dim=DIM, optimizer=SGD(1.0), initializer=Constant(0.0))
        self.carriers = [MessageShard(self.address) for _ in range(CHANNELS)]
        for carrier in self.carriers:
            stack.callback(carrier.close)

    def push(self, rank: int, world_size: int, sequence: int = 1, seconds: float = SYNC_SECONDS) -> Future[Done]:
        """A rank's push of its own row and a common one, in a message."""
        group = SyncGroup(job="j", world_size=world_size, rank=rank, sequence=sequence, sample_count=1)
        gradients = np.full((2, DIM), world_size, np.float32)
        push = Push(table="t", ids=np.array([0, 1 + rank]), gradients=gradients, group=group)
        context = CallContext(stream=f"rank{rank}", sequence=sequence, incarnation=1)
        return self.carriers[rank % CHANNELS].write(context, push, seconds, says_that_it_waits=self.says_that_it_waits)


@pytest.fixture
def one_shard() -> Iterator[Callable[..., OneShard]]:
    with ExitStack() as stack:
        yield lambda sync_timeout_seconds=SYNC_SECONDS: OneShard(stack, sync_timeout_seconds)


@pytest.mark.parametrize("ranks", [300, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_group_of_more_ranks_than_threads_meets_and_the_shard_answers_others_meanwhile(
    one_shard: Callable[..., OneShard], ranks: int
) -> None:
    shard = one_shard()
    for sequence in (1, 2):
        pushed = [shard.push(rank, ranks, sequence) for rank in range(ranks - 1)]
        assert is_serving(shard.address, 10)
        shard.table.push([7_000_000], np.ones((1, DIM), np.float32))
        assert not [(rank, item.exception()) for rank, item in enumerate(pushed) if item.done()]
        pushed.append(shard.push(ranks - 1, ranks, sequence))
        created = ranks + 1 if sequence == 1 else 0
        assert [item.result(60) for item in pushed] == [Done(created=created)] * ranks
        rows = shard.table.pull(np.arange(ranks + 1))
        np.testing.assert_allclose(rows[:, 0], [-ranks * sequence] + [-sequence] * ranks, rtol=1e-4)


def test_a_rank_that_waits_longer_than_a_call_may_take_asks_again_and_is_applied_once(
    one_shard: Callable[..., OneShard], monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = one_shard()
    asked: list[None] = []
    whole = Backoff.reset
    monkeypatch.setattr(Backoff, "reset", lambda self: (asked.append(None), whole(self))[1])
    config = ClientConfig(attempt_timeout_seconds=0.5, recovery_timeout_seconds=0, connect_timeout_seconds=30)
    with connect(shard.scheduler, config=config) as hasty:
        group = SyncGroup(job="j", world_size=2, rank=0, sequence=1, sample_count=1)
        push = hasty.table("t").prepare_push([0], np.ones((1, DIM), np.float32), group=group)
        sent = hasty._calls.background(push.send)
        while len(asked) < 3 and not sent.done():
            wait([sent], 0.05)
        assert not sent.done()
        shard.push(1, 2).result(60)
        assert sent.result(60).created == 2
    assert shard.table.pull([0])[0, 0] == -1.5


def test_a_rank_that_asks_again_still_learns_that_another_is_missing(one_shard: Callable[..., OneShard]) -> None:
    shard = one_shard(sync_timeout_seconds=2.0)
    config = ClientConfig(attempt_timeout_seconds=0.5, recovery_timeout_seconds=0, connect_timeout_seconds=30)
    with connect(shard.scheduler, config=config) as hasty:
        group = SyncGroup(job="j", world_size=2, rank=0, sequence=1, sample_count=1)
        with pytest.raises(RankMissing, match=r"ranks \[1\] of job 'j'"):
            hasty.table("t").push([0], np.ones((1, DIM), np.float32), group=group)


def test_callers_that_do_not_say_that_they_wait_leave_threads_to_others(
    one_shard: Callable[..., OneShard],
) -> None:
    shard, ranks = one_shard(), 150
    shard.says_that_it_waits = False
    pushed = [shard.push(rank, ranks) for rank in range(ranks - 1)]
    assert is_serving(shard.address, 10)
    while sum(item.done() for item in pushed) < ranks - 1 - 64:
        wait([item for item in pushed if not item.done()], 60, "FIRST_COMPLETED")
    told = [rank for rank, item in enumerate(pushed) if item.done()]
    assert {type(pushed[rank].exception()) for rank in told} == {StepPending}
    pushed.append(shard.push(ranks - 1, ranks))
    waited = [rank for rank in range(ranks - 1) if rank not in told]
    assert [pushed[rank].result(60) for rank in waited] == [Done(created=ranks + 1)] * len(waited)
    again = [shard.push(rank, ranks).result(60) for rank in told]
    assert again == [Done(created=ranks + 1, duplicate=True)] * len(told)
