from __future__ import annotations

from geartrain.ams.observe.event_log import EventLog
from geartrain.ams.scheduler.running_jobs import RunningJobs
from geartrain.ams.values.scheduler_messages import ClusterEvent


def test_jobs_are_waited_for_until_they_have_saved_or_are_silent() -> None:
    now = 100.0
    jobs = RunningJobs(lambda: now)
    jobs.report("a", 1, done=False)
    jobs.report("b", 1, done=False)
    assert jobs.to_ask(was_restarted=False).waiting == ("a", "b")
    jobs.report("a", 1, done=True)
    found = jobs.to_ask(was_restarted=False)
    assert (found.waiting, found.saved) == (("b",), ("a",))
    now += 7
    assert jobs.to_ask(was_restarted=False).waiting == ()


def test_an_end_of_a_past_process_of_a_job_is_not_that_of_the_job() -> None:
    jobs = RunningJobs()
    jobs.report("a", 2, done=False)
    jobs.report("a", 1, done=True)
    assert jobs.to_ask(was_restarted=False).waiting == ("a",)


def test_a_restarted_scheduler_is_sure_once_every_job_had_time_to_speak() -> None:
    now = 0.0
    jobs = RunningJobs(lambda: now)
    assert not jobs.to_ask(was_restarted=True).is_sure
    assert jobs.to_ask(was_restarted=False).is_sure
    now = 3.1
    assert jobs.to_ask(was_restarted=True).is_sure


def test_many_jobs_are_told_to_speak_less_often_and_are_waited_for_all_the_same() -> None:
    now = 0.0
    jobs = RunningJobs(lambda: now)
    assert jobs.report("0", 1, done=False) == 1
    for _ in range(2):
        pauses = {jobs.report(str(job), 1, done=False) for job in range(330)}
    assert pauses == {10}
    assert jobs.report("0", 1, done=False, is_urgent=True) == 1  # a shard wants to leave
    assert jobs.report("1", 1, done=True) < 10
    now = 14.0
    jobs.pulse()
    assert len(jobs.to_ask(was_restarted=False).waiting) == 328
    assert [entry.report.state for entry in jobs.entries() if entry.job == "0"] == ["silent"]
    now = 15.1
    assert jobs.to_ask(was_restarted=False).waiting == ()


def test_a_restarted_scheduler_gives_many_jobs_the_time_that_an_earlier_one_told_them() -> None:
    now, log = 0.0, EventLog()
    for job in range(330):
        log.append(ClusterEvent(kind="job_began", text="began", job=str(job), incarnation=1))
    jobs = RunningJobs(lambda: now, log)
    now = 11.0
    jobs.pulse()
    assert not jobs.to_ask(was_restarted=True).is_sure
    assert {entry.report.state for entry in jobs.entries()} == {"training"}
    now = 12.1
    assert jobs.to_ask(was_restarted=True).is_sure


def test_jobs_keep_their_places_whoever_was_heard_last() -> None:
    now = 0.0
    jobs = RunningJobs(lambda: now)
    for name in ("b", "a", "b", "c", "a"):
        now += 1
        jobs.report(name, 1, done=False)
        assert [entry.job for entry in jobs.entries()] == ["b", "a", "c"][: len(jobs.entries())]
