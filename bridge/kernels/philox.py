"""Philox random words and normal numbers in tensor operations, on any device.

Random words are a function of a key and a counter. Normal numbers are made from words by + − · / and a square root
alone, so every processor gives the same bits.

Philox: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011. Normal numbers: Wichura's AS 241 (PPND16),
with our own logarithm, as in ``csrc/values/initial_values.cpp``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

WORD = 2**32 - 1
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_ADDED = (0x9E3779B9, 0xBB67AE85)
CENTRAL_TOP = (
    *(3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3, 1.3731693765509461125e4),
    *(4.5921953931549871457e4, 6.7265770927008700853e4, 3.3430575583588128105e4, 2.5090809287301226727e3),
)
CENTRAL_BOTTOM = (
    *(1.0, 4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3),
    *(2.1213794301586595867e4, 3.9307895800092710610e4, 2.8729085735721942674e4, 5.2264952788528545610e3),
)
TAIL_TOP = (
    *(1.42343711074968357734e0, 4.63033784615654529590e0, 5.76949722146069140550e0, 3.64784832476320460504e0),
    *(1.27045825245236838258e0, 2.41780725177450611770e-1, 2.27238449892691845833e-2, 7.74545014278341407640e-4),
)
TAIL_BOTTOM = (
    *(1.0, 2.05319162663775882187e0, 1.67638483018380384940e0, 6.89767334985100004550e-1),
    *(1.48103976427480074590e-1, 1.51986665636164571966e-2, 5.47593808499534494600e-4, 1.05075007164441684324e-9),
)
LOG_SERIES = tuple(1.0 / odd for odd in range(1, 22, 2))
SQRT_HALF_BITS = 0x3FE6A09E667F3BCD


def philox_words(key: int | Tensor, counter: tuple[Tensor, Tensor, Tensor, Tensor], rounds: int) -> Tensor:
    """Return four words in [0, 2^32) for each counter, int64 [..., 4]: Philox4x32.

    Args:
        key: 64 bits; or int64, one key for each counter.
        counter: Four parts, int64 in [0, 2^32), of shapes that broadcast.
        rounds: Rounds of the cipher.

    Words are held in int64: the low 64 bits of a product are the same whatever its sign.
    """
    x0, x1, x2, x3 = counter
    keys: list[Any] = [key & WORD, key >> 32 & WORD]
    for _ in range(rounds):
        product0, product1 = x0 * _MULTIPLIERS[0], x2 * _MULTIPLIERS[1]
        x0, x1 = (product1 >> 32 & WORD) ^ x1 ^ keys[0], product1 & WORD
        x2, x3 = (product0 >> 32 & WORD) ^ x3 ^ keys[1], product0 & WORD
        keys = [(word + added) & WORD for word, added in zip(keys, _ADDED, strict=True)]
    words = torch.broadcast_tensors(x0, x1, x2, x3)  # type: ignore[no-untyped-call]
    return torch.stack(words, -1)


def inverse_normal(words: Tensor) -> Tensor:
    """Return the inverse of the normal distribution function at (word + 1/2) / 2^32, float64."""
    q = (words + 0.5) * 2.0**-32 - 0.5
    central = 0.180625 - q * q
    middle = q * _polynomial(CENTRAL_TOP, central) / _polynomial(CENTRAL_BOTTOM, central)
    r = torch.sqrt(-_log(0.5 - q.abs())) - 1.6
    tail = _polynomial(TAIL_TOP, r) / _polynomial(TAIL_BOTTOM, r)
    return torch.where(q.abs() > 0.425, torch.where(q < 0, -tail, tail), middle)


def _log(x: Tensor) -> Tensor:
    """Return ln x of normal x in (0, 1): x = m · 2^e, ln m = 2 artanh((m − 1) / (m + 1))."""
    bits = x.view(torch.int64)
    e = (bits - SQRT_HALF_BITS) >> 52
    m = (bits - (e << 52)).view(torch.float64)
    s = (m - 1) / (m + 1)
    return e.double() * 0.6931471805599453 + 2 * s * _polynomial(LOG_SERIES, s * s)


def _polynomial(coefficients: Sequence[float], x: Tensor) -> Tensor:
    value = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = value * x + coefficient
    return value
