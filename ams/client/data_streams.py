"""Data streams of a job for one worker: leases, commits of cursors, and release."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from geartrain.ams.rpc.carrier import AttemptFailed, SchedulerCarrier
from geartrain.ams.values.errors import (
    Busy,
    ClusterNotReady,
    InvalidArgument,
    SchedulerUnavailable,
    ShardRestarted,
    StaleClient,
    TableNotFound,
)
from geartrain.ams.values.rpc import Rpc
from geartrain.ams.values.scheduler_messages import (
    Cursor,
    DescribeHolders,
    DescribeStreams,
    JobWorker,
    LeaseStreams,
    ReleaseStreams,
    RenewStreams,
    RestoreOrder,
    RestoreStreams,
    StreamHolders,
    StreamLease,
    StreamRenewal,
)

R = TypeVar("R")
Cursors = Mapping[int, tuple[int, int]] | Mapping[str, Sequence[int]]
"""(epoch, position) by stream, as returned by this module or as read back from JSON."""
NOTHING: Mapping[int, tuple[int, int]] = {}


class DataStreams:
    """Data streams of a job, leased by one worker. Thread-safe. Each call is one RPC to the scheduler; :meth:`lease` of
    a named stream is two.

    A lease lasts ``lease_seconds`` from the last call; call :meth:`commit` at least every third of that. After
    SchedulerUnavailable a call may be repeated. StaleClient means that the streams belong to this worker no more:
    discard data read since the last commit, then :meth:`lease` again or end, as its message says.
    """

    def __init__(
        self,
        scheduler: SchedulerCarrier,
        job: str,
        worker: str,
        incarnation: int,
        *,
        num_streams: int,
        num_workers: int,
        data: str = "",
        restore: RestoreOrder | None = None,
        timeout_seconds: float,
        patience_seconds: float,
        latest: dict[JobWorker, DataStreams],
        reopen: Callable[[Sequence[str]], None],
        finish_writes: Callable[[], None],
        check_caller: Callable[[], None],
    ) -> None:
        """``latest`` maps each worker name to the object of this process that leased last by it; other ones are stale.
        ``reopen`` makes this process continue with the present tables; ``finish_writes`` waits for pushes.
        ``check_caller`` raises StaleClient if another process has taken over the stream under which this one writes.
        """
        self._scheduler = scheduler
        self._reader = JobWorker(job, worker, incarnation)
        self.num_streams = num_streams
        self._lease = LeaseStreams(
            reader=self._reader, num_streams=num_streams, num_workers=num_workers, data=data, restore=restore
        )
        self.patience_seconds = patience_seconds if restore is not None else 0.0
        """Wait for a scheduler that does not answer, if a lease does not say another."""
        self._reopen, self.finish_writes, self.check_caller = reopen, finish_writes, check_caller
        self._timeout_seconds = timeout_seconds
        self._latest = latest
        self._has_leased = False
        self.lease_number = 0
        """That of the last lease, by which the scheduler knows commits of an earlier one; 0: there was none."""

    @property
    def job(self) -> str:
        """Name of the job that owns the streams."""
        return self._reader.job

    def lease(self, *, orders_restore: bool = True) -> StreamLease:
        """Lease this worker's share of the free streams; return all streams it holds, with their cursors.

        Read a stream from its cursor on; if its epoch is beyond the job's, wait until :meth:`commit` returns that
        epoch. If the scheduler restores the job, the restored tables are reopened here. Raises Busy while the job is
        being saved or restored: retry. ``orders_restore=False``: a job that the scheduler does not restore (any more)
        is left so. Raises StaleClient if another process has this worker's name, or that of its writes.
        """
        if not self._has_leased:
            self._has_leased, self._latest[self._reader] = True, self
        self.check_caller()  # or each step would be refused, and have a restored job go back
        lease = self._call(self._lease if orders_restore else replace(self._lease, restore=None))
        self.lease_number = lease.lease_number
        if lease.tables:
            try:
                self._reopen(lease.tables)
            except (TableNotFound, ShardRestarted, ClusterNotReady) as exc:  # rows were lost once more
                raise Busy(f"the tables of job {self.job!r} are not all there yet: {exc}") from exc
        return lease

    def commit(
        self, cursors: Cursors = NOTHING, *, lease_number: int | None = None, hold: bool = False
    ) -> StreamRenewal:
        """Commit how far these streams were read, all or nothing, and renew the lease.

        A stream that ended epoch e is committed as ``(e + 1, 0)``. The reply lists streams to release if other workers
        have too few, and says whether there are more to lease. ``lease_number``: of the lease in which they were read;
        None: the last one. With ``hold`` all other workers release their streams, once nothing is due of the scheduler,
        until this one commits without it; the reply says when it is alone. Raises StaleClient if that lease has ended.
        """
        number = self.lease_number if lease_number is None else lease_number
        renew = RenewStreams(reader=self._reader, cursors=_checked(cursors), lease_number=number, hold=hold)
        return self._call(renew)

    def release(
        self,
        streams: Sequence[int] | None = None,
        cursors: Cursors = NOTHING,
        *,
        lost: bool = False,
        done: bool = False,
    ) -> None:
        """Commit ``cursors``, then release ``streams``; None: all of them, as a worker that leaves does.

        ``lost``: the worker leaves in the middle of a step, so that a job restored by the scheduler goes back.
        ``done``: all samples of the job are committed: the scheduler saves it; :meth:`lease` raises Busy until then.
        """
        self._call(
            ReleaseStreams(
                reader=self._reader,
                cursors=_checked(cursors),
                streams=tuple(streams or ()),
                all=streams is None,
                lost=lost,
                done=done,
                lease_number=self.lease_number,
            )
        )

    def cursors(self) -> dict[int, Cursor]:
        """Return the committed cursor of every stream of the job, for a snapshot; nothing before the first lease."""
        return self._call(DescribeStreams(job=self._reader.job))

    def holders(self) -> StreamHolders:
        """Return which worker holds each stream of the job now; none before the first lease."""
        return self._call(DescribeHolders(job=self._reader.job))

    def has_others(self) -> bool:
        """Return whether other processes have leased streams of the job, and may again: a restore fences them off."""
        return bool({*self.holders().incarnations.values()} - {self._reader.incarnation})

    def restore(self, cursors: Cursors) -> None:
        """Reset the job to ``cursors``, one for each stream: ends every lease and fences off lower incarnations.

        Call it before the workers go on; it may be repeated.
        """
        reader = self._reader
        self._call(RestoreStreams(job=reader.job, incarnation=reader.incarnation, cursors=_checked(cursors)))

    def _call(self, request: Rpc[R]) -> R:
        if self._has_leased and self._latest.get(self._reader) is not self:
            raise StaleClient(
                f"worker {self._reader.worker!r} of job {self._reader.job!r} was opened a second time, and the second "
                "reader holds its streams now: use that one, or give each reader a worker name of its own"
            )
        try:
            return self._scheduler.call(request, self._timeout_seconds)
        except AttemptFailed as exc:
            raise SchedulerUnavailable(f"{exc}; it may have been done, repeat it: that does no harm") from None


def _checked(cursors: Cursors) -> dict[int, Cursor]:
    try:
        checked = {int(stream): Cursor(int(epoch), int(position)) for stream, (epoch, position) in cursors.items()}
        for stream, cursor in checked.items():
            if min(stream, *cursor) < 0:
                raise ValueError(f"{stream}: {tuple(cursor)} is below 0")
    except (TypeError, ValueError) as exc:
        raise InvalidArgument(f"cursors map a stream to (epoch, position), numbers from 0 on: {exc}") from exc
    return checked
