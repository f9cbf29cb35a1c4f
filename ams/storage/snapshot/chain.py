"""What each snapshot of a chain contributes to a table, when shards wrote all of their rows or those touched since.

The unit is the bucket, which every number of shards divides in its own way. In the buckets of a shard that wrote all of
its rows nothing older counts, be it that the shard was restarted or the table dropped and made anew; in the others the
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
"""[4096]: which buckets are meant."""


@dataclass(frozen=True)
class Layer:
    """One snapshot's part of a table."""

    snapshot: Snapshot
    table: str
    buckets: Buckets
    """Those in which its rows count."""

    def blocks(self, owned: Buckets | None = None) -> list[FileEntry]:
        """Return the blocks that can hold rows that count; with ``owned`` those that can also hold rows of these."""
        return self._of_kinds(ROW_KINDS, owned)

    def removed(self, owned: Buckets | None = None) -> list[FileEntry]:
        """:meth:`blocks` with the ids of rows that were removed: older layers' rows of them do not count."""
        return self._of_kinds((REMOVED,), owned)

    def removed_ids(self, owned: Buckets, *, dense: bool) -> Iterator[Ids]:
        """The ids of rows in buckets ``owned`` that were removed, block by block. Raises SnapshotDamaged."""
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
        """The places of ``buckets`` in ``BUCKET_ORDER``, ascending, by the shard that wrote their rows."""
        shard_of = self.snapshot.manifest.bucket_shards
        return {
            int(shard): np.sort(BUCKET_ORDER[buckets & (shard_of == shard)]) for shard in np.unique(shard_of[buckets])
        }


def _can_hold(entry: FileEntry, places: Mapping[int, Ids]) -> bool:
    """Whether a block can hold rows of buckets at these places."""
    assert entry.shard is not None
    mine = places.get(entry.shard)
    if mine is None or entry.buckets is None:
        return mine is not None
    first, last = entry.buckets
    return bool(np.searchsorted(mine, first) < np.searchsorted(mine, last, "right"))


def layers_of(chain: Sequence[Snapshot], table: str) -> list[Layer]:
    """Return the layers of a table, the newest first as in ``chain``; where two have a row, the newer one holds.

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
    """Which of ``ids`` [N] are among others, that ascend: [N] bool."""
    if not len(ascending):
        return np.zeros(len(ids), np.bool_)
    at = np.searchsorted(ascending, ids)
    return np.equal(ascending[np.minimum(at, len(ascending) - 1)], ids)
