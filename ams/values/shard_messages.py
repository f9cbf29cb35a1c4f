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
"""Lease of a freeze: it ends if its owner does not renew it, unless the shard is writing it."""
WRITE_WINDOW = 1024
"""Most writes by which a client may be ahead of its oldest unacknowledged one."""


def jobs_of(stream: str) -> Iterator[str]:
    """Yield the jobs of a stream: for ``"a/b/c"``, ``"a"``, ``"a/b"`` and ``"a/b/c"``."""
    end = stream.find("/")
    while end >= 0:
        yield stream[:end]
        end = stream.find("/", end + 1)
    yield stream


@dataclass(frozen=True, kw_only=True)
class CallContext:
    """Identity of the caller and the incarnations it expects. Travels with every request."""

    stream: str = ""
    """Name of the sequence of writes of this call; empty for reads."""
    incarnation: int = 0
    """Incarnation of the client; one lower than the shard has seen on this stream is refused."""
    sequence: int = 0
    """Number of this write in its stream, from 1; 0 for reads."""
    oldest_unacknowledged: int = 0
    """Number of the oldest unacknowledged write; the shard drops the dedup state of older ones."""
    shard_incarnation: int = 0
    """Expected incarnation of the shard; 0: any."""
    cluster_version: int = 0
    """Expected cluster version; 0: any."""
    table_incarnation: int = 0
    """Expected incarnation of the table; 0: any."""


@dataclass(frozen=True, kw_only=True)
class SyncGroup:
    """Part of one rank in a synchronous write: the shard applies all parts at once, or none."""

    job: str
    """Name of the group."""
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
    """Number of new rows; for a removal, of removed rows."""
    duplicate: bool = False
    """Whether an earlier attempt had applied the write; this reply is that attempt's."""
    incomplete: bool = False
    """Whether only a part of the write has arrived; nothing is applied yet."""


@dataclass(frozen=True, kw_only=True)
class Pulled:
    """Reply to :class:`Pull`; the rows are in its ``out``."""

    writes: int
    """Number of writes to the table on the shard."""


@dataclass(frozen=True, kw_only=True)
class TableState:
    """State of a table on a shard."""

    spec: TableSpec
    rows: int
    """Rows present on this shard."""
    memory_bytes: int
    writes: int
    """Pushes, assigns and removals applied, including those before the snapshot it was restored from."""
    staleness: tuple[int, ...] = ()
    """Histogram of the writes applied between pull and push, of pushes with ``pulled_at``: place i counts numbers of i
    bits: none, 1, 2 to 3, 4 to 7, ... Since the table was made on this shard."""
    expired: int = 0
    """Rows removed by expiry, since the table was made on this shard."""
    evicted: int = 0
    """Rows evicted for want of room, since then."""
    refused_ids: int = 0
    """Approximate number of ids that are counted and not admitted so far: see ``gt.MinCount``."""
    refused_gradients: int = 0
    """Dropped gradients of ids that were not admitted: one for each id and push, since the table was made here."""
    refused_occurrences: int = 0
    """Occurrences of those ids in those pushes."""
    next_step: int = 0
    """Largest step of any push, plus 1; 0: no push had a step, or the table does not ask for it."""


@dataclass(frozen=True, kw_only=True)
class ShardState:
    """Reply to :class:`Describe`."""

    shard: int
    incarnation: int
    cluster_version: int
    uptime_seconds: float
    unix_seconds: float = 0.0
    """Time of the shard's clock; 0: unknown."""
    row_calls: int = 0
    """Frames of row calls answered since the start."""
    memory_limit_bytes: int = 0
    """Memory limit of its tables, its part of the process's; 0: none."""
    cpu_seconds: float = 0.0
    """CPU time of its process on all cores; the same for several shards of one process."""
    tables: tuple[TableState, ...] = field(default_factory=tuple)


@dataclass(frozen=True, kw_only=True)
class Written:
    """Reply to :class:`WriteFrozen`."""

    files: tuple[str, ...]
    """Written files, each as JSON of :class:`geartrain.ams.storage.snapshot.manifest.FileEntry`."""
    deltas: tuple[str, ...] = ()
    """Tables of which only the rows written since the parent were held; all rows of the others."""
    tables: tuple[TableSpec, ...] = ()
    """Tables with their settings at the moment of the freeze."""


@dataclass(frozen=True, kw_only=True)
class Computed:
    """Reply to :class:`ComputeHosted`."""

    arrays: Arrays


@dataclass(frozen=True, kw_only=True)
class Expired:
    """Reply to :class:`Expire`."""

    position: int
    """Next position; -1: the scan is complete."""
    looked_at: int = 0
    """Rows scanned."""
    expired: int = 0
    """Rows removed, or with ``dry_run`` those that would be."""


@dataclass(frozen=True, kw_only=True)
class DataPlaneOffer:
    """Reply to :class:`OpenDataPlane`."""

    socket: str = ""
    """Name in the abstract namespace of the shard's machine."""
    secret: bytes = field(default=b"", repr=False)
    """Secret to send first, good for one connection."""
    reason: str = ""
    """Reason why there is none; the other fields are empty then."""
    port: int = 0
    """TCP port on the shard's host; 0: none."""
    uses_tls: bool = False
    """Whether TCP is encrypted, with the secret as the key."""


Reply = Done | Pulled | ShardState | Written | Computed | DataPlaneOffer | Expired


@dataclass(frozen=True, kw_only=True)
class CreateTable(Rpc[Done]):
    """Create a table. Idempotent for an equal spec."""

    spec: TableSpec
    for_restore: bool = False
    """Whether reads and writes are refused until :class:`PublishTable`."""


@dataclass(frozen=True, kw_only=True)
class AlterTable(Rpc[Done]):
    """Give an existing table other settings. Idempotent: one older than the last is ignored."""

    spec: TableSpec
    """Spec whose ``altered`` is the cluster version of the shard from then on."""
    dry_run: bool = False
    """Only raise what would be raised, and Busy where the alteration would end a freeze; change nothing."""


@dataclass(frozen=True, kw_only=True)
class DropTable(Rpc[Done]):
    """Remove a table and its rows. Idempotent."""

    table: str
    incarnation: int = 0
    """Incarnation of the table: another one of the name stays; 0: any."""


@dataclass(frozen=True, kw_only=True)
class PublishTable(Rpc[Done]):
    """Publish a restored table, once every shard has its rows. Idempotent."""

    table: str
    incarnation: int
    """Incarnation of the table: no other one of the name is published."""


@dataclass(frozen=True, kw_only=True)
class Pull(Rpc[Pulled]):
    """Read rows into ``out``; creates none."""

    table: str
    ids: Ids
    out: npt.NDArray[Any]
    """[N, D] of the table's dtype, or of 16 bits, to which float32 rows are rounded."""
    present: npt.NDArray[np.bool_] | None = None
    """[N]; if given, set to whether each row exists."""
    required_sync: SyncGroup | None = None
    """Condition of the answer: exactly the writes before ``required_sync.sequence`` are applied. None: none."""


@dataclass(frozen=True, kw_only=True)
class BatchFacts:
    """Facts about the batch of a push, for tables that ask for them."""

    occurrences: npt.NDArray[np.uint32] | None = None
    """[N], C-contiguous: occurrences of each id in the batch; None: one each."""
    step: int | None = None
    """Step of the worker, >= 0."""
    unix_seconds: float | None = None
    """Time of the worker's clock, finite and >= 0."""
    pulled_at: int | None = None
    """Writes to the table on the shard when the rows were pulled."""


@dataclass(frozen=True, kw_only=True)
class Push(Rpc[Done]):
    """Apply gradients with the table's optimizer."""

    table: str
    ids: Ids
    """Distinct ids."""
    gradients: npt.NDArray[Any]
    """[N, D], float32, float16 or bfloat16."""
    lr: float | None = None
    """Learning rate of this push; None: that of the table."""
    scale: float = 1.0
    """Factor of the gradients: clip factor times inverse loss scale."""
    optimizer_scalars: Mapping[str, float] = field(default_factory=dict)
    """Numbers of the table's optimizer that this write replaces, by name: see ``RowOptimizerSpec.for_push``."""
    group: SyncGroup | None = None
    step_goes_on: bool = False
    """Whether more pushes of the same step follow, which matters where a step moves untouched rows too."""
    batch: BatchFacts | None = None


@dataclass(frozen=True, kw_only=True)
class Assign(Rpc[Done]):
    """Overwrite rows; their slots become zero."""

    table: str
    ids: Ids
    """Distinct ids."""
    rows: npt.NDArray[Any]
    """[N, D] of the table's dtype."""


@dataclass(frozen=True, kw_only=True)
class Expire(Rpc[Expired]):
    """Scan a block of rows and remove those that a rule selects. A repeated call scans them again."""

    table: str
    position: int = 0
    """Position to start from: 0, or that of the last reply."""
    expiry: Expiry | None = None
    """Rule; None: the table's own."""
    dry_run: bool = False
    """Whether rows are only counted."""


@dataclass(frozen=True, kw_only=True)
class Remove(Rpc[Done]):
    """Remove rows: they have their initial values again, and no slots."""

    table: str
    ids: Ids
    """[N]; ids without a row are ignored."""


@dataclass(frozen=True, kw_only=True)
class Describe(Rpc[ShardState]):
    """Ask for the state of the shard and of its tables."""


@dataclass(frozen=True, kw_only=True)
class Freeze(Rpc[Done]):
    """Freeze tables for a snapshot or an export. A snapshot ends other freezes of the same tables. Writes go on.

    A repeated call renews the freeze's lease of FREEZE_LEASE_SECONDS; the owner repeats it.
    """

    snapshot_id: str
    tables: tuple[str, ...] = ()
    """Names of tables; none: all tables."""
    parent_id: str = ""
    """Snapshot since which rows are held, where the shard still knows them; empty: all rows."""
    export_root: str = ""
    """Folder of an export; empty for a snapshot. An export is refused (Busy) rather than end a freeze of the same
    tables for another purpose. One process exports into a folder, so that other freezes for it were left behind."""


@dataclass(frozen=True, kw_only=True)
class WriteFrozen(Rpc[Written]):
    """Write the frozen rows to the staging folder of the snapshot. The reply comes when all of it is on the disk."""

    snapshot_id: str
    folder: str
    """Folder as a path that is valid on client and shard alike."""
    rows_alone: bool = False
    """Whether, for an export, rows are written without optimizer state and dedup state."""


@dataclass(frozen=True, kw_only=True)
class Thaw(Rpc[Done]):
    """End the freeze of a snapshot, unless the present one is another's. Idempotent."""

    snapshot_id: str
    kept: bool
    """Whether the snapshot was completed."""


@dataclass(frozen=True, kw_only=True)
class Restore(Rpc[Done]):
    """Write this shard's rows of a snapshot into existing tables. A repeated call joins the first."""

    folder: str
    tables: tuple[str, ...]
    """Names of tables; none: only check that the snapshot's manifests and dedup state can be read."""
    incarnations: tuple[int, ...] = ()
    """Incarnation of each table: no other one of its name is written. None: any."""


@dataclass(frozen=True, kw_only=True)
class Fence(Rpc[Done]):
    """Refuse writes of the streams ``job`` and ``job/…`` with a lower incarnation from now on. Idempotent."""

    job: str
    incarnation: int
    forget: bool = True
    """Whether their dedup state is dropped too: the job goes back, and will write again."""


@dataclass(frozen=True, kw_only=True)
class HostedInputs:
    """Inputs of a hosted model, beside the rows. The model defines their names."""

    arrays: Arrays
    settings: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0
    """Seed of the model's random numbers, with the step; an unsigned 64-bit integer."""
    step: int = 0
    """Step, an unsigned 64-bit integer."""
    weight: float = 1.0
    """Factor of the gradients of an update by these inputs."""


@dataclass(frozen=True, kw_only=True)
class ComputeHosted(Rpc[Computed]):
    """Compute with a hosted model from the shard's rows; changes nothing."""

    table: str
    model: str
    operation: str
    """Operation of the model."""
    inputs: tuple[HostedInputs, ...]
    required_sync: SyncGroup | None = None
    """Condition of the answer, as of :class:`Pull`."""


@dataclass(frozen=True, kw_only=True)
class UpdateHosted(Rpc[Done]):
    """Apply a hosted model's gradients of its inputs with the table's optimizer: one write."""

    table: str
    model: str
    inputs: tuple[HostedInputs, ...]
    """Inputs of one or several batches, whose gradients are summed."""
    lr: float | None = None
    """Learning rate of this write; None: that of the table."""
    scale: float = 1.0
    """Factor of the gradients: clip factor times inverse loss scale."""
    optimizer_scalars: Mapping[str, float] = field(default_factory=dict)
    """Numbers of the table's optimizer that this write replaces, by name: see ``RowOptimizerSpec.for_push``."""
    group: SyncGroup | None = None

    step_goes_on: ClassVar[bool] = False
    """False, as a hosted model pushes all of a step at once."""


@dataclass(frozen=True, kw_only=True)
class OpenDataPlane(Rpc[DataPlaneOffer]):
    """Ask for a connection for pulls, pushes and assigns: see :mod:`geartrain.ams.rpc.client.data_plane`."""


Request = Rpc[Any]
"""Request to a shard."""
