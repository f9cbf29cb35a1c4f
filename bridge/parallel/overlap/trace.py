"""Computation and communication times of all ranks in a step, as a trace file and as numbers.

PyTorch's profiler reports the time of each operation, of work on a class head's rows, and of collectives. A collective
lasts from the call that begins it until this rank has its result, waits for other ranks included: gloo's have such a
range, NCCL's are kernels.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from geartrain.ams.values.arguments import path_name
from geartrain.ams.values.errors import ConfigError, InvalidArgument
from geartrain.ams.values.text import counted
from geartrain.bridge.collectives.communicator import Communicator

Interval = tuple[float, float]
"""A time range [start, end)."""

_STEP = "geartrain::traced_step"
_NO_COMPUTATION = ("autograd::", "c10d::", "_c10d", "c10d_functional::", "gloo:", "nccl:", _STEP)
"""Name prefixes of ranges that are not this rank's computation: autograd's nodes include the waits of their hooks."""
_COLLECTIVE_KERNELS = ("nccl", "rccl")


@dataclass(frozen=True)
class TracedRange:
    """Time range of one operation or collective."""

    name: str
    start: float
    """Seconds since the step began."""
    seconds: float
    is_collective: bool

    @property
    def interval(self) -> Interval:
        """Time range of the operation."""
        return self.start, self.start + self.seconds


@dataclass(frozen=True)
class RankTimes:
    """Times of one rank in a traced step."""

    rank: int
    seconds: float
    """Duration of the whole step."""
    ranges: Sequence[TracedRange]

    def _intervals(self, collective: bool) -> list[Interval]:
        return [found.interval for found in self.ranges if found.is_collective == collective]

    @property
    def compute_seconds(self) -> float:
        """Time with any operation at work."""
        return _length(self._intervals(False))

    @property
    def communication_seconds(self) -> float:
        """Time with any collective in flight."""
        return _length(self._intervals(True))

    @property
    def hidden_seconds(self) -> float:
        """Communication time with an operation at work, too."""
        told, computed = self._intervals(True), self._intervals(False)
        return _length(told) + _length(computed) - _length([*told, *computed])


@dataclass
class TracedStep:
    """Result of :func:`trace_step`, complete once its ``with`` block has ended. Seconds are means over the ranks."""

    path: Path
    ranks: list[RankTimes] = field(default_factory=list)
    """Times by rank; on ranks other than 0 only the own ones."""

    def _mean(self, what: str) -> float:
        if not self.ranks:
            raise InvalidArgument("the traced step has not ended; ask after the with block of gt.trace_step")
        return float(sum(getattr(rank, what) for rank in self.ranks)) / len(self.ranks)

    @property
    def seconds(self) -> float:
        """Duration of the whole step."""
        return self._mean("seconds")

    @property
    def compute_seconds(self) -> float:
        """Time with an operation at work."""
        return self._mean("compute_seconds")

    @property
    def communication_seconds(self) -> float:
        """Time with a collective in flight."""
        return self._mean("communication_seconds")

    @property
    def hidden_seconds(self) -> float:
        """Communication time with an operation at work, too."""
        return self._mean("hidden_seconds")

    @property
    def hidden_fraction(self) -> float:
        """Hidden part of the communication; 1 without communication."""
        communication = self.communication_seconds
        return self.hidden_seconds / communication if communication else 1.0

    def summary(self) -> str:
        """Return one line for each rank, and one for all."""
        lines = [_line(f"rank {rank.rank}", rank) for rank in self.ranks]
        collectives = sum(found.is_collective for found in self.ranks[0].ranges) if self.ranks else 0
        about = _line(counted(len(self.ranks), "rank"), self)
        return "\n".join([*lines, f"{about}, {self.hidden_fraction:.0%}; {counted(collectives, 'collective')} a rank"])


def _length(intervals: Sequence[Interval]) -> float:
    """Return the length of the union of the intervals."""
    total, end = 0.0, -math.inf
    for first, last in sorted(intervals):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


def _line(who: str, times: RankTimes | TracedStep) -> str:
    step, compute, told, hidden = (
        f"{getattr(times, name) * 1e3:.1f} ms"
        for name in ("seconds", "compute_seconds", "communication_seconds", "hidden_seconds")
    )
    return f"{who}: step {step}, computing {compute}, communicating {told}, of which hidden {hidden}"


@contextlib.contextmanager
def trace_step(path: str | Path, process_group: dist.ProcessGroup | None = None) -> Iterator[TracedStep]:
    """Trace the ``with`` block: one or more steps of any training loop over torch.distributed.

        with gt.trace_step("step.json") as trace:
            step(images, labels).backward()
            optimizer.step()
        if rank == 0:
            print(trace.summary())

    Every rank enters it. Rank 0 writes ``path`` for Perfetto (ui.perfetto.dev) or chrome://tracing: a process for each
    rank, with a lane of its computation and one of its collectives: those of class heads, split layers, DDP and FSDP2.
    Do not trace the first step, which allocates. Tracing adds some microseconds to each operation.

    Args:
        path: Path of the file; its folder must exist.
        process_group: The ranks; None: all of them, or this process alone without torch.distributed.

    Raises:
        ConfigError: the file cannot be written.
        InvalidArgument: a profiler, or another ``trace_step``, is active.
        RankLost: a rank did not reach the end.
    """
    target = Path(path_name("path", path, "the name of a file for the trace, such as 'step.json'"))
    link = Communicator(process_group)
    failure: Exception | None = None
    if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        failure = InvalidArgument(
            "a profiler is at work already, torch.profiler's or that of another gt.trace_step; trace in one place"
        )
    link.raise_on_all_ranks(failure, "nothing was traced")
    traced = TracedStep(target)
    on_device = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_device else [])]
    with profile(activities=activities, acc_events=True) as profiler:
        link.agree(True)  # so that all start together, and times of different ranks are comparable
        with record_function(_STEP):
            yield traced
            if on_device:
                torch.cuda.synchronize()
    own = _times_of(link.rank, profiler.events() or [])
    every = link.gather_json([own.seconds, *map(astuple, own.ranges)])
    traced.ranks = [own]
    if link.rank == 0:
        traced.ranks = [
            RankTimes(rank, seconds, [TracedRange(*found) for found in ranges])
            for rank, (seconds, *ranges) in enumerate(every)
        ]
    if link.rank == 0:
        try:
            target.write_text(json.dumps({"traceEvents": _chrome_events(traced.ranks)}), encoding="utf-8")
        except OSError as exc:
            failure = ConfigError(f"the trace cannot be written to {str(target)!r}: {exc}; give another path")
            failure.__cause__ = exc
    link.raise_on_all_ranks(failure, "the trace was not written")


def _times_of(rank: int, events: Sequence[Any]) -> RankTimes:
    (step,) = [event for event in events if event.name == _STEP and not _is_of_device(event)]
    begin, end = step.time_range.start, step.time_range.end
    on_device = any(_is_of_device(event) and not _is_annotation(event) for event in events)
    ranges = []
    for event in events:
        kind = _kind(event, on_device)
        start, stop = max(event.time_range.start, begin), min(event.time_range.end, end)
        if kind is not None and start < stop:
            ranges.append(TracedRange(event.name, (start - begin) / 1e6, (stop - start) / 1e6, kind))
    return RankTimes(rank, (end - begin) / 1e6, sorted(ranges, key=lambda one: one.start))


def _kind(event: Any, on_device: bool) -> bool | None:
    """Return whether an event is a collective; None: neither that nor a computation."""
    name: str = event.name
    if name.startswith("gloo:"):
        return True
    if _is_of_device(event):
        if _is_annotation(event):
            return None
        return any(part in name.lower() for part in _COLLECTIVE_KERNELS)
    is_operation = "::" in name and not name.startswith(_NO_COMPUTATION)
    return False if is_operation and not on_device else None


def _is_of_device(event: Any) -> bool:
    return str(event.device_type) == "DeviceType.CUDA"


def _is_annotation(event: Any) -> bool:
    """Return whether an event is a named range on the device, not a kernel."""
    return bool(getattr(event, "is_user_annotation", False))


def _chrome_events(ranks: Sequence[RankTimes]) -> list[dict[str, Any]]:
    """Return the events in Chrome's Trace Event Format: "X" is a range in microseconds, "M" a name."""
    events: list[dict[str, Any]] = []
    for times in ranks:
        events.append({"ph": "M", "name": "process_name", "pid": times.rank, "args": {"name": f"rank {times.rank}"}})
        for lane, name in ((0, "compute"), (1, "communication")):
            events.append({"ph": "M", "name": "thread_name", "pid": times.rank, "tid": lane, "args": {"name": name}})
        events += [
            {
                "ph": "X",
                "name": found.name,
                "cat": "communication" if found.is_collective else "compute",
                "pid": times.rank,
                "tid": int(found.is_collective),
                "ts": found.start * 1e6,
                "dur": found.seconds * 1e6,
            }
            for found in times.ranges
        ]
    return events
