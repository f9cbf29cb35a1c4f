"""What the scheduler tells Prometheus of shards and jobs."""

from __future__ import annotations

import time

import pytest

from geartrain.ams.observe.event_log import EventLog
from geartrain.ams.observe.metrics import Metric
from geartrain.ams.scheduler.data_streams import StreamLeases
from geartrain.ams.scheduler.metrics import scheduler_metrics
from geartrain.ams.scheduler.running_jobs import RunningJobs
from geartrain.ams.scheduler.worker_steps import WorkerSteps
from geartrain.ams.storage.kv.store import MemoryStore
from geartrain.ams.values.scheduler_messages import ClusterEvent, Cursor, JobReport, JobWorker
from tests.unit.ams.scheduler.test_scheduler import FakeCluster


def told(
    cluster: FakeCluster, jobs: RunningJobs, streams: StreamLeases | None = None, steps: WorkerSteps | None = None
) -> dict[str, dict[tuple[object, ...], object]]:
    streams, steps = streams or StreamLeases(MemoryStore(), 10.0), steps or WorkerSteps(10.0)
    found: list[Metric] = list(scheduler_metrics(cluster.scheduler, jobs, streams, steps))
    return {metric.name: {tuple(labels): value for labels, value in metric.samples} for metric in found}


def test_shards_and_their_fates_are_told() -> None:
    cluster = FakeCluster()
    jobs = RunningJobs(lambda: cluster.now, cluster.scheduler.events)
    assert told(cluster, jobs)["shard_up"] == {(0,): 0, (1,): 0}
    cluster.register_both()
    cluster.scheduler.heartbeat(0, 100, unix_seconds=time.time() + 60, build="9.9")
    cluster.now = 11.0
    cluster.scheduler.heartbeat(0, 100, unix_seconds=time.time() + 60, build="9.9")
    cluster.scheduler.pulse()
    found = told(cluster, jobs)
    assert found["shards_expected"] == {(): 2}
    assert found["shard_up"] == {(0,): 1, (1,): 0}
    assert found["shard_heartbeat_age_seconds"] == {(0,): 0, (1,): 11}
    assert found["member_info"] == {("server", 0, "9.9"): 1}
    assert found["clock_offset_seconds"] == {("server", 0, "host:0"): pytest.approx(60, abs=5)}
    cluster.scheduler.register("host:9", 1, incarnation=201)
    cluster.scheduler.heartbeat(1, 101)
    found = told(cluster, jobs)
    assert found["shard_restarts_total"] == found["shard_takeovers_total"] == {(0,): 0, (1,): 1}
    assert found["events_total"] == {("scheduler",): 1, ("joined",): 2, ("lost",): 1, ("back",): 1, ("takeover",): 1}


def test_jobs_are_told_and_what_could_alarm_only_while_they_are_under_way() -> None:
    cluster = FakeCluster()
    log = cluster.scheduler.events
    jobs = RunningJobs(lambda: cluster.now, log)
    jobs.report("j", 1, done=False, report=JobReport(step=50, snapshot_every_seconds=30.0))
    jobs.report("j", 2, done=False, report=JobReport(step=40, snapshot_every_seconds=30.0))
    for event in (
        ClusterEvent(kind="snapshot", text="whole", job="j", step=45, seconds=3.0, hold_seconds=0.5),
        ClusterEvent(kind="snapshot_failed", text="none", job="j", step=46, reason="SnapshotFailed"),
        ClusterEvent(kind="restore", text="restored"),
    ):
        jobs.apply_event(log.append(event) or event)
    found, now = told(cluster, jobs), time.time()
    assert found["job_last_step"] == {("j",): 40}
    assert found["job_recoveries_total"] == {("j",): 1}
    assert found["job_steps_lost_total"] == {("j",): 10}
    assert found["snapshot_failures_total"] == {("j", "SnapshotFailed"): 1}
    assert found["snapshot_interval_seconds"] == {("j",): 30}
    assert found["snapshot_seconds"] == {("hold",): 0.5, ("write",): 2.5}
    assert found["restores_total"] == {(): 1}
    assert found["snapshot_last_success_timestamp_seconds"] == {("j",): pytest.approx(now, abs=20)}
    assert found["job_last_step_timestamp_seconds"] == {("j",): pytest.approx(now, abs=20)}
    assert found["snapshot_last_failure_timestamp_seconds"] == {("j", "SnapshotFailed"): pytest.approx(now, abs=20)}
    assert found["job_failed_timestamp_seconds"] == {}
    jobs.report("j", 2, done=True, report=JobReport(state="failed", step=50))
    failed = told(cluster, RunningJobs(lambda: cluster.now, log))["job_failed_timestamp_seconds"]
    assert failed == {("j",): pytest.approx(now, abs=20)}  # also by a scheduler that was restarted meanwhile
    jobs.report("j", 3, done=False, report=JobReport(step=50))
    assert told(cluster, jobs)["job_failed_timestamp_seconds"] == {}
    jobs.report("j", 3, done=True, report=JobReport(state="ended", step=60))
    found = told(cluster, jobs)
    assert found["job_last_step"] == {("j",): 60}
    assert found["snapshot_last_success_timestamp_seconds"] == found["job_last_step_timestamp_seconds"] == {}


def test_the_age_of_a_snapshot_counts_from_when_its_job_began_at_most() -> None:
    """So that one that never gets a snapshot alarms, and one that goes on with an old one does not."""
    cluster, unix = FakeCluster(), 1_000.0
    log = EventLog(clock=lambda: unix)
    jobs = RunningJobs(lambda: cluster.now, log)

    def age(job: str) -> object:
        saved = told(cluster, jobs)["snapshot_last_success_timestamp_seconds"][(job,)]
        return pytest.approx(time.time() - saved, abs=5)  # type: ignore[operator]

    jobs.report("old", 1, done=False)
    saved = log.append(ClusterEvent(kind="snapshot", text="whole", job="old", step=1))
    assert saved is not None
    jobs.apply_event(saved)
    jobs.report("old", 1, done=True)
    unix = time.time() - 100
    jobs.report("old", 2, done=False)
    jobs.report("none", 3, done=False)
    assert age("old") == age("none") == 100


def test_workers_of_jobs_are_told_as_long_as_they_have_a_lease() -> None:
    now = 0.0
    streams, steps = StreamLeases(MemoryStore(), 10.0, lambda: now), WorkerSteps(10.0, lambda: now)
    for worker in ("a", "b"):
        streams.lease("j", worker, 1, num_streams=4, num_workers=2)
    streams.renew("j", "a", 1, {0: Cursor(1, 0)})
    now = 11.0  # from now on steps of all are known
    streams.lease("j", "a", 2, num_streams=4)
    for worker, done in (("a", 4), ("b", 4), ("a", 7)):
        steps.report(JobWorker("j", worker, 1), done)
    cluster = FakeCluster()
    found = told(cluster, RunningJobs(lambda: now), streams, steps)
    assert found["stream_workers"] == {("j",): 1}  # b's time is up
    assert found["streams_unread"] == found["stream_epoch"] == {("j",): 0}
    assert found["job_steps_apart"] == {("j",): 3}
    streams.renew("j", "a", 2, {stream: Cursor(1, 0) for stream in range(4)})
    streams.release("j", "a", 2, {}, [3])
    found = told(cluster, RunningJobs(lambda: now), streams, steps)
    assert (found["stream_epoch"], found["streams_unread"]) == ({("j",): 1}, {("j",): 1})
    now = 22.0
    found = told(cluster, RunningJobs(lambda: now), streams, steps)
    assert found["stream_workers"] == found["job_steps_apart"] == {}
