from __future__ import annotations

from geartrain.ams.scheduler.running_jobs import RunningJobs


def test_jobs_are_waited_for_until_they_have_saved_or_are_silent() -> None:
    now = 100.0
    jobs = RunningJobs(lambda: now)
    jobs.tell("a", 1, done=False)
    jobs.tell("b", 1, done=False)
    assert jobs.to_ask(was_restarted=False).waiting == ("a", "b")
    jobs.tell("a", 1, done=True)
    found = jobs.to_ask(was_restarted=False)
    assert (found.waiting, found.saved) == (("b",), ("a",))
    now += 7
    assert jobs.to_ask(was_restarted=False).waiting == ()


def test_an_end_of_a_past_process_of_a_job_is_not_that_of_the_job() -> None:
    jobs = RunningJobs()
    jobs.tell("a", 2, done=False)
    jobs.tell("a", 1, done=True)
    assert jobs.to_ask(was_restarted=False).waiting == ("a",)


def test_a_restarted_scheduler_is_sure_once_every_job_had_time_to_speak() -> None:
    now = 0.0
    jobs = RunningJobs(lambda: now)
    assert not jobs.to_ask(was_restarted=True).is_sure
    assert jobs.to_ask(was_restarted=False).is_sure
    now = 3.1
    assert jobs.to_ask(was_restarted=True).is_sure
