"""How long a collective takes: rings, whose pace the slowest link sets.

Legend: R ranks, n bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from geartrain.bridge.parallel.plan.costs.rates import Rates

Kind = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "send"]
Phase = Literal["forward", "backward", "update"]


FEATURES, FEATURE_GRADIENTS = "features", "gradients of features"
"""What travels between replicated and split parts."""


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One that every rank takes part in."""

    kind: Kind
    what: str
    """What travels, as "features"."""
    phase: Phase
    """When it begins."""
    bytes: int
    """Of the tensor on one rank: of an all-gather what it gets, of a reduce-scatter what it gives."""
    ranks: int
    on_host: bool = False
    """Numbers that decide shapes travel between the processors."""

    @property
    def is_of_features(self) -> bool:
        """Whether micro-batches have one each."""
        return self.what in (FEATURES, FEATURE_GRADIENTS)

    def sent_bytes(self) -> int:
        """That one rank sends, in a ring."""
        return round(sent_bytes(self.kind, self.bytes, self.ranks))

    def seconds(self, hardware: Rates) -> float:
        """With nothing beside it."""
        return collective_seconds(self.kind, self.bytes, self.ranks, hardware)


def sent_bytes(kind: Kind, num_bytes: float, ranks: int) -> float:
    """That each rank of a ring sends: 2 n (R-1)/R of an all-reduce, half of that gathered or reduce-scattered.

    Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms (2009).
    """
    if ranks == 1:
        return 0.0
    parts = {"all-reduce": 2 * (ranks - 1) / ranks, "broadcast": 1.0, "send": 1.0}
    return num_bytes * parts.get(kind, (ranks - 1) / ranks)


def collective_seconds(kind: Kind, num_bytes: float, ranks: int, hardware: Rates) -> float:
    """Seconds of a ring: what each rank sends over the slowest link's bandwidth, and a latency for each of its turns.

    R-1 turns, 1 of a send. An all-reduce has 2 (R-1), or is done in log2(R) exchanges of everything, whichever is
    shorter (Thakur et al., Optimization of collective communication operations in MPICH, 2005).
    """
    if ranks == 1:
        return 0.0
    bandwidth, latency = hardware.link(ranks)
    bandwidth = hardware.collective_bandwidth.get(kind, bandwidth)
    if kind == "all-reduce":
        exchanges = math.ceil(math.log2(ranks))
        few_turns = exchanges * (latency + num_bytes / bandwidth)
        return min(few_turns, sent_bytes(kind, num_bytes, ranks) / bandwidth + 2 * (ranks - 1) * latency)
    return sent_bytes(kind, num_bytes, ranks) / bandwidth + (1 if kind == "send" else ranks - 1) * latency
