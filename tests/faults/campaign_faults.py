"""What a campaign consists of: each fault with its unit, its share of the time, and one run of it by seed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults import attacks, mutations

SEQUENCES_PER_RUN = 200
SHARED_PUSHES_PER_RUN = 100
BULK_PUSHES_PER_RUN = 20
DAMAGES_PER_RUN = 250
ROUNDS_PER_RUN = 200
"""Connections last longer than in ``make test``: fewer faults for a push, more pushes in the time."""


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
    skip: str | None = None
    """Why it cannot be run here."""


def kills(seed: int, folder: Path) -> int:
    """SIGKILL of each role in turn."""
    from tests.faults.kills import ROLES, run_kill

    run_kill(ROLES[seed % len(ROLES)], seed, folder)
    return 1


def failpoints(seed: int, folder: Path) -> int:
    """Each failpoint in turn, then each with another seed, and so on."""
    scenarios = _scenarios()
    names = _failpoint_names()
    outcome = scenarios.run_scenario(names[(seed - 1) % len(names)], (seed - 1) // len(names), folder)
    assert outcome.held, outcome
    return 1


def jobs(seed: int, folder: Path) -> int:
    """Two jobs on one cluster, one of which is killed and goes back."""
    from tests.faults.two_jobs import run_two_jobs

    folder.mkdir(parents=True, exist_ok=True)
    return run_two_jobs(seed, folder)


def stops(seed: int, folder: Path) -> int:
    """SIGSTOP of a shard past its lease."""
    from tests.faults.stops import run_stop

    run_stop(seed, folder)
    return 1


def bulk(seed: int, folder: Path) -> int:
    """Pushes by TCP, whose connections are cut, late, silent and repeated, as those of messages are."""
    attacks.proxies(seed, folder, pushes=BULK_PUSHES_PER_RUN)
    return BULK_PUSHES_PER_RUN


def shared(seed: int, folder: Path) -> int:
    """Pushes by way of shared memory, whose connections end and whose shards stop answering meanwhile."""
    attacks.shared_memory(seed, folder, pushes=SHARED_PUSHES_PER_RUN)
    return SHARED_PUSHES_PER_RUN


def damage(seed: int, folder: Path) -> int:
    """Damaged files of a snapshot."""
    attacks.damage(seed, folder, times=DAMAGES_PER_RUN)
    return DAMAGES_PER_RUN


def sequences(seed: int, folder: Path) -> int:
    """Sequences over a simulated cluster."""
    attacks.sequences(seed, folder, examples=SEQUENCES_PER_RUN)
    return SEQUENCES_PER_RUN


def threads(seed: int, folder: Path) -> int:
    """Threads that push, read, take snapshots, restore and make tables at once."""
    from tests.model.threads import run_threads

    run_threads(seed, ROUNDS_PER_RUN, folder)
    return ROUNDS_PER_RUN


def suite(seed: int, folder: Path) -> int:
    """Each mechanism removed in turn: the attack on it must raise."""
    from tests.faults.test_the_suite import CAUGHT_BY

    mechanism = list(mutations.REMOVALS)[seed % len(mutations.REMOVALS)]
    try:
        mutations.attack_without(mechanism, CAUGHT_BY[mechanism], seed, folder)
    except (AssertionError, BaseExceptionGroup):
        return 1
    raise AssertionError(f"without {mechanism!r} the attack found nothing")


def _scenarios() -> Any:
    return importlib.import_module("tests.faults.scenarios")


def _failpoint_names() -> list[str]:
    if importlib.util.find_spec("tests.faults.scenarios") is None:
        return []
    return list(_scenarios().PLACES)


def all_faults() -> list[Fault]:
    """Return the lines of the campaign, in the order of the report."""
    names = _failpoint_names()
    no_failpoints = None if names else "this version has no failpoints (tests/faults/scenarios.py)"
    return [
        Fault(name="kills", unit="kills", target=10_000, share=0.35, run=kills),
        Fault(
            name="failpoints",
            unit="runs",
            target=5 * len(names),
            share=0.15,
            run=failpoints,
            skip=no_failpoints,
        ),
        Fault(name="jobs", unit="deaths", target=500, share=0.15, run=jobs),
        Fault(name="stops", unit="stops", target=20, share=0.05, run=stops),
        Fault(name="shared", unit="pushes", target=5_000, share=0.1, run=shared),
        Fault(name="bulk", unit="pushes", target=5_000, share=0.3, run=bulk, timeout_seconds=300),
        Fault(name="damage", unit="damages", target=10_000, share=0.05, run=damage),
        Fault(name="sequences", unit="sequences", target=20_000, share=0.3, run=sequences, timeout_seconds=600),
        Fault(name="threads", unit="rounds", target=5_000, share=0.1, run=threads),
        Fault(name="suite", unit="mutations", target=len(mutations.REMOVALS), share=0.05, run=suite),
    ]
