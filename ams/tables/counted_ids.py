"""What a table's admission has counted on a shard."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from geartrain.ams.values.admission.rules import Admission, MinCount
from geartrain.ams.values.placement import BUCKET_ORDER, NUM_BUCKETS
from geartrain.ams.values.specs import Ids


class Refused(NamedTuple):
    """What pushes brought for ids that were not admitted."""

    ids: int = 0
    """That are counted and have no row, about."""
    gradients: int = 0
    """That were dropped, one of each id and push."""
    occurrences: int = 0
    """Of those ids in those pushes."""


class CountedIds(NamedTuple):
    """What admission had counted at one moment. Ranges are those of the table's buckets."""

    num_pushes: int
    """Pushes that brought ids without a row."""
    ranges: Ids
    """[R]: those in which something was counted."""
    counters: npt.NDArray[np.uint8]
    """[R, B]: the filter of each."""
    waiting: Ids
    """[R]: ids that were counted and not admitted, about."""

    def of_buckets(self, owned: npt.NDArray[np.bool_], num_ranges: int) -> CountedIds:
        """The ranges that have a bucket of those marked in ``owned`` [4096]."""
        places = BUCKET_ORDER[np.flatnonzero(owned)]
        wanted = np.isin(self.ranges, np.unique(places // (NUM_BUCKETS // num_ranges)))
        return CountedIds(self.num_pushes, self.ranges[wanted], self.counters[wanted], self.waiting[wanted])


def compiled_admission(admission: Admission | None) -> float | tuple[int, int, int, int, int] | None:
    """What compiled code takes: a probability, or what a filter is made of; None: every id."""
    if isinstance(admission, MinCount):
        filters = admission.num_ranges, admission.range_blocks
        return admission.n, admission.counter_bits, admission.num_hashes, *filters
    return None if admission is None else admission.p
