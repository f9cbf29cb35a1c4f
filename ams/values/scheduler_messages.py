"""What is asked of the scheduler and what it replies, by shards and by clients: plain values."""

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
"""Heartbeats arrive; some are missing; none for a whole lease, or it left; no process has registered; it was told to
end, and waits for the snapshots of running jobs."""


@dataclass(frozen=True, kw_only=True)
class ShardEntry:
    """What the scheduler knows of one shard."""

    shard: int
    address: str
    incarnation: int
    state: ShardCondition
    heartbeat_age_seconds: float


@dataclass(frozen=True, kw_only=True)
class ClusterView:
    """The cluster as the scheduler sees it."""

    cluster_version: int
    num_shards: int
    ready: bool
    """All shards are up."""
    shards: tuple[ShardEntry, ...]
    tables: tuple[TableSpec, ...]
    bucket_shards: BucketShards
    """[4096] uint16: the shard of each bucket."""
    map_version: int
    """Of ``bucket_shards``: counts the maps of the cluster, from 1."""
    incomplete_tables: tuple[str, ...] = ()
    """Names of tables that some shard does not hold any more, or that a change which was cut off left behind."""
    restoring_tables: tuple[str, ...] = ()
    """Those of them that are being restored, or whose restore was cut off."""
    version: str = ""
    """The scheduler's build of Geartrain."""
    wire: str = ""
    """The scheduler's: see :func:`geartrain.ams.rpc.wire.require_same_wire`."""

    def require_registered(self, what: str) -> None:
        """Raise ClusterNotReady if ``what`` is not known because shards have not registered."""
        missing = [str(entry.shard) for entry in self.shards if entry.state == "missing"]
        if missing:
            which = f"{counted(len(missing), 'shard')} of {self.num_shards} ({', '.join(missing)})"
            raise ClusterNotReady(
                f"{what} is not known yet: {which} did not register since the scheduler began; try again, or start "
                "their servers (see 'geartrain status')"
            )


class Cursor(NamedTuple):
    """How far a data stream was read: ``position`` samples of ``epoch``, both from 0."""

    epoch: int
    position: int


@dataclass(frozen=True, kw_only=True)
class StreamLease:
    """What a worker may read."""

    epoch: int
    """The job's: streams beyond it wait."""
    lease_seconds: float
    cursors: dict[int, Cursor]
    """Where each stream that the worker holds goes on."""
    tables: tuple[str, ...] = ()
    """Those that the scheduler restores, to be opened anew with each lease."""


@dataclass(frozen=True, kw_only=True)
class StreamRenewal:
    """What a worker learns when it commits."""

    epoch: int
    """The job's: streams beyond it wait."""
    held: tuple[int, ...]
    release: tuple[int, ...]
    """Of those held, the ones that other workers lack: to be released soon."""
    can_lease: bool
    """More streams are free for this worker."""
    pause: bool = False
    """A snapshot is due: release all streams as soon as what was read of them is committed."""


@dataclass(frozen=True, kw_only=True)
class StreamHolders:
    """Who reads a job now."""

    lease_seconds: float
    """A worker that is silent for so long loses its streams."""
    holders: tuple[str | None, ...]
    """The worker of each stream, from 0 on; None: nobody. Empty if the job has no streams."""
    incarnations: dict[str, int]
    """The highest of every worker that ever had a lease."""


@dataclass(frozen=True, kw_only=True)
class Registration:
    """What a shard learns when it joins."""

    shard: int
    num_shards: int
    cluster_version: int
    lease_seconds: float
    """A shard that sends no heartbeat for this long counts as lost."""
    bucket_map: BucketMap
    """By which it is to hold its rows."""
    highest_incarnation: int = 0
    """That the scheduler has given out or heard of."""
    revoked: str = ""
    """The digest of :class:`Revoked` as it is now."""


@dataclass(frozen=True, kw_only=True)
class Register(Rpc[Registration]):
    """A shard joins. Also how a shard introduces itself to a scheduler that was restarted."""

    address: str
    """host:port at which others reach the shard."""
    shard: int | None
    """The shard it wants to be; None: the first that is free."""
    incarnation: int
    """Chosen anew by every process."""
    cluster_version: int = 0
    """The one it last knew; 0 for a new shard."""
    heartbeat_seconds: float = 0.0
    """How often it means to send heartbeats; 0: not said."""
    tables: tuple[TableSpec, ...] = ()
    """Those it holds."""
    highest_incarnation: int = 0
    """Of a job, stream or table that it has seen."""
    restoring_tables: tuple[str, ...] = ()
    """Names of those of ``tables`` that are being restored and not published."""
    bucket_map: BucketMap | None = None
    """By which it holds its rows, as it was given it; None for a new shard."""
    version: str = ""
    """Its build of Geartrain."""
    wire: str = ""
    """Its own: see :func:`geartrain.ams.rpc.wire.require_same_wire`."""


@dataclass(frozen=True, kw_only=True)
class Beat:
    """What a shard learns from a heartbeat."""

    cluster_version: int
    unknown: bool = False
    """The scheduler was restarted: register again."""
    replaced: bool = False
    """Another process holds the shard now."""
    pool_shards: int = 0
    """Living shards in the memory pool that the heartbeat named; 0: it named none."""
    highest_incarnation: int = 0
    """As in :class:`Registration`."""
    revoked: str = ""
    """As in :class:`Registration`."""
    pause_seconds: float = 0.0
    """So long, at least, until its next one; a third of its lease at most."""


@dataclass(frozen=True, kw_only=True)
class Heartbeat(Rpc[Beat]):
    """A shard lives."""

    shard: int
    incarnation: int
    highest_incarnation: int = 0
    """As in :class:`Register`."""
    memory_pool: str = ""
    """A name of the memory (of a machine, or a container) that its process shares with others; empty: not said."""
    unix_seconds: float = 0.0
    """Its clock; 0: not said."""
    version: str = ""
    """Of Geartrain; empty: not said."""
    wire: str = ""
    """As in :class:`Register`."""


@dataclass(frozen=True, kw_only=True)
class Revoked:
    """The ids of tokens that are believed no more."""

    digest: str = ""
    """Of the ids; empty: there are none."""
    ids: tuple[str, ...] = ()
    """None, if who asked for them knows them."""


@dataclass(frozen=True, kw_only=True)
class ReadRevoked(Rpc[Revoked]):
    """A role asks which tokens the scheduler believes no more."""

    known: str = ""
    """The digest of those that it was told last."""


@dataclass(frozen=True, kw_only=True)
class LeaveCluster(Rpc[None], name="Leave"):
    """A shard goes in good order."""

    shard: int
    incarnation: int


@dataclass(frozen=True, kw_only=True)
class JobsToAsk:
    """Whose snapshots a shard waits for before it leaves."""

    is_sure: bool
    """The scheduler was not restarted so recently that a job may be unheard."""
    waiting: tuple[str, ...] = ()
    """Jobs that train."""
    saved: tuple[str, ...] = ()
    """Jobs that trained until a moment ago: they have taken their snapshot, or ended."""


@dataclass(frozen=True, kw_only=True)
class PrepareLeave(Rpc[JobsToAsk]):
    """A shard wants to leave; repeated until it does. From then on the cluster is not ready."""

    shard: int
    incarnation: int


JobCondition = Literal["training", "saving", "recovering", "waiting", "ended", "stopped", "failed", "silent"]
"""Trains; the same while a snapshot is written; goes back to its last snapshot; has saved for a shard that leaves, and
waits for what takes its place; ended; ended by a signal in good order; failed; is not heard (the scheduler says)."""


@dataclass(frozen=True, kw_only=True)
class JobReport:
    """What a job says of itself."""

    state: JobCondition = "training"
    step: int = 0
    """Steps that it has done."""
    last_step: int = 0
    """Steps at its end; 0: not said."""
    steps_per_second: float = 0.0
    """Over about ten seconds, as all that follows by time."""
    loss: float | None = None
    """The newest that is known."""
    snapshot_every_seconds: float = 0.0
    """Between two snapshots, about; 0: not said."""
    lost_at_step: int | None = None
    """It went back to a snapshot in this process, and had done so many steps before."""
    metric: str = ""
    """Name of the metric of its validation, as ``accuracy``; empty: it was not validated yet."""
    metric_value: float | None = None
    """Its newest value."""
    samples_per_second: float = 0.0
    pull_ms: float | None = None
    """Of a step: waiting for rows."""
    push_ms: float | None = None
    """Of a step: sending what becomes of them."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What else its newest validation found, by name."""


@dataclass(frozen=True, kw_only=True)
class JobEntry:
    """What the scheduler knows of one job."""

    job: str
    report: JobReport
    """The last one; its state as the scheduler sees it."""
    heard_seconds_ago: float
    step_seconds_ago: float
    """Since its step last rose."""
    began_seconds_ago: float = 0.0
    """Since its process was first heard of."""
    snapshot_step: int | None = None
    """Of its newest whole snapshot; None: none was heard of."""
    snapshot_seconds_ago: float | None = None
    snapshot_failures: Mapping[str, int]
    """How often no snapshot came, by type of the error."""
    recoveries: int = 0
    steps_lost: int = 0
    """By all of these."""


@dataclass(frozen=True, kw_only=True)
class DescribeJobs(Rpc[tuple[JobEntry, ...]]):
    """Ask for the jobs that have told, those under way first."""


@dataclass(frozen=True, kw_only=True)
class HeardJob:
    """What a job learns when it tells."""

    leaving: tuple[int, ...] = ()
    """Shards that want to leave."""
    pause_seconds: float = 0.0
    """After so long its next word is due."""


@dataclass(frozen=True, kw_only=True)
class TellJob(Rpc[HeardJob]):
    """A job trains."""

    job: str
    incarnation: int
    """A higher one takes the place of a lower one."""
    done: bool = False
    """It trains no more: it has ended, or taken its snapshot and waits for the shards that follow."""
    report: JobReport | None = None
    """None: not said."""


@dataclass(frozen=True, kw_only=True)
class DescribeCluster(Rpc[ClusterView]):
    """Ask for the cluster as it is now."""


@dataclass(frozen=True, kw_only=True)
class CreateClusterTable(Rpc[TableSpec]):
    """Make a table on all shards; the reply is the table as it is now. Raises StaleClient if ``caller`` is of a job
    that was taken over."""

    spec: TableSpec
    reuse: bool = False
    """Accept an existing table that differs in settings alone; it keeps its own."""
    caller: CallContext | None = None
    for_restore: bool = False
    replace: bool = False
    """Both as of :meth:`geartrain.ams.scheduler.scheduler.Scheduler.create_table`."""


@dataclass(frozen=True, kw_only=True)
class AlterClusterTable(Rpc[TableSpec]):
    """Give a living table the ``settings`` of ``spec``; the reply is the table as it is now. Raises StaleClient as for
    a creation."""

    spec: TableSpec
    settings: tuple[str, ...]
    caller: CallContext | None = None


@dataclass(frozen=True, kw_only=True)
class PublishClusterTables(Rpc[None]):
    """Open restored tables, all at once. Raises as Scheduler.publish_tables, StaleClient as for a creation."""

    tables: tuple[str, ...]
    incarnations: tuple[int, ...]
    """Of each."""
    caller: CallContext | None = None


@dataclass(frozen=True, kw_only=True)
class DropClusterTable(Rpc[None]):
    """Remove a table from all shards. Raises StaleClient as for a creation."""

    table: str
    caller: CallContext | None = None
    incarnation: int = 0
    """Another table of the name stays; 0: whichever there is."""


@dataclass(frozen=True, kw_only=True)
class TakeIncarnation(Rpc[int]):
    """Ask for an incarnation higher than all before."""

    chosen: int = 0
    """If not 0, this one is noted and returned."""


@dataclass(frozen=True, kw_only=True)
class CheckCaller(Rpc[None]):
    """Raise StaleClient if the caller's job or stream was taken over."""

    caller: CallContext


@dataclass(frozen=True, kw_only=True)
class FenceJob(Rpc[None]):
    """End the stream leases of a job's lower incarnations, and give them no more."""

    job: str
    incarnation: int


class JobWorker(NamedTuple):
    """Who reads, or does steps of a job. A higher incarnation takes the place of a lower one of the same worker."""

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
    """Take a worker's share of a job's free data streams."""

    reader: JobWorker
    num_streams: int
    """Of the job; the same in every request."""
    num_workers: int
    """That will come: streams are kept for them for one lease."""
    data: str = ""
    """A name of the data that the streams are parts of, the same in every request; empty: not said."""
    restore: RestoreOrder | None = None
    """The same in every request; None: the job is not restored by the scheduler."""


@dataclass(frozen=True, kw_only=True)
class RenewStreams(Rpc[StreamRenewal]):
    """Commit cursors and prolong the lease."""

    reader: JobWorker
    cursors: Mapping[int, Cursor]


@dataclass(frozen=True, kw_only=True)
class ReleaseStreams(Rpc[None]):
    """Commit cursors and give streams back."""

    reader: JobWorker
    cursors: Mapping[int, Cursor]
    streams: tuple[int, ...] = ()
    all: bool = False
    """All of them, and the worker leaves."""
    lost: bool = False
    """It leaves in the middle of a step, part of which may have been applied."""


@dataclass(frozen=True, kw_only=True)
class DescribeStreams(Rpc[dict[int, Cursor]]):
    """Ask for the committed cursor of every stream of a job."""

    job: str


@dataclass(frozen=True, kw_only=True)
class DescribeHolders(Rpc[StreamHolders]):
    """Ask who holds which stream of a job."""

    job: str


@dataclass(frozen=True, kw_only=True)
class RestoreStreams(Rpc[None]):
    """Put a job back to these cursors."""

    job: str
    incarnation: int
    cursors: Mapping[int, Cursor]


class SlowWorker(NamedTuple):
    """One that others may have to wait for."""

    worker: str
    done: int
    """Steps."""
    seconds: float
    """Since it had done these."""


@dataclass(frozen=True, kw_only=True)
class StepsDone:
    """How far the workers of a job are."""

    done: int
    """Steps that the asker counts as having done: what it told, or more, if it had lost its lease."""
    slowest: int
    """Those of the slowest; where the scheduler does not know of all workers yet, no more than those."""
    lease_seconds: float
    """A worker that tells nothing for so long is waited for no more."""
    slow: tuple[SlowWorker, ...] = ()
    """Of the slowest, up to eight."""


@dataclass(frozen=True, kw_only=True)
class TellSteps(Rpc[StepsDone]):
    """Say how many steps a worker has done, and prolong its lease."""

    who: JobWorker
    done: int | None = None
    """None: it joins, at the steps of the slowest."""


@dataclass(frozen=True, kw_only=True)
class LeaveSteps(Rpc[None]):
    """Have nobody wait for a worker any more."""

    who: JobWorker


class RendezvousValue(NamedTuple):
    """What is under a key."""

    value: bytes | None = None
    """None: nothing."""
    version: int = 0
    """What its writer called it; 0: there is nothing."""


@dataclass(frozen=True, kw_only=True)
class ReadRendezvous(Rpc[tuple[RendezvousValue, ...]]):
    """Ask for values by which the processes of a job find each other, one for each key."""

    job: str
    keys: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class WriteRendezvous(Rpc[RendezvousValue]):
    """Set, add to, or remove one. Idempotent. The reply is what there is then: written, if it has this ``version``."""

    job: str
    key: str
    version: int
    """What this write calls what it leaves: random, not 0."""
    value: bytes | None = None
    """None: remove it, or ``add``."""
    expected: int | None = None
    """Write only if this is its version; 0: only if there is nothing. None: whatever there is."""
    add: int | None = None
    """Instead of ``value``: to the decimal number that is there, or to 0."""


@dataclass(frozen=True, kw_only=True)
class ClusterEvent:
    """What happened in the cluster. What it is not about has its default."""

    kind: str
    text: str
    """One sentence."""
    number: int = 0
    """Counts the events of the scheduler's log, from 1; 0: not noted yet."""
    unix_seconds: float = 0.0
    """When the scheduler noted it."""
    shard: int | None = None
    job: str = ""
    tables: tuple[str, ...] = ()
    incarnation: int = 0
    """Of the shard's or the job's process."""
    step: int | None = None
    snapshot: str = ""
    """Folder or URL."""
    seconds: float = 0.0
    """How long it took, or lasted."""
    hold_seconds: float = 0.0
    """Of these: for so long training stood still."""
    steps_lost: int = 0
    """That a job had done and does again."""
    reason: str = ""
    """Type of the error."""


TOLD_KINDS = ("snapshot", "snapshot_failed", "restore")
"""Of events that clients tell; the scheduler sees the others by itself."""


@dataclass(frozen=True, kw_only=True)
class EventPage:
    """Some events, the oldest first."""

    events: tuple[ClusterEvent, ...]
    last: int
    """Number of the newest of all; 0: none."""


@dataclass(frozen=True, kw_only=True)
class TellEvent(Rpc[None]):
    """Say what this client has done. Idempotent. Raises InvalidArgument for a kind that clients do not tell."""

    event: ClusterEvent
    key: int
    """Random; the same when it is told again."""


@dataclass(frozen=True, kw_only=True)
class ReadEvents(Rpc[EventPage]):
    """Ask for the events behind ``since``, as many as go into a reply."""

    since: int = 0
    """Number of an event."""
