"""When gear training pays: its speed-up over conventional training, from four numbers.

With s the cost of a step of the sparse part, d of the dense part (forward and backward of the batch's distinct ids), of
which the forward is the part φ; h what gear training adds to a step (look-up, delivery); H the hit rate; M the
gradients of an id that share one backward pass, of forward and backward:

    speed-up = (s + d) / (s + h + (1 − H) · φ · d + d / M)

The hit rate of an id asked for λ times a second, at random times, with features that live E seconds: after each miss
come λE hits on average, so H = λE / (1 + λE); an id that occurs R times in all misses once at least, H <= 1 − 1/R.
Since λ grows as steps get shorter, the two equations are solved together.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FORWARD_PART = 1 / 3
"""A backward pass costs about twice its forward."""


def hit_rate(per_step: npt.ArrayLike, expire_seconds: float, step_seconds: float, steps: int) -> float:
    """Expected hit rate of a run.

    Args:
        per_step: [I] how often each id is asked for in a step, on average.
        expire_seconds: life of a feature.
        step_seconds: of one step.
        steps: of the run; bounds the hits of rare ids.
    """
    rates = np.asarray(per_step, np.float64)
    rates = rates[rates > 0]
    if not len(rates) or expire_seconds <= 0:
        return 0.0
    lived = rates * expire_seconds / step_seconds
    asked = rates * steps
    misses = np.maximum(asked / (1 + lived), -np.expm1(-asked))  # an id that occurs at all misses once
    return float(1 - misses.sum() / asked.sum())


def speed_up(
    ratio: float, hits: float, gradients_per_id: int, overhead: float = 0.0, forward: float = FORWARD_PART
) -> float:
    """Steps of gear training in the time of a conventional one; in units of s: ratio = d/s, overhead = h/s."""
    return (1 + ratio) / (1 + overhead + (1 - hits) * forward * ratio + ratio / gradients_per_id)


def predicted(
    per_step: npt.ArrayLike,
    *,
    ratio: float,
    gradients_per_id: int,
    expire_steps: float,
    steps: int,
    overhead: float = 0.0,
    forward: float = FORWARD_PART,
) -> tuple[float, float]:
    """(speed-up, hit rate) with features that live as long as ``expire_steps`` conventional steps."""
    gain = 1.0
    for _ in range(50):  # a contraction: halving towards the new value
        hits = hit_rate(per_step, expire_steps, 1 / gain, steps)
        gain = (gain + speed_up(ratio, hits, gradients_per_id, overhead, forward)) / 2
    return gain, hits
