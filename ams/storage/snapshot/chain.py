"""Layers of a table in a chain of snapshots, where each shard wrote all of its rows or those touched since.

The unit is the bucket: each number of shards divides buckets in its own way. If a shard wrote all of its rows, older
snapshots do not count in its buckets (the shard was restarted, or the table created anew). In the other buckets the
rows of the parent count too, below those of the snapshot itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from geartrain.ams.storage.snapshot.folder import Snapshot
from geartrain.ams.storage.snapshot.manifest import REMOVED, ROW_KINDS, FileEntry
from geartrain.ams.values.errors import SnapshotDamaged
from geartrain.ams.values.placement import BUCKET_ORDER, NUM_BUCKETS, bucket_of
from geartrain.ams.values.specs import Ids, TableSpec

Buckets = npt.NDArray[np.bool_]
"""A mask of buckets, bool [4096]."""


@dataclass(frozen=True)
class Layer:
    """Part of a table that one snapshot holds."""

    snapshot: Snapshot
    table: str
    buckets: Buckets
    """The buckets in which rows of this layer count."""

    def blocks(self, owned: Buckets | None = None) -> list[FileEntry]:
        """Return the blocks that may hold rows that count, in the buckets ``owned`` if given."""
        return self._of_kinds(ROW_KINDS, owned)

    def removed(self, owned: Buckets | None = None) -> list[FileEntry]:
        """Return the blocks of ids whose rows were removed: their rows in older layers do not count."""
        return self._of_kinds((REMOVED,), owned)

    def removed_ids(self, owned: Buckets, *, dense: bool) -> Iterator[Ids]:
        """Yield the ids of removed rows in buckets ``owned``, block by block. Raises SnapshotDamaged."""
        for entry in self.removed(owned):
            ids = self.snapshot.read(entry)["ids"]
            buckets = bucket_of(ids, dense=dense)
            yield ids[owned[buckets] & self.buckets[buckets]]

    def _of_kinds(self, kinds: Collection[str], owned: Buckets | None) -> list[FileEntry]:
        wanted = [self._places_by_shard(self.buckets)] + ([] if owned is None else [self._places_by_shard(owned)])
        return [
            entry
            for entry in self.snapshot.manifest.files
            if entry.kind in kinds and entry.table == self.table and all(_can_hold(entry, places) for places in wanted)
        ]

    def _places_by_shard(self, buckets: Buckets) -> dict[int, Ids]:
        """Return the places of ``buckets`` in ``BUCKET_ORDER``, ascending, by the shard that wrote their rows."""
        shard_of = self.snapshot.manifest.bucket_shards
        return {
            int(shard): np.sort(BUCKET_ORDER[buckets & (shard_of == shard)]) for shard in np.unique(shard_of[buckets])
        }


def _can_hold(entry: FileEntry, places: Mapping[int, Ids]) -> bool:
    """Return whether a block may hold rows of buckets at these places."""
    assert entry.shard is not None
    mine = places.get(entry.shard)
    if mine is None or entry.buckets is None:
        return mine is not None
    first, last = entry.buckets
    return bool(np.searchsorted(mine, first) < np.searchsorted(mine, last, "right"))


def layers_of(chain: Sequence[Snapshot], table: str) -> list[Layer]:
    """Return the layers of a table, newest first as in ``chain``; where two layers have a row, the newer one counts.

    Raises SnapshotDamaged if a snapshot that is needed has no such table, or one of another specification.
    """
    layers: list[Layer] = []
    counting = np.ones(NUM_BUCKETS, np.bool_)
    specs: list[TableSpec] = []
    for snapshot in chain:
        if not counting.any():
            break
        found = [spec for spec in snapshot.manifest.tables if spec["name"] == table]
        spec = TableSpec.from_dict(found[0]) if found else None  # forms of it that mean the same are equal
        if spec is None or not spec.is_same_table((specs or [spec])[0]):
            raise SnapshotDamaged(
                f"{snapshot.path} does not fit {chain[0].path}, which adds to it: table {table!r} is {spec} there, "
                f"{specs} here. Use another snapshot"
            )
        specs = [spec]
        layers.append(Layer(snapshot, table, counting))
        shard_of = snapshot.manifest.bucket_shards
        counting = counting & np.isin(shard_of, snapshot.manifest.deltas.get(table, []))
    return layers


def is_among(ids: Ids, ascending: Ids) -> Buckets:
    """Return which of ``ids`` [N] are in the sorted ids ``ascending``: bool [N]."""
    if not len(ascending):
        return np.zeros(len(ids), np.bool_)
    at = np.searchsorted(ascending, ids)
    return np.equal(ascending[np.minimum(at, len(ascending) - 1)], ids)
