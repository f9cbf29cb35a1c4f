"""Trainers of one task in turns, each on its own clock, so that disturbances of the machine affect all alike."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from _gear_trainer import TrainingClock
from gear_data.page_views import Views

from geartrain.launch.bench import machine

KEPT = Path(".cache") / "gear"
"""Folder of the curves and tables from which docs/explanation/gear.md is made."""
TURN = 20


class Trainer(Protocol):
    """A participant of a race."""

    def step(self, views: Views) -> None:
        """Make one update."""

    def drain(self) -> None:
        """Return once no started work is still computed elsewhere."""

    def auc(self) -> float:
        """Return the AUC on the test views."""

    def close(self) -> None:
        """Release its resources."""


@dataclass
class Runner:
    """A trainer with its clock and measurements."""

    name: str
    trainer: Trainer
    clock: TrainingClock
    steps: int = 0
    curve: list[tuple[float, int, float]] = field(default_factory=list)
    """(seconds of training, steps, AUC) at each test."""

    @property
    def seconds(self) -> float:
        """Real seconds of training."""
        return self.clock.real_seconds

    def train(self, batches: Iterable[Views], until_seconds: float = float("inf")) -> None:
        """Train on these batches, or on as many as there is time for."""
        with self.clock.running():
            started, before = time.perf_counter(), self.seconds
            for views in batches:
                self.trainer.step(views)
                self.steps += 1
                self.clock.tick()
                if before + time.perf_counter() - started >= until_seconds:
                    break
            self.trainer.drain()

    def test(self) -> None:
        """Record the AUC; the clock stands still."""
        self.curve.append((round(self.seconds, 3), self.steps, round(self.trainer.auc(), 5)))


def equal_steps(
    runners: Sequence[Runner],
    batches: Sequence[Views],
    *,
    test_every: int = 0,
    finish: Callable[[Runner], None] | None = None,
) -> None:
    """All batches for every runner, in turns of 20 steps whose order rotates; a test every so many steps.

    ``finish`` is called at the end of each runner's training, on its clock.
    """
    for number, start in enumerate(range(0, len(batches), TURN)):
        part = batches[start : start + TURN]
        for place in range(len(runners)):
            runner = runners[(number + place) % len(runners)]
            if test_every and runner.steps % test_every < TURN and start % test_every < TURN:
                runner.test()
            runner.train(part)
    for runner in runners:
        if finish is not None:
            with runner.clock.running():
                finish(runner)
        if test_every:
            runner.test()


def equal_seconds(runners: Sequence[Runner], streams: Sequence[Iterator[Views]], seconds: float, *, tests: int) -> None:
    """Give every runner so many seconds, in turns whose order rotates, and test it ``tests`` times on the way."""
    for runner in runners:
        runner.test()
    for number in range(1, tests + 1):
        until = seconds * number / tests
        for place in range(len(runners)):
            chosen = (number + place) % len(runners)
            runners[chosen].train(streams[chosen], until)
            runners[chosen].test()


def close(runners: Sequence[Runner]) -> None:
    """End their trainers."""
    for runner in runners:
        runner.trainer.close()


def row_of_curves(runners: Sequence[Runner]) -> dict[str, list[tuple[float, int, float]]]:
    """Name -> its curve."""
    return {runner.name: runner.curve for runner in runners}


def first(batches: Iterator[Views], count: int) -> list[Views]:
    """So many of them."""
    return list(islice(batches, count))


def keep(name: str, value: Any) -> None:
    """Leave a bench's curves for ``scripts/gear_document.py``."""
    KEPT.mkdir(parents=True, exist_ok=True)
    told = {**machine(), "date": time.strftime("%Y-%m-%d")}
    if "setting" in value:
        value = {**value, "load": round(os.getloadavg()[0], 1)}
    for file, content in ((name, value), ("machine", told)):
        (KEPT / f"{file}.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
