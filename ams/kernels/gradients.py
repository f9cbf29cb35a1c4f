"""Selection of the largest few of many gradients on a CPU, and accumulation of the rest: compiled, typed.

``tests/specification/gradients.py`` is the specification. Arrays are C-contiguous vectors; N elements of one of them, T
of them, K = Σ k selected elements of all. Each function releases the GIL, uses up to ``threads`` threads, and gives the
same bits on every instruction set and for any number of threads.

A tensor is read once: elements above a limit are kept, and the k largest are chosen from them. ``estimates`` float32
[T] are the initial limits: zeros at first, then the values that the last call left there. They affect the time of a
call, never its result.
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
    """Add gradients to the accumulated ones, return the k largest magnitudes, and set their places to 0.

    u = momentum · u + scale · g;  v = v + u, with ``nesterov`` v = v + (scale · g + momentum · u); in float32, as
    written. At the returned places u = v = 0. State is read and written once: 20 bytes an element.

    Args:
        gradients: g, float32, float16 or bfloat16 [N] each.
        velocities: u, float32 [N] each; changed in place.
        residuals: v, float32 [N] each; changed in place.
        ks: number to return of each, 0 <= k <= N < 2**31.
        estimates: initial limits, float32 [T], updated.
        momentum: factor of u.
        scale: factor of g.
        nesterov: look ahead.
        threads: most threads; few tensors use fewer.

    Returns:
        The indices [K] within each tensor, one tensor after the other, ascending in each, and the elements of v [K]. Of
        equal magnitudes those of lower index.

    Raises:
        NonFinite: a tensor with k > 0 has NaN or infinity in g, u or v, or v would have. All state was changed by then,
            except places that are not finite: restore it from a copy.
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
