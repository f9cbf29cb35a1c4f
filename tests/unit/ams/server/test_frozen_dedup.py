"""What a shard that was restored knows of the writes that its rows hold."""

from __future__ import annotations

import gc
import json
import sys
from concurrent.futures import Future

import numpy as np
import pytest

from geartrain.ams.kernels._core import CompletedWrites, SyncGroups
from geartrain.ams.server.freeze.dedup import CompletedWrite, RestoredDedup, StreamWrites, held_dedup, merged_stream
from geartrain.ams.values.errors import SnapshotDamaged, StaleClient, StepMismatch
from geartrain.ams.values.shard_messages import CallContext, Done, Push, Reply, SyncGroup


def apply(
    completed: CompletedWrites, sequence: int, *, table: str = "t", oldest: int = 1, incarnation: int = 1
) -> bool:
    """Whether the write was new."""
    context = CallContext(stream="s", incarnation=incarnation, sequence=sequence, oldest_unacknowledged=oldest)
    future: Future[Reply] = Future()
    if completed.admit(context, future):
        completed.applied(context, Done(created=sequence), table)
        return True
    assert future.result() == Done(created=sequence, duplicate=True)
    return False


def restored(
    *sources: CompletedWrites, tables: tuple[str, ...] = ("t",), into: CompletedWrites | None = None
) -> CompletedWrites:
    target = CompletedWrites() if into is None else into
    held = [json.loads(json.dumps(held_dedup(source, SyncGroups(1.0), tables).to_json())) for source in sources]
    RestoredDedup(held, tables).apply(target, SyncGroups(1.0))
    return target


def test_a_write_of_the_snapshot_is_a_duplicate_and_a_later_one_is_new() -> None:
    completed = CompletedWrites()
    for sequence, oldest in ((1, 1), (2, 2), (4, 2)):
        assert apply(completed, sequence, oldest=oldest)
    copy = restored(completed)
    assert [apply(copy, sequence, oldest=2) for sequence in (2, 3, 4, 5)] == [False, True, False, True]
    with pytest.raises(StaleClient, match="acknowledged already"):
        apply(copy, 1)


def test_the_past_of_a_stream_stays_shut_out() -> None:
    first, second = CompletedWrites(), CompletedWrites()
    apply(first, 1, incarnation=5)
    apply(second, 1, incarnation=3)
    with pytest.raises(StaleClient, match="superseded by 5"):
        apply(restored(first, second), 2, incarnation=4)
    live = CompletedWrites()
    apply(live, 1, incarnation=9)
    with pytest.raises(StaleClient, match="superseded by 9"):
        apply(restored(first, into=live), 2, incarnation=8)


def test_only_writes_to_the_restored_tables_count() -> None:
    completed = CompletedWrites()
    apply(completed, 1, table="t")
    apply(completed, 2, table="u")
    assert [apply(restored(completed), sequence) for sequence in (1, 2)] == [False, True]


def test_streams_that_wrote_to_other_tables_are_in_no_snapshot() -> None:
    completed = CompletedWrites()
    for stream_name, table in (("a", "t"), ("b", "u"), ("c", "t"), ("c", "u")):
        context = CallContext(stream=stream_name, sequence=1 + (table == "u"), oldest_unacknowledged=1)
        completed.admit(context, Future())
        completed.applied(context, Done(), table)
    held = held_dedup(completed, SyncGroups(1.0), ["t"]).to_json()
    assert {name: [write[0] for write in done] for name, (_, _, done) in held["streams"].items()} == {
        "a": [1],
        "c": [1],
    }
    copy = restored(completed)
    again = held_dedup(copy, SyncGroups(1.0), ["t", "u"]).to_json()
    assert set(again["streams"]) == {"a", "c"}, "they wrote to it before"
    completed.dropped("t")
    assert not held_dedup(completed, SyncGroups(1.0), ["t"]).to_json()["streams"]


def test_marks_are_those_of_the_moment_at_which_they_were_held() -> None:
    completed = CompletedWrites()
    apply(completed, 1)
    held = held_dedup(completed, SyncGroups(1.0), ["t"])
    apply(completed, 2, oldest=2)
    completed.dropped("t")
    assert held.to_json()["streams"] == {"s": (1, 1, [(1, 1, "t")])}


def test_holding_marks_takes_little_of_the_shards_turn() -> None:
    completed = CompletedWrites()
    for number in range(100):
        for sequence in range(1, 501):
            context = CallContext(stream=f"job/rank{number}", sequence=sequence, oldest_unacknowledged=1)
            completed.admit(context, Future())
            completed.applied(context, Done(), "t")
    gc.collect()  # garbage of other tests is none of this one's blocks
    before = sys.getallocatedblocks()
    held = held_dedup(completed, SyncGroups(1.0), ["t"])
    assert sys.getallocatedblocks() - before < 5_000  # no object of Python for each write: those come after the turn
    found = held.to_json()["streams"]
    assert sum(len(done) for _, _, done in found.values()) == 50_000
    assert sys.getallocatedblocks() - before > 50_000


def stream(*done: int, oldest: int = 1, incarnation: int = 1) -> StreamWrites:
    return StreamWrites(incarnation, oldest, [CompletedWrite(sequence, 1, "t") for sequence in done])


@pytest.mark.parametrize(
    ("sources", "done"),
    [
        ([stream(3, 4)], [3, 4]),
        ([stream(3, 4), stream(3)], [3]),
        ([stream(3, 4), stream(4, oldest=4)], [3, 4]),
        ([stream(3), None], []),
    ],
)
def test_a_write_counts_where_every_source_holds_its_part(sources: list[StreamWrites | None], done: list[int]) -> None:
    assert [write.sequence for write in merged_stream(sources, ["t"]).done] == done


def push(rank: int, sequence: int, *, job: str = "job") -> Push:
    group = SyncGroup(job=job, world_size=2, rank=rank, sequence=sequence, sample_count=1)
    return Push(table="t", ids=np.array([1]), gradients=np.ones((1, 2), np.float32), group=group)


def test_a_sync_group_goes_on_at_its_step() -> None:
    groups = SyncGroups(1.0)
    for rank in (0, 1):
        groups.join(CallContext(), push(rank, 7))
    groups.complete(push(0, 7))
    target = SyncGroups(1.0)
    RestoredDedup([held_dedup(CompletedWrites(), groups, ["t"]).to_json()], ["t"]).apply(CompletedWrites(), target)
    assert target.is_applied(push(0, 7)), "a retry of the last step"
    assert not target.is_applied(push(0, 8))
    with pytest.raises(StepMismatch):
        target.is_applied(push(0, 9))
    assert not target.is_applied(push(0, 1, job="another"))  # begins at its own numbering
    nothing = SyncGroups(1.0)
    RestoredDedup([held_dedup(CompletedWrites(), groups, ["u"]).to_json()], ["u"]).apply(CompletedWrites(), nothing)
    assert nothing.steps() == []


def test_marks_of_another_version_are_a_typed_error() -> None:
    with pytest.raises(SnapshotDamaged, match="not of this version"):
        RestoredDedup([{"streams": 1}], ["t"])
