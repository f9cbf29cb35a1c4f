"""What is due for jobs that the scheduler restores: when nobody may read, and what is remembered of it."""

from __future__ import annotations

import dataclasses

import pytest

from geartrain.ams.scheduler.data_streams import StreamLeases
from geartrain.ams.storage.kv.store import MemoryStore
from geartrain.ams.values.errors import Busy, InvalidArgument, SnapshotFailed, StaleClient
from geartrain.ams.values.scheduler_messages import Cursor, RestoreOrder, StreamLease

ORDER = RestoreOrder(root="/snapshots/a", tables=("t", "u"), every_seconds=60.0)
SAVED = {stream: Cursor(0, 3) for stream in range(4)}


class Clocked:
    """Streams whose job was saved once, and their clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.store = MemoryStore()
        self.restart()
        with pytest.raises(Busy, match="job 'a' is saved"):
            self.lease("w")
        self.streams.set_due("a", "")

    def restart(self) -> None:
        self.streams = StreamLeases(self.store, 10.0, clock=lambda: self.now)
        self.streams.can_restore = True

    def lease(self, worker: str, incarnation: int = 1, job: str = "a", order: RestoreOrder = ORDER) -> StreamLease:
        return self.streams.lease(job, worker, incarnation, 4, restore=order)

    @property
    def due(self) -> str:
        return self.streams.restored_jobs()["a"].due


def test_a_worker_lost_with_streams_in_its_hands_takes_the_job_back() -> None:
    job = Clocked()
    assert job.lease("w").tables == ("t", "u")
    job.lease("idle")  # holds no stream: nothing of it can be in the rows
    job.now = 9.0
    job.streams.renew("a", "w", 1, {0: Cursor(0, 5)})
    job.now = 11.0
    assert job.due == ""
    job.now = 20.0
    assert job.due == "restore"
    with pytest.raises(StaleClient, match="holds no lease any more"):
        job.streams.renew("a", "w", 1, {0: Cursor(0, 6)})
    before = job.streams.restored_jobs()
    job.restart()  # it is remembered
    assert job.streams.restored_jobs() == before
    with pytest.raises(Busy, match="goes back to its newest snapshot"):
        job.lease("w", 2)
    job.streams.set_due("a", "snapshot")  # what was lost comes first
    assert job.due == "restore"
    job.streams.restore_cursors("a", SAVED)
    assert job.lease("w", 2).cursors == SAVED


def test_a_commit_that_was_under_way_during_the_restore_is_refused() -> None:
    job = Clocked()
    before = job.lease("w").lease_number
    assert job.lease("w").lease_number == before  # the same lease, asked for again
    job.streams.set_due("a", "restore")
    job.streams.restore_cursors("a", SAVED)
    job.restart()
    now = job.lease("w").lease_number
    job.restart()
    late = {0: Cursor(0, 9)}
    for commit in (job.streams.renew, job.streams.release):
        with pytest.raises(StaleClient, match=f"lease {before} of worker 'w' .* has ended, and it has lease {now} now"):
            commit("a", "w", 1, late, lease_number=before)
    assert job.streams.cursors("a") == SAVED
    job.streams.renew("a", "w", 1, late, lease_number=now)
    assert job.streams.cursors("a")[0] == (0, 9)
    job.streams.renew("a", "w", 1, {})  # of a client of an earlier version


def test_a_job_that_is_done_is_saved_before_its_workers_end() -> None:
    job = Clocked()
    job.lease("w")
    job.lease("v")
    last = {0: Cursor(1, 0)}
    assert not job.streams.renew("a", "w", 1, last).is_saved
    saved = job.streams.cursors("a")
    job.streams.release("a", "w", 1, {}, done=True)
    assert job.due == "snapshot"
    job.restart()  # it is remembered
    assert job.streams.renew("a", "v", 1, {}).pause
    job.streams.record_saved("a", saved)
    job.streams.set_due("a", "")
    job.restart()
    job.streams.renew("a", "v", 1, {})
    job.lease("w")
    assert job.streams.renew("a", "w", 1, {}).is_saved
    job.streams.release("a", "w", 1, {}, done=True)
    assert job.due == ""  # once is enough
    held = min(job.lease("w").cursors)
    assert not job.streams.renew("a", "w", 1, {held: Cursor(1, 0)}).is_saved
    job.streams.record_saved("a", SAVED)  # of before the last commit
    assert not job.streams.renew("a", "w", 1, {}).is_saved


def test_one_that_is_started_again_is_known_to_be_lost_at_once() -> None:
    job = Clocked()
    job.lease("w")
    with pytest.raises(Busy, match="goes back"):
        job.lease("w", 2)
    with pytest.raises(StaleClient, match="superseded by 2"):
        job.streams.renew("a", "w", 1, {})


def test_one_that_leaves_in_order_costs_nothing_and_in_the_middle_of_a_step_all() -> None:
    job = Clocked()
    job.lease("w")
    job.streams.release("a", "w", 1, {0: Cursor(0, 2)})
    assert job.due == "" and job.lease("v").cursors[0] == (0, 2)
    job.streams.release("a", "v", 1, {0: Cursor(0, 9)}, lost=True)
    assert job.due == "restore"


def test_before_a_snapshot_all_workers_let_go() -> None:
    job = Clocked()
    job.lease("w")
    job.streams.set_due("a", "snapshot")
    renewal = job.streams.renew("a", "w", 1, {0: Cursor(0, 2)})  # the step that it was in
    assert renewal.pause and not renewal.can_lease and not renewal.release
    assert job.streams.renew("a", "w", 1, {}, hold=True).pause  # that comes first
    with pytest.raises(Busy, match="is saved"):
        job.lease("v")
    assert job.streams.restored_jobs()["a"].is_read
    job.streams.release("a", "w", 1, {})
    assert not job.streams.restored_jobs()["a"].is_read


def test_a_worker_that_is_alone_stays_so_though_a_snapshot_becomes_due() -> None:
    job = Clocked()
    job.lease("w")
    for _ in range(2):
        assert job.streams.renew("a", "w", 1, {}, hold=True).is_alone
        job.streams.set_due("a", "snapshot")
    assert not job.streams.renew("a", "w", 1, {}).is_alone


def test_without_a_first_snapshot_a_worker_hears_why_and_may_ask_again() -> None:
    job = Clocked()
    job.streams.stop_restoring("a", SnapshotFailed("the disk is full"))
    with pytest.raises(SnapshotFailed, match="the disk is full"):
        job.lease("w")
    assert not job.streams.restored_jobs()
    with pytest.raises(Busy, match="is saved"):
        job.lease("w")


@pytest.mark.parametrize(
    ("job", "changes", "said"),
    [
        ("a", {"root": "/other"}, "other workers said '/snapshots/a'"),
        ("b", {"root": "/other"}, "table 't', which goes back with job 'a'.* Give tables of its own"),
        ("b", {"tables": ("v",)}, "where job 'a' has its snapshots; give a folder of its own"),
        ("b", {"tables": ()}, "name all tables"),
        ("b", {"every_seconds": 0.0}, "every 0.0 s; .* a number of seconds > 0"),
        ("b", {"every_seconds": float("nan")}, "a number of seconds > 0"),
    ],
)
def test_an_order_that_cannot_be_is_refused(job: str, changes: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        Clocked().lease("v", job=job, order=dataclasses.replace(ORDER, **changes))  # type: ignore[arg-type]


def test_a_scheduler_that_keeps_nothing_restores_nothing() -> None:
    with pytest.raises(InvalidArgument, match="start it with --data FOLDER"):
        StreamLeases(MemoryStore(), 10.0).lease("a", "w", 1, 4, restore=ORDER)


def test_a_fenced_worker_that_may_be_in_a_step_takes_the_job_back() -> None:
    job = Clocked()
    job.lease("w")
    job.streams.fence("a", 2)
    assert job.due == "restore"
