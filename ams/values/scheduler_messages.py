"""Requests to the scheduler and its replies, for shards and clients: plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from geartrain.ams.values.errors import ClusterNotReady
from geartrain.ams.values.placement import BucketMap, BucketShards
from geartrain.ams.values.rpc import Rpc
from geartrain.ams.values.shard_messages import CallContext
from geartrain.ams.values.specs import TableSpec
from geartrain.ams.values.text import counted

ShardCondition = Literal["up", "silent", "lost", "missing", "leaving"]
"""Up: heartbeats arrive. Silent: some are missing. Lost: none for a whole lease, or it left. Missing: no process has
registered. Leaving: it is shutting down, and waits for the snapshots of running jobs."""


@dataclass(frozen=True, kw_only=True)
class ShardEntry:
    """State of a shard at the scheduler."""

    shard: int
    address: str
    incarnation: int
    state: ShardCondition
    heartbeat_age_seconds: float


@dataclass(frozen=True, kw_only=True)
class ClusterView:
    """State of the cluster at the scheduler."""

    cluster_version: int
    num_shards: int
    ready: bool
    """Whether all shards are up."""
    shards: tuple[ShardEntry, ...]
    tables: tuple[TableSpec, ...]
    bucket_shards: BucketShards
    """[4096] uint16: shard of each bucket."""
    map_version: int
    """Version of ``bucket_shards`` among the maps of the cluster, from 1."""
    incomplete_tables: tuple[str, ...] = ()
    """Names of tables that some shard lacks, or that an interrupted change left behind."""
    restoring_tables: tuple[str, ...] = ()
    """Names of incomplete tables that are being restored, or whose restore was cut off."""
    version: str = ""
    """Build of the scheduler."""
    wire: str = ""
    """Wire version of the scheduler: see :func:`geartrain.ams.rpc.wire.require_same_wire`."""

    def require_registered(self, what: str) -> None:
        """Raise ClusterNotReady if ``what`` is unknown because shards have not registered."""
        missing = [str(entry.shard) for entry in self.shards if entry.state == "missing"]
        if missing:
            which = f"{counted(len(missing), 'shard')} of {self.num_shards} ({', '.join(missing)})"
            raise ClusterNotReady(
                f"{what} is not known yet: {which} did not register since the scheduler began; try again, or start "
                "their servers (see 'geartrain status')"
            )


class Cursor(NamedTuple):
    """Read position in a data stream: ``position`` samples of ``epoch``, both from 0."""

    epoch: int
    position: int


@dataclass(frozen=True, kw_only=True)
class StreamLease:
    """Lease of a worker's data streams."""

    epoch: int
    """Epoch of the job: streams beyond it wait."""
    lease_seconds: float
    cursors: dict[int, Cursor]
    """Where each stream that the worker holds goes on."""
    tables: tuple[str, ...] = ()
    """Those that the scheduler restores, to be opened anew with each lease."""
    lease_number: int = 0
    """Number of the lease in its job, from 1: a worker that has lost its lease gets another one."""


@dataclass(frozen=True, kw_only=True)
class StreamRenewal:
    """Reply to a worker's commit."""

    epoch: int
    """Epoch of the job: streams beyond it wait."""
    held: tuple[int, ...]
    release: tuple[int, ...]
    """Held streams that other workers lack: to be released soon."""
    can_lease: bool
    """More streams are free for this worker."""
    pause: bool = False
    """A snapshot is due: release all streams as soon as what was read of them is committed."""
    is_saved: bool = False
    """The newest snapshot of a job that the scheduler restores has all commits."""
    is_alone: bool = False
    """The worker asked to be alone, and no other one reads the job."""


@dataclass(frozen=True, kw_only=True)
class StreamHolders:
    """Workers that read a job now."""

    lease_seconds: float
    """Lease of a worker: after this long without a message it loses its streams."""
    holders: tuple[str | None, ...]
    """Worker of each stream, from 0 on; None: none. Empty if the job has no streams."""
    incarnations: dict[str, int]
    """Highest incarnation of every worker that ever had a lease."""


@dataclass(frozen=True, kw_only=True)
class Registration:
    """Reply to a shard that registers."""

    shard: int
    num_shards: int
    cluster_version: int
    lease_seconds: float
    """Lease of a shard: after this long without a heartbeat it counts as lost."""
    bucket_map: BucketMap
    """Map by which it must hold its rows."""
    highest_incarnation: int = 0
    """Highest incarnation that the scheduler has issued or seen."""
    revoked: str = ""
    """Current digest of :class:`Revoked`."""


@dataclass(frozen=True, kw_only=True)
class Register(Rpc[Registration]):
    """Register a shard. A shard also registers again with a restarted scheduler."""

    address: str
    """Address "host:port" for others."""
    shard: int | None
    """Requested shard; None: the first free one."""
    incarnation: int
    """Incarnation, chosen anew by every process."""
    cluster_version: int = 0
    """Last cluster version that it knew; 0 for a new shard."""
    heartbeat_seconds: float = 0.0
    """Interval of its heartbeats; 0: unknown."""
    tables: tuple[TableSpec, ...] = ()
    """Tables that it holds."""
    highest_incarnation: int = 0
    """Highest incarnation of a job, stream or table that it has seen."""
    restoring_tables: tuple[str, ...] = ()
    """Names of those ``tables`` that are being restored and not published."""
    bucket_map: BucketMap | None = None
    """Map by which it holds its rows, as received; None for a new shard."""
    version: str = ""
    """Build of the shard."""
    wire: str = ""
    """Wire version of the shard: see :func:`geartrain.ams.rpc.wire.require_same_wire`."""


@dataclass(frozen=True, kw_only=True)
class HeartbeatResult:
    """Reply to a heartbeat."""

    cluster_version: int
    unknown: bool = False
    """Whether the scheduler was restarted, and the shard must register again."""
    replaced: bool = False
    """Whether another process holds the shard now."""
    pool_shards: int = 0
    """Shards that are up in the memory pool of the heartbeat; 0: it named none."""
    highest_incarnation: int = 0
    """Highest incarnation, as in :class:`Registration`."""
    revoked: str = ""
    """Digest of revoked tokens, as in :class:`Registration`."""
    pause_seconds: float = 0.0
    """Shortest time until its next heartbeat; at most a third of its lease."""


@dataclass(frozen=True, kw_only=True)
class Heartbeat(Rpc[HeartbeatResult]):
    """Heartbeat of a shard."""

    shard: int
    incarnation: int
    highest_incarnation: int = 0
    """Highest incarnation, as in :class:`Register`."""
    memory_pool: str = ""
    """Name of the memory (of a machine, or a container) that its process shares with others; empty: unknown."""
    unix_seconds: float = 0.0
    """Time of its clock; 0: unknown."""
    version: str = ""
    """Build of the shard; empty: unknown."""
    wire: str = ""
    """Wire version, as in :class:`Register`."""


@dataclass(frozen=True, kw_only=True)
class Revoked:
    """Ids of revoked tokens."""

    digest: str = ""
    """Digest of the ids; empty: there are none."""
    ids: tuple[str, ...] = ()
    """Revoked ids; empty if the caller has them."""


@dataclass(frozen=True, kw_only=True)
class ReadRevoked(Rpc[Revoked]):
    """Ask for the revoked tokens."""

    known: str = ""
    """Digest of the last reply."""


@dataclass(frozen=True, kw_only=True)
class LeaveCluster(Rpc[None], name="Leave"):
    """Deregister a shard that shuts down."""

    shard: int
    incarnation: int


@dataclass(frozen=True, kw_only=True)
class SavingJobs:
    """Jobs whose snapshots a leaving shard waits for."""

    is_sure: bool
    """Whether the scheduler has run for long enough to know all jobs."""
    waiting: tuple[str, ...] = ()
    """Jobs in training."""
    saved: tuple[str, ...] = ()
    """Jobs that trained until recently: they have taken their snapshot, or ended."""


@dataclass(frozen=True, kw_only=True)
class PrepareLeave(Rpc[SavingJobs]):
    """Announce that a shard shuts down; repeated until it does. From then on the cluster is not ready."""

    shard: int
    incarnation: int


JobCondition = Literal["training", "saving", "recovering", "waiting", "ended", "stopped", "failed", "silent"]
"""Training; saving: the same while a snapshot is written; recovering: it goes back to its last snapshot; waiting: it
has saved for a leaving shard and waits for the replacement; ended; stopped: ended in good order by a signal; failed;
silent: the scheduler receives no reports."""


@dataclass(frozen=True, kw_only=True)
class JobReport:
    """Report of a job about itself."""

    state: JobCondition = "training"
    step: int = 0
    """Steps done."""
    last_step: int = 0
    """Steps at its end; 0: unknown."""
    steps_per_second: float = 0.0
    """Mean over about ten seconds, as of all rates and times below."""
    loss: float | None = None
    """Newest known loss."""
    snapshot_every_seconds: float = 0.0
    """Approximate time between two snapshots; 0: unknown."""
    lost_at_step: int | None = None
    """Steps done before this process went back to a snapshot; None: it did not."""
    metric: str = ""
    """Name of the validation metric, as ``accuracy``; empty: no validation yet."""
    metric_value: float | None = None
    """Newest value of that metric."""
    samples_per_second: float = 0.0
    pull_ms: float | None = None
    """Wait of a step for rows."""
    push_ms: float | None = None
    """Time of a step for sending its updates."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Other results of its newest validation, by name."""


@dataclass(frozen=True, kw_only=True)
class JobEntry:
    """State of a job at the scheduler."""

    job: str
    report: JobReport
    """Last report, with the state as the scheduler sees it."""
    heard_seconds_ago: float
    step_seconds_ago: float
    """Seconds since its step last rose."""
    began_seconds_ago: float = 0.0
    """Seconds since its process was first seen."""
    snapshot_step: int | None = None
    """Step of its newest complete snapshot; None: none was reported."""
    snapshot_seconds_ago: float | None = None
    snapshot_failures: Mapping[str, int]
    """Number of failed snapshots by type of the error."""
    recoveries: int = 0
    steps_lost: int = 0
    """Steps lost by all recoveries."""


@dataclass(frozen=True, kw_only=True)
class DescribeJobs(Rpc[tuple[JobEntry, ...]]):
    """Ask for the jobs that have reported, running ones first."""


@dataclass(frozen=True, kw_only=True)
class JobReportReply:
    """Reply to a job's report."""

    leaving: tuple[int, ...] = ()
    """Shards that are shutting down."""
    pause_seconds: float = 0.0
    """Time until its next report is due."""


@dataclass(frozen=True, kw_only=True)
class ReportJob(Rpc[JobReportReply]):
    """Report of a running job."""

    job: str
    incarnation: int
    """Incarnation of the job; a higher one replaces a lower one."""
    done: bool = False
    """Whether training is over: the job has ended, or taken its snapshot and waits for the replacement shards."""
    report: JobReport | None = None
    """Report; None: no report."""


@dataclass(frozen=True, kw_only=True)
class DescribeCluster(Rpc[ClusterView]):
    """Ask for the state of the cluster."""


@dataclass(frozen=True, kw_only=True)
class CreateClusterTable(Rpc[TableSpec]):
    """Create a table on all shards; the reply is the present table. Raises StaleClient after a takeover of the job."""

    spec: TableSpec
    reuse: bool = False
    """Accept an existing table that differs in settings alone; it keeps its own."""
    caller: CallContext | None = None
    for_restore: bool = False
    replace: bool = False
    """Both: see :meth:`geartrain.ams.scheduler.scheduler.Scheduler.create_table`."""


@dataclass(frozen=True, kw_only=True)
class AlterClusterTable(Rpc[TableSpec]):
    """Change ``settings`` of a table to those of ``spec``; the reply is the table. Raises StaleClient likewise."""

    spec: TableSpec
    settings: tuple[str, ...]
    caller: CallContext | None = None


@dataclass(frozen=True, kw_only=True)
class PublishClusterTables(Rpc[None]):
    """Publish restored tables, all at once. Raises as Scheduler.publish_tables, StaleClient as CreateClusterTable."""

    tables: tuple[str, ...]
    incarnations: tuple[int, ...]
    """Incarnation of each table."""
    caller: CallContext | None = None


@dataclass(frozen=True, kw_only=True)
class DropClusterTable(Rpc[None]):
    """Remove a table from all shards. Raises StaleClient as CreateClusterTable does."""

    table: str
    caller: CallContext | None = None
    incarnation: int = 0
    """Incarnation of the table: another one of the name stays; 0: any."""


@dataclass(frozen=True, kw_only=True)
class IssueIncarnation(Rpc[int]):
    """Ask for an incarnation higher than all before."""

    chosen: int = 0
    """Incarnation to record and return; 0: the scheduler chooses one."""


@dataclass(frozen=True, kw_only=True)
class CheckCaller(Rpc[None]):
    """Raise StaleClient if the caller's job or stream was taken over."""

    caller: CallContext


@dataclass(frozen=True, kw_only=True)
class FenceJob(Rpc[None]):
    """End the stream leases of a job's lower incarnations, and refuse them new ones."""

    job: str
    incarnation: int


class JobWorker(NamedTuple):
    """Worker of a job, as a reader or for its steps. A higher incarnation replaces a lower one of the same worker."""

    job: str
    worker: str
    incarnation: int


@dataclass(frozen=True, kw_only=True)
class RestoreOrder:
    """Snapshots of a job that the scheduler takes, and restores when the job has lost something: see
    :class:`geartrain.ams.scheduler.data_streams.StreamLeases`."""

    root: str
    """Local folder or URL of its own, the same on every machine."""
    tables: tuple[str, ...]
    """Names of all tables that the job trains; no other job of the cluster may."""
    every_seconds: float = 300.0
    """Between two snapshots. What was trained since the last one is trained again after a loss."""


@dataclass(frozen=True, kw_only=True)
class LeaseStreams(Rpc[StreamLease]):
    """Lease a worker's share of a job's free data streams."""

    reader: JobWorker
    num_streams: int
    """Number of streams of the job; the same in every request."""
    num_workers: int
    """Number of expected workers: streams are kept for them for one lease."""
    data: str = ""
    """A name of the data that the streams are parts of, the same in every request; empty: not said."""
    restore: RestoreOrder | None = None
    """The same in every request; None: the job is not restored by the scheduler."""


@dataclass(frozen=True, kw_only=True)
class RenewStreams(Rpc[StreamRenewal]):
    """Commit cursors and renew the lease."""

    reader: JobWorker
    cursors: Mapping[int, Cursor]
    lease_number: int = 0
    """Lease in which the cursors were read; 0: not said."""
    hold: bool = False
    """Others release their streams, until a renewal without it."""


@dataclass(frozen=True, kw_only=True)
class ReleaseStreams(Rpc[None]):
    """Commit cursors and release streams."""

    reader: JobWorker
    cursors: Mapping[int, Cursor]
    streams: tuple[int, ...] = ()
    all: bool = False
    """All of them, and the worker leaves."""
    lost: bool = False
    """It leaves in the middle of a step, part of which may have been applied."""
    done: bool = False
    """All samples of the job are committed: it is to be saved before its workers end."""
    lease_number: int = 0
    """As of :class:`RenewStreams`."""


@dataclass(frozen=True, kw_only=True)
class DescribeStreams(Rpc[dict[int, Cursor]]):
    """Ask for the committed cursor of every stream of a job."""

    job: str


@dataclass(frozen=True, kw_only=True)
class DescribeHolders(Rpc[StreamHolders]):
    """Ask for the worker of each stream of a job."""

    job: str


@dataclass(frozen=True, kw_only=True)
class RestoreStreams(Rpc[None]):
    """Reset a job to these cursors."""

    job: str
    incarnation: int
    cursors: Mapping[int, Cursor]


class SlowWorker(NamedTuple):
    """Slow worker that others may have to wait for."""

    worker: str
    done: int
    """Steps done."""
    seconds: float
    """Seconds since the last of these steps."""


@dataclass(frozen=True, kw_only=True)
class StepsDone:
    """Progress of the workers of a job."""

    done: int
    """Steps that count as done by the caller: those reported, or more, if it had lost its lease."""
    slowest: int
    """Steps of the slowest worker; at most those of the caller while the scheduler does not know all workers."""
    lease_seconds: float
    """Lease of a worker: others do not wait for one that is silent for longer."""
    slow: tuple[SlowWorker, ...] = ()
    """Slowest workers, up to eight."""


@dataclass(frozen=True, kw_only=True)
class ReportSteps(Rpc[StepsDone]):
    """Report a worker's steps, and renew its lease."""

    who: JobWorker
    done: int | None = None
    """Steps done; None: it joins, at the steps of the slowest."""


@dataclass(frozen=True, kw_only=True)
class LeaveSteps(Rpc[None]):
    """Remove a worker, so that others do not wait for it."""

    who: JobWorker


class RendezvousValue(NamedTuple):
    """Value of a key."""

    value: bytes | None = None
    """Value; None: there is none."""
    version: int = 0
    """Version chosen by its writer; 0: there is no value."""


@dataclass(frozen=True, kw_only=True)
class ReadRendezvous(Rpc[tuple[RendezvousValue, ...]]):
    """Ask for one value for each key; the processes of a job find each other by them."""

    job: str
    keys: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class WriteRendezvous(Rpc[RendezvousValue]):
    """Set, add to, or remove a value. Idempotent. The reply is the value then: written if it has this ``version``."""

    job: str
    key: str
    version: int
    """Version of the value after this write: random, not 0."""
    value: bytes | None = None
    """New value; None: remove it, or ``add``."""
    expected: int | None = None
    """Required version of the present value; 0: there must be none. None: any."""
    add: int | None = None
    """Number to add, instead of ``value``, to the present decimal number, or to 0."""


@dataclass(frozen=True, kw_only=True)
class ClusterEvent:
    """Event in the cluster. Fields that do not apply have their defaults."""

    kind: str
    text: str
    """Description in one sentence."""
    number: int = 0
    """Number of the event in the scheduler's log, from 1; 0: not recorded yet."""
    unix_seconds: float = 0.0
    """Time at which the scheduler recorded it."""
    shard: int | None = None
    job: str = ""
    tables: tuple[str, ...] = ()
    incarnation: int = 0
    """Incarnation of the shard's or the job's process."""
    step: int | None = None
    snapshot: str = ""
    """Folder or URL of the snapshot."""
    seconds: float = 0.0
    """Duration."""
    hold_seconds: float = 0.0
    """Part of ``seconds`` in which training stood still."""
    steps_lost: int = 0
    """Steps that a job repeats."""
    reason: str = ""
    """Type of the error."""


TOLD_KINDS = ("snapshot", "snapshot_failed", "restore")
"""Kinds of events that clients report; the scheduler detects the others."""


@dataclass(frozen=True, kw_only=True)
class EventPage:
    """Page of events, the oldest first."""

    events: tuple[ClusterEvent, ...]
    last: int
    """Number of the newest event of all; 0: none."""


@dataclass(frozen=True, kw_only=True)
class ReportEvent(Rpc[None]):
    """Report an event of this client. Idempotent. Raises InvalidArgument for a kind that clients do not report."""

    event: ClusterEvent
    key: int
    """Random key, the same in a retry."""


@dataclass(frozen=True, kw_only=True)
class ReadEvents(Rpc[EventPage]):
    """Ask for the events after ``since``, as many as fit into a reply."""

    since: int = 0
    """Number of an event."""
