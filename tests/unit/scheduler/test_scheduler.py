"""The scheduler's decisions, with an injected clock and shards that only remember what they were asked."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from geartrain.ams import errors
from geartrain.ams.messages import CallContext, CreateTable, Done, DropTable, Reply, Request
from geartrain.ams.scheduler.scheduler import Scheduler
from geartrain.ams.specs import SGD, TableSpec

SPEC = TableSpec(name="t", dim=4, optimizer=SGD(0.1))


class FakeCluster:
    """A scheduler, its clock, and carriers to shards that note requests."""

    def __init__(self, num_shards: int = 2) -> None:
        self.now = 0.0
        self.asked: list[tuple[str, Request]] = []
        self.broken: set[str] = set()
        self.scheduler = Scheduler(num_shards, self.open_carrier, lease_seconds=10, clock=lambda: self.now)

    def open_carrier(self, address: str) -> FakeCarrier:
        return FakeCarrier(self, address)

    def register_both(self) -> None:
        for shard in (0, 1):
            self.scheduler.register(f"host:{shard}", shard, incarnation=100 + shard)


class FakeCarrier:
    def __init__(self, cluster: FakeCluster, address: str) -> None:
        self.cluster, self.address = cluster, address

    def submit(self, context: CallContext, request: Request, timeout_seconds: float | None) -> Future[Reply]:  # noqa: ARG002
        future: Future[Reply] = Future()
        if self.address in self.cluster.broken:
            future.set_exception(errors.InternalError("broken"))
        else:
            self.cluster.asked.append((self.address, request))
            future.set_result(Done())
        return future

    def close(self) -> None:
        """Nothing to release."""


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
    assert cluster.asked == [("host:0", CreateTable(spec=SPEC)), ("host:0", DropTable(table="t"))]
    assert cluster.scheduler.describe().tables == ()


def test_a_table_whose_rows_a_restarted_shard_lost_is_not_offered() -> None:
    cluster = FakeCluster()
    cluster.register_both()
    cluster.scheduler.create_table(SPEC)
    cluster.scheduler.leave(1, 101)
    cluster.scheduler.register("host:1", 1, incarnation=201)
    assert cluster.scheduler.describe().tables == ()
    with pytest.raises(errors.ShardRestarted, match=r"shards \[1\]"):
        cluster.scheduler.create_table(SPEC, reuse=True)
    with pytest.raises(errors.TableExists):
        cluster.scheduler.create_table(SPEC)
    cluster.scheduler.drop_table("t")
    assert not cluster.scheduler.create_table(SPEC)


def test_a_new_scheduler_learns_tables_and_version_from_the_shards() -> None:
    cluster = FakeCluster()
    assert cluster.scheduler.heartbeat(0, 100).unknown
    cluster.scheduler.register("host:0", 0, 100, cluster_version=7, tables=[SPEC])
    assert cluster.scheduler.describe().tables == ()  # shard 1 may not hold it
    cluster.scheduler.register("host:1", 1, 101, cluster_version=7, tables=[SPEC])
    view = cluster.scheduler.describe()
    assert (view.tables, view.cluster_version, view.ready) == ((SPEC,), 7, True)


def test_a_shard_with_rows_is_not_expelled_by_a_newcomer_that_was_quicker() -> None:
    cluster = FakeCluster()
    assert cluster.scheduler.register("new:1", None, incarnation=9).shard == 0
    cluster.scheduler.register("host:0", 0, 100, cluster_version=7, tables=[SPEC])
    assert cluster.scheduler.heartbeat(0, 9).replaced
    with pytest.raises(errors.ConfigError, match="held by a living process"):
        cluster.scheduler.register("new:2", 0, incarnation=10)


def test_after_a_stop_of_the_scheduler_itself_every_shard_has_a_whole_lease() -> None:
    cluster = FakeCluster()
    cluster.scheduler.pulse()
    cluster.register_both()
    cluster.now = 100  # stopped: nobody could be heard
    with pytest.raises(errors.ConfigError, match="held by a living process"):
        cluster.scheduler.register("h:9", 0, incarnation=9)
    for cluster.now in range(101, 112):
        cluster.scheduler.pulse()
    assert cluster.scheduler.register("h:9", 0, incarnation=9).shard == 0
