"""Prometheus metrics of a job in this process: steps, durations of their parts, samples, loss."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from geartrain.ams.observe.metrics import Buckets, Metric, serve_metrics
from geartrain.ams.rpc.credentials import Credentials
from geartrain.ams.values.config import require_private
from geartrain.bridge.rows.tables import ROW_SECONDS

BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Histogram bounds in seconds, of a step or a part of it."""
PHASES = ("pull", "push", "forward", "backward", "update")
"""Phases of a step: ``pull`` waits for rows, ``push`` sends gradients. The times of the other three exclude both."""


RATE_SECONDS = 10.0
"""Window of displayed rates, long enough to smooth over a validation or a snapshot."""


class RecentSteps:
    """Speed of a thread's steps in the last :data:`RATE_SECONDS`, and its waits for rows."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._past: deque[tuple[float, int, int, float, float]] = deque()
        """Time, steps and batches by then, and the seconds of their pulls and pushes; oldest first."""

    def rates(self, step: int, batches: int) -> dict[str, float]:
        """Return the rates up to now, at ``step``, before which were so many ``batches``; nothing at the first call,
        which starts the window."""
        now = (time.perf_counter(), step, batches, ROW_SECONDS["pull"], ROW_SECONDS["push"])
        self._past.append(now)
        while len(self._past) > 2 and now[0] - self._past[1][0] >= RATE_SECONDS:
            self._past.popleft()
        seconds, steps, more, pull, push = (at - before for at, before in zip(now, self._past[0], strict=True))
        if not steps:
            return {}
        return {
            "steps_per_second": steps / max(seconds, 1e-9),
            "samples_per_second": more * self._batch_size / max(seconds, 1e-9),
            "pull_ms": 1e3 * pull / steps,
            "push_ms": 1e3 * push / steps,
        }


class StepTimer:
    """Durations of the parts of a step in the training thread, from now on. Cost: some microseconds a step."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._since = self._now()

    def ended(self, phase: str) -> None:
        """Count the time since the last call as ``phase``, except pulls and pushes: phases of their own."""
        now = self._now()
        whole, pull, push = (at - before for at, before in zip(now, self._since, strict=True))
        self._since = now
        self.seconds["pull"] += pull
        self.seconds["push"] += push
        self.seconds[phase] += whole - pull - push

    @staticmethod
    def _now() -> tuple[float, float, float]:
        return time.perf_counter(), ROW_SECONDS["pull"], ROW_SECONDS["push"]


class JobCounters:
    """Counters of a process's steps, over all attempts. Written by one thread, read from any."""

    def __init__(self) -> None:
        self.job = ""
        self.loss: float | None = None
        """Newest loss that was read."""
        self.figures: Mapping[str, float] = {}
        """Figures of the newest validation, by name."""
        self._steps = self._samples = 0
        self._counts = {phase: [0] * (len(BOUNDS) + 1) for phase in PHASES}
        self._seconds = dict.fromkeys(PHASES, 0.0)

    def step_done(self, seconds: Mapping[str, float], samples: int) -> None:
        """Count a step with the ``seconds`` of each phase. Cost: two microseconds."""
        self._steps += 1
        self._samples += samples
        for phase, spent in seconds.items():
            self._counts[phase][bisect_left(BOUNDS, spent)] += 1
            self._seconds[phase] += spent

    def metrics(self) -> Iterator[Metric]:
        """Yield all metrics; nothing before there is a job."""
        if not self.job:
            return
        job, label = (self.job,), ("job",)
        yield Metric("job_steps_total", "counter", "Steps done by this process.", label, [(job, self._steps)])
        samples = [(job, self._samples)]
        yield Metric("job_samples_total", "counter", "Samples of the steps done by this process.", label, samples)
        if self.loss is not None:
            yield Metric("job_loss", "gauge", "Newest loss that was read.", label, [(job, self.loss)])
        if self.figures:
            what, named = (
                "Figures of the newest validation.",
                [((self.job, name), of) for name, of in self.figures.items()],
            )
            yield Metric("job_metric", "gauge", what, ("job", "metric"), named)
        what = "Seconds of phases of a step: pull (waits for rows), push, forward (with the loss), backward, update."
        parts = [((self.job, p), Buckets(BOUNDS, tuple(self._counts[p]), self._seconds[p])) for p in PHASES]
        yield Metric("job_step_seconds", "histogram", what, ("job", "phase"), parts)


COUNTERS = JobCounters()
"""Counters of this process."""


@contextmanager
def serve_job_metrics(address: str | None, say: Callable[[str], None]) -> Iterator[None]:
    """Serve Prometheus metrics at ``address`` inside the context, and print the address; None: do nothing.

    Raises ConfigError: the address cannot be bound, strangers could reach it, or prometheus_client is not installed.
    """
    if address is None:
        yield
        return
    require_private("--metrics", address, insecure=False)
    with serve_metrics(address, COUNTERS.metrics, "worker", Credentials.mine(address)) as port:
        say(f"Metrics of this job for Prometheus: {port.address}")
        yield
