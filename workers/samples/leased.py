"""Samples of a job shared by many workers: each leases data streams and commits its progress."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import TracebackType
from typing import Self, TypeVar

from geartrain.ams.client.data_streams import NOTHING, Cursors, DataStreams
from geartrain.ams.observe.metrics import Metric, register_source
from geartrain.ams.values.errors import (
    Busy,
    Fenced,
    InvalidArgument,
    SchedulerUnavailable,
    SnapshotFailed,
    StaleClient,
    TableNotFound,
    Unavailable,
)
from geartrain.ams.values.scheduler_messages import StreamLease, StreamRenewal
from geartrain.ams.values.text import counted
from geartrain.workers.samples.batches import SampleBatch
from geartrain.workers.samples.reader import StreamBatches

logger = logging.getLogger(__name__)
T = TypeVar("T")
_LOST = Unavailable, Fenced, TableNotFound
"""Errors of a step where rows, or the lease, are gone."""
_POLL_SECONDS = 0.2
"""Interval of checks for something to read again."""
_RETRY_SECONDS = 0.2
_HELD_SECONDS = 0.02
"""Interval at which a worker that others are paused for asks whether it is alone."""
_INTERRUPT_SECONDS = 1.0
"""Interval at which a wait checks for an interrupt."""

_SAID_SECONDS = 10.0
"""Interval at which a wait for the scheduler is logged."""


class BusyWait:
    """A wait while the scheduler saves or restores a job, which is logged if it takes long."""

    def __init__(self) -> None:
        self._began = self._said_at = time.monotonic()

    def log(self, why: Busy) -> None:
        """Log the reason, at intervals."""
        if (now := time.monotonic()) - self._said_at >= _SAID_SECONDS:
            self._said_at = now
            logger.warning("%s (waited %.0f s; the scheduler's log says what it lacks)", why, now - self._began)


class LeasedSamples(Iterator[SampleBatch]):
    """Batches of this worker's part of a job's samples; made by ``samples.shared(cluster, ...)``.

        with samples.shared(cluster, "ctr", worker="worker-3", epochs=2) as batches:
            for batch in batches:
                ...train on it, wait for its pushes...
                batches.commit(batch)

    A sample is done once :meth:`commit` has returned; uncommitted ones are read again, here or by another worker, when
    this one dies or leaves. However many workers come and go, every sample of every epoch is committed exactly once. An
    epoch begins when all workers have ended the one before.

    One thread reads; any may commit. Cost: an RPC to the scheduler for each commit.

    With ``restore=gt.RestoreOrder(...)`` the scheduler saves the job and restores it, tables and cursors together, when
    a shard or a worker is lost. Then train on each batch in :meth:`apply`, and each sample is in the rows once.
    """

    def __init__(self, reader: StreamBatches, streams: DataStreams) -> None:
        self._reader, self._streams = reader, streams
        self._lock = threading.Condition()
        self._handed_out: deque[SampleBatch] = deque()
        """Uncommitted batches, in order."""
        self._committed: dict[int, tuple[int, int]] = {}
        self._renewal: StreamRenewal | None = None
        """Last reply of the scheduler; None: there is no lease."""
        self._spoke = 0.0
        """Time at which the lease was last renewed."""
        self._lease_seconds = 0.0
        self._handed_out_at = 0.0
        """Time at which the last batch was handed out."""
        self._committer: int | None = None
        """Thread that committed last; None: none has."""
        self._is_restored = False
        """Whether the scheduler restores the job after a loss."""
        self._applying: SampleBatch | None = None
        """Batch that is being trained on."""
        self._owes_loss = False
        """Whether a step failed in the middle, and the scheduler does not know yet."""
        self._busy: BusyWait | None = None
        """Present wait for a lease."""
        self._why_lost = ""
        self._told_at = 0.0
        """Time at which a wait for commits was last logged."""
        self._is_closed = self._is_interrupted = False
        self._is_alone = False
        """Whether :meth:`alone` has paused the other workers."""
        register_source(self)

    def metrics(self) -> Iterator[Metric]:
        """Yield the number of samples that would be read again if this process died now."""
        job, samples = self._streams.job, sum(batch.num_samples for batch in self._handed_out.copy())
        what = "Samples that were handed out and not committed."
        yield Metric("stream_uncommitted_samples", "gauge", what, ("job",), [((job,), samples)])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except (SchedulerUnavailable, StaleClient):
            if kind is None:
                raise

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> SampleBatch:
        """Return the next batch. Waits while other workers have samples of the epoch to finish.

        Raises:
            StaleClient: another process has this worker's name.
            SchedulerUnavailable: it was away for as long as a lease lasts.
            SourceError: samples cannot be read.
            BrokerUnavailable: those of a topic cannot; the loop may be entered again.
            InvalidArgument: it has waited for a third of a lease for commits, which this thread should make. Make them,
                and enter the loop again.
        """
        while self.has_more:
            if (batch := self.next_batch()) is not None:
                return batch
        raise StopIteration

    @property
    def has_more(self) -> bool:
        """Whether :meth:`next_batch` may return one."""
        return not (self._is_closed or self._is_interrupted)

    def next_batch(self, epoch: int = 0) -> SampleBatch | None:
        """Return the next batch, of any epoch; None: there is none now, after a wait of a second at most. Raises as the
        iteration does.
        """
        del epoch
        with self._lock:
            renewal = self._prepared()
            if renewal is None:
                return None  # its lease was lost, or is not available yet
            if renewal.pause:
                self._pause(renewal)
                return None
            if self._reader.is_done(renewal.epoch, lambda: self._repeated(self._streams.cursors)):
                self._end()
                return None
        batch = self._reader.next_batch(renewal.epoch)
        with self._lock:
            if self._renewal is None:
                return None  # lost meanwhile: another worker has the streams
            if batch is not None:
                self._handed_out.append(batch)
                self._handed_out_at = time.monotonic()
                return batch
            if not self._reader.has_more:
                self._wait(renewal)
        return None

    def interrupt(self) -> None:
        """End the iteration, from any thread, also one that waits for samples or for commits. Returns at once.

        Streams are kept until :meth:`close`, and batches may be committed. ``gt.prefetch`` calls it when its loop ends
        early.
        """
        self._is_interrupted = True
        if self._lock.acquire(blocking=False):
            self._lock.notify_all()
            self._lock.release()

    def apply(self, batch: SampleBatch, step: Callable[[], object]) -> bool:
        """Call ``step``, which trains on ``batch``, wait for its pushes and commit; return whether that was done.

            for batch in batches:
                batches.apply(batch, lambda: train(batch))

        False: the cluster lost something before or meanwhile, and the scheduler restores the job. The samples come
        again, here or at another worker; simply continue the loop. ``step`` starts with ``zero_grad()``, as old
        gradients are refused. Any other error of ``step`` is raised, and the job is restored, too: at the next batch,
        or when this is closed. Only for jobs with ``restore=``; pass batches in the order of the loop.

        Raises InvalidArgument: the job has none. SchedulerUnavailable: it was away for as long as a lease lasts.
        StaleClient: another process has taken this one's place.
        """
        with self._lock:
            if not self._is_restored:
                raise InvalidArgument(
                    f"apply() is for jobs that the scheduler restores: give shared(..., restore=gt.RestoreOrder(...)) "
                    f"for job {self._streams.job!r}, or commit(batch) after each step"
                )
            if not any(handed is batch for handed in self._handed_out):
                return False
            self._applying = batch
        may_retry: tuple[type[Exception], ...] = _LOST
        try:
            try:
                step()
                self._streams.finish_writes()
            except StaleClient:  # by a shard
                may_retry = ()
                self._streams.check_caller()  # raises it if this worker was superseded: each later push fails, too
                may_retry = (StaleClient,)  # of a table that the scheduler has dropped for a restore
                raise
            self.commit(batch)
            return True
        except BaseException as exc:
            with self._lock:
                self._owes_loss = True
                self._lose()
            if not isinstance(exc, may_retry):
                raise
            logger.warning("job %r loses a step and will be restored: %s", self._streams.job, exc)
            return False
        finally:
            with self._lock:
                self._applying = None
                self._lock.notify_all()

    def commit(self, batch: SampleBatch) -> None:
        """Commit the samples of ``batch``, and of all that were handed out before it. One RPC.

        A batch that was committed already is skipped, so that a call which raised SchedulerUnavailable may be repeated.
        Raises StaleClient if this worker was silent for longer than its lease (or another process has its name): the
        batch will be read again by the streams' present holder; continuing the loop leases anew.
        """
        with self._lock:
            if self._is_restored and self._applying is not batch:
                raise InvalidArgument(
                    f"the scheduler restores job {self._streams.job!r}: train on a batch in apply(batch, step), which "
                    "commits it, so that no step is there twice"
                )
            if not any(handed is batch for handed in self._handed_out):
                if getattr(batch, "is_committed_by", None) is self:
                    return
                raise StaleClient(
                    "the batch was read before this worker lost its lease, or by another reader; its samples are read "
                    "again by whoever holds their streams now"
                )
            done: list[SampleBatch] = []
            for handed in self._handed_out:
                done.append(handed)
                if handed is batch:
                    break
            cursors: dict[int, tuple[int, int]] = {}
            for handed in done:
                cursors.update(handed.cursors)
            if self._renew(cursors) is None:
                raise StaleClient(
                    f"{self._why_lost}. What this worker had read since its last commit is read again by whoever holds "
                    "the streams now"
                )
            for handed in done:
                self._handed_out.popleft()
                handed.is_committed_by = self
            self._committer = threading.get_ident()
            self._lock.notify_all()

    def cursors(self) -> dict[int, tuple[int, int]]:
        """Return the position of each stream of the job after all commits of its workers. One RPC."""
        with self._lock:
            found = self._repeated(self._streams.cursors)
        return {**dict.fromkeys(range(self._streams.num_streams), (0, 0)), **found}

    def keep(self) -> None:
        """Renew the lease, if a third of it has passed: for a worker that does something else for long. No wait."""
        with self._lock:
            if self._renewal is not None and time.monotonic() - self._spoke > self._lease_seconds / 3:
                self._renew(NOTHING)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let no other worker read while the block lasts, so that a snapshot has each batch both in the rows and in
        :meth:`cursors`, or in neither. Waits for batches of others. Enter it with this worker's batches committed;
        after :meth:`close` it does nothing.
        """
        with self._lock:
            while not (self._is_closed or self._is_interrupted):
                renewal = self._prepared()
                if renewal is None:
                    continue
                if renewal.pause:
                    self._pause(renewal)
                    continue
                renewal = self._renew(NOTHING, hold=True)
                if renewal is None or renewal.pause:
                    continue
                if renewal.is_alone:
                    self._is_alone = True
                    break
                self._lock.wait(_HELD_SECONDS)
        try:
            yield
        finally:
            with self._lock:
                self._is_alone = False
                self._renew(NOTHING)

    def require_alone(self) -> None:
        """Raise SnapshotFailed if others may have read since the block of :meth:`alone` began: to be called once the
        shards have frozen, as ``when_frozen`` of the snapshot. One RPC.
        """
        with self._lock:
            if self._is_alone and ((renewal := self._renew(NOTHING, hold=True)) is None or not renewal.is_alone):
                raise SnapshotFailed(
                    f"other workers of job {self._streams.job!r} may have trained meanwhile, as this one had lost its "
                    "lease; take it again"
                )

    def restore(self, cursors: Cursors) -> None:
        """Reset the whole job to ``cursors``: every worker leases anew. One RPC."""
        with self._lock:
            self._repeated(lambda: self._streams.restore(cursors))
            self._lose()

    def close(self) -> None:
        """Release the streams, so that others resume at once where this worker's commits end. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            has_lease = self._renewal is not None
            self._lose()
            self._reader.close()
            self._report_loss()
            if has_lease:
                self._repeated(self._streams.release)

    def _report_loss(self) -> None:
        """Have the job restored if part of a step may have been applied."""
        if self._owes_loss:
            with suppress(StaleClient):
                self._repeated(lambda: self._streams.release(lost=True))
            self._owes_loss = False

    def _prepared(self) -> StreamRenewal | None:
        """Hold a valid lease, without streams that others lack."""
        if self._renewal is None:
            if self._applying is not None:  # its pushes must not reach the tables that are opened with the lease
                self._lock.wait(_INTERRUPT_SECONDS)
                return None
            self._report_loss()
            try:
                lease = self._repeated(self._leased)
            except Busy as exc:
                self._busy = self._busy or BusyWait()
                self._busy.log(exc)
                self._lock.wait(_POLL_SECONDS)
                return None
            self._busy = None
            self._is_restored = bool(lease.tables)
            self._spoke, self._lease_seconds = time.monotonic(), lease.lease_seconds
            self._reader.drop(list(self._reader.positions))
            self._handed_out.clear()
            self._committed = dict(lease.cursors)
            self._reader.add(lease.cursors)
            self._renewal = StreamRenewal(epoch=lease.epoch, held=tuple(lease.cursors), release=(), can_lease=False)
            self._record_starts()
        elif time.monotonic() - self._spoke > self._lease_seconds / 3:
            self._renew(NOTHING)
        if self._renewal is not None and self._renewal.release:
            self._release()
        if self._renewal is not None and self._renewal.can_lease and self._applying is None:
            self._lease_more()
        return self._renewal

    def _leased(self) -> StreamLease:
        """A lease; where all is done it orders no restore, for the tables of a job that has ended may be gone."""
        at = self._streams.cursors()
        is_done = bool(at) and self._reader.is_done(min(epoch for epoch, _ in at.values()), lambda: at)
        return self._streams.lease(orders_restore=not is_done)

    def _pause(self, renewal: StreamRenewal) -> None:
        """Wait, as a snapshot is due, for the commits of all handed-out batches, then release everything."""
        if self._handed_out:
            self._wait(renewal)
            return
        at = self._reader.positions
        ended = {stream: position for stream, position in at.items() if position != self._committed[stream]}
        with suppress(StaleClient):
            self._repeated(lambda: self._streams.release(None, ended))
        self._lose()

    def _end(self) -> None:
        """Close, as all samples are committed. A job that the scheduler restores is saved first: after the close,
        nobody reads again the samples that a restore loses.
        """
        renewal = self._renew(NOTHING) if self._is_restored else None
        if self._is_restored and renewal is None:
            return  # the job went back meanwhile
        if renewal is None or renewal.is_saved:
            with suppress(StaleClient):  # if the job goes back, it is to where it is
                self.close()
            return
        if (now := time.monotonic()) - self._told_at > self._lease_seconds:
            self._told_at = now
            logger.info("job %r is done, and ends once the scheduler has saved it", self._streams.job)
        with suppress(StaleClient):
            self._repeated(lambda: self._streams.release(done=True))
        self._lose()

    def _release(self) -> None:
        """Release streams that others lack: those without uncommitted samples."""
        assert self._renewal is not None
        asked = set(self._renewal.release) - {stream for batch in self._handed_out for stream in batch.cursors}
        if asked:
            at = self._reader.positions
            ended = {stream: at[stream] for stream in asked if at[stream] != self._committed[stream]}
            try:
                self._repeated(lambda: self._streams.release(sorted(asked), ended))
            except StaleClient:
                self._lose()
                return
            self._reader.drop(asked)
            for stream in asked:
                del self._committed[stream]
            self._renew(NOTHING)

    def _lease_more(self) -> None:
        try:
            lease = self._repeated(self._streams.lease)
        except Busy:  # the next commit reports why
            assert self._renewal is not None
            self._renewal = replace(self._renewal, can_lease=False)
            return
        self._spoke = time.monotonic()
        known = self._reader.positions
        # With a lease that ended unnoticed some are lost, reset, or read by another worker meanwhile.
        if any(lease.cursors.get(stream) != self._committed[stream] for stream in known):
            self._lose()
            return
        new = {stream: cursor for stream, cursor in lease.cursors.items() if stream not in known}
        self._reader.add(new)
        self._committed.update(new)
        self._renewal = StreamRenewal(epoch=lease.epoch, held=tuple(lease.cursors), release=(), can_lease=False)
        self._record_starts()

    def _record_starts(self) -> None:
        """Commit the reader's start, if it differs from the streams' cursors: "latest" must not move."""
        behind = {stream for batch in self._handed_out for stream in batch.cursors}
        moved = {
            stream: at
            for stream, at in self._reader.positions.items()
            if stream not in behind and at != self._committed[stream]
        }
        if moved:
            self._renew(moved)

    def _wait(self, renewal: StreamRenewal) -> None:
        """Wait, as there is nothing to read now, and report that to the scheduler."""
        if self._handed_out:
            self._lock.wait(min(_INTERRUPT_SECONDS, self._lease_seconds / 3))
            now, behind = time.monotonic(), counted(len(self._handed_out), "batch", "batches")
            if (
                self._handed_out
                and self._applying is None
                and now - max(self._handed_out_at, self._told_at) > self._lease_seconds / 3
            ):
                self._told_at = now
                if self._committer in (None, threading.get_ident()):  # no other thread will
                    raise InvalidArgument(
                        f"all samples that this worker may read now were handed out, and {behind} not committed; call "
                        "commit(batch) when a batch is done, the last one of an epoch before asking for the next"
                    )
                logger.warning("job %r: the next epoch waits for the commits of %s", self._streams.job, behind)
            return
        positions = self._reader.positions
        ended = {stream: at for stream, at in positions.items() if at != self._committed.get(stream)}
        found = self._renew(ended)
        if found is not None and found.epoch == renewal.epoch and not found.can_lease:
            self._lock.wait(min(_POLL_SECONDS, self._lease_seconds / 10))

    def _renew(self, cursors: Cursors, *, hold: bool = False) -> StreamRenewal | None:
        """Commit, and renew the lease; None: it was lost."""
        if self._renewal is None:
            return None
        number = self._streams.lease_number  # another thread may lease anew while the scheduler is away
        try:
            self._renewal = self._repeated(lambda: self._streams.commit(cursors, lease_number=number, hold=hold))
        except StaleClient as exc:
            logger.warning(
                "%s (%s handed out and not committed)", exc, counted(len(self._handed_out), "batch", "batches")
            )
            self._why_lost = str(exc)
            self._lose()
            return None
        self._spoke = time.monotonic()
        self._committed.update({int(stream): (int(at[0]), int(at[1])) for stream, at in cursors.items()})
        return self._renewal

    def _lose(self) -> None:
        self._renewal = None
        self._handed_out.clear()
        self._lock.notify_all()

    def _repeated(self, call: Callable[[], T]) -> T:
        """Call the scheduler; retry while it is away, for as long as a lease lasts, or as a restoring one may need."""
        until = time.monotonic() + max(self._lease_seconds, self._streams.patience_seconds)
        while True:
            try:
                return call()
            except SchedulerUnavailable:
                if time.monotonic() > until or self._is_interrupted:
                    raise
                self._lock.wait(_RETRY_SECONDS)
