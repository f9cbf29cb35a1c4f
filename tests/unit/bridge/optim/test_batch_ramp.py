"""The batch of each step: never smaller than before, by the formula, and summed beforehand."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from geartrain.ams.values.errors import InvalidArgument
from geartrain.bridge.optim.batch_plan import BatchRamp, plan_of_epochs


@st.composite
def ramps(draw: st.DrawFn) -> BatchRamp:
    first = draw(st.integers(1, 20))
    initial_steps = draw(st.integers(0, 30))
    return BatchRamp(
        first=first,
        last=first + draw(st.integers(0, 200)),
        initial_steps=initial_steps,
        total_steps=initial_steps + draw(st.integers(1, 60)),
    )


@given(ramps())
def test_each_batch_is_the_nearest_to_the_cosine_and_none_shrinks(ramp: BatchRamp) -> None:
    counts = [ramp.at(step) for step in range(ramp.total_steps)]
    assert counts == sorted(counts)
    for step, count in enumerate(counts):
        part = max(0, step - ramp.initial_steps) / (ramp.total_steps - ramp.initial_steps)
        exact = ramp.first + (ramp.last - ramp.first) * (1 - math.cos(math.pi * part)) / 2
        assert abs(count - exact) <= 0.5 + 1e-9
    assert ramp.total == sum(counts)


@given(
    epochs=st.floats(1.0, 20.0),
    initial=st.floats(0.0, 0.9),
    samples=st.integers(64, 5000),
    first=st.integers(1, 3),
    more=st.integers(0, 40),
    ranks=st.integers(1, 3),
)
def test_a_plan_of_epochs_uses_them_up_but_for_less_than_a_batch(
    epochs: float, initial: float, samples: int, first: int, more: int, ranks: int
) -> None:
    quantum = 4 * ranks
    sizes = {"initial_batch": first * quantum, "max_batch": (first + more) * quantum, "micro_batch": 4, "ranks": ranks}
    passes = {"epochs": epochs, "initial_epochs": epochs * initial, "warmup_epochs": 0.0, "samples_per_epoch": samples}
    try:
        plan = plan_of_epochs(**passes, **sizes)  # type: ignore[arg-type]
    except InvalidArgument:
        assert epochs * samples < sizes["initial_batch"] * (epochs * initial * samples / sizes["initial_batch"] + 1.5)
    else:
        assert 0 <= epochs * samples - plan.total_samples < sizes["max_batch"]
