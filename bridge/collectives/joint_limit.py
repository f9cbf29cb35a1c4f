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
    *rounds, (num_bits, _) = _rounds(size, most_bytes)
    ends = torch.arange(-1, max(num for num, _ in (*rounds, (num_bits, 1))) + 1, device=wanted.device).clamp_(min=0)
    low, left = torch.zeros_like(wanted), wanted
    total: Tensor | None = None
    for num, width in rounds:
        own = count_below(torch.add(low, ends[: num + 2], alpha=width)).diff()  # the first of no width: 0
        counts = link.start_sum(own.to(torch.uint8 if width < 256 else torch.int32)).result()
        sums = counts.cumsum(0, dtype=torch.int64)
        total = sums[-1] if total is None else total
        num_before = torch.searchsorted(sums[1:], left)
        left = left - sums.take(num_before)
        low = torch.add(low, num_before, alpha=width)
    bits, places = count_below(low + ends[1 : num_bits + 2]).diff(), torch.arange(_WORD, device=wanted.device)
    words = link.start_sum((bits.view(-1, _WORD) << places).sum(1)).result()
    sums = ((words.unsqueeze(1) >> places) & 1).flatten().cumsum(0)
    low = low + torch.searchsorted(sums, left)
    limit = ((low + 1) * (wanted > 0)).clamp_(max=size)
    return limit, torch.minimum(wanted, sums[-1] if total is None else total)


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
            ways.append((max(most_bytes, sum(_bytes_for(*one) for one in rounds)), count, rounds))
        if min(ways)[0] == most_bytes:
            break
    return min(ways)[2]


def _bytes_for(num: int, width: int) -> float:
    """What the counts of so many intervals take."""
    return num / 8 if width == 1 else (num + 1) * (1 if width < 256 else 4)
