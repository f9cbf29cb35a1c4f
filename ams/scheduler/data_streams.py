"""Data streams: leases of a job's data to its workers, with committed cursors.

A job's data are a fixed number of logical streams, however many workers read them. A worker leases streams, reads from
their cursors on and commits its progress; a stream that it releases, or loses with its lease, another worker resumes
from the last committed cursor. So each position is with at most one worker at a time, and is committed once.

A cursor is (epoch, position). A stream that has ended epoch e is at (e + 1, 0) and is not read before all streams have
ended e: every epoch is exact, and the job's epoch is the lowest of its streams. Its holder keeps it meanwhile.

A job may ask the scheduler to restore it. Then a snapshot is taken while no worker reads, so that its rows match its
cursors; a worker lost while it holds streams, or rows lost with a shard, return tables and cursors to the newest
snapshot. Here is recorded what is due; :mod:`geartrain.launch.connected.restorer` carries it out.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal, NamedTuple

from geartrain.ams.scheduler.incarnations import Incarnations
from geartrain.ams.scheduler.pauses import PauseDetector
from geartrain.ams.scheduler.state import key_of
from geartrain.ams.storage.kv.store import KeyValueStore
from geartrain.ams.values.arguments import checked_name
from geartrain.ams.values.errors import Busy, GeartrainError, InvalidArgument, StaleClient
from geartrain.ams.values.scheduler_messages import Cursor, RestoreOrder, StreamHolders, StreamLease, StreamRenewal
from geartrain.ams.values.shard_messages import CallContext, jobs_of

MAX_STREAMS = 4096
MAX_READ = 2**62
"""Largest epoch or position of a cursor."""
_MAX_GONE = 256
"""Workers without a lease that a job remembers: containers make new names for each process."""
_KIND, _FENCE = "streams", "fence"
_BUSY_SECONDS = 0.2
Due = Literal["", "snapshot", "restore"]
"""Action that the scheduler owes a job before reading continues."""


class RestoredJob(NamedTuple):
    """A job that the scheduler restores."""

    order: RestoreOrder
    number: int
    """Number of the order, stored in its snapshots: it tells those of an earlier job of the name apart."""
    due: Due
    is_read: bool
    """Whether a worker has a lease."""


@dataclass(frozen=True)
class _Worker:
    incarnation: int
    deadline: float
    """End of its lease."""
    lease_number: int


@dataclass
class _Job:
    cursors: list[Cursor]
    holders: list[str | None]
    workers: dict[str, _Worker] = field(default_factory=dict)
    """Workers with a lease."""
    last_lease: int = 0
    """Highest number of a lease."""
    incarnations: dict[str, int] = field(default_factory=dict)
    """Highest incarnation of each worker with a lease, and of the last that had one; newest at the end."""
    data: str = ""
    """Name of the data, as the first worker gave it."""
    expected_workers: int = 1
    expected_until: float = float("-inf")
    """Time until which streams are reserved for ``expected_workers``, though fewer have come."""
    restore: RestoreOrder | None = None
    order_number: int = 0
    due: Due = ""
    is_saved: bool = False
    """Whether its newest snapshot has all commits."""
    held_for: str = ""
    """Worker that is alone, or waits to be: no other one leases streams."""

    def copy(self) -> _Job:
        job = replace(self, cursors=list(self.cursors), holders=list(self.holders))
        job.workers, job.incarnations = dict(self.workers), dict(self.incarnations)
        return job

    @property
    def epoch(self) -> int:
        return min(cursor.epoch for cursor in self.cursors)

    def held_by(self, worker: str) -> list[int]:
        return [stream for stream, holder in enumerate(self.holders) if holder == worker]

    @property
    def free(self) -> list[int]:
        """Free streams, those to be read now first."""
        nobody = [stream for stream, holder in enumerate(self.holders) if holder is None]
        return sorted(nobody, key=lambda stream: self.cursors[stream].epoch)

    def drop(self, worker: str) -> None:
        self.workers.pop(worker, None)
        self.held_for = "" if self.held_for == worker else self.held_for
        self.holders = [None if holder == worker else holder for holder in self.holders]

    def lose(self, worker: str) -> None:
        """Drop a worker that ended without release. The rows may contain part of its reads."""
        must_go_back = self.restore is not None and worker in self.holders
        self.drop(worker)
        if must_go_back:
            self.revoke_leases()

    def revoke_leases(self) -> None:
        """End every lease: no worker reads before tables and cursors are restored."""
        self.due, self.held_for, self.holders = "restore", "", [None] * len(self.holders)
        self.workers.clear()

    def record_lease(self, worker: str, incarnation: int) -> None:
        """Record a worker with a lease; of those without one the earliest is forgotten."""
        self.incarnations.pop(worker, None)
        self.incarnations[worker] = incarnation
        gone = [name for name in self.incarnations if name not in self.workers]
        for name in gone[: max(0, len(gone) - _MAX_GONE)]:
            del self.incarnations[name]

    def share(self, worker: str, now: float) -> int:
        """Return the number of streams a worker should hold: an even share, or one more."""
        count = max(len(self.workers), self.expected_workers if now < self.expected_until else 0)
        least, more = divmod(len(self.cursors), count)
        # Workers that hold most keep the odd ones, so that the fewest move.
        held = Counter(self.holders)
        order = sorted(self.workers, key=lambda name: (-held[name], name))
        return least + (order.index(worker) < more)


class StreamLeases:
    """Data streams of all jobs. Thread-safe. Results and acknowledgements were first written to the store."""

    def __init__(
        self,
        store: KeyValueStore,
        lease_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        incarnations: Incarnations | None = None,
    ) -> None:
        """Load the state in ``store``; every worker has a whole lease from now.

        ``incarnations`` records those that callers chose; None: that of the store.
        """
        self.lease_seconds = lease_seconds
        self.can_restore = False
        """Whether a restorer carries out what is due, and the store is durable."""
        self._refusals: dict[str, GeartrainError] = {}
        """Error that prevented the first snapshot, by job."""
        self._incarnations = Incarnations(store) if incarnations is None else incarnations
        self._store = store
        self._clock = clock
        self._stops = PauseDetector(lease_seconds / 4, clock, self._extend_all)
        self._lock = threading.Lock()
        self._jobs: dict[str, _Job] = {}
        self._fences: dict[str, int] = {}
        """Lowest incarnation that may take part, by job."""
        for key, value in store.read_all().items():
            if key.startswith(f"{_FENCE}/"):
                fence = json.loads(value)
                self._fences[fence["job"]] = fence["incarnation"]
                self._incarnations.record_seen(fence["incarnation"])  # a shard may have reported a higher one before
            if key.startswith(f"{_KIND}/"):
                name, job = _from_json(value, clock() + lease_seconds)
                self._jobs[name] = job
                self._incarnations.record_seen(max(job.incarnations.values(), default=0))

    def pulse(self) -> None:
        """Record that the scheduler runs. To be called several times a lease, or never."""
        with self._lock:
            self._stops.pulse()

    def lease(
        self,
        job: str,
        worker: str,
        incarnation: int,
        num_streams: int = 64,
        num_workers: int = 1,
        data: str = "",
        restore: RestoreOrder | None = None,
    ) -> StreamLease:
        """Lease a worker its share of the free streams; return all that it holds, at their committed cursors.

        While the first lease lasts, ``num_workers`` have streams reserved. A higher incarnation of a worker replaces
        a lower one. The error that prevented the job's first snapshot is raised once, by the next lease.

        Raises:
            StaleClient: A higher incarnation of the worker or job is known.
            InvalidArgument: An argument is not valid, ``data`` is not the job's, or ``restore`` cannot be carried out:
                it names another root or other tables than the job's, or those of another job.
            Busy: A snapshot or restore of the job is due, or another worker saves it.
        """
        checked_name("job", job)
        checked_name("worker", worker)
        if data:
            checked_name("data", data)
        with self._lock:
            self._incarnations.check(f"incarnation of worker {worker!r}", incarnation)
            changed = self._current(job, num_streams)
            if len(changed.cursors) != num_streams:
                raise InvalidArgument(
                    f"num_streams is {num_streams}, job {job!r} has {len(changed.cursors)}; keep that number for the "
                    "life of a job, or choose another job name"
                )
            if data and changed.data not in ("", data):
                raise InvalidArgument(
                    f"worker {worker!r} reads data {data!r}, job {job!r} has {changed.data!r}: all workers of a job "
                    "read the same, in the same order. Give the same files and settings, or choose another job name"
                )
            if num_workers < 1:
                raise InvalidArgument(f"num_workers is {num_workers} for worker {worker!r}; it must be >= 1")
            self._require_current(job, changed, worker, incarnation)
            if (refusal := self._refusals.pop(job, None)) is not None:
                raise refusal
            if restore not in (None, changed.restore):
                self._order(job, changed, restore)
            self._incarnations.record_chosen("incarnation", incarnation)
            changed.data = changed.data or data
            known = changed.workers.get(worker)
            if known is not None and known.incarnation < incarnation:
                changed.lose(worker)
            if changed.due or changed.held_for not in ("", worker):
                changed.record_lease(worker, incarnation)
                self._commit(job, changed)
                what = "goes back to its newest snapshot" if changed.due == "restore" else "is saved"
                raise Busy(f"job {job!r} {what}: its streams are leased again after that", _BUSY_SECONDS)
            now = self._clock()
            if not changed.workers:
                changed.expected_until = now + self.lease_seconds
            changed.expected_workers = num_workers
            held = changed.workers.get(worker)
            number = changed.last_lease + 1 if held is None else held.lease_number
            changed.last_lease = max(changed.last_lease, number)
            changed.workers[worker] = _Worker(incarnation, now + self.lease_seconds, number)
            changed.record_lease(worker, incarnation)
            if len(changed.workers) >= num_workers:
                changed.expected_until = float("-inf")  # all have come
            missing = changed.share(worker, now) - len(changed.held_by(worker))
            for stream in changed.free[: max(0, missing)]:
                changed.holders[stream] = worker
            self._commit(job, changed)
            cursors = {stream: changed.cursors[stream] for stream in changed.held_by(worker)}
            tables = changed.restore.tables if changed.restore else ()
            return StreamLease(
                epoch=changed.epoch,
                lease_seconds=self.lease_seconds,
                cursors=cursors,
                tables=tables,
                lease_number=number,
            )

    def renew(
        self,
        job: str,
        worker: str,
        incarnation: int,
        cursors: Mapping[int, Cursor],
        lease_number: int = 0,
        *,
        hold: bool = False,
    ) -> StreamRenewal:
        """Commit a worker's progress, all or nothing, and renew its lease. With ``hold`` the others are paused, if
        nothing is due, until it renews without.

        Raises StaleClient (the worker has lost the lease of this number, or was superseded; nothing is committed),
        InvalidArgument.
        """
        with self._lock:
            changed = self._committed(job, worker, incarnation, cursors, lease_number)
            if hold and not changed.due:
                changed.held_for = changed.held_for or worker
            elif not hold and changed.held_for == worker:
                changed.held_for = ""
            self._commit(job, changed)
            held, share = changed.held_by(worker), changed.share(worker, self._clock())
            is_paused = changed.due == "snapshot" or changed.held_for not in ("", worker)
            surplus = max(0, len(held) - share)
            # Ended ones first: they are not being read.
            by_use = sorted(held, key=lambda stream: (-changed.cursors[stream].epoch, -stream))
            return StreamRenewal(
                epoch=changed.epoch,
                held=tuple(held),
                release=() if is_paused else tuple(sorted(by_use[:surplus])),
                can_lease=len(held) < share and bool(changed.free) and not (is_paused or changed.held_for),
                pause=is_paused,
                is_saved=changed.is_saved,
                is_alone=changed.held_for == worker and len(changed.workers) == 1,
            )

    def release(
        self,
        job: str,
        worker: str,
        incarnation: int,
        cursors: Mapping[int, Cursor],
        streams: Sequence[int] | None = None,
        lease_number: int = 0,
        *,
        lost: bool = False,
        done: bool = False,
    ) -> None:
        """Commit ``cursors``, then release ``streams``; None: all, and the worker leaves, if ``lost`` in the middle of
        a step. ``done``: nothing is left to read, so that a job which the scheduler restores is to be saved. Raises as
        :meth:`renew`."""
        with self._lock:
            changed = self._committed(job, worker, incarnation, cursors, lease_number)
            if lost:
                changed.lose(worker)
            elif streams is None:
                changed.drop(worker)
            for stream in streams or ():
                self._require_held(job, changed, worker, stream)
                changed.holders[stream] = None
            if done and changed.restore is not None and not changed.due and not changed.is_saved:
                changed.due = "snapshot"
            self._commit(job, changed)

    def cursors(self, job: str) -> dict[int, Cursor]:
        """Return the committed cursor of every stream; empty if the job has none."""
        with self._lock:
            known = self._jobs.get(job)
            return {} if known is None else dict(enumerate(known.cursors))

    def holders(self, job: str) -> StreamHolders:
        """Return the holder of each stream; workers whose lease has ended hold none."""
        with self._lock:
            if job not in self._jobs:
                return StreamHolders(lease_seconds=self.lease_seconds, holders=(), incarnations={})
            now = self._current(job)
            return StreamHolders(
                lease_seconds=self.lease_seconds, holders=tuple(now.holders), incarnations=dict(now.incarnations)
            )

    def readers(self) -> dict[str, tuple[int, int, int]]:
        """Return, for each job that is read: its workers, its epoch, and unread streams of that epoch."""
        with self._lock:
            found, now = {}, self._clock()
            for name, job in self._jobs.items():
                live = {worker for worker, held in job.workers.items() if held.deadline >= now}
                left = [cursor for cursor, by in zip(job.cursors, job.holders, strict=True) if by not in live]
                if live:
                    found[name] = (len(live), job.epoch, sum(cursor.epoch == job.epoch for cursor in left))
            return found

    def restore(self, job: str, incarnation: int, cursors: Mapping[int, Cursor]) -> None:
        """Reset a job to ``cursors``, one for each stream from 0 on, and end every lease.

        Fences off lower incarnations. Raises StaleClient, InvalidArgument.
        """
        if not 1 <= len(cursors) <= MAX_STREAMS or set(cursors) != set(range(len(cursors))):
            raise InvalidArgument(
                f"cursors are of streams {sorted(cursors)}; there must be one for each stream 0 … n − 1, n in "
                f"[1, {MAX_STREAMS}]"
            )
        checked_name("job", job)
        ordered = [cursors[stream] for stream in range(len(cursors))]
        epoch = min(cursor.epoch for cursor in ordered)
        for stream, cursor in enumerate(ordered):
            _check_cursor(stream, cursor)
            if cursor.position < 0 or cursor.epoch < 0 or (cursor.epoch != epoch and cursor != (epoch + 1, 0)):
                raise InvalidArgument(
                    f"cursor {tuple(cursor)} of stream {stream} fits no epoch: others are in epoch {epoch}, and a "
                    f"stream that ended it is at ({epoch + 1}, 0)"
                )
        with self._lock:
            self._require_fence(job, incarnation)
            self._incarnations.record_chosen("incarnation", incarnation)
            known = self._jobs.get(job)
            restored = _Job(ordered, [None] * len(ordered))
            if known is not None:
                restored.incarnations = {name: at for name, at in known.incarnations.items() if at >= incarnation}
                restored.data = known.data
                restored.last_lease = known.last_lease
                restored.restore, restored.order_number, restored.due = known.restore, known.order_number, known.due
            self._commit(job, restored, fence=incarnation)

    def _order(self, job: str, changed: _Job, restore: RestoreOrder | None) -> None:
        """Make the scheduler restore the job from now on: first it is saved. Raises InvalidArgument."""
        assert restore is not None
        said = f"job {job!r} asks the scheduler to restore it"
        if not self.can_restore:
            raise InvalidArgument(
                f"{said}, and this one keeps nothing: start it with --data FOLDER, or take and restore snapshots with "
                "cluster.snapshot() and cluster.restore()"
            )
        if not restore.tables or not 0 < restore.every_seconds < float("inf"):
            raise InvalidArgument(
                f"{said} with tables {restore.tables!r} every {restore.every_seconds} s; name all tables that it "
                "trains, and a number of seconds > 0"
            )
        before = changed.restore
        if before is not None and (before.root, before.tables) != (restore.root, restore.tables):
            raise InvalidArgument(
                f"{said} to {restore.root!r} with tables {restore.tables!r}; other workers said {before.root!r} and "
                f"{before.tables!r}. Give all of them the same, or choose another job name"
            )
        for other, its in self._jobs.items():
            if other == job or its.restore is None:
                continue
            if its.restore.root == restore.root:
                raise InvalidArgument(
                    f"{said} to {restore.root!r}, where job {other!r} has its snapshots; give a folder of its own"
                )
            if shared := set(its.restore.tables).intersection(restore.tables):
                raise InvalidArgument(
                    f"{said} with table {min(shared)!r}, which goes back with job {other!r}: a table belongs to one "
                    "job. Give tables of its own, or drop those of the other job once it has ended"
                )
        if before is None:
            changed.due, changed.order_number = "snapshot", self._incarnations.next()
        changed.restore = restore

    def restored_jobs(self) -> dict[str, RestoredJob]:
        """Return the jobs that the scheduler restores, with the action due."""
        with self._lock:
            jobs = {name: self._current(name) for name, job in list(self._jobs.items()) if job.restore is not None}
        return {
            name: RestoredJob(job.restore, job.order_number, job.due, bool(job.workers))
            for name, job in jobs.items()
            if job.restore is not None
        }

    def set_due(self, job: str, due: Due) -> None:
        """Set a job's due action; one that is already due comes first. ``""``: it was saved."""
        with self._lock:
            changed = self._current(job)
            if changed.due == "restore":
                return
            changed.due = due
            if due == "restore":
                changed.revoke_leases()
            self._commit(job, changed)

    def record_saved(self, job: str, cursors: Mapping[int, Cursor]) -> None:
        """Record the ``cursors`` of a job's newest snapshot."""
        with self._lock:
            changed = self._current(job)
            changed.is_saved = dict(enumerate(changed.cursors)) == cursors
            self._commit(job, changed)

    def restore_cursors(self, job: str, cursors: Mapping[int, Cursor]) -> None:
        """Let a job's workers continue, after a restore of its tables, from the ``cursors`` of the same snapshot."""
        with self._lock:
            changed = self._current(job)
            changed.cursors, changed.due = [cursors[stream] for stream in range(len(cursors))], ""
            changed.is_saved = True
            self._commit(job, changed)

    def stop_restoring(self, job: str, why: GeartrainError | None = None) -> None:
        """Stop restoring a job; one of its workers gets the error ``why``."""
        with self._lock:
            changed = self._current(job)
            changed.restore, changed.due = None, ""
            if why is not None:
                self._refusals[job] = why
            self._commit(job, changed)

    def fence(self, job: str, incarnation: int) -> None:
        """Fence off workers of a lower incarnation of ``job`` and ``job/…``, and end their leases.

        Raises StaleClient if a higher incarnation did so before.
        """
        checked_name("job", job)
        with self._lock:
            self._require_fence(job, incarnation)
            self._incarnations.record_chosen("incarnation", incarnation)
            self._commit(job, None, fence=incarnation)
            for name in [name for name in self._jobs if job in jobs_of(name)]:
                changed = self._jobs[name].copy()
                for worker in [name for name, held in changed.workers.items() if held.incarnation < incarnation]:
                    changed.lose(worker)
                self._commit(name, changed)

    def require_current(self, caller: CallContext | None) -> None:
        """Raise StaleClient if a named caller's job was taken over."""
        if caller is not None and caller.stream:
            with self._lock:
                self._require_fence(caller.stream, caller.incarnation)

    def _current(self, job: str, num_streams: int = 0) -> _Job:
        """Return a copy of the job without workers whose lease has ended; a new one if it is not known."""
        self._stops.notice()
        known = self._jobs.get(job)
        if known is None:
            if not job or not 1 <= num_streams <= MAX_STREAMS:
                raise InvalidArgument(f"job {job!r} needs a name and 1 … {MAX_STREAMS} streams, not {num_streams}")
            return _Job([Cursor(0, 0)] * num_streams, [None] * num_streams)
        changed, now = known.copy(), self._clock()
        late = [name for name, worker in changed.workers.items() if worker.deadline < now]
        for name in late:
            changed.lose(name)
        if late:  # stored before the answer: a restart must not return the streams to them
            self._commit(job, changed.copy())
        return changed

    def _extend_all(self) -> None:
        deadline = self._clock() + self.lease_seconds
        for job in self._jobs.values():
            job.workers = {name: replace(worker, deadline=deadline) for name, worker in job.workers.items()}

    def _committed(
        self, job: str, worker: str, incarnation: int, cursors: Mapping[int, Cursor], lease_number: int
    ) -> _Job:
        if job not in self._jobs:
            raise StaleClient(f"job {job!r} has no streams (its scheduler may have lost them); lease streams again")
        changed = self._current(job)
        self._require_current(job, changed, worker, incarnation)
        held = changed.workers.get(worker)
        if held is None or held.incarnation != incarnation:
            raise StaleClient(
                f"worker {worker!r} of job {job!r} holds no lease any more: it was silent for "
                f"{self.lease_seconds:g} s, or the job went back. Its streams go on from their last committed "
                "cursors; lease streams again"
            )
        if lease_number not in (0, held.lease_number):
            raise StaleClient(
                f"lease {lease_number} of worker {worker!r} of job {job!r} has ended, and it has lease "
                f"{held.lease_number} now: its streams went back to their last committed cursors meanwhile; go on from "
                "those of the new lease"
            )
        epoch = changed.epoch
        for stream, cursor in cursors.items():
            self._require_held(job, changed, worker, stream)
            _check_cursor(stream, cursor)
            before = changed.cursors[stream]
            is_next = cursor.epoch == epoch or cursor == (epoch + 1, 0)
            if cursor < before or not is_next:
                raise InvalidArgument(
                    f"cursor {tuple(cursor)} of stream {stream} does not follow {tuple(before)}: positions go up, the "
                    f"job is in epoch {epoch}, and a stream that has ended it is at ({epoch + 1}, 0)"
                )
            changed.cursors[stream], changed.is_saved = cursor, False
        changed.workers[worker] = replace(held, deadline=self._clock() + self.lease_seconds)
        return changed

    @staticmethod
    def _require_held(job: str, changed: _Job, worker: str, stream: int) -> None:
        if not 0 <= stream < len(changed.holders):
            raise InvalidArgument(f"stream {stream} of job {job!r} is not in [0, {len(changed.holders)})")
        holder = changed.holders[stream]
        if holder != worker:
            by = "nobody" if holder is None else f"worker {holder!r}"
            raise StaleClient(f"stream {stream} of job {job!r} is held by {by}, not by {worker!r}; lease streams again")

    def _require_current(self, job: str, changed: _Job, worker: str, incarnation: int) -> None:
        self._require_fence(job, incarnation)
        latest = changed.incarnations.get(worker, 0)
        if incarnation < latest:
            raise StaleClient(
                f"incarnation {incarnation} of worker {worker!r} of job {job!r} was superseded by {latest}: another "
                "process reads in its place; stop this one"
            )

    def _require_fence(self, job: str, incarnation: int) -> None:
        fenced = max(jobs_of(job), key=lambda name: self._fences.get(name, 0))
        fence = self._fences.get(fenced, 0)
        if incarnation < max(fence, 1):
            raise StaleClient(
                f"incarnation {incarnation} of job {job!r} was superseded by {fence} of {fenced!r}: the job was taken "
                "over; stop this process"
            )

    def _commit(self, name: str, job: _Job | None, *, fence: int | None = None) -> None:
        """Write these changes, then publish them."""
        changes: dict[str, bytes | None] = {}
        if job is not None:
            changes[key_of(_KIND, name)] = _to_json(name, job)
        shadowed: list[str] = []
        if fence is not None:
            changes[key_of(_FENCE, name)] = json.dumps({"job": name, "incarnation": fence}).encode()
            # A job's fence covers those of its parts with lower incarnations.
            shadowed = [part for part, low in self._fences.items() if part.startswith(f"{name}/") and low <= fence]
            changes.update(dict.fromkeys((key_of(_FENCE, part) for part in shadowed), None))
        self._store.write(changes)
        if job is not None:
            self._jobs[name] = job
        if fence is not None:
            self._fences[name] = fence
        for part in shadowed:
            del self._fences[part]


def _check_cursor(stream: int, cursor: Cursor) -> None:
    if max(cursor) > MAX_READ:
        raise InvalidArgument(f"cursor {tuple(cursor)} of stream {stream} is beyond 2^62 ({MAX_READ})")


def _to_json(name: str, job: _Job) -> bytes:
    fields = {
        "job": name,
        "cursors": job.cursors,
        "holders": job.holders,
        "workers": {worker: held.incarnation for worker, held in job.workers.items()},
        "leases": {worker: held.lease_number for worker, held in job.workers.items()},
        "last_lease": job.last_lease,
        "incarnations": job.incarnations,
        "data": job.data,
        "restore": None if job.restore is None else asdict(job.restore),
        "order_number": job.order_number,
        "due": job.due,
        "is_saved": job.is_saved,
        "held_for": job.held_for,
    }
    return json.dumps(fields).encode()


def _from_json(value: bytes, deadline: float) -> tuple[str, _Job]:
    fields = json.loads(value)
    leases = fields.get("leases", {})  # an earlier version gave them no numbers
    job = _Job(
        [Cursor(*cursor) for cursor in fields["cursors"]],
        fields["holders"],
        {worker: _Worker(number, deadline, leases.get(worker, 0)) for worker, number in fields["workers"].items()},
        fields.get("last_lease", 0),
        fields["incarnations"],
        fields["data"],
    )
    if (order := fields.get("restore")) is not None:
        job.restore = RestoreOrder(**order | {"tables": tuple(order["tables"])})
        job.order_number, job.due = fields["order_number"], fields["due"]
        job.is_saved = fields.get("is_saved", False)
    job.held_for = fields.get("held_for", "")
    return fields["job"], job
