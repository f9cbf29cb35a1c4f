"""Convergence over seconds by where slow gears run: beside their worker on its processor, or on one of their own.

Two workers train 200 glyphs in halves through one cluster, each with a slow gear; the bottom part is four times as wide
as the top part. All take turns in one process, and each worker and slow gear has a clock: the processor time of what it
did, and of what it waited for. So a case says what it would be on machines that nothing else uses, on any machine:

- *one processor*: a worker and its slow gear share one, as many as conventional training has.
- *two processors*: each has its own, twice as many as conventional training has. This is the paper's setting, where
  20 conventional workers stand beside 20 fast and 20 slow gears.
- *slow link*: to send the bottom part's gradients and fetch its weights takes 50 ms more, whoever makes the update.

Calls between processes cost nothing here: ``geartrain bench gear_store`` has them. See ``_halves_task.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from _common import result, threads
from _halves_task import BATCH, HalvesWorker, accuracy, glyph_halves

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.launch.bench import Result

WORKERS, CHANNELS = 2, 64
SECONDS, TESTS = 4.0, 2
LINKS = {"fast link": 0.0, "slow link": 0.05}
PROCESSORS = {"one processor": False, "two processors": True}


@dataclass(frozen=True, kw_only=True)
class Gear:
    """Settings of a slow gear."""

    expire_seconds: float = 0.0
    gradients_per_id: int = 4
    ids_per_update: int = BATCH

    def __str__(self) -> str:
        return f"expiry {self.expire_seconds:g} s, M={self.gradients_per_id}, {self.ids_per_update} ids an update"


GEARS = (Gear(), Gear(expire_seconds=1.0), Gear(ids_per_update=BATCH // 4), Gear(gradients_per_id=1))
"""Each differs from the first in one thing."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What all workers together had reached by a time."""

    at_seconds: float
    accuracy: float
    steps: int
    updates: int
    """Of the bottom part."""

    def __str__(self) -> str:
        return f"{self.steps / self.at_seconds:.1f} steps and {self.updates / self.at_seconds:.1f} updates a second"


class TimedWorker:
    """A worker and its slow gear, each with a clock."""

    def __init__(self, cluster: Cluster, seed: int, gear: Gear | None, link: float, is_apart: bool) -> None:
        self.now = self._slow_now = 0.0
        self.steps = self.updates = 0
        self._link, self._is_apart = link, is_apart
        data = glyph_halves()
        settings: dict[str, Any] = {"expire_seconds": None, "gradients_per_id": 1} if gear is None else vars(gear)
        self.worker = HalvesWorker(cluster, data, lambda: self.now, seed=0, channels=CHANNELS, **settings)
        self._batches = data.train.batches(BATCH, seed=seed, passes=10_000)
        self._since = 0.0
        if self.worker.gear is not None:
            engine: Any = self.worker.gear._port
            engine.features = self._timed(engine.features, waits=True)
            engine.deliver = self._timed(engine.deliver, waits=False)
            push = engine._dense.push

            def counted_push(*arguments: Any, **settings: Any) -> Any:
                self.updates += 1
                return push(*arguments, **settings)

            engine._dense.push = counted_push

    def step(self) -> None:
        """Make one update."""
        batch = next(self._batches)
        self._since = time.process_time()
        self.worker.step(batch)
        self.now += time.process_time() - self._since
        self.steps += 1
        if self.worker.gear is None:
            self.now += self._link
            self.updates += 1

    def _timed(self, call: Callable[..., Any], *, waits: bool) -> Callable[..., Any]:
        """Put a call of the slow gear on its clock; the worker ``waits`` for the answer, or goes on at once."""

        def timed(*arguments: Any) -> Any:
            begun, updates = time.process_time(), self.updates
            self.now += begun - self._since
            answer = call(*arguments)
            self._since = time.process_time()
            cost, link = self._since - begun, self._link * (self.updates - updates)
            self._slow_now = max(self._slow_now, self.now) + cost + link
            if waits:
                self.now = self._slow_now
            elif not self._is_apart:
                self.now += cost
            return answer

        return timed


def results(full: bool = False) -> Iterator[Result]:
    """Yield the cases of ``geartrain bench gear_places``; ``full`` trains five times as long."""
    seconds = SECONDS * (5 if full else 1)
    for link, link_seconds in LINKS.items():
        conventional = _curve(None, link_seconds, False, seconds)
        for processors, is_apart in PROCESSORS.items():
            for gear in GEARS:
                ours = _curve(gear, link_seconds, is_apart, seconds)
                for mine, theirs in zip(ours, conventional, strict=True):
                    case = f"top-1 at {mine.at_seconds:g} s, {link}, {processors} a worker, {gear} ({mine}; {theirs})"
                    points = (max(100 * mine.accuracy, 0.01), "conventional", max(100 * theirs.accuracy, 0.01))
                    yield result(case, *points, "points", more_is_better=True)


def _curve(gear: Gear | None, link_seconds: float, is_apart: bool, seconds: float) -> list[Seen]:
    """Train until every worker's clock is at ``seconds``; the one that is furthest behind goes next."""
    curve: list[Seen] = []
    test = next(iter(glyph_halves().tests.values()))
    with threads(1), gt.local(num_shards=1) as cluster:
        workers = [TimedWorker(cluster, seed, gear, link_seconds, is_apart) for seed in range(WORKERS)]
        while len(curve) < TESTS:
            slowest = min(workers, key=lambda worker: worker.now)
            at = seconds * (len(curve) + 1) / TESTS
            if slowest.now < at:
                slowest.step()
                continue
            reached = accuracy(cluster, slowest.worker.fast, test, CHANNELS)
            steps, updates = (sum(getattr(each, name) for each in workers) for name in ("steps", "updates"))
            curve.append(Seen(at_seconds=at, accuracy=reached, steps=steps, updates=updates))
        for each in workers:
            each.worker.close()
    return curve
