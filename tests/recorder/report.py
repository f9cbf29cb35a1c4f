"""What one step did, as counted; and a model of the time that it takes on a card."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from geartrain.bridge.kernels.launch import Cost

REPOSITORY = Path(__file__).resolve().parents[2]

LAUNCH_SECONDS = 5e-6
"""The host's part of starting a kernel."""
_SHOWN = 12


def our_line(depth: int = 2) -> str:
    """Which lines of the project are being run, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    lines: list[str] = []
    while frame is not None and len(lines) < depth:
        path = _in_repository(frame.f_code.co_filename)
        if path is not None:
            lines.append(f"{path}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(lines) or "(outside)"


_PATHS: dict[str, str | None] = {}


def _in_repository(filename: str) -> str | None:
    if filename not in _PATHS:
        path = Path(filename).resolve()
        ours = path.is_relative_to(REPOSITORY) and not path.is_relative_to(Path(__file__).parent)
        ours = ours and ".venv" not in path.parts and not filename.startswith("<") and path.name != "launch.py"
        _PATHS[filename] = path.relative_to(REPOSITORY).as_posix() if ours else None
    return _PATHS[filename]


@dataclass
class Report:
    """Counts of one step. Places are lines of the project: "bridge/rows/pending.py:206 < bridge/rows/tables.py:90"."""

    title: str = ""
    launches: int = 0
    bytes: float = 0
    flops: float = 0
    waits: Counter[str] = field(default_factory=Counter)
    """Where the host waited for the device: "kind @ place"."""
    mixtures: Counter[str] = field(default_factory=Counter)
    """Operations on tensors of several devices, which CUDA refuses."""
    kernels: Counter[str] = field(default_factory=Counter)
    """Of ours, by name; among the launches."""
    operations: Counter[str] = field(default_factory=Counter)
    """Of torch, by name; among the launches."""
    lines: Counter[str] = field(default_factory=Counter)
    """Launches by place."""
    seconds: Counter[str] = field(default_factory=Counter)
    """Modelled, by kernel or operation: each alone at its bound."""
    seconds_by_line: Counter[str] = field(default_factory=Counter)
    to_device: Counter[str] = field(default_factory=Counter)
    to_host: Counter[str] = field(default_factory=Counter)
    """Bytes copied, by place."""
    collectives: Counter[str] = field(default_factory=Counter)
    """Of dry ranks: "name of the device|host @ place"."""
    integers: int = 1
    """What an integer is that the host reads from the device, where it is made up."""
    events: int = 0
    """Recorded so far: the host has waited for those up to ``known``; those up to ``before`` are of earlier steps."""
    known: int = 0
    before: int = 0
    trace: list[str] = field(default_factory=list)
    """Each launch with its numbers and the shapes of its tensors."""
    differences: list[str] = field(default_factory=list)
    """Of two steps that a CUDA graph would hold, by the launches in which they differ."""
    failure: str = ""
    """What ended the step, if anything did."""

    @property
    def num_waits(self) -> int:
        """Times the host waited."""
        return sum(self.waits.values())

    @property
    def device_ms(self) -> float:
        """Modelled milliseconds on the device."""
        return 1e3 * sum(self.seconds.values())

    def count(self, name: str, cost: Cost, seconds: float, *, ours: bool = False) -> None:
        """Note one launch."""
        line = our_line(1)
        self.launches += 1
        self.bytes += cost.num_bytes
        self.flops += cost.flops
        (self.kernels if ours else self.operations)[name] += 1
        self.lines[line] += 1
        self.seconds[name] += seconds
        self.seconds_by_line[line] += seconds

    def wait(self, kind: str) -> None:
        """Note that the host waited, for all that the device was given."""
        self.waits[f"{kind} @ {our_line(3)}"] += 1
        self.known = self.events

    def reset(self) -> None:
        """Begin anew: setting up is done."""
        events = self.events
        self.__init__(self.title, integers=self.integers, events=events, known=self.known, before=events)

    def to_json(self) -> str:
        """For another process."""
        return json.dumps(vars(self))

    @staticmethod
    def from_json(text: str) -> Report:
        """Of :meth:`to_json`."""
        values: dict[str, Any] = json.loads(text)
        counters = {item.name for item in fields(Report) if item.default_factory is Counter}
        return Report(**{name: Counter(value) if name in counters else value for name, value in values.items()})

    def text(self) -> str:
        """For people."""
        host_ms = 1e3 * self.launches * LAUNCH_SECONDS
        parts = [
            f"## {self.title}: {self.launches} launches, {self.num_waits} waits, {len(self.mixtures)} mixtures; "
            f"{self.bytes / 1e9:.3f} GB, {self.flops / 1e12:.3f} TFLOP; modelled {self.device_ms:.2f} ms on an H100, "
            f"{host_ms:.2f} ms of the host at 5 us a launch"
        ]
        for name, counts in (("WAIT", self.waits), ("MIXTURE", self.mixtures), ("collective", self.collectives)):
            parts += [f"  {name} {number}x {what}" for what, number in counts.most_common(20)]
        for name, counts, unit, scale in (
            ("kernels", self.kernels, "", 1),
            ("operations", self.operations, "", 1),
            ("launches by line", self.lines, "", 1),
            ("ms by operation", self.seconds, "", 1e3),
            ("ms by line", self.seconds_by_line, "", 1e3),
            ("to the device", self.to_device, " MB", 1e-6),
            ("to the host", self.to_host, " MB", 1e-6),
        ):
            if counts:
                shown = ", ".join(f"{key} {n * scale:.4g}{unit}" for key, n in counts.most_common(_SHOWN))
                parts.append(f"  {name}: {shown}")
        if self.failure:
            parts.append(f"  FAILED: {self.failure}")
        return "\n".join(parts)
