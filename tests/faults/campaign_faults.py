"""What a campaign consists of: each fault with its unit, its share of the time, and one run of it by seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.faults import attacks, mutations
from tests.faults.kills import ROLES, run_kill
from tests.faults.restored_click_jobs import run as run_clicks
from tests.faults.scenarios import PLACES, run_scenario
from tests.faults.serve_strangers import serve_strangers
from tests.faults.stops import run_stop
from tests.faults.strangers import strangers
from tests.faults.two_jobs import run_two_jobs
from tests.model.threads import run_threads


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One line of the campaign."""

    name: str
    unit: str
    """What is counted."""
    target: int
    """How many of them one campaign wants; what is left of the time goes to those that are far from theirs."""
    share: float
    """Of the time, against the others' shares."""
    run: Callable[[int, Path], int]
    """Run one seed (from 1) in an empty folder; returns the number of units. Raises if a promise was broken."""
    timeout_seconds: float = 300.0


def kills(seed: int, folder: Path) -> int:
    """SIGKILL of each role in turn."""
    run_kill(ROLES[seed % len(ROLES)], seed, folder)
    return 1


def stops(seed: int, folder: Path) -> int:
    """SIGSTOP of a shard past its lease."""
    run_stop(seed, folder)
    return 1


def failpoints(seed: int, folder: Path) -> int:
    """Each failpoint in turn, then each with another seed, and so on."""
    names = list(PLACES)
    outcome = run_scenario(names[(seed - 1) % len(names)], (seed - 1) // len(names), folder)
    assert outcome.held, outcome
    return 1


def counted(attack: Callable[..., object], **times: int) -> Callable[[int, Path], int]:
    """Run an attack whose only setting says how many units it makes."""
    (number,) = times.values()

    def run(seed: int, folder: Path) -> int:
        attack(seed, folder, **times)
        return number

    return run


def suite(seed: int, folder: Path) -> int:
    """Each mechanism removed in turn: the attack on it must raise."""
    from tests.faults.test_the_suite import CAUGHT_BY

    mechanism = list(mutations.REMOVALS)[seed % len(mutations.REMOVALS)]
    try:
        mutations.attack_without(mechanism, CAUGHT_BY[mechanism], seed, folder)
    except (AssertionError, BaseExceptionGroup):
        return 1
    raise AssertionError(f"without {mechanism!r} the attack found nothing")


def all_faults() -> list[Fault]:
    """Return the lines of the campaign, in the order of the report."""
    return [
        Fault(name="kills", unit="kills", target=10_000, share=0.35, run=kills),
        Fault(name="failpoints", unit="runs", target=5 * len(PLACES), share=0.15, run=failpoints),
        Fault(name="jobs", unit="deaths", target=500, share=0.15, run=run_two_jobs),
        Fault(name="clicks", unit="disturbances", target=500, share=0.15, run=run_clicks, timeout_seconds=1200),
        Fault(name="stops", unit="stops", target=20, share=0.05, run=stops),
        Fault(name="shared", unit="pushes", target=5_000, share=0.1, run=counted(attacks.shared_memory, pushes=100)),
        # Connections last longer than in ``make test``: fewer faults for a push, more pushes in the time.
        Fault(name="bulk", unit="pushes", target=5_000, share=0.3, run=counted(attacks.proxies, pushes=20)),
        Fault(name="damage", unit="damages", target=10_000, share=0.05, run=counted(attacks.damage, times=250)),
        Fault(
            name="sequences",
            unit="sequences",
            target=20_000,
            share=0.3,
            run=counted(attacks.sequences, examples=200),
            timeout_seconds=600,
        ),
        Fault(name="threads", unit="rounds", target=5_000, share=0.1, run=counted(run_threads, rounds=200)),
        Fault(name="strangers", unit="attacks", target=1_000_000, share=0.1, run=strangers, timeout_seconds=600),
        Fault(name="serve", unit="attacks", target=100_000, share=0.05, run=serve_strangers, timeout_seconds=600),
        Fault(name="suite", unit="mutations", target=len(mutations.REMOVALS), share=0.05, run=suite),
    ]
