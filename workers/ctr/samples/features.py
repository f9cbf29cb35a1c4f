"""Features of a network: the fields, or pairs of fields, whose ids are looked up for a sample and its history.

Without torch: a service reads samples by it, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from geartrain.ams.kernels.embedding import PoolingName
from geartrain.ams.values.specs import Ids
from geartrain.workers.ctr.samples.click_samples import PADDING

HISTORY, HISTORY_ITEMS = "history", "history_items"
"""Names, in the place of a field, of a history's events: ids of item and outcome together; ids of the item."""
HISTORY_OUTCOMES = "history_outcomes"
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, kw_only=True)
class SampleFeature:
    """An input of a network: a vector for each sample, or for each event of its history."""

    name: str
    dim: int
    of: tuple[str, ...]
    """Fields whose ids are looked up, or :data:`HISTORY`; several: an id for each combination of their ids."""
    pooling: PoolingName | None = "mean"
    table: str
    """Name of the table, without the job's name."""
    latest: int | None = None
    """Number of ids used of a list, its last ones; None: all."""

    def to_json(self) -> dict[str, Any]:
        """Return the feature as plain values."""
        return {**asdict(self), "of": list(self.of)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> SampleFeature:
        """Return the feature of :meth:`to_json`'s values."""
        return cls(**{**values, "of": tuple(values["of"])})


def ids_by_feature(features: Iterable[SampleFeature], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ids of each feature, from those of the fields; ids of several fields are :func:`crossed`."""
    found = {}
    for feature in features:
        first, *others = feature.of
        ids = fields[first]
        for other in others:
            ids = crossed(ids, fields[other])
        if feature.latest is not None:
            ids = latest_ids(ids, feature.latest)
        found[feature.name] = ids
    return found


def latest_ids(ids: Ids, count: int) -> Ids:
    """Return the last ``count`` ids of each list [N, L], followed by padding."""
    is_there = ids != PADDING
    lengths = is_there.sum(1, keepdims=True)
    there_first = np.take_along_axis(ids, np.argsort(~is_there, 1, kind="stable"), 1)
    places = np.maximum(lengths - count, 0) + np.arange(min(count, ids.shape[1]))
    found = np.take_along_axis(there_first, np.minimum(places, ids.shape[1] - 1), 1)
    return np.where(places < lengths, found, PADDING)


def latest_of_bags(values: Ids, offsets: Ids, count: int) -> tuple[Ids, Ids]:
    """Return :func:`latest_ids` of consecutive lists."""
    is_there = values != PADDING
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(is_there)])[offsets]
    begins = np.maximum(ends[:-1], ends[1:] - count)
    shorter = np.concatenate([np.zeros(1, np.int64), np.cumsum(ends[1:] - begins)])
    places = np.arange(shorter[-1]) + np.repeat(begins - shorter[:-1], np.diff(shorter))
    return values[is_there][places], shorter


def crossed(first: Ids, second: Ids) -> Ids:
    """Return an id below 2^63 for each pair of ``first`` [N] and ``second`` [N] or [N, L]; padding there stays."""
    left = first if second.ndim == first.ndim else first[:, None]
    mixed = (left.view(np.uint64) * _GOLDEN) ^ second.view(np.uint64)
    mixed = (mixed ^ (mixed >> np.uint64(32))) * _GOLDEN  # so that pairs of similar ids do not collide
    pairs: Ids = (mixed >> np.uint64(1)).view(np.int64)
    return np.where(second == PADDING, PADDING, pairs)
