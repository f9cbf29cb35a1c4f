"""Find where to cut an order of which each rank holds some places, by counts alone: no rank sees another's places."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from geartrain.bridge.collectives.communicator import Communicator

_WORD = 64
_MOST_ROUNDS = 6


def joint_limit(
    link: Communicator, count_below: Callable[[Tensor], Tensor], size: int, wanted: Tensor, most_bytes: int
) -> tuple[Tensor, Tensor]:
    """Return the limit below which the first ``wanted`` places of all ranks lie, and how many lie there.

    Each place in [0, ``size``) is held by one rank at most; ``count_below`` [n] int64 -> [n] tells how many of this
    rank's lie below each of the rising numbers given. Where there are fewer in all, the limit is ``size``.

    Every round counts the places by interval, sums the counts over the ranks, and goes on inside the interval where
    the cut lies; the last one sends a bit for each place. Some all-reduces, of ``most_bytes`` together where that is
    possible in 6. Nobody waits for a device.
    """
    places = torch.arange(_WORD, device=wanted.device)
    low, left = torch.zeros_like(wanted), wanted
    total: Tensor | None = None
    for num_intervals, width in _rounds(size, most_bytes):
        own = count_below(low + torch.arange(0, (num_intervals + 1) * width, width, device=wanted.device)).diff()
        if width > 1:
            counts = link.start_sum(own.to(torch.uint8 if width < 256 else torch.int32)).result()
        else:
            words = (own.view(-1, _WORD) << places).sum(1)
            counts = ((link.start_sum(words).result().unsqueeze(1) >> places) & 1).flatten()
        ends = counts.cumsum(0, dtype=torch.int64)
        total = ends[-1] if total is None else total
        is_before = ends < left
        left = left - (counts * is_before).sum()
        low = torch.add(low, is_before.sum(), alpha=width)
    assert total is not None
    return torch.where(wanted > 0, low + 1, 0).clamp(max=size), torch.minimum(wanted, total)


def _rounds(size: int, most_bytes: int) -> list[tuple[int, int]]:
    """Intervals and their width, round by round; in the last one, of whole words of bits, the width is 1.

    As few rounds as keep to ``most_bytes``; where none do, those of the fewest bytes.
    """
    whole = max(1, -(-size // _WORD))
    ways: list[tuple[float, int, list[tuple[int, int]]]] = []
    for count in range(_MOST_ROUNDS):
        for words in [2**power for power in range(whole.bit_length())] if count else [whole]:
            num = math.ceil((whole / words) ** (1 / count)) if count else 1
            rounds = [(num, num**after * words * _WORD) for after in reversed(range(count))] + [(words * _WORD, 1)]
            ways.append((max(most_bytes, sum(num * _bytes_for(width) for num, width in rounds)), count, rounds))
        if min(ways)[0] == most_bytes:
            break
    return min(ways)[2]


def _bytes_for(width: int) -> float:
    """What the count of an interval takes."""
    return 1 / 8 if width == 1 else 1 if width < 256 else 4
