"""Prometheus metrics of the scheduler, read from membership, jobs and events at each scrape."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from geartrain.ams.observe.metrics import Metric
from geartrain.ams.scheduler.data_streams import StreamLeases
from geartrain.ams.scheduler.running_jobs import UNDER_WAY, RunningJobs
from geartrain.ams.scheduler.scheduler import Scheduler
from geartrain.ams.scheduler.worker_steps import WorkerSteps


def scheduler_metrics(
    scheduler: Scheduler, jobs: RunningJobs, streams: StreamLeases, steps: WorkerSteps
) -> Iterator[Metric]:
    """Yield all metrics. Thread-safe."""
    yield from _of_shards(scheduler)
    yield from _of_jobs(jobs)
    yield from _of_workers(streams, steps)
    events = scheduler.events
    counts = events.counts.copy()
    yield Metric("events_total", "counter", "Events of each kind since the scheduler began.", ("kind",), _by(counts))
    restores = counts["restore"]
    yield Metric("restores_total", "counter", "Restores of snapshots since the scheduler began.", (), [((), restores)])
    newest = events.newest("snapshot")
    phases = newest and {"hold": newest.hold_seconds, "write": newest.seconds - newest.hold_seconds}
    what = (
        "Seconds of the newest snapshot: until every shard held its moment (writes wait), and then until it was whole."
    )
    yield Metric("snapshot_seconds", "gauge", what, ("phase",), _by(phases or {}))


def _of_shards(scheduler: Scheduler) -> Iterator[Metric]:
    view, members = scheduler.describe(), scheduler.members()
    shards, seen = view.shards, [entry for entry in view.shards if entry.state != "missing"]
    noted = scheduler.shard_events
    yield Metric("shards_expected", "gauge", "Shards of the cluster.", (), [((), view.num_shards)])
    yield Metric(
        "cluster_version",
        "gauge",
        "Rises when a shard comes back empty or a table is altered.",
        (),
        [((), view.cluster_version)],
    )
    up = {entry.shard: int(entry.state in ("up", "leaving")) for entry in shards}
    yield Metric("shard_up", "gauge", "1 while heartbeats of the shard arrive.", ("shard",), _by(up))
    ages = {entry.shard: entry.heartbeat_age_seconds for entry in seen}
    yield Metric("shard_heartbeat_age_seconds", "gauge", "Seconds since its last heartbeat.", ("shard",), _by(ages))
    restarts = {entry.shard: noted.restarts[entry.shard] for entry in shards}
    what = "Processes that replaced one that had ended, or seemed to."
    yield Metric("shard_restarts_total", "counter", what, ("shard",), _by(restarts))
    takeovers = {entry.shard: noted.takeovers[entry.shard] for entry in shards}
    what = "Processes that replaced one that still ran."
    yield Metric("shard_takeovers_total", "counter", what, ("shard",), _by(takeovers))
    told = {shard: member for shard, member in members.items() if member.version}
    what = "Seconds by which a member's clock is ahead of the scheduler's, less the travel time of a heartbeat."
    offsets = [(("server", shard, member.address), member.clock_ahead_seconds) for shard, member in told.items()]
    yield Metric("clock_offset_seconds", "gauge", what, ("role", "number", "address"), offsets)
    versions = [(("server", shard, member.version), 1) for shard, member in told.items()]
    yield Metric("member_info", "gauge", "Always 1; says what runs where.", ("role", "number", "version"), versions)


def _of_jobs(jobs: RunningJobs) -> Iterator[Metric]:
    """Yield metrics of jobs: times and intervals only while a job runs or should; the others also once it has ended."""
    now, entries = time.time(), jobs.entries()
    going = [entry for entry in entries if entry.report.state in UNDER_WAY or entry.report.state == "silent"]
    job = ("job",)
    steps = {entry.job: entry.report.step for entry in entries}
    yield Metric("job_last_step", "gauge", "Steps that the job has done.", job, _by(steps))
    recoveries = {entry.job: entry.recoveries for entry in entries}
    yield Metric("job_recoveries_total", "counter", "Times that the job went back to a snapshot.", job, _by(recoveries))
    lost = {entry.job: entry.steps_lost for entry in entries}
    yield Metric("job_steps_lost_total", "counter", "Steps that the job had done and did again.", job, _by(lost))
    failures = [((e.job, reason), number) for e in entries for reason, number in e.snapshot_failures.items()]
    what = "Failed snapshots, by type of the error."
    yield Metric("snapshot_failures_total", "counter", what, ("job", "reason"), failures)
    failed_at, snapshot_failed_at = jobs.failed_at()
    what = "Unix time at which the job failed, unless it has begun again."
    yield Metric("job_failed_timestamp_seconds", "gauge", what, job, _by(failed_at))
    what = "Unix time of the job's last failed snapshot, by type of the error."
    samples = list(snapshot_failed_at.items())
    yield Metric("snapshot_last_failure_timestamp_seconds", "gauge", what, ("job", "reason"), samples)
    stepped = {entry.job: now - entry.step_seconds_ago for entry in going}
    what = "Unix time at which the job's step last rose."
    yield Metric("job_last_step_timestamp_seconds", "gauge", what, job, _by(stepped))
    # A job that never gets one must alarm, too; one that starts again must not, before there could be one.
    saved = {}
    for entry in going:
        ago = entry.snapshot_seconds_ago
        saved[entry.job] = now - (entry.began_seconds_ago if ago is None else min(ago, entry.began_seconds_ago))
    what = "Unix time at which the job's newest snapshot was whole or, if later, its process began."
    yield Metric("snapshot_last_success_timestamp_seconds", "gauge", what, job, _by(saved))
    every = {e.job: e.report.snapshot_every_seconds for e in going if e.report.snapshot_every_seconds}
    yield Metric("snapshot_interval_seconds", "gauge", "Approximate seconds between two snapshots.", job, _by(every))


def _of_workers(streams: StreamLeases, steps: WorkerSteps) -> Iterator[Metric]:
    """Yield metrics of jobs with known workers: those that share data streams, or may not drift apart."""
    read, job = streams.readers(), ("job",)
    for index, (name, text) in enumerate(
        (
            ("stream_workers", "Workers that read its data streams."),
            ("stream_epoch", "Passes over its data that are behind all its streams."),
            ("streams_unread", "Streams of this epoch that nobody reads."),
        )
    ):
        yield Metric(name, "gauge", text, job, _by({key: of[index] for key, of in read.items()}))
    what = "Steps that its fastest worker is ahead of its slowest."
    yield Metric("job_steps_apart", "gauge", what, job, _by(steps.apart()))


def _by(values: Mapping[Any, float]) -> list[tuple[tuple[object], float]]:
    """Return samples with one label."""
    return [((label,), value) for label, value in values.items()]
