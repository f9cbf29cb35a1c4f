"""Handlers of the scheduler's requests, independent of the transport."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from geartrain.ams.observe.event_log import EventLog
from geartrain.ams.rpc.ping import PingHandler
from geartrain.ams.rpc.wire import WIRE, require_same_wire
from geartrain.ams.scheduler.data_streams import StreamLeases
from geartrain.ams.scheduler.rendezvous import Rendezvous
from geartrain.ams.scheduler.running_jobs import RunningJobs
from geartrain.ams.scheduler.scheduler import Scheduler
from geartrain.ams.scheduler.worker_steps import WorkerSteps
from geartrain.ams.values.arguments import checked_name
from geartrain.ams.values.config import split_address
from geartrain.ams.values.errors import ConfigError, InvalidArgument, ProtocolError
from geartrain.ams.values.rpc import Ping, Rpc, version
from geartrain.ams.values.scheduler_messages import (
    TOLD_KINDS,
    AlterClusterTable,
    CheckCaller,
    CreateClusterTable,
    DescribeCluster,
    DescribeHolders,
    DescribeJobs,
    DescribeStreams,
    DropClusterTable,
    FenceJob,
    Heartbeat,
    HeartbeatResult,
    IssueIncarnation,
    JobReportReply,
    LeaseStreams,
    LeaveCluster,
    LeaveSteps,
    PrepareLeave,
    PublishClusterTables,
    ReadEvents,
    ReadRendezvous,
    ReadRevoked,
    Register,
    Registration,
    ReleaseStreams,
    RenewStreams,
    ReportEvent,
    ReportJob,
    ReportSteps,
    RestoreStreams,
    Revoked,
    SavingJobs,
    StreamLease,
    StreamRenewal,
    WriteRendezvous,
)
from geartrain.ams.values.shard_messages import CallContext
from geartrain.ams.values.specs import TableSpec
from geartrain.ams.values.text import quoted

_LONGEST_TOLD = 1_000
"""Most characters of a text in a client's event."""


class WaitingCaller(Protocol):
    """The call of a request, as far as a handler needs it."""

    def require_waiting(self) -> None:
        """End the call if its caller no longer waits."""


class SchedulerHandlers:
    """Handlers of requests, by type."""

    def __init__(
        self,
        scheduler: Scheduler,
        streams: StreamLeases,
        steps: WorkerSteps,
        events: EventLog | None = None,
        revoked: Callable[[], Revoked] = Revoked,
    ) -> None:
        """``revoked`` returns the revoked tokens."""
        self._scheduler = scheduler
        self._revoked = revoked
        self._streams = streams
        self._events = events = EventLog() if events is None else events
        self.jobs = RunningJobs(events=events)
        rendezvous = Rendezvous()
        self.by_request: Mapping[type[Rpc[Any]], Callable[[Any, WaitingCaller], Any]] = {
            Ping: PingHandler("scheduler"),
            Register: self._register,
            Heartbeat: self._heartbeat,
            ReadRevoked: self._read_revoked,
            LeaveCluster: lambda leave, _: scheduler.leave(leave.shard, leave.incarnation),
            PrepareLeave: self._prepare_leave,
            ReportJob: self._report_job,
            DescribeJobs: lambda _, __: self.jobs.entries(),
            DescribeCluster: lambda _, __: dataclasses.replace(scheduler.describe(), version=version(), wire=WIRE),
            CreateClusterTable: self._create_table,
            AlterClusterTable: self._alter_table,
            DropClusterTable: self._drop_table,
            PublishClusterTables: self._publish_tables,
            IssueIncarnation: lambda take, _: scheduler.issue_incarnation(take.chosen),
            CheckCaller: lambda check, _: streams.require_current(check.caller),
            FenceJob: lambda fence, _: streams.fence(fence.job, fence.incarnation),
            LeaseStreams: self._lease_streams,
            RenewStreams: self._renew_streams,
            ReleaseStreams: self._release_streams,
            DescribeStreams: lambda describe, _: streams.cursors(describe.job),
            DescribeHolders: lambda describe, _: streams.holders(describe.job),
            RestoreStreams: lambda restore, _: streams.restore(restore.job, restore.incarnation, restore.cursors),
            ReportSteps: lambda tell, _: steps.report(tell.who, tell.done),
            LeaveSteps: lambda leave, _: steps.leave(leave.who),
            ReadRendezvous: lambda read, _: rendezvous.read(read.job, read.keys),
            ReportEvent: self._report_event,
            ReadEvents: lambda read, _: events.since(read.since),
            WriteRendezvous: lambda write, _: rendezvous.write(write),
        }

    def _register(self, shard: Register, _: WaitingCaller) -> Registration:
        require_same_wire(f"the server at {quoted(shard.address)}", shard.version, shard.wire, "the scheduler")
        if split_address(shard.address)[1] == 0:  # the scheduler itself calls the address, and gives it to every client
            raise ConfigError(f"address {shard.address!r} has port 0; give the port that the server listens on")
        # First: once all shards have registered, incarnations are assigned above those they have seen.
        self._scheduler.record_incarnation(shard.highest_incarnation)
        registration = self._scheduler.register(
            shard.address,
            shard.shard,
            shard.incarnation,
            cluster_version=shard.cluster_version,
            heartbeat_seconds=shard.heartbeat_seconds,
            tables=shard.tables,
            restoring_tables=shard.restoring_tables,
            bucket_map=shard.bucket_map,
        )
        return dataclasses.replace(registration, revoked=self._revoked().digest)

    def _heartbeat(self, beat: Heartbeat, _: WaitingCaller) -> HeartbeatResult:
        # the scheduler was replaced: the shard registers again, and gets the reason of its refusal
        if beat.wire != WIRE:
            return HeartbeatResult(cluster_version=0, unknown=True)
        self._scheduler.record_incarnation(beat.highest_incarnation)
        heard = self._scheduler.heartbeat(
            beat.shard, beat.incarnation, beat.memory_pool, unix_seconds=beat.unix_seconds, build=beat.version
        )
        return dataclasses.replace(heard, revoked=self._revoked().digest)

    def _read_revoked(self, read: ReadRevoked, _: WaitingCaller) -> Revoked:
        revoked = self._revoked()
        return dataclasses.replace(revoked, ids=()) if read.known == revoked.digest else revoked

    def _prepare_leave(self, leave: PrepareLeave, _: WaitingCaller) -> SavingJobs:
        self._scheduler.prepare_leave(leave.shard, leave.incarnation)
        return self.jobs.to_ask(was_restarted=self._scheduler.was_restarted)

    def _report_job(self, tell: ReportJob, _: WaitingCaller) -> JobReportReply:
        leaving = self._scheduler.leaving_shards()
        job = checked_name("job", tell.job)
        pause = self.jobs.report(job, tell.incarnation, done=tell.done, report=tell.report, is_urgent=bool(leaving))
        return JobReportReply(leaving=leaving, pause_seconds=pause)

    def _report_event(self, tell: ReportEvent, _: WaitingCaller) -> None:
        told = tell.event
        if told.kind not in TOLD_KINDS:
            raise InvalidArgument(f"an event's kind is {quoted(told.kind)}; clients report {', '.join(TOLD_KINDS)}")
        if max(map(len, (told.text, told.snapshot, told.reason, *told.tables))) > _LONGEST_TOLD:
            raise InvalidArgument(f"an event has a text of more than {_LONGEST_TOLD} characters; shorten it")
        if told.job:
            checked_name("job", told.job)
        if (noted := self._events.append(told, key=tell.key)) is not None:
            self.jobs.apply_event(noted)

    def _create_table(self, create: CreateClusterTable, call: WaitingCaller) -> TableSpec:
        return self._scheduler.create_table(
            create.spec,
            reuse=create.reuse,
            require_current=self._require_current(create.caller, call),
            for_restore=create.for_restore,
            replace=create.replace,
        )

    def _alter_table(self, alter: AlterClusterTable, call: WaitingCaller) -> TableSpec:
        return self._scheduler.alter_table(
            alter.spec, alter.settings, require_current=self._require_current(alter.caller, call)
        )

    def _drop_table(self, drop: DropClusterTable, call: WaitingCaller) -> None:
        self._scheduler.drop_table(
            drop.table, incarnation=drop.incarnation, require_current=self._require_current(drop.caller, call)
        )

    def _publish_tables(self, publish: PublishClusterTables, call: WaitingCaller) -> None:
        if len(publish.tables) != len(publish.incarnations):
            raise ProtocolError(f"{len(publish.tables)} tables have {len(publish.incarnations)} incarnations")
        self._scheduler.publish_tables(
            dict(zip(publish.tables, publish.incarnations, strict=True)),
            require_current=self._require_current(publish.caller, call),
        )

    def _require_current(self, caller: CallContext | None, call: WaitingCaller) -> Callable[[], None]:
        """Return a check that ends a change of tables at its turn if its caller has left, or its job was taken over."""

        def require() -> None:
            call.require_waiting()
            self._streams.require_current(caller)

        return require

    def _lease_streams(self, lease: LeaseStreams, _: WaitingCaller) -> StreamLease:
        return self._streams.lease(*lease.reader, lease.num_streams, lease.num_workers, lease.data, lease.restore)

    def _renew_streams(self, renew: RenewStreams, _: WaitingCaller) -> StreamRenewal:
        return self._streams.renew(*renew.reader, renew.cursors, renew.lease_number, hold=renew.hold)

    def _release_streams(self, release: ReleaseStreams, _: WaitingCaller) -> None:
        streams = None if release.all else release.streams
        self._streams.release(
            *release.reader, release.cursors, streams, release.lease_number, lost=release.lost, done=release.done
        )
