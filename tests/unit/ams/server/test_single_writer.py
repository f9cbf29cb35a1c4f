"""Nothing that goes wrong on it ends a shard's writer in silence; a shard whose writer has ended says so to all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from geartrain.ams.observe import failpoints
from geartrain.ams.server.shard import Shard
from geartrain.ams.values.errors import InternalError, RankMissing
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.shard_messages import CallContext, CreateTable, Describe, Freeze, Pull, Push, SyncGroup, Thaw
from geartrain.ams.values.specs import Constant, TableSpec

SECONDS = 60.0
SPEC = TableSpec(name="t", dim=2, optimizer=SGD(1.0), num_rows=8, initializer=Constant(0))
IDS = np.arange(8)
ERRORS = [SystemExit(3), KeyboardInterrupt(), MemoryError(), ValueError("a defect")]


@pytest.fixture
def shard() -> Iterator[Shard]:
    shard = Shard(0, np.arange(4096), incarnation=1, sync_timeout_seconds=0.2)
    shard.submit(CallContext(), CreateTable(spec=SPEC)).result(SECONDS)
    yield shard
    shard.close()


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise error

    return fail


def pull(shard: Shard) -> None:
    shard.pull(CallContext(), Pull(table="t", ids=IDS, out=np.empty((8, 2), np.float32)))


def part(rank: int = 0) -> tuple[CallContext, Push]:
    group = SyncGroup(job="j", world_size=2, rank=rank, sequence=1, sample_count=1)
    push = Push(table="t", ids=IDS, gradients=np.ones((8, 2), np.float32), group=group)
    return CallContext(stream=f"j/{rank}", incarnation=1, sequence=1), push


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_an_error_of_any_kind_in_a_call_is_its_reply_and_the_next_one_is_done(
    shard: Shard, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(failpoints, "reach", raising(error))
        assert shard.submit(CallContext(), Thaw(snapshot_id="0" * 32, kept=False)).exception(SECONDS) is not None
    shard.submit(CallContext(), Describe()).result(SECONDS)


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_deadlines_are_kept_after_an_error_of_any_kind_in_keeping_them(
    shard: Shard, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    whole, failed = shard._freezes.thaw_expired, threading.Event()

    def end_silent() -> None:
        if failed.is_set():
            return whole()
        failed.set()
        raise error

    monkeypatch.setattr(shard._freezes, "thaw_expired", end_silent)
    frozen = shard.submit(CallContext(), Freeze(snapshot_id="0" * 32, tables=("t",)))
    frozen.result(SECONDS)
    first = shard.submit(*part())
    assert isinstance(first.exception(SECONDS), RankMissing)
    assert failed.wait(SECONDS)
    context, push = part()
    second = shard.submit(CallContext(stream=context.stream, incarnation=1, sequence=2), push)
    assert isinstance(second.exception(SECONDS), RankMissing)


@pytest.fixture
def broken(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> Shard:
    """A shard whose writer ends."""
    monkeypatch.setattr(shard._writer, "_next_entry", raising(SystemExit(3)))
    shard.submit(CallContext(), Describe())
    shard._writer._thread.join(SECONDS)
    return shard


def test_a_shard_without_its_writer_raises_from_every_call(broken: Shard) -> None:
    words = "the writer of shard 0 has ended: SystemExit"
    assert words in (broken.stop_reason or "")
    for _ in range(2):
        with pytest.raises(InternalError, match=words):
            broken.submit(CallContext(), Describe()).result(SECONDS)
        with pytest.raises(InternalError, match=words):
            broken.run(CallContext(), Describe()).result(SECONDS)
        with pytest.raises(InternalError, match=words):
            pull(broken)
        with pytest.raises(InternalError, match=words):
            broken.write(*part())


def test_whoever_waits_when_the_writer_ends_is_told(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = shard.submit(*part())
    shard.submit(CallContext(), Describe()).result(SECONDS)
    monkeypatch.setattr(shard, "_next_deadline", raising(SystemExit(3)))
    monkeypatch.setattr(shard._writer, "_next_deadline", raising(SystemExit(3)))
    with shard.engine.turn:
        queued = [shard.submit(CallContext(), Describe()) for _ in range(4)]
        assert queued[1].cancel()  # whose caller has gone
    for future in (waiting, *queued[2:]):
        assert isinstance(future.exception(SECONDS), InternalError)
