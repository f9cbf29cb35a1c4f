"""Limit below which the first places of all ranks lie, found by counts: no rank sends its places."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from geartrain.bridge.collectives.communicator import Communicator

_WORD = 64
_MAX_ROUNDS = 8


def joint_limit(
    link: Communicator,
    count_below: Callable[[Tensor], Tensor],
    size: int,
    wanted: Tensor,
    most_bytes: int,
    *,
    are_there: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the limit below which the first ``wanted`` places of all ranks lie, and how many lie there.

    Each place in [0, ``size``) is held by at most one rank; ``count_below`` [n] int64 -> [n] int32 counts this rank's
    places below each of the ascending numbers. ``wanted`` is int32 (0-dim). With fewer places in all, the limit is
    ``size`` or more; ``are_there`` rules this out.

    Every round sums over the ranks the counts below the ends of some intervals, and continues inside the one with the
    cut; the last one sends a bit for each place. Some all-reduces, of ``most_bytes`` together where that is possible in
    8, with 4 launches beside each but the last, which has 16. The host waits for no device.
    """
    rounds, num_words = _rounds(size, most_bytes, are_there=are_there)
    ends = torch.arange(max(num_words * _WORD, *(num for num, _ in rounds), 0) + 1, device=wanted.device)
    low, left, total = torch.zeros_like(wanted, dtype=torch.int64), wanted, wanted
    for number, (num, width) in enumerate(rounds):
        is_first, is_last = number == 0, number == len(rounds) - 1
        # The end of the present interval is known to lie behind the cut, if any end does; the last round also counts
        # below its start.
        of_round = ends[0 if is_last else 1 : num + (is_first and not are_there)]
        sums = link.start_sum(count_below(torch.add(low, of_round, alpha=width))).result()
        if is_first and not are_there:
            total = torch.minimum(wanted, sums[-1])
        num_before = torch.searchsorted(sums[1:] if is_last else sums, wanted)
        if is_last:
            left = wanted - sums.take(num_before)
        low = torch.add(low, num_before, alpha=width)
    bits = count_below(low + ends[: num_words * _WORD + 1]).diff()
    words = link.start_sum((bits.view(-1, _WORD) << ends[:_WORD]).sum(1)).result()
    sums = ((words.unsqueeze(1) >> ends[:_WORD]) & 1).flatten().cumsum(0, dtype=torch.int32)
    if not rounds and not are_there:
        total = torch.minimum(wanted, sums[-1])
    return low + torch.searchsorted(sums, left) + wanted.clamp(max=1), total


def _rounds(size: int, most_bytes: int, *, are_there: bool) -> tuple[list[tuple[int, int]], int]:
    """Return intervals and their width, round by round, and the words of bits of the last round.

    As few rounds as fit ``most_bytes``; if none do, those of the fewest bytes.
    """
    whole = max(1, -(-size // _WORD))
    ways: list[tuple[float, int, list[tuple[int, int]], int]] = []
    for count in range(_MAX_ROUNDS):
        for words in [2**power for power in range(whole.bit_length())] if count else [whole]:
            num = math.ceil((whole / words) ** (1 / count)) if count else 1
            rounds = [(num, num**after * words * _WORD) for after in reversed(range(count))]
            num_counts = (num - 1) * count + (1 if are_there else 2) if count else 0
            ways.append((max(most_bytes, 4 * num_counts + 8 * words), count, rounds, words))
        if min(ways)[0] == most_bytes:
            break
    _, _, rounds, words = min(ways)
    return rounds, words
