"""When gear training pays: its speed-up over conventional training, from four numbers.

With s the cost of a step of the sparse part, d of the dense part (forward and backward of the batch's distinct ids), of
which the forward is the part φ; h what gear training adds to a step (look-up, delivery); H the hit rate; M the
gradients of an id that share one backward pass, of forward and backward:

    speed-up = (s + d) / (s + h + (1 − H) · φ · d + d / M)

The hit rate of an id asked for λ times a second, at random times, with features that live E seconds: after each miss
come λE hits on average, so 1 − H = 1 / (1 + λE). Where a backward pass leaves fresh features (``train_mode`` "always"
or "never"), it saves one miss for M times that the id is asked for: 1 − H = 1 / (1 + λE) − 1 / M. An id that occurs R
times in all misses once at least: 1 − H >= 1 / R. Since λ grows as steps get shorter, the two equations are solved
together.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FORWARD_PART = 1 / 3
"""A backward pass costs about twice its forward."""


def hit_rate(
    per_step: npt.ArrayLike,
    expire_seconds: float,
    step_seconds: float,
    steps: int,
    gradients_per_pass: float = float("inf"),
) -> float:
    """Expected hit rate of a run.

    Args:
        per_step: [I] how often each id is asked for in a step, on average.
        expire_seconds: life of a feature.
        step_seconds: of one step.
        steps: of the run; bounds the hits of rare ids.
        gradients_per_pass: M, if backward passes leave fresh features.
    """
    rates = np.asarray(per_step, np.float64)
    rates = rates[rates > 0]
    if not len(rates) or expire_seconds <= 0:
        return 0.0
    lived = rates * expire_seconds / step_seconds
    asked = rates * steps
    stale = np.maximum(1 / (1 + lived) - 1 / gradients_per_pass, 0.0)
    misses = np.maximum(asked * stale, -np.expm1(-asked))  # an id that occurs at all misses once
    return float(1 - misses.sum() / asked.sum())


def speed_up(
    ratio: float, hits: float, gradients_per_pass: float, overhead: float = 0.0, forward: float = FORWARD_PART
) -> float:
    """Steps of gear training in the time of a conventional one; in units of s: ratio = d/s, overhead = h/s."""
    return (1 + ratio) / (1 + overhead + (1 - hits) * forward * ratio + ratio / gradients_per_pass)


def predicted(
    per_step: npt.ArrayLike,
    *,
    ratio: float,
    gradients_per_pass: float,
    expire_steps: float,
    steps: int,
    overhead: float = 0.0,
    forward: float = FORWARD_PART,
) -> tuple[float, float]:
    """(speed-up, hit rate) with features that live as long as ``expire_steps`` conventional steps."""
    gain = 1.0
    for _ in range(50):  # a contraction: halving towards the new value
        hits = hit_rate(per_step, expire_steps, 1 / gain, steps, gradients_per_pass)
        gain = (gain + speed_up(ratio, hits, gradients_per_pass, overhead, forward)) / 2
    return gain, hits
