"""What the scheduler keeps of jobs: how far they are, their snapshots, and what it notes of their lives."""

from __future__ import annotations

from pathlib import Path

from geartrain.ams.observe.event_log import EventLog
from geartrain.ams.scheduler import running_jobs
from geartrain.ams.scheduler.running_jobs import RunningJobs
from geartrain.ams.values.scheduler_messages import ClusterEvent, JobEntry, JobReport


class Watched:
    """Jobs, their log, and a clock."""

    def __init__(self, folder: Path | None = None) -> None:
        self.now = 100.0
        self.log = EventLog(folder)
        self.jobs = RunningJobs(lambda: self.now, self.log)

    def tell(self, incarnation: int, step: int, state: str = "training", *, lost_at: int | None = None) -> None:
        report = JobReport(state=state, step=step, last_step=900, lost_at_step=lost_at)  # type: ignore[arg-type]
        self.jobs.report("j", incarnation, done=state not in ("training", "saving"), report=report)

    def wait(self, seconds: float) -> None:
        for _ in range(round(seconds)):
            self.now += 1
            self.jobs.pulse()

    @property
    def entry(self) -> JobEntry:
        (found,) = self.jobs.entries()
        return found

    @property
    def kinds(self) -> list[str]:
        return [event.kind for event in self.log.since(0).events]


def test_a_job_is_known_by_its_last_word() -> None:
    watched = Watched()
    watched.tell(1, 10)
    watched.now += 2
    watched.tell(1, 30)
    watched.now += 1
    watched.tell(1, 30, "saving")
    assert watched.entry.report == JobReport(state="saving", step=30, last_step=900)
    assert (watched.entry.step_seconds_ago, watched.entry.heard_seconds_ago) == (1.0, 0.0)
    watched.tell(1, 900, "ended")
    watched.tell(1, 900, "ended")
    assert watched.kinds == ["job_began", "job_ended"]
    watched.wait(3_601)
    assert watched.jobs.entries() == ()


def test_a_job_that_is_silent_is_noted_once_and_is_back_when_it_is_heard() -> None:
    watched = Watched()
    watched.tell(1, 10)
    watched.wait(20)
    assert watched.entry.report.state == "silent"
    watched.tell(1, 11)
    assert watched.entry.report.state == "training"
    assert watched.kinds == ["job_began", "job_silent", "job_back"]


def test_a_scheduler_that_was_stopped_calls_no_job_silent() -> None:
    watched = Watched()
    watched.tell(1, 10)
    watched.wait(1)
    watched.now += 60
    watched.jobs.pulse()
    assert watched.entry.report.state == "training"


def test_what_is_lost_with_a_process_is_counted_whether_it_says_so_or_another_takes_its_place() -> None:
    watched = Watched()
    watched.tell(1, 50)
    watched.tell(1, 57, "recovering")
    watched.wait(30)
    watched.tell(2, 40, lost_at=57)
    assert (watched.entry.recoveries, watched.entry.steps_lost) == (1, 17)
    watched.tell(2, 80, lost_at=57)
    watched.tell(3, 60)  # of a process that was started anew: killed, the one before said nothing
    assert (watched.entry.recoveries, watched.entry.steps_lost) == (2, 37)
    watched.tell(3, 70, "waiting")  # for what takes the place of a shard that leaves: nothing is lost
    watched.tell(4, 70, lost_at=70)
    watched.tell(4, 90, "stopped", lost_at=70)
    watched.tell(5, 90)
    assert (watched.entry.recoveries, watched.entry.steps_lost) == (2, 37)
    assert watched.kinds == ["job_began", "recovery", "recovery", "job_began", "job_stopped", "job_began"]


def test_a_restarted_scheduler_knows_from_its_events_what_became_of_jobs(tmp_path: Path) -> None:
    before = Watched(tmp_path)
    before.tell(1, 10)
    before.tell(2, 5)
    for event in (
        ClusterEvent(kind="snapshot", text="whole", job="j", step=5),
        ClusterEvent(kind="snapshot_failed", text="none", job="j", step=9, reason="SnapshotFailed"),
    ):
        before.jobs.apply_event(before.log.append(event) or event)
    before.log.close()
    after = Watched(tmp_path)
    entry = after.entry
    assert (entry.recoveries, entry.steps_lost, entry.snapshot_step) == (1, 5, 5)
    assert entry.snapshot_failures == {"SnapshotFailed": 1}
    assert entry.snapshot_seconds_ago is not None and entry.snapshot_seconds_ago < 60
    assert after.jobs.to_ask(was_restarted=False).waiting == ()  # nobody waits for one that was not heard
    after.tell(2, 30)
    assert after.kinds == before.kinds
    after.tell(1, 7)
    assert after.entry.report.step == 30


def test_reasons_that_clients_tell_are_bounded() -> None:
    watched = Watched()
    watched.tell(1, 10)
    for number in range(500):
        watched.jobs.apply_event(ClusterEvent(kind="snapshot_failed", text="none", job="j", reason=f"R{number}"))
    failures = watched.entry.snapshot_failures
    assert (len(failures), failures["R0"], failures["Other"]) == (21, 1, 480)


def test_jobs_are_bounded(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(running_jobs, "_MAX_JOBS", 3)
    now = 0.0
    jobs = RunningJobs(lambda: now)
    for number in range(9):
        now += 1
        jobs.report(f"j{number}", 1, done=number > 0)
    assert {entry.job for entry in jobs.entries()} == {"j0", "j7", "j8"}
