"""When a step's collectives run beside its computation, and how long it takes then.

One computes, one link carries; a collective begins when what it sends is there and the link is free.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from geartrain.bridge.parallel.plan.costs.collectives import Collective
from geartrain.bridge.parallel.plan.hardware.hardware import Hardware
from geartrain.bridge.parallel.plan.planned import ExpectedStep, PlannedPart

Averages = Sequence[tuple[Sequence[Tensor], Collective]]
Trained = Sequence[tuple[PlannedPart, Sequence[nn.Parameter]]]


def expected_steps(
    parts: Sequence[PlannedPart],
    collectives: Sequence[tuple[str, Collective]],
    averages: Averages,
    trained: Trained,
    hardware: Hardware,
    micro_batches: int,
) -> tuple[ExpectedStep, ExpectedStep]:
    """With what can be hidden hidden, and with every collective waited for.

    Args:
        parts: In the order of the forward pass.
        collectives: All of the step's, each with the name of its part.
        averages: Those of them that average gradients, each with what it averages.
        trained: Replicated parts and their parameters, in the order of the forward pass.
        hardware: Whose rates count.
        micro_batches: With n of them the features of one travel while the next is computed, and their gradients while
            the split part works on the next: all but the n-th part of such a collective can be hidden.
    """
    forward, backward, update = (
        sum(getattr(part, f"{phase}_seconds") for part in parts) for phase in ("forward", "backward", "update")
    )
    communication = sum(one.seconds(hardware) for _, one in collectives)
    hidden = hidden_averages(averages, trained, hardware)
    if micro_batches > 1:
        hidden += _hidden_features(parts, collectives, hardware) * (micro_batches - 1) / micro_batches
    shared = {"forward": forward, "backward": backward, "update": update, "communication": communication}
    slowed = (1 - hardware.overlap) * hidden
    return (
        ExpectedStep(**shared, hidden=hidden, slowed=slowed),
        ExpectedStep(**shared, hidden=0.0, slowed=0.0),
    )


def hidden_averages(averages: Averages, trained: Trained, hardware: Hardware) -> float:
    """Seconds of the gradients' collectives beside which the backward pass still goes on.

    A part's gradients come evenly over its backward pass, the last layer's first.
    """
    ready: dict[int, float] = {}
    clock = 0.0
    for part, parameters in reversed(trained):
        whole, made = sum(one.nbytes for one in parameters), 0
        for one in reversed(parameters):
            made += one.nbytes
            ready[id(one)] = clock + part.backward_seconds * made / max(1, whole)
        clock += part.backward_seconds
    free = 0.0
    for bucket, collective in averages:
        free = max(free, *(ready[id(one)] for one in bucket)) + collective.seconds(hardware)
    total = sum(collective.seconds(hardware) for _, collective in averages)
    return max(0.0, total - max(0.0, free - clock))


def _hidden_features(
    parts: Sequence[PlannedPart], collectives: Sequence[tuple[str, Collective]], hardware: Hardware
) -> float:
    """Seconds of features beside the replicated forward passes, and of their gradients beside the split parts."""
    hidden = 0.0
    replicated = sum(part.forward_seconds for part in parts if part.scope != "split")
    for part in parts:
        if part.scope == "split":
            own = [one for name, one in collectives if name == part.name and one.is_of_features]
            for kind, beside in (
                ("all-gather", replicated),
                ("reduce-scatter", part.forward_seconds + part.backward_seconds),
            ):
                hidden += min(beside, sum(one.seconds(hardware) for one in own if one.kind == kind))
    return hidden
