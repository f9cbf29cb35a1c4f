"""Data streams: shared out evenly, read by one worker at a time, committed once."""

from __future__ import annotations

import pytest

from geartrain.ams.scheduler.data_streams import StreamLeases
from geartrain.ams.storage.kv.store import MemoryStore
from geartrain.ams.values.errors import Busy, InvalidArgument, StaleClient
from geartrain.ams.values.scheduler_messages import Cursor, StreamLease, StreamRenewal

LEASE = 10.0


class Clocked:
    """Streams, their clock, and a short way to call them."""

    def __init__(self, num_streams: int = 64, num_workers: int = 1) -> None:
        self.now = 0.0
        self.num_streams, self.num_workers = num_streams, num_workers
        self.store = MemoryStore()
        self.restart()

    def restart(self) -> None:
        self.streams = StreamLeases(self.store, LEASE, clock=lambda: self.now)

    def lease(self, worker: str, incarnation: int = 1) -> StreamLease:
        return self.streams.lease(
            "job", worker, incarnation, num_streams=self.num_streams, num_workers=self.num_workers
        )

    def commit(self, worker: str, cursors: dict[int, tuple[int, int]] | None = None, by: int = 1) -> StreamRenewal:
        made = {stream: Cursor(*cursor) for stream, cursor in (cursors or {}).items()}
        return self.streams.renew("job", worker, by, made)

    def settle(self, workers: list[str]) -> dict[str, int]:
        """Let every worker release and lease until nobody is asked to; return how many streams each holds."""
        for _ in range(2):
            for worker in workers:
                renewal = self.commit(worker)
                self.streams.release("job", worker, 1, {}, renewal.release)
            for worker in workers:
                if self.commit(worker).can_lease:
                    self.lease(worker)
        renewals = {worker: self.commit(worker) for worker in workers}
        assert not any(renewal.release or renewal.can_lease for renewal in renewals.values())
        return {worker: len(renewal.held) for worker, renewal in renewals.items()}


def test_streams_are_shared_evenly_as_workers_come_and_go() -> None:
    job = Clocked()
    assert len(job.lease("a").cursors) == 64
    assert not job.lease("b").cursors
    assert job.settle(["a", "b"]) == {"a": 32, "b": 32}
    job.lease("c")
    held = job.settle(["a", "b", "c"])
    assert sorted(held.values()) == [21, 21, 22]
    job.streams.release("job", "b", 1, {})
    assert job.settle(["a", "c"]) == {"a": 32, "c": 32}


def test_streams_are_kept_for_the_workers_that_are_expected_but_not_for_ever() -> None:
    job = Clocked(num_workers=4)
    assert [len(job.lease(worker).cursors) for worker in "abc"] == [16, 16, 16]
    job.now = 9
    for worker in "abc":
        assert not job.commit(worker).can_lease
    job.now = 11  # the fourth never came
    assert sorted(job.settle(["a", "b", "c"]).values()) == [21, 21, 22]


def test_once_all_have_come_those_who_leave_are_not_waited_for() -> None:
    job = Clocked(num_workers=2)
    assert [len(job.lease(worker).cursors) for worker in "ab"] == [32, 32]
    job.streams.release("job", "a", 1, {})
    assert job.settle(["b"]) == {"b": 64}


def test_a_silent_worker_loses_its_streams_at_their_last_committed_cursors() -> None:
    job = Clocked(num_streams=2)
    job.lease("a")
    job.commit("a", {0: (0, 7), 1: (0, 3)})
    job.now = 5
    assert not job.lease("b").cursors
    job.now = 10.5
    job.lease("b")
    assert job.lease("b").cursors == {0: (0, 7), 1: (0, 3)}
    with pytest.raises(StaleClient, match="'a' of job 'job' holds no lease any more: it was silent for 10 s"):
        job.commit("a", {0: (0, 9)})
    assert job.streams.cursors("job") == {0: (0, 7), 1: (0, 3)}


def test_a_stream_that_has_ended_the_epoch_waits_for_the_others() -> None:
    job = Clocked(num_streams=2)
    job.lease("a")
    assert job.commit("a", {0: (1, 0)}).epoch == 0
    with pytest.raises(InvalidArgument, match=r"cursor \(1, 5\) of stream 0 does not follow \(1, 0\)"):
        job.commit("a", {0: (1, 5)})
    assert job.commit("a", {1: (1, 0)}).epoch == 1
    job.commit("a", {0: (1, 5)})
    with pytest.raises(InvalidArgument, match="positions go up"):
        job.commit("a", {0: (1, 4)})
    with pytest.raises(InvalidArgument, match=r"ended it is at \(2, 0\)"):
        job.commit("a", {0: (3, 0)})


def test_a_commit_is_all_or_nothing() -> None:
    job = Clocked(num_streams=2, num_workers=2)
    (mine,), (theirs,) = job.lease("a").cursors, job.lease("b").cursors
    with pytest.raises(StaleClient, match=f"stream {theirs} of job 'job' is held by worker 'b', not by 'a'"):
        job.commit("a", {mine: (0, 5), theirs: (0, 5)})
    assert set(job.streams.cursors("job").values()) == {(0, 0)}


def test_names_of_workers_that_went_do_not_pile_up() -> None:
    job = Clocked(num_streams=2)
    for number in range(1_000):
        job.lease(f"pod-{number}", 2)
        job.streams.release("job", f"pod-{number}", 2, {})
    job.lease("stays", 2)
    (record,) = (value for key, value in job.store.read_all().items() if key.startswith("streams/"))
    assert len(record) < 8_000
    job.restart()
    with pytest.raises(StaleClient, match="was superseded by 2"):
        job.lease("pod-999", 1)
    assert len(job.commit("stays", by=2).held) == 2


def test_a_higher_incarnation_takes_the_place_of_a_lower_one() -> None:
    job = Clocked(num_streams=2)
    job.lease("a")
    job.commit("a", {0: (0, 4)})
    with pytest.raises(StaleClient, match="holds no lease"):
        job.commit("a", {0: (0, 5)}, by=2)  # it is not its predecessor
    assert job.lease("a", incarnation=2).cursors == {0: (0, 4), 1: (0, 0)}
    with pytest.raises(StaleClient, match="superseded by 2"):
        job.commit("a", {0: (0, 5)})
    job.now = 100  # though its lease has run out
    with pytest.raises(StaleClient, match="superseded by 2"):
        job.lease("a", incarnation=1)


def test_a_job_that_goes_back_shuts_out_those_of_before() -> None:
    job = Clocked(num_streams=2)
    job.lease("a")
    kept = job.streams.cursors("job")
    job.commit("a", {0: (1, 0), 1: (0, 3)})
    job.streams.restore("job", 2, kept)
    with pytest.raises(StaleClient, match="incarnation 1 of job 'job' was superseded by 2"):
        job.commit("a", {1: (0, 9)})
    assert job.lease("a", incarnation=2).cursors == kept
    with pytest.raises(StaleClient):
        job.streams.restore("job", 1, kept)
    with pytest.raises(InvalidArgument, match="one for each stream"):
        job.streams.restore("job", 2, {1: Cursor(0, 0)})
    with pytest.raises(InvalidArgument, match="fits no epoch"):
        job.streams.restore("job", 2, {0: Cursor(0, 0), 1: Cursor(1, 1)})


def test_a_fence_ends_the_leases_of_lower_incarnations_and_outlives_the_scheduler() -> None:
    job = Clocked(num_streams=2)
    job.lease("a")
    job.lease("b", incarnation=5)
    job.streams.fence("job", 5)
    job.restart()
    with pytest.raises(StaleClient, match="superseded by 5"):
        job.commit("a")
    assert job.lease("b", incarnation=5).cursors == {0: (0, 0), 1: (0, 0)}
    job.streams.fence("other", 3)
    for name in ("other", "other/part"):
        with pytest.raises(StaleClient, match="superseded by 3 of 'other'"):
            job.streams.lease(name, "a", 2)
    job.streams.lease("others", "a", 2)


def test_a_stop_of_the_scheduler_costs_nobody_a_lease() -> None:
    job = Clocked(num_streams=2)
    job.streams.pulse()
    job.lease("a")
    job.now = 60
    assert job.commit("a").held == (0, 1)


def test_the_number_of_streams_is_fixed_for_a_job() -> None:
    job = Clocked(num_streams=2)
    job.lease("a")
    with pytest.raises(InvalidArgument, match="num_streams is 3, job 'job' has 2"):
        job.streams.lease("job", "a", 1, num_streams=3)
    with pytest.raises(StaleClient, match="'unknown' has no streams"):
        job.streams.renew("unknown", "a", 1, {})


def test_who_holds_what_is_told_and_nobody_after_the_lease() -> None:
    clocked = Clocked(num_streams=4)
    assert clocked.streams.holders("job").holders == ()
    clocked.lease("a", incarnation=3)
    clocked.lease("b")
    clocked.settle(["b"])
    told = clocked.streams.holders("job")
    assert told.holders == ("a",) * 4 and told.incarnations == {"a": 3, "b": 1} and told.lease_seconds == LEASE
    clocked.now += LEASE + 1
    assert clocked.streams.holders("job").holders == (None,) * 4


def test_workers_that_may_come_back_are_told_and_not_those_that_a_restore_fenced_off() -> None:
    clocked = Clocked(num_streams=1)
    clocked.lease("a", incarnation=3)
    clocked.lease("b", incarnation=4)
    clocked.now += LEASE + 1
    assert clocked.streams.holders("job").incarnations == {"a": 3, "b": 4}
    clocked.streams.restore("job", 4, {0: Cursor(0, 0)})
    assert clocked.streams.holders("job").incarnations == {"b": 4}


def test_a_job_keeps_the_name_of_its_data_over_a_restart() -> None:
    job = Clocked()
    job.lease("a")  # says nothing
    job.streams.lease("job", "a", 1, data="clicks, seed 1")
    job.restart()
    job.lease("b")
    with pytest.raises(InvalidArgument, match=r"'b' reads data 'clicks, seed 2', job 'job' has 'clicks, seed 1'"):
        job.streams.lease("job", "b", 1, data="clicks, seed 2")
    with pytest.raises(InvalidArgument, match="data is"):
        job.streams.lease("job", "b", 1, data="x" * 300)


def test_a_worker_is_alone_until_it_renews_as_usual() -> None:
    job = Clocked()
    job.lease("a")
    job.lease("b")

    def hold() -> StreamRenewal:
        return job.streams.renew("job", "a", 1, {}, hold=True)

    assert not hold().is_alone and not hold().can_lease
    assert job.commit("b").pause
    job.streams.release("job", "b", 1, {})
    assert hold().is_alone
    job.restart()
    for _ in range(2):
        with pytest.raises(Busy):
            job.lease("b")
        assert hold().is_alone
    assert not job.commit("a").is_alone
    assert not job.lease("b").cursors and not job.commit("b").pause
    hold()
    job.now = LEASE / 2
    job.commit("b")
    job.now = LEASE + 1  # "a" is gone
    assert not job.commit("b").pause and len(job.lease("b").cursors) == 64
