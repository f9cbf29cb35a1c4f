"""Sets of moments as sorted, disjoint intervals [start, end)."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """All moments that are in any of them."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        elif end > start:
            joined.append((start, end))
    return joined


def length(intervals: Iterable[Interval]) -> float:
    """How long they are together, once each."""
    return sum(end - start for start, end in union(intervals))


def common(left: Iterable[Interval], right: Iterable[Interval]) -> list[Interval]:
    """All moments that are in one of ``left`` and in one of ``right``."""
    found: list[Interval] = []
    ours, theirs = union(left), union(right)
    here = there = 0
    while here < len(ours) and there < len(theirs):
        start, end = max(ours[here][0], theirs[there][0]), min(ours[here][1], theirs[there][1])
        if start < end:
            found.append((start, end))
        if ours[here][1] < theirs[there][1]:
            here += 1
        else:
            there += 1
    return found
