"""Requests to a shard and its replies. Carriers move these values between a client and a shard and add nothing to them.

Shapes: N ids of one request, D = ``TableSpec.dim``. ids are int64 [N]; rows and gradients are [N, D], C-contiguous.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from geartrain.ams.values.expiry.rules import Expiry
from geartrain.ams.values.rpc import Rpc
from geartrain.ams.values.specs import Ids, TableSpec

FREEZE_LEASE_SECONDS = 30.0
"""A freeze whose owner is silent for so long is ended, unless the shard is writing it."""
WRITE_WINDOW = 1024
"""A client may be at most this many writes ahead of its oldest unacknowledged one."""


def jobs_of(stream: str) -> Iterator[str]:
    """Yield the jobs that a stream belongs to: of ``"a/b/c"``, ``"a"``, ``"a/b"`` and ``"a/b/c"``."""
    end = stream.find("/")
    while end >= 0:
        yield stream[:end]
        end = stream.find("/", end + 1)
    yield stream


@dataclass(frozen=True, kw_only=True)
class CallContext:
    """Who calls, and which past the caller believes in. Travels with every request."""

    stream: str = ""
    """Names the sequence of writes this call belongs to; empty for reads."""
    incarnation: int = 0
    """Incarnation of the client; a lower one than the shard has seen on this stream is fenced."""
    sequence: int = 0
    """Number of this write in its stream, from 1; 0 for reads."""
    oldest_unacknowledged: int = 0
    """Writes below this number are acknowledged; the shard forgets that they were applied."""
    shard_incarnation: int = 0
    """The shard the client means; 0 if it does not mind."""
    cluster_version: int = 0
    """The cluster the client means; 0 if it does not mind."""
    table_incarnation: int = 0
    """Which table of its name the client means; 0 if it does not mind."""


@dataclass(frozen=True, kw_only=True)
class SyncGroup:
    """One rank's part of a synchronous write: the shard applies all parts at once, or none."""

    job: str
    """Names the group."""
    world_size: int
    rank: int
    sequence: int
    """Number of this write within the job, equal on all ranks, from 1."""
    sample_count: int
    """Weight of this rank's gradient: the number of samples it is the mean over. 0 with no ids is allowed."""


Arrays = Mapping[str, npt.NDArray[Any]]
"""Arrays by name: vectors or matrices of float32, float64 or int64, C-contiguous."""


@dataclass(frozen=True, kw_only=True)
class Done:
    """Reply to a write."""

    created: int = 0
    """Rows that did not exist before; of a removal, those that went."""
    duplicate: bool = False
    """The write had been applied by an earlier attempt; this reply is that attempt's."""
    incomplete: bool = False
    """Only a part of the write has arrived; nothing is applied yet."""


@dataclass(frozen=True, kw_only=True)
class Pulled:
    """Reply to :class:`Pull`, whose rows are where it wants them."""

    writes: int
    """Those that the table has had on the shard."""


@dataclass(frozen=True, kw_only=True)
class TableState:
    """One table on one shard."""

    spec: TableSpec
    rows: int
    """Rows present on this shard."""
    memory_bytes: int
    writes: int
    """Pushes, assigns and removals applied, those before a snapshot that it was restored from included."""
    staleness: tuple[int, ...] = ()
    """Of pushes that say when their rows were pulled: how many came with so many writes applied in between, at place i
    those of i bits: none, 1, 2 to 3, 4 to 7, ... Since the table was made on this shard."""
    expired: int = 0
    """Rows that went by a rule, since the table was made on this shard."""
    evicted: int = 0
    """Rows that went because others needed their room, since then."""
    refused_ids: int = 0
    """Ids that pushes brought, that were counted and not admitted so far, about: see ``gt.MinCount``."""
    refused_gradients: int = 0
    """Gradients of ids that were not admitted, which were dropped: one of each id and push, since the table was made on
    this shard."""
    refused_occurrences: int = 0
    """How often those ids occurred in those pushes."""
    next_step: int = 0
    """The step after the largest that a push said; 0: none said when it was, or the table does not ask."""


@dataclass(frozen=True, kw_only=True)
class ShardState:
    """Reply to :class:`Describe`."""

    shard: int
    incarnation: int
    cluster_version: int
    uptime_seconds: float
    unix_seconds: float = 0.0
    """The shard's clock; 0: not told."""
    row_calls: int = 0
    """Frames with calls for rows that it has answered since it began."""
    memory_limit_bytes: int = 0
    """That its tables may take, its part of what its process may; 0: any number."""
    cpu_seconds: float = 0.0
    """Of all cores since its process began; several shards of one share alike."""
    tables: tuple[TableState, ...] = field(default_factory=tuple)


@dataclass(frozen=True, kw_only=True)
class Written:
    """Reply to :class:`WriteFrozen`."""

    files: tuple[str, ...]
    """The files written, each as JSON of ``storage.snapshot_manifest.FileEntry``."""
    deltas: tuple[str, ...] = ()
    """Tables of which only the rows written since the parent were held; all rows of the others."""


@dataclass(frozen=True, kw_only=True)
class Computed:
    """Reply to :class:`ComputeHosted`."""

    arrays: Arrays


@dataclass(frozen=True, kw_only=True)
class Expired:
    """Reply to :class:`Expire`."""

    position: int
    """Where to go on; -1: that was all."""
    looked_at: int = 0
    """Rows."""
    expired: int = 0
    """Of these, those that went, or would have."""


@dataclass(frozen=True, kw_only=True)
class DataPlaneOffer:
    """Reply to :class:`OpenDataPlane`."""

    socket: str = ""
    """Name in the abstract namespace of the shard's machine."""
    secret: bytes = field(default=b"", repr=False)
    """To be shown first, good for one connection."""
    reason: str = ""
    """Why there is none; the other fields are empty then."""
    port: int = 0
    """Of the shard's host, for TCP; 0: none."""
    uses_tls: bool = False
    """By TCP: encrypted, with the secret as the key."""


Reply = Done | Pulled | ShardState | Written | Computed | DataPlaneOffer | Expired


@dataclass(frozen=True, kw_only=True)
class CreateTable(Rpc[Done]):
    """Make a table. Idempotent for an equal spec."""

    spec: TableSpec
    for_restore: bool = False
    """Nobody reads or writes it before :class:`PublishTable`."""


@dataclass(frozen=True, kw_only=True)
class AlterTable(Rpc[Done]):
    """Give a living table other settings. Idempotent: an earlier one that comes late does nothing."""

    spec: TableSpec
    """Its ``altered`` is the cluster version that the shard is at from then on."""


@dataclass(frozen=True, kw_only=True)
class DropTable(Rpc[Done]):
    """Remove a table and its rows. Idempotent."""

    table: str
    incarnation: int = 0
    """Another table of the name stays; 0: whichever there is."""


@dataclass(frozen=True, kw_only=True)
class PublishTable(Rpc[Done]):
    """Open a table that was made to be restored, now that every shard has its rows. Idempotent."""

    table: str
    incarnation: int
    """No other table of the name is meant."""


@dataclass(frozen=True, kw_only=True)
class Pull(Rpc[Pulled]):
    """Read rows into ``out``; creates nothing."""

    table: str
    ids: Ids
    out: npt.NDArray[Any]
    """[N, D] of the table's dtype, or of 16 bits, to which rows of float32 are rounded."""
    present: npt.NDArray[np.bool_] | None = None
    """[N]; if given, set to whether the row exists."""
    required_sync: SyncGroup | None = None
    """If given, the shard answers only when exactly the writes before ``required_sync.sequence`` are applied."""


@dataclass(frozen=True, kw_only=True)
class BatchFacts:
    """What a push says of the batch that its gradients are of, for tables that ask for it."""

    occurrences: npt.NDArray[np.uint32] | None = None
    """[N], C-contiguous: how often each id was in the batch; None: once."""
    step: int | None = None
    """Of the worker, >= 0."""
    unix_seconds: float | None = None
    """By the worker's clock, finite and >= 0."""
    pulled_at: int | None = None
    """The writes that the table had had on the shard when the rows were pulled."""


@dataclass(frozen=True, kw_only=True)
class Push(Rpc[Done]):
    """Apply gradients with the table's optimizer."""

    table: str
    ids: Ids
    """Distinct."""
    gradients: npt.NDArray[Any]
    """[N, D], float32, float16 or bfloat16."""
    lr: float | None = None
    """Learning rate of this push; None: that of the table."""
    scale: float = 1.0
    """Multiplies the gradients: clip factor times inverse loss scale."""
    optimizer_scalars: Mapping[str, float] = field(default_factory=dict)
    """Numbers of the table's optimizer that this write replaces, by name: see ``RowOptimizerSpec.for_push``."""
    group: SyncGroup | None = None
    step_goes_on: bool = False
    """More pushes of the same step follow. It matters where a step moves untouched rows too."""
    batch: BatchFacts | None = None


@dataclass(frozen=True, kw_only=True)
class Assign(Rpc[Done]):
    """Overwrite rows; their slots become zero."""

    table: str
    ids: Ids
    """Distinct."""
    rows: npt.NDArray[Any]
    """[N, D] of the table's dtype."""


@dataclass(frozen=True, kw_only=True)
class Expire(Rpc[Expired]):
    """Look at some rows, and remove those that a rule says. Repeated, it looks at them again."""

    table: str
    position: int = 0
    """Where to begin: 0, or what the reply for the rows before said."""
    expiry: Expiry | None = None
    """None: the table's own."""
    dry_run: bool = False
    """Only count the rows."""


@dataclass(frozen=True, kw_only=True)
class Remove(Rpc[Done]):
    """Take rows out: they have their initial values again, and no slots."""

    table: str
    ids: Ids
    """[N]; those that have no row are passed over."""


@dataclass(frozen=True, kw_only=True)
class Describe(Rpc[ShardState]):
    """Ask for the state of the shard and of its tables."""


@dataclass(frozen=True, kw_only=True)
class Freeze(Rpc[Done]):
    """Hold tables as they are now, for a snapshot or an export, while writes go on. Ends other freezes of the same
    tables, unless it is for an export.

    Repeated, it renews the freeze's lease of FREEZE_LEASE_SECONDS; who holds one repeats it.
    """

    snapshot_id: str
    tables: tuple[str, ...] = ()
    """Names; none: all tables."""
    parent_id: str = ""
    """Hold only the rows written since that snapshot, where the shard still knows them; empty: all rows."""
    export_root: str = ""
    """Of an export its folder: rather than end a freeze of the same tables for anything else, be refused (Busy). One
    process exports into a folder, so that what another holds for it was left behind."""


@dataclass(frozen=True, kw_only=True)
class WriteFrozen(Rpc[Written]):
    """Write what was frozen to the staging folder of the snapshot. The reply comes when all of it is on the disk."""

    snapshot_id: str
    folder: str
    """A path that means the same folder to client and shard."""
    rows_alone: bool = False
    """Of an export: write rows without the optimizer's state, and no dedup state."""


@dataclass(frozen=True, kw_only=True)
class Thaw(Rpc[Done]):
    """End the freeze of a snapshot, if it is that one's. Idempotent."""

    snapshot_id: str
    kept: bool
    """Whether the snapshot was completed."""


@dataclass(frozen=True, kw_only=True)
class Restore(Rpc[Done]):
    """Write those rows of a snapshot that this shard owns into tables that exist. Repeated, it joins the first."""

    folder: str
    tables: tuple[str, ...]
    """None: only see whether the snapshot's manifests and dedup state can be read."""
    incarnations: tuple[int, ...] = ()
    """Of each table: no other one of its name is written to. None: whichever there are."""


@dataclass(frozen=True, kw_only=True)
class Fence(Rpc[Done]):
    """From now on refuse writes of the streams ``job`` and ``job/…`` with a lower incarnation. Idempotent."""

    job: str
    incarnation: int
    forget: bool = True
    """Also forget which of their writes were applied: the job goes back, and will write them anew."""


@dataclass(frozen=True, kw_only=True)
class HostedInputs:
    """What a hosted model computes from, beside the rows. The model says which names it takes."""

    arrays: Arrays
    settings: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0
    """Of whatever the model draws, with the step; an unsigned 64-bit integer."""
    step: int = 0
    """An unsigned 64-bit integer."""
    weight: float = 1.0
    """Multiplies the gradients of an update made of these inputs."""


@dataclass(frozen=True, kw_only=True)
class ComputeHosted(Rpc[Computed]):
    """Let a hosted model compute from the rows that the shard owns; changes nothing."""

    table: str
    model: str
    operation: str
    """One that the model offers."""
    inputs: tuple[HostedInputs, ...]
    required_sync: SyncGroup | None = None
    """As that of :class:`Pull`."""


@dataclass(frozen=True, kw_only=True)
class UpdateHosted(Rpc[Done]):
    """Apply the gradients that a hosted model makes from its inputs with the table's optimizer: one write."""

    table: str
    model: str
    inputs: tuple[HostedInputs, ...]
    """Of one or several batches, whose gradients are summed."""
    lr: float | None = None
    """Learning rate of this write; None: that of the table."""
    scale: float = 1.0
    """Multiplies the gradients: clip factor times inverse loss scale."""
    optimizer_scalars: Mapping[str, float] = field(default_factory=dict)
    """Numbers of the table's optimizer that this write replaces, by name: see ``RowOptimizerSpec.for_push``."""
    group: SyncGroup | None = None

    step_goes_on: ClassVar[bool] = False
    """A hosted model pushes all of a step at once."""


@dataclass(frozen=True, kw_only=True)
class OpenDataPlane(Rpc[DataPlaneOffer]):
    """Ask for a connection over which pulls, pushes and assigns go: see :mod:`geartrain.ams.rpc.client.data_plane`."""


Request = Rpc[Any]
"""Of a shard."""
