"""Philox in tensor operations: random words that are a function of a key and a counter, on any device.

Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

WORD = 2**32 - 1
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_ADDED = (0x9E3779B9, 0xBB67AE85)


def philox_words(key: int | Tensor, counter: tuple[Tensor, Tensor, Tensor, Tensor], rounds: int) -> Tensor:
    """Four words in [0, 2^32) for each of the counters, int64 [..., 4]; Philox4x32.

    ``key`` has 64 bits, or is int64 of each counter; the four parts of a counter are int64 in [0, 2^32), of shapes that
    broadcast. Words are held in int64: the low 64 bits of a product are the same whatever its sign.
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
