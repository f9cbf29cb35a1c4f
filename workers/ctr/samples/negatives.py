"""Choice of training samples without a click, by a hash: the same on every worker."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from geartrain.ams.kernels.ops import splitmix64
from geartrain.ams.values.specs import Ids
from geartrain.workers.samples.batches import SampleBatch, Values

Hashes = npt.NDArray[np.uint64]


def learned_from(
    columns: Iterable[Ids | Hashes], clicks: npt.NDArray[np.float32], part: float
) -> npt.NDArray[np.int64]:
    """Return the places of clicked samples, and of about the ``part`` of the others with the lowest hashes.

    The hash is over all ``columns`` [N] or [N, L]. At least one place is returned, as no step can train on none.
    """
    hashes = np.zeros(len(clicks), np.uint64)
    for values in columns:
        of_values = splitmix64(values.view(np.uint64))
        hashes = splitmix64(hashes ^ (of_values if of_values.ndim == 1 else of_values.sum(1)))
    places = np.flatnonzero((clicks > 0) | (hashes < np.uint64(part * 2**64)))
    return places if len(places) else np.array([hashes.argmin()])


def columns_of(batch: SampleBatch) -> Iterable[Ids | Hashes]:
    """Yield a batch's values to hash: columns by name, and places in the data, as samples may be equal."""
    yield from batch.places or ()
    for name in sorted(batch):
        hashes, level = _hashed(batch[name]), batch.level_of.get(name)
        yield hashes if level is None else hashes[batch.index[level].numpy()]


def _hashed(values: Values) -> Hashes:
    if not isinstance(values, tuple):
        return splitmix64(values.numpy().astype(np.int64))
    items, offsets = (tensor.numpy() for tensor in values)
    sums = np.append(np.uint64(0), splitmix64(items.astype(np.int64)).cumsum(dtype=np.uint64))
    found: Hashes = sums[offsets[1:]] - sums[offsets[:-1]]
    return found
