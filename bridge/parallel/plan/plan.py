"""Cost of a step as printable data: memory of the fullest rank, collectives, expected time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from geartrain.ams.values.text import counted
from geartrain.bridge.parallel.plan.hardware import CLUSTERS, Hardware
from geartrain.bridge.parallel.plan.trace import Collective
from geartrain.bridge.parallel.scopes import Scope


@dataclass(frozen=True, kw_only=True)
class PlannedPart:
    """One part of a model on the fullest rank."""

    name: str
    scope: str
    """"replicated", "sharded", "split", or "" for a part without parameters."""
    num_parameters: int
    """Parameters of the whole part, over all ranks."""
    parameter_bytes: int
    """Bytes on this rank, as the four below."""
    gradient_bytes: int
    """Bytes of gradients, with their communication buckets."""
    optimizer_bytes: int
    activation_bytes: int
    """Bytes kept from the forward to the backward pass; of a split part, its logits and the features of all ranks."""
    forward_seconds: float
    backward_seconds: float
    update_seconds: float

    @property
    def bytes(self) -> int:
        """Sum of the bytes above."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.activation_bytes


@dataclass(frozen=True, kw_only=True)
class PlannedCollective:
    """One collective of a step, or several equal ones."""

    part: str
    times: int
    collective: Collective
    seconds: float
    """Time of all ``times`` of them, without overlap."""

    @property
    def bytes(self) -> int:
        """Bytes of all of them, counted as :class:`Traffic` does."""
        return self.times * self.collective.bytes

    @property
    def sent_bytes(self) -> int:
        """Bytes that one rank sends in all of them."""
        return self.times * self.collective.sent_bytes


@dataclass(frozen=True, kw_only=True)
class ExpectedStep:
    """Expected time of a step, in seconds."""

    forward: float
    backward: float
    update: float
    communication: float
    """Time of all collectives, without overlap."""
    hidden: float
    """Part of it during which the rank computes."""
    slowed: float
    """Slowdown of the computation by hidden communication."""

    @property
    def compute(self) -> float:
        """Time of forward, backward and update."""
        return self.forward + self.backward + self.update

    @property
    def exposed(self) -> float:
        """Communication time during which the rank waits."""
        return self.communication - self.hidden

    @property
    def seconds(self) -> float:
        """Time of the whole step."""
        return self.compute + self.exposed + self.slowed

    def to_dict(self) -> dict[str, float]:
        """Return all figures as plain values."""
        return {**asdict(self), "compute": self.compute, "exposed": self.exposed, "seconds": self.seconds}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Expected step of a model on ranks; :func:`auto_plan` and ``ParallelModel.plan`` make it.

    ``print(plan.explain())`` shows it; pass ``scopes`` to :func:`parallelize`.
    """

    scopes: Mapping[str, Scope]
    """Replicated and split parts, by name."""
    ranks: int
    """Number of ranks that train together."""
    batch: int
    """Samples of a rank."""
    hardware: Hardware
    """Hardware of the plan."""
    changed: Callable[..., Plan] = field(repr=False, compare=False)
    """Makes the plan of the same model with another ``batch``, other ``scopes``, ``ranks``, ``hardware`` and so on."""
    parts: tuple[PlannedPart, ...]
    collectives: tuple[PlannedCollective, ...]
    step: ExpectedStep
    """Expected step with overlap: buckets sent during the backward pass, and micro-batches if there are any."""
    graph_seconds: float = 0.0
    """Time to build the graph of KNN softmax once, between steps; 0: there is none."""
    reasons: tuple[str, ...] = ()
    """Reasons of :func:`auto_plan` for its choice."""

    @property
    def is_by_peaks(self) -> bool:
        """Whether its rates are from data sheets, not measured."""
        return self.hardware.name in CLUSTERS

    @property
    def step_without_overlap(self) -> ExpectedStep:
        """Expected step in which each collective is waited for at once."""
        return replace(self.step, hidden=0.0, slowed=0.0)

    @property
    def rank_bytes(self) -> int:
        """Memory of the fullest rank."""
        return sum(part.bytes for part in self.parts)

    @property
    def fits(self) -> bool:
        """Whether the fullest rank's memory is within that of its device."""
        return self.rank_bytes <= self.hardware.memory_bytes

    @property
    def sent_bytes(self) -> int:
        """Bytes that one rank sends in a step."""
        return sum(planned.sent_bytes for planned in self.collectives)

    @property
    def samples_per_second(self) -> float:
        """Throughput of all ranks."""
        return self.ranks * self.batch / self.step.seconds

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as plain values."""
        return {
            "scopes": {name: str(scope) for name, scope in self.scopes.items()},
            "ranks": self.ranks,
            "batch": self.batch,
            "rank_bytes": self.rank_bytes,
            "fits": self.fits,
            "sent_bytes": self.sent_bytes,
            "samples_per_second": self.samples_per_second,
            "step": self.step.to_dict(),
            "step_without_overlap": self.step_without_overlap.to_dict(),
            "graph_seconds": self.graph_seconds,
            "is_by_peaks": self.is_by_peaks,
            "parts": [{**asdict(part), "bytes": part.bytes} for part in self.parts],
            "collectives": [
                {"part": planned.part, "times": planned.times, "seconds": planned.seconds, **asdict(planned.collective)}
                for planned in self.collectives
            ],
            "hardware": self.hardware.to_dict(),
            "reasons": list(self.reasons),
        }

    def explain(self) -> str:
        """Return words and tables: memory by part, collectives in order, the expected step."""
        step, memory = self.step, self.hardware.memory_bytes
        slowed = f" (it slows the computation by {seconds_text(step.slowed)})" if step.slowed else ""
        parts = [
            [
                part.name or ("model" if part.scope else "loss, rest"),
                part.scope or "-",
                f"{part.num_parameters:,}",
                *map(bytes_text, (part.parameter_bytes, part.gradient_bytes, part.optimizer_bytes)),
                *map(bytes_text, (part.activation_bytes, part.bytes)),
            ]
            for part in self.parts
        ]
        collectives = [
            [
                *(planned.collective.phase, planned.part or "loss, rest", planned.collective.kind),
                *(planned.collective.what, str(planned.times), bytes_text(planned.collective.bytes)),
                *(bytes_text(planned.sent_bytes), seconds_text(planned.seconds)),
            ]
            for planned in self.collectives
        ]
        columns = ["when", "part", "kind", "what", "times", "bytes each", "a rank sends", "alone"]
        sent = [f"a rank sends {bytes_text(self.sent_bytes)} a step", ""]
        steps = f"{self.graph_seconds / step.seconds:,.0f} steps"
        graph = f"{self.graph_seconds / 3600:,.3f} hours a build, as long as {steps}"
        return "\n".join(
            [
                f"{counted(self.ranks, 'rank')} of {counted(self.batch, 'sample')} each, {self.hardware.name} "
                f"({counted(self.hardware.ranks_per_node, 'rank')} a node)",
                *(f"  {reason}" for reason in self.reasons),
                "",
                "memory of the fullest rank",
                *_table(
                    ["part", "scope", "parameters", "weights", "gradients", "optimizer", "activations", "together"],
                    parts,
                ),
                f"together {bytes_text(self.rank_bytes)} of {bytes_text(memory)}"
                + ("" if self.fits else ": IT DOES NOT FIT"),
                "",
                *(["collectives of a step", *_table(columns, collectives), *sent] if collectives else []),
                f"expected step {seconds_text(step.seconds)}: forward {seconds_text(step.forward)}, "
                f"backward {seconds_text(step.backward)}, update {seconds_text(step.update)},",
                f"  communication {seconds_text(step.communication)}, of which {seconds_text(step.hidden)} "
                f"hidden{slowed}",
                f"  without overlap {seconds_text(self.step_without_overlap.seconds)}; "
                f"{self.samples_per_second:,.0f} samples/s of all ranks",
                *([f"  the graph of classes: {graph}"] if self.graph_seconds else []),
                *([f"modelled by the peaks of data sheets, which no {self.hardware.name} reaches"] * self.is_by_peaks),
            ]
        )

    def __str__(self) -> str:
        """Return the plan in one line."""
        scopes = ", ".join(f"{name or 'the model'} {scope}" for name, scope in self.scopes.items())
        ranks = f"{counted(self.ranks, 'rank')} of {counted(self.batch, 'sample')}"
        return f"{ranks}: {scopes}; {seconds_text(self.step.seconds)} a step expected"


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Return columns as wide as their contents, the first ones to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    are_texts = [not any(text[:1].isdigit() for text in column) for column in zip(*rows, strict=True)]
    return [
        "  "
        + "  ".join(
            text.ljust(width) if is_text else text.rjust(width)
            for is_text, text, width in zip(are_texts, row, widths, strict=True)
        ).rstrip()
        for row in (head, *rows)
    ]


def bytes_text(number: float) -> str:
    """Return text such as "1.5 GB", of 10^9 bytes."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:,.1f} {unit}"
    return f"{number:,.0f} B"


def seconds_text(number: float) -> str:
    """Return text such as "1.50 ms"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if number >= size:
            return f"{number / size:,.2f} {unit}"
    return f"{number / 1e-6:,.1f} µs"
