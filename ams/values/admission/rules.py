"""Admission rules, and the dimensions of the filter that counts ids.

Values only, no state. Compiled code decides (``csrc/admission/admission.hpp``), from what pushes carried.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from geartrain.ams.values.admission.filters import BLOCK_BYTES, best, rate_of
from geartrain.ams.values.arguments import integer, real_number
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.text import quoted

MAX_RANGES = 4096
_RANGE_BLOCKS = 16
"""Fewest blocks of a range of buckets, unless there is only one range."""
_MAX_COUNT = 2**16 - 1
_MIN_BYTES = 4096


@dataclass(frozen=True)
class Probability:
    """Admission by chance: each occurrence of an id without a row admits it with probability ``p``.

    So n occurrences admit it with 1 - (1 - p)ⁿ, and it takes 1 / p of them on the average. Takes no memory.

    The chance is a hash of the table's seed and name, the id, and the number of the push among those that the shard has
    applied: a retried push is applied once, and a repeated run on as many shards decides the same.
    """

    p: float
    """Probability in (0, 1]."""

    def __post_init__(self) -> None:
        p = real_number("p", self.p)
        if not 0 < p <= 1:
            raise InvalidArgument(f"p is {self.p!r}; it must lie in (0, 1], 1 for every id")
        object.__setattr__(self, "p", p)


@dataclass(frozen=True)
class MinCount:
    """Admission by count: an id gets its row at the push that brings its ``n``-th occurrence.

    Occurrences of ids without a row are counted in a counting Bloom filter, which never counts too little: no id waits
    for more than n occurrences. It counts too much where other ids share all counters of an id. With M = ``max_bytes``
    in L = M / 64 blocks of B counters each (256 for n <= 3, 128 for n <= 15, 64 for n <= 255, else 32), k of them for
    an id, a new id is admitted at once with a probability of at most about

        Σⱼ Poisson(j; N / L) · (1 - (1 - 1/B)^(k·j))^k

    where N ids were counted so far. The bound is reached if each of them has been seen n - 1 times, and for n = 2
    (:meth:`false_positive_rate_at`). k is the number that uses the memory best (:attr:`num_hashes`); up to
    :attr:`capacity` ids are counted before the probability exceeds ``false_positive_rate``. Beyond that more rows are
    made than wanted; nothing is lost.

    Sources: Bloom filters that count, Fan et al., "Summary Cache" (1998); in blocks, Putze et al., "Cache-, Hash- and
    Space-Efficient Bloom Filters" (2007).
    """

    n: int
    """Occurrences, from 1 to 65,535."""
    max_bytes: int = 64 << 20
    """Memory of the filter of the whole table, beside that of its rows; a shard has the share of its buckets. At least
    4,096."""
    false_positive_rate: float = 0.01
    """False positive rate that the filter is dimensioned for, in (0, 0.5]."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", integer("n", self.n, 1, _MAX_COUNT))
        object.__setattr__(self, "max_bytes", integer("max_bytes", self.max_bytes, _MIN_BYTES, 2**48))
        rate = real_number("false_positive_rate", self.false_positive_rate)
        if not 0 < rate <= 0.5:
            raise InvalidArgument(f"false_positive_rate is {rate!r}; it must lie in (0, 0.5]")
        object.__setattr__(self, "false_positive_rate", rate)

    @property
    def counter_bits(self) -> int:
        """Bits of a counter, which saturates at n."""
        return next(bits for bits in (2, 4, 8, 16) if self.n < 2**bits)

    @property
    def block_counters(self) -> int:
        """Number of counters of a block."""
        return BLOCK_BYTES * 8 // self.counter_bits

    @property
    def num_hashes(self) -> int:
        """Number of counters of an id."""
        return best(self.block_counters, self.false_positive_rate).num_hashes

    @property
    def capacity(self) -> int:
        """Number of ids that can be counted before ``false_positive_rate`` of new ones are admitted too early."""
        return int(best(self.block_counters, self.false_positive_rate).ids_of_block * self.num_blocks)

    def false_positive_rate_at(self, num_ids: int) -> float:
        """Return the probability above for N = ``num_ids``."""
        return rate_of(num_ids / self.num_blocks, self.block_counters, self.num_hashes)

    @property
    def num_blocks(self) -> int:
        """Number of blocks of all filters."""
        return self.num_ranges * self.range_blocks

    @property
    def num_ranges(self) -> int:
        """Number of ranges of the table's buckets with a filter of their own: a power of two."""
        return int(min(MAX_RANGES, 2 ** int(math.log2(max(1, self.max_bytes // (BLOCK_BYTES * _RANGE_BLOCKS))))))

    @property
    def range_blocks(self) -> int:
        """Number of blocks of the filter of a range."""
        return self.max_bytes // (BLOCK_BYTES * self.num_ranges)


Admission = Probability | MinCount


def require_admission(admission: object) -> None:
    """Raise InvalidArgument unless ``admission`` is an admission rule or None."""
    if admission is not None and not isinstance(admission, Probability | MinCount):
        raise InvalidArgument(
            f"admission is {quoted(admission)}; it must be gt.MinCount(3), gt.Probability(0.1), or None: every id"
        )
