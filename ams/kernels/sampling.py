"""Class sampling: a sample without replacement that every process computes alike, from (seed, step) alone."""

from __future__ import annotations

from geartrain.ams.kernels import ops
from geartrain.ams.values.specs import Ids

__all__ = ["sample_ids"]


def sample_ids(num_ids: int, count: int, seed: int, step: int) -> Ids:
    """Return the first ``count`` ids of a keyed permutation of [0, num_ids).

    The permutation is a Feistel network walked until it falls inside the range (Black and Rogaway, "Ciphers with
    arbitrary finite domains", CT-RSA 2002): O(count) time, no memory beside the answer. A larger ``count`` only
    appends, and the active classes of a step are the same wherever they are computed.

    Args:
        num_ids: Size of the range, in [1, 2**62].
        count: How many, in [0, num_ids].
        seed: Any integer, modulo 2**64.
        step: Any integer, modulo 2**64.

    Returns:
        Distinct ids, int64 [count], in the permutation's order.

    Raises:
        InvalidArgument: ``num_ids`` or ``count`` is out of range.
    """
    return ops.sample_permutation(num_ids, count, seed, step)
