"""Errors of Geartrain.

GeartrainError
├── InvalidArgument (ValueError)     the caller's mistake: names the value, the legal range and the remedy
│   ├── InvalidIds                   negative, out-of-range or wrongly typed ids or labels
│   ├── InvalidRows                  wrong width, shape or dtype of rows or gradients
│   ├── NonFinite                    NaN, infinity, or a value beyond the range of its type
│   │   └── TrainingDiverged         a job's values overflowed: names step, model kept, rates to try
│   └── SpecMismatch                 an existing table differs from the one asked for
├── ConfigError (ValueError)         an invalid file, flag or environment variable
│   ├── ShardHeld                    a running process holds the shard that another one wants
│   └── RunHeld                      another process trains in the run folder
├── TableExists                      create_table on a name in use without reuse=True
├── TableNotFound (LookupError)
│   └── TableBeingRestored           it cannot be read, written or opened before all of its rows are there
├── GraphNotFound (LookupError)      no graph of this table was built, or it was dropped
├── NotServed (LookupError)          a service has no such model, version or operation: names those that it has
├── Unavailable (ConnectionError)
│   ├── ShardUnavailable             a shard did not answer within recovery_timeout_seconds
│   ├── DataPortClosed               a shard answers, but its port for rows does not: names host, port and remedy
│   ├── SchedulerUnavailable
│   ├── GraphUnavailable             the graph service did not answer within recovery_timeout_seconds
│   ├── GearUnavailable              no slow gear answers for some ids within recovery_timeout_seconds
│   ├── StoreUnavailable             a key-value server did not answer
│   ├── BrokerUnavailable            no broker of a topic answered within a reader's time-out
│   ├── Busy                         a role is overloaded: says after how many seconds to retry
│   ├── StepPending                  a synchronous push waits for other ranks: clients retry
│   └── ClusterNotReady              fewer shards have registered than the cluster needs
├── AccessDenied (PermissionError)   a role refuses this to the certificate or token of this process
├── Fenced                           the caller or the shard is out of date
│   ├── StaleClient                  a newer incarnation of this client is running
│   ├── StaleCluster                 the cluster version moved on
│   ├── StaleBucketMap               a shard holds its rows by another bucket map than the cluster's
│   ├── ShardRestarted               the shard came back without the rows the client relies on
│   └── NotHolder                    another slow gear holds the partition of an id now
├── SyncError                        a sync group cannot go on
│   ├── RankMissing                  not every rank pushed in time; nothing of the step was applied
│   ├── RankLost                     a rank died, ran out of batches, or was silent too long in a collective
│   ├── StepMismatch                 a rank is at another step than its group, or pushes other gradients for one
│   ├── StepPartlyApplied            some shards applied a step, others refused it: the job goes back to a snapshot
│   └── WorkerStalled                a worker is so far behind that others waited for it too long: names it
├── SampleError                      a slow gear has no dense feature for an id: names it
│   ├── SampleNotFound (LookupError) no sample has this id
│   └── SampleDamaged                its sample cannot be decoded, or has another shape than the others
├── SourceError                      samples cannot be read: names the file or topic, and where known the row
│   ├── SourceNotFound (LookupError) there is no such file, folder or topic, or nothing in it
│   ├── ColumnMismatch (ValueError)  a column is missing, or of another type than was asked for
│   └── SourceDamaged                a file, line or message is cut or changed, or has an invalid value
├── ModuleFailed                     the module of a dense part raises for every sample: has its error
├── ModelDamaged                     a file of a saved model is missing, changed or another's: names the file
├── SnapshotError
│   ├── SnapshotDamaged              a file is missing, changed or another's: names file, shard, table and rows
│   │   └── SnapshotOfOtherFormat    written by another version of Geartrain, in a format that this one does not read
│   ├── SnapshotRefused              a role does not read or write snapshots there: names its snapshot_roots
│   ├── SnapshotFailed               a snapshot could not be written or removed; older ones are unchanged
│   │   └── SnapshotSuperseded       another snapshot of its tables was begun, or it was given up: take it again
│   └── SnapshotNotFound (LookupError)
├── StateError                       the scheduler's own state
│   ├── StateDamaged                 a file or value is changed, cut or gone: names the file and the key
│   └── StateFailed                  a change could not be written
├── OutOfMemory (MemoryError)        rows exceed the memory limit of a server, which applied nothing of the write
│   └── TableFull                    new rows of one write do not fit below the table's max_bytes, whatever is evicted
├── Cancelled                        long work was ended at its caller's request
├── ProtocolError                    bytes that are not a valid message
│   ├── MessageTooLarge
│   └── VersionMismatch              a peer speaks another wire version than the scheduler: names both builds
└── InternalError                    a bug of ours, reported by a shard
"""

from __future__ import annotations


class GeartrainError(Exception):
    """Base of every error that Geartrain raises on purpose."""


class InvalidArgument(GeartrainError, ValueError):
    """A value the caller passed is outside its legal range."""


class InvalidIds(InvalidArgument):
    """Ids or labels are negative, out of range, or not 64-bit integers."""


class InvalidRows(InvalidArgument):
    """Rows or gradients have the wrong width, shape or dtype."""


class NonFinite(InvalidArgument):
    """Rows or gradients hold NaN or infinity, overflow the type they travel in, or would carry a row beyond the range
    of its storage type.

    The first two are found before anything is sent: nothing was changed on any shard. The last only the shard that
    holds the row can see: it changed nothing, other shards may have applied their part.
    """


class TrainingDiverged(NonFinite):
    """A job's values overflowed. The model written is the best one kept, if the job keeps one."""


class SpecMismatch(InvalidArgument):
    """An existing table was created with another specification."""


class ConfigError(GeartrainError, ValueError):
    """A configuration file, flag or environment variable is invalid."""


class ShardHeld(ConfigError):
    """A running process holds the shard that a server wants, or running ones hold all of them."""


class RunHeld(ConfigError):
    """Another process trains in the run folder."""


class TableExists(GeartrainError):
    """The table name is in use and ``reuse=True`` was not given."""


class TableNotFound(GeartrainError, LookupError):
    """No table of this name exists in the cluster."""


class TableBeingRestored(TableNotFound):
    """The table is being restored from a snapshot, or its restore was cut off: it cannot be read, written or opened."""


class GraphNotFound(GeartrainError, LookupError):
    """The graph service keeps no graph of this table."""


class NotServed(GeartrainError, LookupError):
    """A service has no model, version or operation of this name. The message names those that it has."""


class Unavailable(GeartrainError, ConnectionError):
    """A role of the cluster does not answer."""


class ShardUnavailable(Unavailable):
    """A shard did not answer within ``recovery_timeout_seconds``. The message names it."""


class DataPortClosed(Unavailable):
    """A shard of another machine answers, but its port for rows cannot be reached. The message names both."""


class SchedulerUnavailable(Unavailable):
    """The scheduler did not answer."""


class GraphUnavailable(Unavailable):
    """The graph service did not answer within ``recovery_timeout_seconds``."""


class GearUnavailable(Unavailable):
    """No slow gear answered for some ids within ``recovery_timeout_seconds``."""


class StoreUnavailable(Unavailable):
    """A key-value server (Redis) did not answer. The message names its URL."""


class BrokerUnavailable(Unavailable):
    """No broker of a Kafka topic answered within the reader's time-out. The message names topic and brokers.

    Nothing is lost: the next read continues at the same place.
    """


class Busy(Unavailable):
    """A role is overloaded. Nothing of the request was done: retry after ``retry_after_seconds``.

    Clients do so by themselves, for up to ``recovery_timeout_seconds``.
    """

    def __init__(self, message: str, retry_after_seconds: float = 1.0) -> None:
        """``message`` names the overload."""
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class StepPending(Unavailable):
    """A synchronous push waits for other ranks of its group for longer than the call may take.

    The push stays at the shard, and a retry joins it. Geartrain's client retries until the group is complete or
    RankMissing ends it, so that its callers never see this.
    """


class ClusterNotReady(Unavailable):
    """Fewer shards have registered than the cluster needs."""


class AccessDenied(GeartrainError, PermissionError):
    """A role refuses the call: the certificate of this process expired or is of another role, or its token is missing,
    expired, revoked, or lacks the right."""


class Fenced(GeartrainError):
    """The caller, or the shard it calls, is out of date."""


class StaleClient(Fenced):
    """A newer incarnation of this client has taken over its stream."""


class StaleCluster(Fenced):
    """The call carries an earlier cluster version than the shard's."""


class StaleBucketMap(Fenced):
    """A shard holds its rows by another bucket map than the cluster's, so that clients would not find them there."""


class ShardRestarted(Fenced):
    """The shard was restarted since the client connected and no longer holds the client's rows."""


class NotHolder(Fenced):
    """The slow gear does not hold the partition of an id, or not any more: the scheduler knows the holder."""


class SyncError(GeartrainError):
    """A sync group cannot go on."""


class RankMissing(SyncError):
    """Not every rank of the sync group pushed within the group's time-out. Nothing of the step was applied there."""


class RankLost(SyncError):
    """A rank died, or did not answer in a collective within the time limit of its process group.

    A rank that left the loop because it had fewer batches counts as lost, too: give all ranks equally many. The others'
    part of the step is not applied; end all ranks and continue from the last snapshot.
    """


class StepMismatch(SyncError):
    """A rank is at another step than its sync group, or pushes other gradients for a step that was applied."""


class StepPartlyApplied(SyncError):
    """Some shards applied a joint step and others refused it, so that the table holds half of the step.

    No rank may train on: all ranks go back to the last snapshot. The message names the shards and the refusal, which
    is the error's ``__cause__``.
    """


class WorkerStalled(SyncError):
    """A worker waited too long for slower ones of its job, which are alive (see ``gt.SSP``): names the slowest.

    The pushes of the step are applied. Another ``step()`` continues to wait.
    """


class SampleError(GeartrainError):
    """A slow gear cannot compute the dense feature of an id. The message names the id; other ids are not touched."""

    ids: tuple[int, ...] = ()
    """Ids of the call that have no dense feature, ascending."""


class SampleNotFound(SampleError, LookupError):
    """No sample has this id."""


class SampleDamaged(SampleError):
    """The sample of an id cannot be decoded, or has another shape than the others."""


class SourceError(GeartrainError):
    """Samples cannot be read. The message names the file or topic and, where it is about one, the row."""


class SourceNotFound(SourceError, LookupError):
    """There is no such file, folder or topic, or nothing in it."""


class ColumnMismatch(SourceError, ValueError):
    """A column of a source is missing, or of another type than was asked for."""


class SourceDamaged(SourceError):
    """A file, line or message is cut, was changed, or holds an invalid value."""


class ModuleFailed(GeartrainError):
    """The user's module of a dense part raised for every sample."""


class ModelDamaged(GeartrainError):
    """A file of a saved model is missing, changed or of another model. The message names the file."""


class SnapshotError(GeartrainError):
    """A snapshot cannot be written, found or read."""


class SnapshotDamaged(SnapshotError):
    """A file of a snapshot is missing, changed, of another snapshot or of another version of Geartrain.

    The message names the file and, where it holds rows, their number, table and shard.
    """


class SnapshotOfOtherFormat(SnapshotDamaged):
    """Another version of Geartrain wrote the snapshot, in a format that this one does not read. It may be intact."""


class SnapshotRefused(SnapshotError):
    """A role does not read or write snapshots in this place, or not for another user.

    The message names its setting ``snapshot_roots``. It is the same whether or not there is anything in that place.
    """


class SnapshotFailed(SnapshotError):
    """A snapshot could not be written or removed. Older snapshots are unchanged."""


class SnapshotSuperseded(SnapshotFailed):
    """Another snapshot of the same tables was begun before this one was written, or it was given up. Take it again."""


class SnapshotNotFound(SnapshotError, LookupError):
    """No snapshot of this name exists, or none at all."""


class StateError(GeartrainError):
    """The state that a role keeps on disk cannot be read or written."""


class StateDamaged(StateError):
    """A file or value of the state is changed, cut or gone. The message names the file and, if known, the key."""


class StateFailed(StateError):
    """A change of the state could not be written. A restart may find it or not; it was not acknowledged."""


class OutOfMemory(GeartrainError, MemoryError):
    """A write exceeds the memory for rows of a server process (``server.memory_bytes``), or of the machine.

    The shard that raises this has applied nothing of it; other shards may have applied their part.
    """


class TableFull(OutOfMemory):
    """A write has more new rows than fit below the table's ``max_bytes`` beside its others: says both numbers.

    The shard that raises this has applied nothing of it, and evicted nothing.
    """


class Cancelled(GeartrainError):
    """Long work was ended at its caller's request. It can be resumed from its saved progress."""


class ProtocolError(GeartrainError):
    """Bytes that are not a valid message."""


class MessageTooLarge(ProtocolError):
    """A message is larger than the receiver accepts."""


class VersionMismatch(ProtocolError):
    """A role or client and the scheduler are incompatible versions of Geartrain."""


class InternalError(GeartrainError):
    """A defect of Geartrain itself, reported by a shard."""


def being_restored(table: str) -> TableBeingRestored:
    """Return the error of a table that is being restored."""
    return TableBeingRestored(
        f"table {table!r} is being restored from a snapshot, and cannot be read, written or opened until all of its "
        "rows are there; retry then. If the process that restored it is gone, restore the snapshot again, or drop the "
        "table"
    )


def error_named(name: str) -> type[GeartrainError]:
    """Return the error class called ``name``, or :class:`InternalError` if there is none (a newer peer's)."""
    found = globals().get(name)
    if isinstance(found, type) and issubclass(found, GeartrainError):
        return found
    return InternalError
