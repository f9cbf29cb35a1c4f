"""The scheduler's decisions, with an injected clock and shards that only remember what they were asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace

import pytest

from geartrain.ams.rpc.carrier import NotSent
from geartrain.ams.scheduler import broadcast as tell_shards_module
from geartrain.ams.scheduler.scheduler import Scheduler
from geartrain.ams.storage.kv.store import KeyValueStore, MemoryStore
from geartrain.ams.values import errors
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.placement import BucketMap, even_placement
from geartrain.ams.values.scheduler_messages import ClusterView
from geartrain.ams.values.shard_messages import AlterTable, CallContext, CreateTable, Done, DropTable, Reply, Request
from geartrain.ams.values.specs import TableSpec

SPEC = TableSpec(name="t", dim=4, optimizer=SGD(0.1))
MAP = BucketMap(1, even_placement(2))


class FakeCluster:
    """A scheduler, its clock, and carriers to shards that note requests."""

    def __init__(self, num_shards: int = 2, store: KeyValueStore | None = None) -> None:
        self.now = 0.0
        self.store = MemoryStore() if store is None else store
        self.asked: list[tuple[str, Request]] = []
        self.broken: set[str] = set()
        self.unreachable: dict[str, int] = {}
        """Addresses that so many requests do not reach."""
        self.refused: dict[tuple[str, bool], errors.GeartrainError] = {}
        """What addresses answer to an alteration, or to the question whether they take it (True), once."""
        self.on_ask: Callable[[], None] = lambda: None
        self.answers: set[int] | NotSent = {0}
        """Incarnations of who answers at any address."""
        self.scheduler = Scheduler(
            num_shards,
            self.open_carrier,
            lease_seconds=10,
            store=self.store,
            clock=lambda: self.now,
            incarnations_at=self.incarnations_at,
        )

    def incarnations_at(self, address: str) -> set[int]:  # noqa: ARG002
        if isinstance(self.answers, NotSent):
            raise self.answers
        return self.answers

    def open_carrier(self, address: str, _: int) -> FakeCarrier:
        return FakeCarrier(self, address)

    def register_both(self) -> None:
        for shard in (0, 1):
            self.scheduler.register(f"host:{shard}", shard, incarnation=100 + shard)


class FakeCarrier:
    def __init__(self, cluster: FakeCluster, address: str) -> None:
        self.cluster, self.address = cluster, address

    def submit(self, context: CallContext, request: Request, timeout_seconds: float | None) -> Future[Reply]:  # noqa: ARG002
        future: Future[Reply] = Future()
        self.cluster.on_ask()
        if self.cluster.unreachable.get(self.address, 0):
            self.cluster.unreachable[self.address] -= 1
            future.set_exception(NotSent("the name of the host cannot be resolved"))
        elif isinstance(request, AlterTable) and (self.address, request.dry_run) in self.cluster.refused:
            future.set_exception(self.cluster.refused.pop((self.address, request.dry_run)))
        elif self.address in self.cluster.broken:
            future.set_exception(errors.InternalError("broken"))
        else:
            self.cluster.asked.append((self.address, request))
            future.set_result(Done())
        return future

    def close(self) -> None:
        """Nothing to release."""


class FailingStore(MemoryStore):
    """A store that can be made to fail, as if its process ended there."""

    writes_left = 1_000

    def write(self, changes: Mapping[str, bytes | None]) -> None:
        if self.writes_left <= 0:
            raise errors.StateFailed("killed")
        self.writes_left -= 1
        super().write(changes)


def states(cluster: FakeCluster) -> list[str]:
    return [entry.state for entry in cluster.scheduler.describe().shards]


def test_a_shard_without_heartbeats_is_lost_after_its_lease() -> None:
    cluster = FakeCluster()
    assert states(cluster) == ["missing", "missing"]
    cluster.register_both()
    cluster.now = 9
    cluster.scheduler.heartbeat(0, 100)
    cluster.now = 12
    assert states(cluster) == ["up", "lost"]


def test_shards_are_given_out_in_order_and_refused_when_all_are_held() -> None:
    scheduler = FakeCluster().scheduler
    assert [scheduler.register(f"h:{i}", None, incarnation=i + 1).shard for i in range(2)] == [0, 1]
    with pytest.raises(errors.ConfigError, match="has 2 shards, all held"):
        scheduler.register("h:9", None, incarnation=9)
    with pytest.raises(errors.InvalidArgument, match="0 … 1"):
        scheduler.register("h:9", 7, incarnation=9)


@pytest.mark.parametrize(
    ("answers", "refusal"),
    [
        ({101, 0}, pytest.raises(errors.ShardHeld, match="another process serves a shard at host:1, and answers")),
        (NotSent("no reply in time"), pytest.raises(errors.ClusterNotReady, match=r"not known yet: no reply in time")),
        (set(), pytest.raises(errors.ClusterNotReady, match="nobody answers there; it is free 10 s after")),
    ],
    ids=["answers", "silent", "nobody"],
)
def test_a_newcomer_with_the_address_of_a_holder_waits_until_that_is_known_to_be_gone(
    answers: set[int] | NotSent, refusal: AbstractContextManager[object]
) -> None:
    cluster = FakeCluster()
    cluster.register_both()
    cluster.answers = answers
    with refusal:
        cluster.scheduler.register("host:1", 1, incarnation=201)
    cluster.now = 11.0  # its lease is over, whoever answers
    assert cluster.scheduler.register("host:1", 1, incarnation=201).shard == 1


def test_a_shard_is_told_how_many_share_its_memory() -> None:
    cluster = FakeCluster(num_shards=4)
    for shard, pool in enumerate(("a", "a", "b", "a")):
        cluster.scheduler.register(f"host:{shard}", shard, incarnation=100 + shard)
        cluster.scheduler.heartbeat(shard, 100 + shard, pool)
    cluster.now = 2.0
    assert [cluster.scheduler.heartbeat(0, 100, pool).pool_shards for pool in ("a", "")] == [3, 0]
    cluster.scheduler.leave(3, 103)
    cluster.now = 4.0
    assert cluster.scheduler.heartbeat(0, 100, "a").pool_shards == 2


def test_a_shard_that_left_frees_its_place_and_its_successor_moves_the_cluster_version() -> None:
    cluster = FakeCluster()
    cluster.register_both()
    version = cluster.scheduler.describe().cluster_version
    cluster.scheduler.leave(1, 101)
    assert states(cluster) == ["up", "lost"]
    assert cluster.scheduler.register("h:5", None, incarnation=205).shard == 1
    assert cluster.scheduler.describe().cluster_version == version + 1
    assert cluster.scheduler.heartbeat(1, 101).replaced


def test_tables_are_made_on_all_shards_or_none() -> None:
    cluster = FakeCluster()
    with pytest.raises(errors.ClusterNotReady, match=r"0 \(missing\)"):
        cluster.scheduler.create_table(SPEC)
    cluster.register_both()
    cluster.broken.add("host:1")
    with pytest.raises(errors.InternalError):
        cluster.scheduler.create_table(SPEC)
    (_, made), undone = cluster.asked
    assert isinstance(made, CreateTable) and made.spec == SPEC
    # However late it arrives, it must not drop the next table of the name.
    assert undone == ("host:0", DropTable(table="t", incarnation=made.spec.incarnation))
    assert cluster.scheduler.describe().tables == ()


def test_a_table_whose_rows_a_restarted_shard_lost_is_not_offered() -> None:
    cluster = FakeCluster()
    cluster.register_both()
    cluster.scheduler.create_table(SPEC)
    cluster.scheduler.leave(1, 101)
    cluster.scheduler.register("host:1", 1, incarnation=201)
    view = cluster.scheduler.describe()
    assert view.tables == () and view.incomplete_tables == ("t",)
    with pytest.raises(errors.ShardRestarted, match=r"shards \[1\]"):
        cluster.scheduler.create_table(SPEC, reuse=True)
    with pytest.raises(errors.TableExists):
        cluster.scheduler.create_table(SPEC)
    cluster.scheduler.drop_table("t")
    cluster.scheduler.create_table(SPEC)
    assert cluster.scheduler.describe().incomplete_tables == ()


def altered(cluster: FakeCluster) -> list[tuple[str, float, int]]:
    """What shards were told: address, learning rate, cluster version."""
    return [
        (address, request.spec.optimizer.lr, request.spec.altered)
        for address, request in cluster.asked
        if isinstance(request, AlterTable) and not request.dry_run
    ]


def test_an_alteration_reaches_all_shards_moves_the_cluster_version_and_is_kept() -> None:
    cluster = FakeCluster()
    cluster.register_both()
    made = cluster.scheduler.create_table(SPEC)
    wanted = replace(SPEC, optimizer=SGD(0.5))
    found = cluster.scheduler.alter_table(wanted, ("optimizer",))
    assert (found, found.incarnation, found.altered) == (wanted, made.incarnation, 2)
    assert altered(cluster) == [("host:0", 0.5, 2), ("host:1", 0.5, 2)]
    later = FakeCluster(store=cluster.store).scheduler.describe()
    assert (later.cluster_version, later.tables) == (2, (wanted,))
    assert later.tables[0].altered == 2
    with pytest.raises(errors.SpecMismatch, match="dim is 4, not 5"):
        cluster.scheduler.alter_table(replace(SPEC, dim=5), ())
    with pytest.raises(errors.InvalidArgument, match="'seed' of a table cannot be altered"):
        cluster.scheduler.alter_table(SPEC, ("seed",))
    assert cluster.scheduler.describe().cluster_version == 2


def test_alterations_of_two_clients_do_not_undo_each_other() -> None:
    cluster = FakeCluster()
    cluster.register_both()
    cluster.scheduler.create_table(SPEC)
    cluster.scheduler.alter_table(replace(SPEC, max_bytes=10_000), ("max_bytes",))
    found = cluster.scheduler.alter_table(replace(SPEC, optimizer=SGD(0.5)), ("optimizer",))
    assert found == replace(SPEC, max_bytes=10_000, optimizer=SGD(0.5))


def test_a_shard_that_is_not_reached_by_an_alteration_has_it_by_the_next_one() -> None:
    cluster = FakeCluster()
    cluster.register_both()
    cluster.scheduler.create_table(SPEC)
    cluster.refused["host:1", False] = errors.ShardUnavailable("stopped")
    with pytest.raises(errors.ShardUnavailable):
        cluster.scheduler.alter_table(replace(SPEC, optimizer=SGD(0.5)), ("optimizer",))
    assert cluster.scheduler.describe().tables == (replace(SPEC, optimizer=SGD(0.5)),)  # whoever opens it now
    cluster.scheduler.alter_table(replace(SPEC, optimizer=SGD(0.5)), ("optimizer",))
    assert altered(cluster) == [("host:0", 0.5, 2), ("host:0", 0.5, 3), ("host:1", 0.5, 3)]


@pytest.mark.parametrize("refusal", [errors.InvalidArgument("holds no row"), errors.Busy("is frozen")])
def test_an_alteration_that_a_shard_would_refuse_reaches_none(refusal: errors.GeartrainError) -> None:
    cluster = FakeCluster()
    cluster.register_both()
    cluster.scheduler.create_table(SPEC)
    cluster.refused["host:1", True] = refusal
    with pytest.raises(type(refusal)):
        cluster.scheduler.alter_table(replace(SPEC, optimizer=SGD(0.5)), ("optimizer",))
    assert altered(cluster) == []
    assert (cluster.scheduler.describe().tables, cluster.scheduler.describe().cluster_version) == ((SPEC,), 1)


def test_an_alteration_that_a_shard_lacks_memory_for_is_taken_back_on_all() -> None:
    cluster = FakeCluster()
    cluster.register_both()
    cluster.scheduler.create_table(SPEC)
    cluster.refused["host:1", False] = errors.OutOfMemory("too large")
    with pytest.raises(errors.OutOfMemory, match="too large"):
        cluster.scheduler.alter_table(replace(SPEC, optimizer=SGD(0.5)), ("optimizer",))
    assert altered(cluster) == [("host:0", 0.5, 2), ("host:0", 0.1, 3), ("host:1", 0.1, 3)]
    assert cluster.scheduler.describe().tables == (SPEC,)


def test_a_table_restored_in_the_place_of_an_altered_one_has_its_settings() -> None:
    cluster = FakeCluster()
    cluster.register_both()
    cluster.scheduler.create_table(SPEC)
    cluster.scheduler.alter_table(replace(SPEC, max_bytes=10_000), ("max_bytes",))
    cluster.scheduler.leave(1, 101)
    cluster.scheduler.register("host:1", 1, incarnation=201)  # without its rows
    with pytest.raises(errors.ShardRestarted):
        cluster.scheduler.alter_table(SPEC, ("max_bytes",))
    restored = cluster.scheduler.create_table(SPEC, for_restore=True, replace=True)
    assert restored.max_bytes == 10_000
    assert cluster.scheduler.create_table(SPEC, for_restore=True).max_bytes == 10_000  # and once more
    with pytest.raises(errors.TableBeingRestored):
        cluster.scheduler.alter_table(SPEC, ("max_bytes",))
    cluster.scheduler.drop_table("t")
    assert cluster.scheduler.create_table(SPEC, for_restore=True).max_bytes is None


def test_a_scheduler_without_a_memory_believes_the_latest_settings() -> None:
    cluster = FakeCluster()
    later = replace(SPEC, optimizer=SGD(0.5), altered=7)
    cluster.scheduler.register("host:0", 0, 100, cluster_version=7, tables=[SPEC], bucket_map=MAP)
    cluster.scheduler.register("host:1", 1, 101, cluster_version=7, tables=[later], bucket_map=MAP)
    assert cluster.scheduler.describe().tables == (later,)


def test_a_table_that_is_just_made_or_dropped_is_not_called_incomplete() -> None:
    cluster = FakeCluster()
    cluster.register_both()
    seen: list[ClusterView] = []
    cluster.on_ask = lambda: seen.append(cluster.scheduler.describe())
    cluster.scheduler.create_table(SPEC)
    cluster.scheduler.drop_table("t")
    assert [(view.tables, view.incomplete_tables) for view in seen] == 4 * [((), ())]


def test_a_table_whose_making_was_cut_off_is_incomplete() -> None:
    cluster = FakeCluster()
    cluster.register_both()
    cluster.broken |= {"host:0", "host:1"}  # it is not known whether they hold it
    with pytest.raises(errors.InternalError):
        cluster.scheduler.create_table(SPEC)
    assert cluster.scheduler.describe().incomplete_tables == ("t",)


def test_a_new_scheduler_learns_tables_and_version_from_the_shards() -> None:
    cluster = FakeCluster()
    assert cluster.scheduler.heartbeat(0, 100).unknown
    cluster.scheduler.register("host:0", 0, 100, cluster_version=7, tables=[SPEC], bucket_map=MAP)
    view = cluster.scheduler.describe()
    assert view.tables == () == view.incomplete_tables  # shard 1 has not said whether it holds it
    with pytest.raises(errors.ClusterNotReady, match=r"table 't' is not known yet: 1 shard of 2 \(1\)"):
        view.require_registered("whether there is a table 't'")
    cluster.scheduler.register("host:1", 1, 101, cluster_version=7, tables=[SPEC], bucket_map=MAP)
    view = cluster.scheduler.describe()
    view.require_registered("all")
    assert (view.tables, view.cluster_version, view.ready) == ((SPEC,), 7, True)


def test_a_shard_with_rows_is_not_expelled_by_a_newcomer_that_was_quicker() -> None:
    cluster = FakeCluster()
    assert cluster.scheduler.register("new:1", None, incarnation=9).shard == 0
    cluster.scheduler.register("host:0", 0, 100, cluster_version=7, tables=[SPEC], bucket_map=MAP)
    assert cluster.scheduler.heartbeat(0, 9).replaced
    with pytest.raises(errors.ConfigError, match="held by a live process"):
        cluster.scheduler.register("new:2", 0, incarnation=10)


def test_after_a_stop_of_the_scheduler_itself_every_shard_has_a_whole_lease() -> None:
    cluster = FakeCluster()
    cluster.scheduler.pulse()
    cluster.register_both()
    cluster.now = 100  # stopped: nobody could be heard
    with pytest.raises(errors.ConfigError, match="held by a live process"):
        cluster.scheduler.register("h:9", 0, incarnation=9)
    for cluster.now in range(101, 112):
        cluster.scheduler.pulse()
    assert cluster.scheduler.register("h:9", 0, incarnation=9).shard == 0


def test_a_restarted_scheduler_goes_on_where_it_was() -> None:
    first = FakeCluster()
    first.register_both()
    first.scheduler.create_table(SPEC)
    first.scheduler.leave(1, 101)
    first.scheduler.register("host:1", 1, incarnation=201)  # moves the cluster version
    version = first.scheduler.describe().cluster_version
    second = FakeCluster(store=first.store)
    view = second.scheduler.describe()
    assert (view.cluster_version, [entry.incarnation for entry in view.shards]) == (version, [100, 201])
    assert [entry.state for entry in view.shards] == ["silent", "silent"]
    assert not second.scheduler.heartbeat(0, 100).unknown
    assert second.scheduler.heartbeat(1, 101).replaced
    assert states(second) == ["up", "silent"]
    with pytest.raises(errors.ShardRestarted, match=r"shards \[1\]"):
        second.scheduler.create_table(SPEC, reuse=True)


def test_a_restarted_scheduler_gives_no_shard_away_before_a_whole_lease_unless_it_was_free() -> None:
    first = FakeCluster()
    first.register_both()
    first.scheduler.leave(1, 101)
    second = FakeCluster(store=first.store)
    assert second.scheduler.register("new:1", None, incarnation=9).shard == 1
    with pytest.raises(errors.ClusterNotReady, match=r"shard 0 may live on at host:0; it is free in 10\.0 s"):
        second.scheduler.register("new:0", 0, incarnation=10)
    second.now = 10.1
    assert second.scheduler.register("new:0", 0, incarnation=10).shard == 0


def test_every_table_has_a_higher_incarnation_than_all_before(monkeypatch: pytest.MonkeyPatch) -> None:
    first = FakeCluster()
    first.register_both()
    made = first.scheduler.create_table(SPEC)
    assert first.scheduler.create_table(SPEC, reuse=True) == made
    assert [request.spec.incarnation for _, request in first.asked] == [made.incarnation] * 2  # type: ignore[attr-defined]
    second = FakeCluster(store=first.store)
    second.register_both()
    assert [spec.incarnation for spec in second.scheduler.describe().tables] == [made.incarnation]
    monkeypatch.setattr(time, "time_ns", lambda: 1)  # the clock was set back
    second.scheduler.drop_table("t")
    second.scheduler.create_table(replace(SPEC, name="u"))
    again = second.scheduler.create_table(SPEC)
    assert again == made
    assert again.incarnation > made.incarnation
    second.asked.clear()
    second.scheduler.drop_table("t")
    assert [request for _, request in second.asked] == [DropTable(table="t", incarnation=again.incarnation)] * 2


def test_a_scheduler_without_its_state_learns_from_the_shards_which_tables_they_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = FakeCluster()
    held = replace(SPEC, incarnation=7)
    cluster.scheduler.register("host:0", 0, incarnation=100, cluster_version=1, tables=[held], bucket_map=MAP)
    cluster.scheduler.register(
        "host:1", 1, incarnation=101, cluster_version=1, tables=[replace(SPEC, incarnation=5)], bucket_map=MAP
    )
    assert cluster.scheduler.describe().tables == ()  # not of one table
    cluster.scheduler.register("host:1", 1, incarnation=101, cluster_version=1, tables=[held], bucket_map=MAP)
    assert [spec.incarnation for spec in cluster.scheduler.describe().tables] == [7]
    monkeypatch.setattr(time, "time_ns", lambda: 1)
    assert cluster.scheduler.create_table(replace(SPEC, name="u")).incarnation == 8


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_a_table_whose_making_was_cut_short_is_made_anew(kept: int) -> None:
    store = FailingStore()
    first = FakeCluster(store=store)
    first.register_both()
    store.writes_left = kept
    with pytest.raises(errors.StateFailed):
        first.scheduler.create_table(SPEC)
    store.writes_left = 1_000
    second = FakeCluster(store=store)
    assert second.scheduler.describe().tables == ()
    other = TableSpec(name="t", dim=8, optimizer=SGD(0.1))
    assert second.scheduler.create_table(other) == other
    dropped_first = [DropTable(table="t")] * 2 * (kept == 2)  # what the shards may still hold
    assert [request for _, request in second.asked] == [*dropped_first, *[CreateTable(spec=other)] * 2]


@pytest.mark.parametrize("kept", [0, 1])
def test_a_table_whose_dropping_was_cut_short_is_whole_or_gone(kept: int) -> None:
    store = FailingStore()
    first = FakeCluster(store=store)
    first.register_both()
    first.scheduler.create_table(SPEC)
    first.asked.clear()
    store.writes_left = kept
    with pytest.raises(errors.StateFailed):
        first.scheduler.drop_table("t")
    assert len(first.asked) == 2 * kept
    store.writes_left = 1_000
    assert FakeCluster(store=store).scheduler.describe().tables == (() if kept else (SPEC,))


def test_the_state_of_another_cluster_is_refused() -> None:
    first = FakeCluster(num_shards=2)
    with pytest.raises(errors.ConfigError, match=r"num_shards is 3, but .* num_shards 2; start it with that"):
        FakeCluster(num_shards=3, store=first.store)
    first.store.write({"cluster": b'{"format": 2, "num_shards": 2}'})
    with pytest.raises(errors.ConfigError, match=r"has format 2; .* reads format 1\. Use .* or give an empty"):
        FakeCluster(num_shards=2, store=first.store)


def test_a_shard_that_misses_heartbeats_is_silent_before_it_is_lost() -> None:
    cluster = FakeCluster()
    cluster.scheduler.register("host:0", 0, 100, heartbeat_seconds=1.0)
    cluster.scheduler.register("host:1", 1, 101, heartbeat_seconds=2.0)
    cluster.now = 3.5
    assert states(cluster) == ["silent", "up"]
    cluster.now = 6.5
    assert states(cluster) == ["silent", "silent"]
    cluster.now = 10.5
    assert states(cluster) == ["lost", "lost"]


def test_a_shard_that_cannot_be_reached_at_first_is_told_of_a_table_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tell_shards_module, "_PAUSE_SECONDS", 0.0)
    cluster = FakeCluster()
    cluster.register_both()
    cluster.unreachable["host:1"] = 2
    cluster.scheduler.create_table(SPEC)
    assert [address for address, request in cluster.asked if isinstance(request, CreateTable)] == ["host:0", "host:1"]


def test_one_that_stays_out_of_reach_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tell_shards_module, "_RETRY_SECONDS", 0.0)
    cluster = FakeCluster()
    cluster.register_both()
    cluster.unreachable["host:1"] = 1
    with pytest.raises(
        errors.ShardUnavailable, match=r"shard 1 does not answer a request about the table.*'geartrain status'"
    ):
        cluster.scheduler.create_table(SPEC)
    cluster.scheduler.create_table(SPEC)


@pytest.mark.parametrize(
    "held", [None, BucketMap(2, even_placement(2)), BucketMap(1, even_placement(3))], ids=["none", "newer", "other"]
)
def test_a_shard_that_holds_its_rows_by_another_map_is_refused(held: BucketMap | None) -> None:
    cluster = FakeCluster()
    before = cluster.scheduler.describe()
    with pytest.raises(errors.StaleBucketMap, match="not version 1 of this cluster of 2 shards"):
        cluster.scheduler.register("host:0", 0, 100, cluster_version=7, tables=[SPEC], bucket_map=held)
    assert [entry.state for entry in cluster.scheduler.describe().shards] == ["missing", "missing"]
    assert cluster.scheduler.describe().cluster_version == before.cluster_version
    given = cluster.scheduler.register("host:0", 0, 100).bucket_map  # of one that begins nobody asks
    assert given.is_as(cluster.scheduler.register("host:0", 0, 100, cluster_version=1, bucket_map=given).bucket_map)


def kinds(cluster: FakeCluster) -> list[tuple[str, int | None]]:
    """Of the events after the scheduler's first, with the shard of each."""
    return [(event.kind, event.shard) for event in cluster.scheduler.events.since(1).events]


def test_a_shard_that_is_lost_and_comes_back_is_noted_in_this_order() -> None:
    cluster = FakeCluster()
    cluster.register_both()
    cluster.now = 9.0
    cluster.scheduler.heartbeat(0, 100)
    cluster.scheduler.pulse()
    cluster.now = 11.0
    cluster.scheduler.heartbeat(0, 100)
    cluster.scheduler.pulse()
    cluster.scheduler.pulse()
    assert kinds(cluster) == [("joined", 0), ("joined", 1), ("lost", 1)]
    cluster.scheduler.register("host:9", 1, incarnation=201)
    cluster.scheduler.register("host:9", 1, incarnation=201)
    assert kinds(cluster)[3:] == [("back", 1)]
    assert cluster.scheduler.shard_events.restarts == {1: 1}
    assert cluster.scheduler.shard_events.takeovers == {}


def test_a_silent_shard_that_is_heard_again_is_back_with_its_rows() -> None:
    cluster = FakeCluster()
    cluster.register_both()
    cluster.now = 8.0
    cluster.scheduler.heartbeat(0, 100)
    cluster.scheduler.pulse()
    cluster.now = 12.0
    cluster.scheduler.pulse()
    cluster.scheduler.heartbeat(1, 101)
    assert kinds(cluster)[2:] == [("lost", 1), ("back", 1)]
    assert "with its rows" in cluster.scheduler.events.since(0).events[-1].text
    assert cluster.scheduler.shard_events.restarts == {}


def test_a_process_that_lives_on_without_its_shard_is_a_takeover_and_noted_once() -> None:
    cluster = FakeCluster()
    cluster.register_both()
    cluster.now = 11.0
    cluster.scheduler.register("host:9", 1, incarnation=201)
    for _ in range(3):
        assert cluster.scheduler.heartbeat(1, 101).replaced
    assert kinds(cluster)[2:] == [("lost", 1), ("back", 1), ("takeover", 1)]
    assert cluster.scheduler.shard_events.takeovers == {1: 1}


def test_a_shard_that_ends_in_good_order_is_not_lost() -> None:
    cluster = FakeCluster()
    cluster.register_both()
    cluster.scheduler.prepare_leave(1, 101)
    cluster.scheduler.prepare_leave(1, 101)
    cluster.scheduler.leave(1, 101)
    cluster.scheduler.pulse()
    cluster.now = 30.0
    cluster.scheduler.heartbeat(0, 100)
    cluster.scheduler.pulse()
    assert kinds(cluster)[2:] == [("leaving", 1), ("left", 1)]


def test_tables_are_noted_when_they_are_made_opened_and_dropped() -> None:
    cluster = FakeCluster()
    cluster.register_both()
    cluster.scheduler.create_table(SPEC)
    cluster.scheduler.create_table(SPEC, reuse=True)
    restored = cluster.scheduler.create_table(SPEC, for_restore=True, replace=True)
    cluster.scheduler.publish_tables({"t": restored.incarnation})
    cluster.scheduler.publish_tables({"t": restored.incarnation})
    cluster.scheduler.drop_table("t")
    cluster.scheduler.drop_table("t")
    said = [event.text for event in cluster.scheduler.events.since(3).events]
    assert said == ["table t made", "table t opened with restored rows", "table t dropped"]
