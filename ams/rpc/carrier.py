"""What a carrier is: the way from a client to one shard, or to the scheduler."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from geartrain.ams.values.errors import ClusterNotReady
from geartrain.ams.values.messages import CallContext, Reply, Request
from geartrain.ams.values.placement import BucketShards
from geartrain.ams.values.specs import TableSpec
from geartrain.ams.values.text import counted


class AttemptFailed(Exception):
    """One attempt did not come back: whether the shard saw the request is unknown. The caller may retry."""


class NotSent(AttemptFailed):
    """No connection came about, or none was tried: nobody has seen the request."""


class NobodyThere(NotSent):
    """The connection was refused, or there is no such host: no process listens at the address."""


ShardCondition = Literal["up", "silent", "lost", "missing"]
"""Heartbeats arrive; some are missing; none for a whole lease, or it left; no process has registered."""


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
    incomplete_tables: tuple[str, ...] = ()
    """Names of tables that some shard does not hold any more, or that a change which was cut off left behind."""
    restoring_tables: tuple[str, ...] = ()
    """Those of them that are being restored, or whose restore was cut off."""

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


@dataclass(frozen=True, kw_only=True)
class StreamHolders:
    """Who reads a job now."""

    lease_seconds: float
    """A worker that is silent for so long loses its streams."""
    holders: tuple[str | None, ...]
    """The worker of each stream, from 0 on; None: nobody. Empty if the job has no streams."""
    incarnations: dict[str, int]
    """The highest of every worker that ever had a lease."""


class ShardCarrier(Protocol):
    """The way to one shard. Thread-safe."""

    def submit(
        self, context: CallContext, request: Request, timeout_seconds: float | None, *, alone: bool = False
    ) -> Future[Reply]:
        """Send a request. The arrays of the request stay the caller's and must not change until the future is done.

        With ``alone`` the caller has nothing to send beside it, so that the carrier may finish it on this thread,
        before it returns: that saves the changes of thread. The future holds the reply (a pull's rows are then in
        ``request.out``), the shard's GeartrainError, or AttemptFailed if no reply came within ``timeout_seconds``.
        """

    def close(self) -> None:
        """Release the connection. Idempotent."""


class SchedulerCarrier(Protocol):
    """The way to the scheduler. Thread-safe; every call may raise a GeartrainError or AttemptFailed."""

    def describe(self, timeout_seconds: float | None) -> ClusterView:
        """Return the cluster as it is now."""

    def create_table(
        self,
        spec: TableSpec,
        *,
        reuse: bool,
        timeout_seconds: float | None,
        caller: CallContext | None = None,
        for_restore: bool = False,
        replace: bool = False,
    ) -> TableSpec:
        """Make a table on all shards; return its spec with its incarnation. Raises StaleClient if ``caller`` is of a
        job that was taken over. ``for_restore`` and ``replace`` are those of :meth:`Scheduler.create_table`.
        """

    def publish_tables(
        self, tables: Mapping[str, int], timeout_seconds: float | None, *, caller: CallContext | None = None
    ) -> None:
        """Open restored tables, by name with their incarnations, all at once. Raises as
        :meth:`Scheduler.publish_tables`, StaleClient as :meth:`create_table`.
        """

    def drop_table(
        self, table: str, timeout_seconds: float | None, *, caller: CallContext | None = None, incarnation: int = 0
    ) -> None:
        """Remove a table from all shards; another one of the name than ``incarnation`` stays, 0: whichever there is.
        Raises StaleClient as :meth:`create_table`.
        """

    def take_incarnation(self, chosen: int, timeout_seconds: float | None) -> int:
        """Return an incarnation higher than all before; if ``chosen`` is not 0, note that one and return it."""

    def check_caller(self, caller: CallContext, timeout_seconds: float | None) -> None:
        """Raise StaleClient if the caller's job or stream was taken over."""

    def fence_job(self, job: str, incarnation: int, timeout_seconds: float | None) -> None:
        """End the stream leases of a job's lower incarnations, and give them no more."""

    def lease_streams(
        self,
        job: str,
        worker: str,
        incarnation: int,
        *,
        num_streams: int,
        num_workers: int,
        timeout_seconds: float | None,
    ) -> StreamLease:
        """Take a worker's share of a job's free data streams."""

    def renew_streams(
        self, job: str, worker: str, incarnation: int, cursors: Mapping[int, Cursor], timeout_seconds: float | None
    ) -> StreamRenewal:
        """Commit cursors and prolong the lease."""

    def release_streams(
        self,
        job: str,
        worker: str,
        incarnation: int,
        cursors: Mapping[int, Cursor],
        streams: Sequence[int] | None,
        timeout_seconds: float | None,
    ) -> None:
        """Commit cursors and give streams back; None: all, and the worker leaves."""

    def stream_cursors(self, job: str, timeout_seconds: float | None) -> dict[int, Cursor]:
        """Return the committed cursor of every stream of a job."""

    def stream_holders(self, job: str, timeout_seconds: float | None) -> StreamHolders:
        """Return who holds which stream of a job."""

    def restore_streams(
        self, job: str, incarnation: int, cursors: Mapping[int, Cursor], timeout_seconds: float | None
    ) -> None:
        """Put a job back to these cursors."""

    def close(self) -> None:
        """Release the connection. Idempotent."""


def gather(futures: Sequence[Future[Any]]) -> Future[list[Any]]:
    """Return a future of all results in order, done when every one is; it holds the first error if any failed."""
    joint: Future[list[Any]] = Future()
    remaining = len(futures)
    lock = threading.Lock()

    def one_done(_: Future[Any]) -> None:
        nonlocal remaining
        with lock:
            remaining -= 1
            if remaining:
                return
        error = next((e for future in futures if (e := future.exception()) is not None), None)
        if error is not None:
            joint.set_exception(error)
        else:
            joint.set_result([future.result() for future in futures])

    for future in futures:
        future.add_done_callback(one_done)
    if not futures:
        joint.set_result([])
    return joint
