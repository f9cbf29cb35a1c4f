"""The largest few of many gradients on a CPU, and what gathers until it is among them: compiled, typed.

``tests/specification/gradients.py`` is the specification. Arrays are C-contiguous vectors; N elements of one of them,
T of them, K = Σ k selected elements of all. Each function releases the GIL, works on up to ``threads`` threads, and
gives the same bits on every instruction set and for any number of threads.

A tensor is swept once: what exceeds a limit survives, and the k largest come from the survivors. ``estimates`` float32
[T] are the limits to begin with: zeros at first, then what the last call left there. They decide how long a call takes,
never what it returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from geartrain.ams.kernels import _core
from geartrain.ams.kernels.ops import as_bits
from geartrain.ams.values.errors import NonFinite

Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int32]


def accumulate_and_take(
    gradients: Sequence[npt.NDArray[Any]],
    velocities: Sequence[Floats],
    residuals: Sequence[Floats],
    ks: Sequence[int],
    estimates: Floats,
    *,
    momentum: float,
    scale: float = 1.0,
    nesterov: bool = False,
    threads: int = 1,
) -> tuple[Indices, Floats]:
    """Add gradients to what has gathered, take the k largest magnitudes of it, and set their places to 0.

    u = momentum · u + scale · g;  v = v + u, with ``nesterov`` v = v + (scale · g + momentum · u); in float32, as
    written. At the places taken u = v = 0. State is read and written once: 20 bytes an element.

    Args:
        gradients: g, float32, float16 or bfloat16 [N] each.
        velocities: u, float32 [N] each; changed in place.
        residuals: v, float32 [N] each; changed in place.
        ks: how many of each, 0 <= k <= N < 2**31.
        estimates: float32 [T], see above.
        momentum: of u.
        scale: of g.
        nesterov: look ahead.
        threads: at most so many; few tensors get fewer.

    Returns:
        The indices [K] within each tensor, one tensor after the other, rising in each, and the elements of v [K]. Where
        magnitudes are equal, those of lower index.

    Raises:
        NonFinite: a tensor of which something is taken has NaN or infinity in g, u or v, or v would have. All state was
            changed by then, but for places that are not finite, which stay so: put back a copy of it.
        ValueError: arrays contradict each other.
    """
    bits = [as_bits(gradient, "gradient") for gradient in gradients]
    indices, values = np.empty(sum(ks), np.int32), np.empty(sum(ks), np.float32)
    bad = _core.take_largest(
        list(residuals),
        list(velocities),
        [array for array, _ in bits],
        [code for _, code in bits],
        list(ks),
        momentum,
        scale,
        nesterov,
        estimates,
        indices,
        values,
        threads,
    )
    if bad >= 0:
        raise NonFinite(f"tensor {bad} holds NaN or infinity, or would with what is added to it")
    return indices, values
