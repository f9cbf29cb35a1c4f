"""The specification of the selection of the largest gradients, in plain numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]


def largest(values: Floats, k: int) -> Indices:
    """The indices of the k largest magnitudes of ``values`` [N], rising; where magnitudes are equal, the lower ones."""
    falling = np.lexsort((np.arange(len(values)), -np.abs(values)))
    return np.sort(falling[:k])


def accumulate_and_take(
    gradient: Floats, velocity: Floats, residual: Floats, k: int, *, momentum: float, scale: float, nesterov: bool
) -> tuple[Indices, Floats]:
    """Do with one tensor [N] what the compiled function does with each, in float32; return indices and values [k]."""
    scaled = gradient * np.float32(scale)
    velocity[:] = velocity * np.float32(momentum) + scaled
    residual[:] = residual + (velocity * np.float32(momentum) + scaled if nesterov else velocity)
    indices = largest(residual, k)
    values = residual[indices]
    residual[indices] = velocity[indices] = 0
    return indices, values
