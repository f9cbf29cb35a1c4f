"""Who counts among the workers of a job, and how far the slowest is, with a clock that the test turns."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.ams.scheduler.worker_steps import WorkerSteps
from geartrain.ams.values.errors import InvalidArgument, StaleClient
from geartrain.ams.values.scheduler_messages import JobWorker, StepsDone

LEASE = 10.0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def worker(name: str, incarnation: int = 1) -> JobWorker:
    return JobWorker("ctr", name, incarnation)


def started(clock: Clock) -> WorkerSteps:
    """A scheduler that has been there for longer than a lease."""
    steps = WorkerSteps(LEASE, clock)
    clock.now += LEASE
    return steps


def test_the_slowest_is_told_and_named_with_the_time_since_its_last_step() -> None:
    clock = Clock()
    steps = started(clock)
    steps.report(worker("a"), None)
    steps.report(worker("b"), None)
    clock.now += 3
    assert steps.report(worker("a"), 1) == StepsDone(done=1, slowest=0, lease_seconds=LEASE, slow=(("b", 0, 3.0),))
    assert steps.report(worker("b"), 1).slowest == 1
    assert steps.report(worker("b"), 1).slowest == 1  # told again, it counts once


def test_who_joins_begins_at_the_steps_of_the_slowest() -> None:
    steps = started(Clock())
    steps.report(worker("a"), None)
    steps.report(worker("b"), None)
    steps.report(worker("a"), 7)
    steps.report(worker("b"), 5)
    assert steps.report(worker("c"), None).done == 5
    assert steps.report(worker("c"), None).done == 5  # a repetition
    assert steps.report(worker("d"), 2).done == 5  # and who has lost its lease meanwhile


def test_a_worker_whose_lease_has_run_out_is_waited_for_no_more() -> None:
    clock = Clock()
    steps = started(clock)
    steps.report(worker("a"), None)
    steps.report(worker("b"), None)
    clock.now += 0.9 * LEASE
    assert steps.report(worker("a"), 3).slowest == 0
    clock.now += 0.2 * LEASE
    assert steps.report(worker("a"), 4).slowest == 4
    assert steps.report(worker("b"), 1).done == 4


def test_a_worker_that_leaves_is_waited_for_no_more() -> None:
    steps = started(Clock())
    steps.report(worker("a"), None)
    steps.report(worker("b", 2), None)
    steps.leave(worker("b", 1))  # of the process before it
    assert steps.report(worker("a"), 1).slowest == 0
    steps.leave(worker("b", 2))
    assert steps.report(worker("a"), 1).slowest == 1
    steps.leave(worker("a"))
    steps.leave(worker("a"))
    assert steps.report(worker("a"), None).done == 0


def test_a_process_that_takes_a_workers_name_takes_its_place() -> None:
    steps = started(Clock())
    steps.report(worker("a"), None)
    steps.report(worker("b", 1), None)
    steps.report(worker("a"), 6)
    steps.report(worker("b", 1), 4)
    assert steps.report(worker("b", 2), None).done == 6
    with pytest.raises(StaleClient, match="incarnation 1 of worker 'b' of job 'ctr' was superseded by 2"):
        steps.report(worker("b", 1), 5)


def test_what_cannot_be_a_step_is_refused() -> None:
    steps = WorkerSteps(LEASE, Clock())
    with pytest.raises(InvalidArgument, match="worker 'a' has done -1 steps"):
        steps.report(worker("a"), -1)
    with pytest.raises(InvalidArgument, match="job is ''"):
        steps.report(JobWorker("", "a", 1), None)


def test_a_restarted_scheduler_says_nothing_of_the_slowest_that_is_not_sure() -> None:
    clock = Clock()
    steps = WorkerSteps(LEASE, clock)
    assert steps.report(worker("new"), None).done == 0
    assert steps.report(worker("a"), 10).slowest == 0
    assert steps.report(worker("b"), 7).done == 7  # its own word
    clock.now += LEASE
    assert steps.report(worker("a"), 10) == StepsDone(
        done=10, slowest=7, lease_seconds=LEASE, slow=(("new", 7, LEASE), ("b", 7, LEASE))
    )


def test_nobody_loses_its_lease_to_a_scheduler_that_was_stopped() -> None:
    clock = Clock()
    steps = started(clock)
    steps.report(worker("a"), None)
    steps.report(worker("b"), None)
    steps.pulse()
    clock.now += 2 * LEASE
    assert steps.report(worker("a"), 1).slowest == 0


@dataclass
class Truth:
    """A worker as it is: it goes on only where it may by what it was told."""

    name: str
    done: int = 0
    slowest: int = 0
    heard: float = 0.0
    is_there: bool = False
    history: list[int] = field(default_factory=list)

    def hear(self, said: StepsDone, now: float) -> None:
        self.done, self.slowest, self.heard, self.is_there = said.done, max(self.slowest, said.slowest), now, True


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["step", "step", "renew", "wait", "leave", "restart"]), st.integers(0, 2)),
        min_size=10,
        max_size=60,
    ),
    st.integers(0, 3),
)
def test_no_worker_is_further_ahead_of_a_living_one_than_it_may(acts: list[tuple[str, int]], bound: int) -> None:
    clock = Clock()
    steps, restarted_at = started(clock), 0.0
    workers = [Truth(name) for name in "abc"]
    for act, number in acts:
        one = workers[number]
        if act == "restart":
            steps, restarted_at = WorkerSteps(LEASE, clock), clock.now
        elif act == "wait":
            clock.now += LEASE / 4
        elif act == "leave":
            steps.leave(worker(one.name))
            one.is_there = False
        elif not one.is_there:
            if clock.now < restarted_at + LEASE:
                continue  # the others may not have told yet that they are there
            one.slowest = 0
            one.hear(steps.report(worker(one.name), None), clock.now)
        elif act == "renew" or one.done - one.slowest > bound:
            one.hear(steps.report(worker(one.name), one.done), clock.now)
        else:
            one.hear(steps.report(worker(one.name), one.done + 1), clock.now)
        for other in workers:  # a lease that has run out is nobody's
            other.is_there &= clock.now - other.heard < LEASE
        live = [other.done for other in workers if other.is_there]
        assert not live or max(live) - min(live) <= bound + 1
