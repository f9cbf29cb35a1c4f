"""Histories: the events of each sample's user before it.

The events of all users are in one array, by user and time, and a history is a slice of it: memory grows with the
samples, not with the length of histories.

Legend: N samples, E events.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from geartrain.ams.values.specs import Ids


@dataclass(frozen=True)
class Histories:
    """Histories of N samples, each a slice of the events, the oldest first; it may be empty."""

    items: Ids
    """[E], item of each event."""
    outcomes: Ids
    """[E]: outcome of each event, such as a rating."""
    begin: Ids
    """[N], start of each slice."""
    end: Ids
    """[N], end of each slice."""

    def subset(self, indices: npt.NDArray[np.int64]) -> Histories:
        """Return the histories of the samples at ``indices``, with the same events."""
        return replace(self, begin=self.begin[indices], end=self.end[indices])

    def take(self, indices: npt.NDArray[np.int64]) -> tuple[Ids, Ids]:
        """Return the positions of the events of the samples at ``indices`` [B], and B + 1 offsets into these."""
        begin, lengths = self.begin[indices], self.end[indices] - self.begin[indices]
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        places: Ids = np.arange(offsets[-1]) + np.repeat(begin - offsets[:-1], lengths)
        return places, offsets


def histories_before(
    users: Ids, items: Ids, outcomes: Ids, times: Ids, *, events: npt.NDArray[np.int64], length: int
) -> Histories:
    """Return the histories of samples with ``users``, ``items``, ``outcomes`` and ``times``, each [N].

    Only the samples at ``events`` become events; each is in the histories of its user's strictly later samples. A
    history keeps its latest ``length`` events; equal times keep the order of the samples.
    """
    _, user = np.unique(users, return_inverse=True)
    moments, moment = np.unique(times, return_inverse=True)
    key = user.astype(np.int64) * len(moments) + moment  # rises by user, then by time
    chosen = np.sort(events)
    order = chosen[np.argsort(key[chosen], kind="stable")]
    keys = key[order]
    end = np.searchsorted(keys, key, side="left").astype(np.int64)
    first = np.searchsorted(keys, user.astype(np.int64) * len(moments), side="left").astype(np.int64)
    return Histories(items[order], outcomes[order], np.maximum(first, end - length), end)
