"""Incarnations rise, whatever clocks say and whoever is restarted."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from geartrain.ams.client.factory import local
from geartrain.ams.pb.v1.wire import WIRE
from geartrain.ams.scheduler.data_streams import MAX_READ, StreamLeases
from geartrain.ams.scheduler.handlers import SchedulerHandlers
from geartrain.ams.scheduler.incarnations import MAX_GIVEN, Incarnations
from geartrain.ams.scheduler.scheduler import Scheduler
from geartrain.ams.scheduler.worker_steps import WorkerSteps
from geartrain.ams.storage.kv.store import MemoryStore
from geartrain.ams.values.errors import ClusterNotReady, InvalidArgument, StaleClient
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.placement import BucketMap, even_placement
from geartrain.ams.values.scheduler_messages import Cursor, Register
from geartrain.ams.values.specs import TableSpec

SPEC = TableSpec(name="t", dim=4, optimizer=SGD(0.1))
HOUR_NS = 3600 * 10**9


def scheduler(store: MemoryStore, num_shards: int = 1) -> Scheduler:
    return Scheduler(num_shards, lambda _: None, store=store)  # type: ignore[arg-type,return-value]


def set_clock(patch: pytest.MonkeyPatch, now_ns: int) -> None:
    patch.setattr(time, "time_ns", lambda: now_ns)


def test_a_clock_that_is_set_back_lowers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    given = Incarnations(MemoryStore())
    before = given.next()
    set_clock(monkeypatch, 1)
    assert given.next() == before + 1


def test_a_restarted_scheduler_goes_on_above_what_it_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    before = Incarnations(store).next()
    set_clock(monkeypatch, 1)
    assert Incarnations(store).next() > before


def test_a_restarted_scheduler_goes_on_above_fences_below_what_a_shard_had_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = MemoryStore()
    given, ahead = Incarnations(store), time.time_ns() + HOUR_NS
    given.record_seen(ahead + 1)  # which is not kept, for the shard says it again
    StreamLeases(store, 10, incarnations=given).fence("job", ahead)
    set_clock(monkeypatch, 1)
    again = Incarnations(store)
    StreamLeases(store, 10, incarnations=again)
    assert again.next() > ahead


def test_what_others_chose_is_passed_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    ahead = time.time_ns() + HOUR_NS
    Incarnations(store).record_chosen("incarnation", ahead)
    assert Incarnations(store).next() > ahead
    set_clock(monkeypatch, 1)
    assert Incarnations(store).next() > ahead + 1


def test_a_scheduler_without_its_state_learns_from_the_shards_what_was_used(monkeypatch: pytest.MonkeyPatch) -> None:
    set_clock(monkeypatch, 1)
    fresh = scheduler(MemoryStore(), num_shards=2)
    fresh.register("h:0", 0, 5, cluster_version=1, bucket_map=BucketMap(1, even_placement(2)))
    fresh.record_incarnation(100)
    with pytest.raises(ClusterNotReady, match=r"which incarnations were used is not known yet: 1 shard of 2 \(1\)"):
        fresh.issue_incarnation()
    fresh.register("h:1", 1, 6, cluster_version=1, bucket_map=BucketMap(1, even_placement(2)))
    fresh.record_incarnation(200)
    assert fresh.issue_incarnation() == 201


def test_what_a_shard_has_seen_is_known_once_it_has_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    set_clock(monkeypatch, 1)
    fresh = scheduler(MemoryStore())
    handlers, registered, taken = (
        SchedulerHandlers(fresh, StreamLeases(MemoryStore(), 10), WorkerSteps(10)),
        fresh.register,
        [],
    )

    def somebody_connects_at_once(*arguments: Any, **keywords: Any) -> Any:
        registration = registered(*arguments, **keywords)
        taken.append(fresh.issue_incarnation())
        return registration

    monkeypatch.setattr(fresh, "register", somebody_connects_at_once)
    request = Register(address="h:7000", shard=0, incarnation=5, highest_incarnation=200, wire=WIRE)
    handlers.by_request[Register](request, None)  # type: ignore[arg-type]
    assert taken == [201]


@pytest.mark.parametrize("number", [MAX_GIVEN + 1, 2**63, 2**64 - 1])
def test_a_number_that_leaves_no_room_is_refused_and_changes_nothing(number: int) -> None:
    store = MemoryStore()
    cluster, streams = scheduler(store), StreamLeases(store, 10)
    before = store.read_all()
    with pytest.raises(InvalidArgument, match=rf"incarnation is {number}; it must be at most 2\^62"):
        cluster.issue_incarnation(number)
    with pytest.raises(InvalidArgument, match=str(number)):
        streams.fence("job", number)
    with pytest.raises(InvalidArgument, match=str(number)):
        streams.restore("job", number, {0: Cursor(0, 0)})
    with pytest.raises(InvalidArgument, match=str(number)):
        streams.lease("job", "w", number, num_streams=1)
    with pytest.raises(InvalidArgument, match=f"cluster_version is {number}.*Start the shard's server anew"):
        cluster.register("h:0", 0, 5, cluster_version=number)
    assert store.read_all() == before
    cluster.record_incarnation(2**64 - 1)  # of a shard that somebody told nonsense
    cluster.register("h:0", 0, 5)
    assert cluster.issue_incarnation() < MAX_GIVEN


@pytest.mark.parametrize("number", [2**63, 2**64 - 1])
def test_a_table_that_somebody_numbered_on_a_shard_keeps_the_shard_not_out(
    number: int, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = scheduler(MemoryStore())
    tables = [replace(SPEC, incarnation=number), replace(SPEC, name="ours", incarnation=MAX_GIVEN + 1)]
    cluster_map = BucketMap(1, cluster.describe().bucket_shards)
    for _ in range(2):
        cluster.record_incarnation(number)
        cluster.register("h:0", 0, 5, cluster_version=1, tables=tables, bucket_map=cluster_map)
    assert [spec.name for spec in cluster.describe().tables] == ["ours"]
    assert cluster.issue_incarnation() == MAX_GIVEN + 2
    assert caplog.text.count("which no scheduler assigned") == 1


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_a_shard_that_means_to_beat_never_is_refused(seconds: float) -> None:
    with pytest.raises(InvalidArgument, match="heartbeat_seconds is"):
        scheduler(MemoryStore()).register("h:0", 0, 5, heartbeat_seconds=seconds)


@pytest.mark.parametrize("incarnation", [0, 2**63, 2**64 - 1])
def test_a_shard_needs_an_incarnation_that_names_it(incarnation: int) -> None:
    with pytest.raises(InvalidArgument, match=r"from 1 to 2\^63 - 1"):
        scheduler(MemoryStore()).register("h:0", 0, incarnation)


def test_after_the_highest_choice_of_a_caller_there_is_room_for_successors() -> None:
    store = MemoryStore()
    given = Incarnations(store)
    given.record_chosen("incarnation", MAX_GIVEN)
    streams = StreamLeases(store, 10, incarnations=given)
    higher = given.next()
    assert higher == MAX_GIVEN + 1
    streams.fence("job", MAX_GIVEN)
    streams.fence("job", higher)  # it was given out
    assert Incarnations(store).next() == higher + 1
    fresh = Incarnations(MemoryStore())
    fresh.record_seen(higher)
    assert fresh.next() == higher + 1


@pytest.mark.parametrize("cursor", [Cursor(0, MAX_READ + 1), Cursor(2**64 - 1, 0)])
def test_a_cursor_beyond_all_data_is_refused(cursor: Cursor) -> None:
    streams = StreamLeases(MemoryStore(), 10)
    with pytest.raises(InvalidArgument, match=r"beyond 2\^62"):
        streams.restore("job", 1, {0: cursor})
    streams.lease("job", "w", 1, num_streams=1)
    with pytest.raises(InvalidArgument, match=r"beyond 2\^62"):
        streams.renew("job", "w", 1, {0: cursor})


def test_fences_of_the_parts_of_a_job_go_with_that_of_the_whole() -> None:
    store = MemoryStore()
    streams = StreamLeases(store, 10)
    for rank in range(100):
        streams.fence(f"job/rank{rank}", 5)
    streams.fence("job/rank7", 9)
    streams.fence("jobs", 3)
    streams.fence("job", 8)
    assert {key for key in store.read_all() if key.startswith("fence/")} == {
        "fence/job",
        "fence/job/rank7",
        "fence/jobs",
    }
    for again in (streams, StreamLeases(store, 10)):
        with pytest.raises(StaleClient):
            again.lease("job/rank0", "w", 7, num_streams=1)
        with pytest.raises(StaleClient):
            again.lease("job/rank7", "w", 8, num_streams=1)
        again.lease("job/rank0", "w", 8, num_streams=1)


def test_an_embedded_cluster_gives_its_process_an_incarnation_and_passes_those_it_was_given() -> None:
    ahead = time.time_ns() + HOUR_NS
    with local(stream="job", incarnation=ahead) as cluster:
        assert cluster.write_stream.incarnation == ahead
        cluster.create_table("t", dim=1, optimizer=SGD(1.0))
        assert cluster.table("t").spec.incarnation > ahead
    with local(stream="job") as cluster:
        assert cluster.write_stream.incarnation > 0
    with pytest.raises(InvalidArgument, match=r"at most 2\^62"):
        local(stream="job", incarnation=2**63 - 1)
