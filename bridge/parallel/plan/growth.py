"""The largest batch that fits, and what follows from it for accumulation and the learning rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from geartrain.ams.values.arguments import integer
from geartrain.ams.values.errors import InvalidArgument
from geartrain.bridge.parallel.plan.explanation import bytes_text

if TYPE_CHECKING:
    from geartrain.bridge.parallel.plan.plan import Plan

_USED = 0.9
"""Of a device's memory; the rest is for its libraries, and for what an allocator cannot use."""
_MOST = 65_536


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


def grown_batch(plan: Plan, global_batch: int | None, memory_bytes: int | None, most: int | None) -> GrownBatch:
    """See :meth:`Plan.grow_batch`."""
    limit = int(_USED * plan.hardware.memory_bytes)
    if memory_bytes is not None:
        limit = integer("memory_bytes", memory_bytes, 1)
    most = integer("most", _MOST if most is None else most, 1)
    if global_batch is not None:
        integer("global_batch", global_batch, plan.ranks)
        most = min(most, -(-global_batch // plan.ranks))
    largest = _largest(plan, limit, most)
    accumulation = 1
    if global_batch is not None:
        accumulation = -(-global_batch // (plan.ranks * largest))
        largest = -(-global_batch // (plan.ranks * accumulation))
    grown = plan.request.changed(batch=largest).plan()
    samples = plan.ranks * largest * accumulation
    return GrownBatch(
        plan=grown,
        batch=largest,
        accumulation=accumulation,
        global_batch=samples,
        lr_factor=samples / (plan.ranks * plan.batch),
    )


def _largest(plan: Plan, limit: int, most: int) -> int:
    """Samples of a rank: memory grows nearly evenly with them, so a few dry runs find the largest that fits."""
    fits, too_many = 0, most + 1
    guess = min(most, max(1, plan.batch))
    while too_many - fits > 1:
        needed = plan.request.changed(batch=guess).plan().rank_bytes
        if needed <= limit:
            fits, fitting_bytes = guess, needed
        else:
            too_many, failing_bytes = guess, needed
        if not fits:
            guess = max(1, guess // 2)
        elif too_many > most:
            guess = min(most, 2 * fits)
        else:
            slope = (failing_bytes - fitting_bytes) / (too_many - fits)
            guess = min(too_many - 1, max(fits + 1, fits + int((limit - fitting_bytes) / max(slope, 1e-9))))
        if fits == 0 and too_many == 1:
            raise InvalidArgument(
                f"not one sample of a rank fits into {bytes_text(limit)}: {bytes_text(needed)} are needed. Split more "
                "of the model, or use more ranks"
            )
    return fits
