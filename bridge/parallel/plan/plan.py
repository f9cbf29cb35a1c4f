"""What a step costs, as data that can be printed: who holds what, which collectives it has, how long it is to take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from geartrain.ams.values.arguments import integer
from geartrain.ams.values.text import counted
from geartrain.bridge.parallel.plan.explanation import collectives_lines, memory_lines, step_lines
from geartrain.bridge.parallel.plan.growth import USED, largest_batch
from geartrain.bridge.parallel.plan.hardware.hardware import Hardware
from geartrain.bridge.parallel.plan.planned import ExpectedStep, PlannedCollective, PlannedPart
from geartrain.bridge.parallel.scopes import Scope


class PlanSource(Protocol):
    """What a plan was made of."""

    def changed(self, *, batch: int | None = None, **fields: Any) -> PlanSource:
        """The same with another batch of a rank, or other fields."""

    def plan(self) -> Plan:
        """Make it."""


MOST_SAMPLES = 65_536
"""Of a rank, that a batch grows to where nothing is said."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A step of a model on ranks, before it is run; :func:`auto_plan` and ``ParallelModel.plan`` make it.

    ``print(plan.explain())`` shows it, ``scopes`` go to :func:`parallelize`.
    """

    scopes: Mapping[str, Scope]
    hardware: Hardware
    ranks: int
    batch: int
    """Samples of a rank."""
    parts: tuple[PlannedPart, ...]
    collectives: tuple[PlannedCollective, ...]
    step: ExpectedStep
    """With buckets sent while the backward pass goes on, and micro-batches if there are some."""
    step_without_overlap: ExpectedStep
    """Each collective waited for where it begins."""
    request: PlanSource
    """What it was made of."""
    reasons: tuple[str, ...] = ()
    """Why :func:`auto_plan` chose it."""

    @property
    def rank_bytes(self) -> int:
        """Memory of the fullest rank."""
        return sum(part.bytes for part in self.parts)

    @property
    def fits(self) -> bool:
        """Whether that is within the memory of its device."""
        return self.rank_bytes <= self.hardware.memory_bytes

    @property
    def sent_bytes(self) -> int:
        """That one rank sends in a step."""
        return sum(one.sent_bytes for one in self.collectives)

    @property
    def samples_per_second(self) -> float:
        """Of all ranks."""
        return self.ranks * self.batch / self.step.seconds

    def changed(
        self,
        *,
        batch: int | None = None,
        micro_batches: int | None = None,
        sparsity: float | None = None,
        hardware: Hardware | None = None,
    ) -> Plan:
        """The same with another batch of a rank, in micro-batches whose features travel beside computation, with
        gradients of which all but ``sparsity`` are sent, or on other hardware. None leaves a setting as it is.
        """
        given = {"micro_batches": micro_batches, "sparsity": sparsity, "hardware": hardware}
        fields = {name: value for name, value in given.items() if value is not None}
        return self.request.changed(batch=batch, **fields).plan()

    def grow_batch(
        self, global_batch: int | None = None, *, memory_bytes: int | None = None, most: int | None = None
    ) -> GrownBatch:
        """Give the memory that is free to the batch: the largest one of a rank that fits, and what follows from it.

        Without ``global_batch`` the batch of all ranks grows with that of a rank, and the learning rate in proportion
        (Goyal et al. 2017, linear scaling). With it, the batch of all ranks is that, by accumulation over few
        micro-batches, and the learning rate follows it in the same way. Where no ranks · batch · accumulation is that,
        it is the next number above that up to twice as many micro-batches as fit give.

        Args:
            global_batch: Samples of all ranks that one update is to be made of; None: as many as fit at once.
            memory_bytes: Of a rank's device that may be used; None: nine tenths of the hardware's.
            most: Samples of a rank at a time, whatever would fit. None: 65,536.

        Raises InvalidArgument if not even one sample fits.
        """
        limit = int(USED * self.hardware.memory_bytes)
        if memory_bytes is not None:
            limit = integer("memory_bytes", memory_bytes, 1)
        most = integer("most", MOST_SAMPLES if most is None else most, 1)
        if global_batch is not None:
            integer("global_batch", global_batch, self.ranks)
            most = min(most, -(-global_batch // self.ranks))

        def bytes_of(batch: int) -> int:
            return self.request.changed(batch=batch).plan().rank_bytes

        largest = largest_batch(bytes_of, first=self.batch, limit=limit, most=most)
        accumulation = 1
        if global_batch is not None:
            own = -(-global_batch // self.ranks)
            fewest = -(-own // largest)
            accumulation = min(range(fewest, 2 * fewest + 1), key=lambda count: (-(-own // count) * count, count))
            largest = -(-own // accumulation)
        return GrownBatch(
            plan=self.request.changed(batch=largest).plan(),
            batch=largest,
            accumulation=accumulation,
            global_batch=self.ranks * largest * accumulation,
            lr_factor=largest * accumulation / self.batch,
        )

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values."""
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
            "parts": [{**asdict(part), "bytes": part.bytes} for part in self.parts],
            "collectives": [
                {"part": one.part, "times": one.times, "seconds": one.seconds, **asdict(one.collective)}
                for one in self.collectives
            ],
            "hardware": self.hardware.to_dict(),
            "reasons": list(self.reasons),
        }

    def explain(self) -> str:
        """The same in words and tables: memory by part, collectives in their order, the expected step."""
        nodes = counted(self.hardware.ranks_per_node, "rank")
        return "\n".join(
            [
                f"{counted(self.ranks, 'rank')} of {counted(self.batch, 'sample')} each, "
                f"{self.hardware.name} ({nodes} a node)",
                *(f"  {reason}" for reason in self.reasons),
                "",
                *memory_lines(self.parts, self.rank_bytes, self.hardware.memory_bytes),
                "",
                *collectives_lines(self.collectives),
                *step_lines(self.step, self.step_without_overlap, self.samples_per_second),
            ]
        )

    def __str__(self) -> str:
        """One line."""
        return (
            f"{counted(self.ranks, 'rank')} of {counted(self.batch, 'sample')}: "
            + ", ".join(f"{name or 'the model'} {scope}" for name, scope in self.scopes.items())
            + f"; {self.step.seconds * 1e3:.3g} ms a step expected"
        )


@dataclass(frozen=True, kw_only=True)
class GrownBatch:
    """A larger batch and what goes with it; :meth:`Plan.grow_batch` makes it."""

    plan: Plan
    """Of a step with it."""
    batch: int
    """Samples of a rank at a time."""
    accumulation: int
    """Backward passes before an update."""
    global_batch: int
    """Samples of all ranks in an update."""
    lr_factor: float
    """What the learning rate is to be multiplied by: as much as the global batch grows (Goyal et al. 2017; large ones
    need warm-up).
    """

    @property
    def samples_per_second(self) -> float:
        """Of all ranks; the update and the averaging of gradients once in ``accumulation`` passes."""
        step = self.plan.step
        averaged = sum(one.seconds for one in self.plan.collectives if one.collective.what.endswith("gradients"))
        once = step.update + max(0.0, averaged - step.hidden)
        return self.global_batch / (self.accumulation * (step.seconds - once) + once)
