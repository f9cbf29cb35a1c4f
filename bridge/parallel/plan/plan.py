"""What a step costs, as data that can be printed: who holds what, which collectives it has, how long it is to take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from geartrain.ams.values.text import counted
from geartrain.bridge.parallel.plan.costs.collectives import Collective
from geartrain.bridge.parallel.plan.hardware.hardware import Hardware

if TYPE_CHECKING:
    from geartrain.bridge.parallel.plan.build import PlanRequest
    from geartrain.bridge.parallel.plan.growth import GrownBatch
    from geartrain.bridge.parallel.scopes import Scope


@dataclass(frozen=True, kw_only=True)
class PlannedPart:
    """One part of a model, as the fullest rank has it."""

    name: str
    scope: str
    """"replicated", "sharded", "split", or "" for what has no parameters."""
    num_parameters: int
    """Of the whole part, over all ranks."""
    parameter_bytes: int
    """On this rank, as the four below."""
    gradient_bytes: int
    """With the buckets that they travel in."""
    optimizer_bytes: int
    activation_bytes: int
    """Kept from the forward to the backward pass; of a split part, its logits and the features of all ranks."""
    forward_seconds: float
    backward_seconds: float
    update_seconds: float

    @property
    def bytes(self) -> int:
        """All of it together."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.activation_bytes


@dataclass(frozen=True, kw_only=True)
class PlannedCollective:
    """One collective of a step, or several that are alike."""

    part: str
    times: int
    collective: Collective
    seconds: float
    """Of all ``times`` of them, nothing beside them."""

    @property
    def bytes(self) -> int:
        """Of all of them, counted as :class:`Traffic` does."""
        return self.times * self.collective.bytes

    @property
    def sent_bytes(self) -> int:
        """That one rank sends in all of them."""
        return self.times * self.collective.sent_bytes()


@dataclass(frozen=True, kw_only=True)
class ExpectedStep:
    """How long a step is to take, in seconds."""

    forward: float
    backward: float
    update: float
    communication: float
    """Of all collectives, were there nothing beside them."""
    hidden: float
    """That part of it during which the rank computes."""
    slowed: float
    """What hidden communication costs the computation beside it."""

    @property
    def compute(self) -> float:
        """Forward, backward and update."""
        return self.forward + self.backward + self.update

    @property
    def exposed(self) -> float:
        """Communication during which the rank waits."""
        return self.communication - self.hidden

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.compute + self.exposed + self.slowed

    def to_dict(self) -> dict[str, float]:
        """All of it as plain values."""
        sums = {"compute": self.compute, "exposed": self.exposed, "seconds": self.seconds}
        return {**asdict(self), **sums}


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
    request: PlanRequest
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
        (Goyal et al. 2017, linear scaling). With it, the batch of all ranks is that, by accumulation over as few
        micro-batches as fit, and the learning rate follows it in the same way.

        Args:
            global_batch: Samples of all ranks that one update is to be made of; None: as many as fit at once.
            memory_bytes: Of a rank's device that may be used; None: nine tenths of the hardware's.
            most: Samples of a rank at a time, whatever would fit. None: 65,536.

        Raises InvalidArgument if not even one sample fits.
        """
        from geartrain.bridge.parallel.plan.growth import grown_batch

        return grown_batch(self, global_batch, memory_bytes, most)

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
        from geartrain.bridge.parallel.plan.explanation import explained

        return explained(self)

    def __str__(self) -> str:
        """One line."""
        return (
            f"{counted(self.ranks, 'rank')} of {counted(self.batch, 'sample')}: "
            + ", ".join(f"{name or 'the model'} {scope}" for name, scope in self.scopes.items())
            + f"; {self.step.seconds * 1e3:.3g} ms a step expected"
        )
