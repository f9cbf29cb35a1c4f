"""Which samples of the senders go to which owner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SampleSpan:
    """Consecutive samples of one sender that one owner takes."""

    sender: int
    owner: int
    num: int
    """How many, at least 1."""
    at_sender: int
    """Where they begin among the samples of the sender."""
    at_owner: int
    """Where they begin among those that the owner takes."""


def deal(sizes: Sequence[int], num_owners: int) -> list[SampleSpan]:
    """Share the samples of senders, ``sizes`` of each, among the owners, in order and as evenly as can be.

    There are at most senders + owners - 1 spans. The owners' samples, one owner behind the other, are those of the
    senders in their order.
    """
    total = sum(sizes)
    found = []
    first = 0  # of this sender, among all samples
    for sender, size in enumerate(sizes):
        for owner in range(num_owners):
            begin, end = (total * number // num_owners for number in (owner, owner + 1))
            start, stop = max(first, begin), min(first + size, end)
            if start < stop:
                found.append(SampleSpan(sender, owner, stop - start, at_sender=start - first, at_owner=start - begin))
        first += size
    return found
