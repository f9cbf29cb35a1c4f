"""Counters of a table's admission on a shard."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from geartrain.ams.values.admission.rules import Admission, MinCount
from geartrain.ams.values.placement import BUCKET_ORDER, NUM_BUCKETS
from geartrain.ams.values.specs import Ids


class RefusedCounts(NamedTuple):
    """Counts of ids that pushes named and that were not admitted."""

    ids: int = 0
    """Approximate number of ids that are counted and have no row."""
    gradients: int = 0
    """Dropped gradients, one for each id and push."""
    occurrences: int = 0
    """Occurrences of those ids in those pushes."""


class CountedIds(NamedTuple):
    """Counters of admission at one moment, by range of the table's buckets."""

    num_pushes: int
    """Number of pushes with ids that have no row."""
    ranges: Ids
    """[R]: ranges with counts."""
    counters: npt.NDArray[np.uint8]
    """[R, B]: filter of each range."""
    waiting: Ids
    """[R]: approximate number of ids that are counted and not admitted."""

    def of_buckets(self, owned: npt.NDArray[np.bool_], num_ranges: int) -> CountedIds:
        """Return the ranges with a bucket that is marked in ``owned`` [4096]."""
        places = BUCKET_ORDER[np.flatnonzero(owned)]
        wanted = np.isin(self.ranges, np.unique(places // (NUM_BUCKETS // num_ranges)))
        return CountedIds(self.num_pushes, self.ranges[wanted], self.counters[wanted], self.waiting[wanted])


def compiled_admission(admission: Admission | None) -> float | tuple[int, int, int, int, int] | None:
    """Return the argument of compiled code: a probability, or the settings of a filter; None admits every id."""
    if isinstance(admission, MinCount):
        filters = admission.num_ranges, admission.range_blocks
        return admission.n, admission.counter_bits, admission.num_hashes, *filters
    return None if admission is None else admission.p
