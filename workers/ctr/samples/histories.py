"""What each sample's user did before it.

The events of all users lie in one row, by user and time, so that a history is a slice of it: memory grows with the
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
    """Of each of N samples a slice of the events, the oldest first; it may be empty."""

    items: Ids
    """[E], of each event."""
    outcomes: Ids
    """[E]: what came of it, such as a rating."""
    begin: Ids
    """[N]."""
    end: Ids
    """[N]."""

    def subset(self, indices: npt.NDArray[np.int64]) -> Histories:
        """Those of the samples at ``indices``, of the same events."""
        return replace(self, begin=self.begin[indices], end=self.end[indices])

    def take(self, indices: npt.NDArray[np.int64]) -> tuple[Ids, Ids]:
        """Of the samples at ``indices`` [B]: where their events are among all of them, and B + 1 offsets into that."""
        begin, lengths = self.begin[indices], self.end[indices] - self.begin[indices]
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        places: Ids = np.arange(offsets[-1]) + np.repeat(begin - offsets[:-1], lengths)
        return places, offsets


def histories_before(
    users: Ids, items: Ids, outcomes: Ids, times: Ids, *, events: npt.NDArray[np.int64], length: int
) -> Histories:
    """The histories of samples with ``users``, ``items``, ``outcomes`` and ``times``, each [N].

    Only the samples at ``events`` become events; each is in the histories of its user's strictly later samples. The
    latest ``length`` of them stay; of equal times the order of the samples.
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
