"""Parts, collectives and length of a planned step, as data."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from geartrain.bridge.parallel.plan.costs.collectives import Collective


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
