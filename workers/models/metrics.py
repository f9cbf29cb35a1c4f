"""How good scores are."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from geartrain.ams.values.errors import InvalidArgument


def area_under_curve(scores: npt.ArrayLike, labels: npt.ArrayLike) -> float:
    """The probability that a positive has a higher score than a negative, ties counting one half (ROC AUC).

    The rank sum of Mann and Whitney (1947), O(N log N). ``scores`` [N] and ``labels`` [N] of 0 and 1.

    Raises InvalidArgument if the shapes differ, a score is NaN, or there is no positive or no negative.
    """
    values, positive = np.asarray(scores, np.float64).ravel(), np.asarray(labels).ravel() > 0.5
    if values.shape != positive.shape or np.isnan(values).any():
        raise InvalidArgument(
            f"there are {len(values)} scores, {int(np.isnan(values).sum())} of them NaN, and {len(positive)} labels; "
            "give each label a number"
        )
    num_positive, num_negative = int(positive.sum()), int((~positive).sum())
    if not num_positive or not num_negative:
        raise InvalidArgument(f"of {len(values)} labels {num_positive} are positive; the curve needs both kinds")
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    last_ranks = np.cumsum(counts)
    mean_ranks = last_ranks - (counts - 1) / 2
    rank_sum = float(mean_ranks[places][positive].sum())
    return (rank_sum - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative)
