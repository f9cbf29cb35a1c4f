"""The class sampling of ``ams/kernels`` in tensor operations: the same ids, on any device, and no host waits.

The permutation of [0, C) is a Feistel network over [0, 2^bits), walked until it falls inside the range. How far a walk
goes only the device knows; so that nobody has to ask it, all walks are done by pointer doubling: after r rounds
everything outside [0, C) points at most 2^r places further along its cycle, and bits rounds reach every end.

Legend: C the range, O = 2^bits − C < C numbers outside it, N ids wanted.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 2**32 - 1
_LONG = 2**64 - 1


def sample_ids_on(device: torch.device, num_ids: int, count: int, seed: int, step: int) -> Tensor:
    """Return :func:`geartrain.ams.kernels.ops.sample_ids` as int64 [N] on ``device``.

    About 100 + bits operations on N + O numbers (the C++ needs O(N) time), and 75·(N + O) bytes meanwhile. The
    arguments are those of that function, and are not checked.
    """
    bits = (num_ids - 1).bit_length()
    keys = _round_keys(seed, step)
    outside = 2**bits - num_ids
    # From the places outside it goes on by one pass of the network each, from the inside by one to begin with.
    ahead = _permuted(torch.arange(num_ids, 2**bits, device=device), bits, keys)
    for _ in range((outside - 1).bit_length() if outside > 1 else 0):
        ahead = _further(ahead, ahead, num_ids)
    return _further(_permuted(torch.arange(count, device=device), bits, keys), ahead, num_ids)


def _further(values: Tensor, ahead: Tensor, num_ids: int) -> Tensor:
    """Where the values lie, moved on where they are outside the range: ``ahead`` tells whereto, from ``num_ids`` on."""
    if not len(ahead):
        return values
    return torch.where(values < num_ids, values, ahead[(values - num_ids).clamp_(min=0)])


def _permuted(values: Tensor, bits: int, keys: list[int]) -> Tensor:
    """One pass of the Feistel network over [0, 2^bits); ``values`` int64."""
    left_bits, right_bits = bits // 2, bits - bits // 2
    left_mask, right_mask = 2**left_bits - 1, 2**right_bits - 1
    left, right = values >> right_bits, values & right_mask
    for left_key, right_key in zip(keys[::2], keys[1::2], strict=True):
        left ^= _mixed(right ^ left_key).bitwise_and_(left_mask)
        right ^= _mixed(left ^ right_key).bitwise_and_(right_mask)
    return left.bitwise_left_shift_(right_bits).bitwise_or_(right)


def _mixed(words: Tensor) -> Tensor:
    """The 32-bit finaliser of MurmurHash3, in place; int64 keeps the low 32 bits of a product whatever its sign."""
    words ^= words >> 16
    words.mul_(0x85EBCA6B).bitwise_and_(_WORD)
    words ^= words >> 13
    words.mul_(0xC2B2AE35).bitwise_and_(_WORD)
    words ^= words >> 16
    return words


def _round_keys(seed: int, step: int) -> list[int]:
    base = _splitmix64(_splitmix64(seed & _LONG) ^ (step & _LONG))
    return [_splitmix64((base + number) & _LONG) >> 32 for number in range(1, 9)]


def _splitmix64(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _LONG
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _LONG
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _LONG
    return value ^ (value >> 31)
