"""What each snapshot of a chain contributes to a table, when shards wrote all of their rows or those touched since.

The unit is the bucket, which every number of shards divides in its own way. In the buckets of a shard that wrote all of
its rows nothing older counts, be it that the shard was restarted or the table dropped and made anew; in the others the
rows of the parent count too, below those of the snapshot itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from geartrain.ams.storage.snapshot.folder import Snapshot
from geartrain.ams.storage.snapshot.manifest import ROWS, FileEntry
from geartrain.ams.values.errors import SnapshotDamaged
from geartrain.ams.values.placement import NUM_BUCKETS, even_placement

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
        shard_of = even_placement(self.snapshot.manifest.num_shards)
        counting = set(shard_of[self.buckets].tolist())
        if owned is not None:
            counting &= set(shard_of[owned].tolist())
        return [
            entry
            for entry in self.snapshot.manifest.files
            if entry.kind == ROWS and entry.table == self.table and entry.shard in counting
        ]


def layers_of(chain: Sequence[Snapshot], table: str) -> list[Layer]:
    """Return the layers of a table, the newest first as in ``chain``; where two have a row, the newer one holds.

    Raises SnapshotDamaged if a snapshot that is needed has no such table, or one of another specification.
    """
    layers: list[Layer] = []
    counting = np.ones(NUM_BUCKETS, np.bool_)
    specs: list[object] = []
    for snapshot in chain:
        if not counting.any():
            break
        spec = next((spec for spec in snapshot.manifest.tables if spec["name"] == table), None)
        if spec is None or spec != (specs or [spec])[0]:
            raise SnapshotDamaged(
                f"{snapshot.path} does not fit {chain[0].path}, which adds to it: table {table!r} is {spec} there, "
                f"{specs} here. Use another snapshot"
            )
        specs = [spec]
        layers.append(Layer(snapshot, table, counting))
        shard_of = even_placement(snapshot.manifest.num_shards)
        counting = counting & np.isin(shard_of, snapshot.manifest.deltas.get(table, []))
    return layers
