"""Tables of neighbours on disk, a file each, versioned with the rows they were built from.

Legend: C classes, P classes of a shard, k neighbours.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from geartrain.ams.graph.building.neighbours import NeighbourTable, id_dtype
from geartrain.ams.storage.array_file import read_arrays, read_head, write_arrays
from geartrain.ams.storage.durable import create_folders, sync_folder
from geartrain.ams.values.errors import StateDamaged, StateFailed
from geartrain.ams.values.placement import NUM_BUCKETS
from geartrain.ams.values.text import sized

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RowsVersion:
    """The rows that a table of neighbours was built from."""

    table: str
    """Name of the class table."""
    table_version: int
    """Writes that its shards had applied, summed; a graph of fewer is older than its rows."""
    fingerprint: str = ""
    """Of the rows themselves, if it is known."""
    step: int = 0
    """Training step of the rows, as whoever had it built said."""
    built_unix_seconds: float = 0.0
    """When the table of neighbours was finished."""
    graph_version: int = 1
    """Counts the graphs of the class table."""
    table_incarnation: int = 0
    """Number of the class table, which tells it from others of its name; 0: kept by a version that did not note it."""


@dataclass(frozen=True)
class GraphSizes:
    """Bytes of a table of neighbours; ``print`` it."""

    whole_bytes: int
    shard_bytes: tuple[int, ...]
    """Of the lists of the classes of each shard."""

    def __str__(self) -> str:
        """Such as "graph 372.5 GiB, on 256 shards 1.5 GiB each at most"."""
        largest = max(self.shard_bytes)
        return f"graph {sized(self.whole_bytes)}, on {len(self.shard_bytes)} shards {sized(largest)} each at most"


def graph_sizes(num_classes: int, k: int, num_buckets: Sequence[int]) -> GraphSizes:
    """Say how many bytes the table takes whole and on each shard: 8 · (P + 1) + 4 · P · min(k, C - 1).

    ``num_buckets`` are those of each shard, which has their share P of the C classes, to a few classes.
    """
    width = np.dtype(id_dtype(num_classes)).itemsize * min(k, num_classes - 1)
    owned = np.diff(np.cumsum([0, *num_buckets]) * num_classes // NUM_BUCKETS)
    sizes = 8 * (owned + 1) + width * owned
    return GraphSizes(8 * (num_classes + 1) + width * num_classes, tuple(sizes.tolist()))


class GraphStore:
    """Tables of neighbours in a folder, one for each class table."""

    def __init__(self, folder: Path) -> None:
        create_folders(folder)
        self._folder = folder

    def save(self, graph: NeighbourTable, version: RowsVersion) -> None:
        """Keep a table in place of the one of the same class table, all or nothing. Raises StateFailed."""
        head = {"rows": dataclasses.asdict(version), "k": graph.k}
        arrays = {"offsets": graph.offsets, "neighbours": graph.neighbours}
        write_arrays(self._path(version.table), head, arrays, "free space there, or give another folder")

    def load(self, table: str) -> tuple[NeighbourTable, RowsVersion] | None:
        """The table kept for a class table and the version of its rows; None if there is none. Raises StateDamaged."""
        try:
            head, arrays = read_arrays(self._path(table))
        except FileNotFoundError:
            return None
        except (OSError, StateDamaged) as exc:
            raise StateDamaged(f"the graph of table {table!r}: {exc}; build it again") from exc
        return NeighbourTable(arrays["offsets"], arrays["neighbours"], int(head["k"])), RowsVersion(**head["rows"])

    def tables(self) -> list[str]:
        """The class tables that something is kept for, sorted."""
        found = []
        for path in self._folder.glob("*.graph"):
            try:
                found.append(str(read_head(path)["rows"]["table"]))
            except (OSError, StateDamaged, LookupError) as exc:
                _log.warning("%s is no graph that can be read: %r", path, exc)
        return sorted(found)

    def remove(self, table: str) -> None:
        """Remove what is kept for a class table, if anything. Raises StateFailed."""
        try:
            self._path(table).unlink(missing_ok=True)
            sync_folder(self._folder)
        except OSError as exc:
            raise StateFailed(f"{self._path(table)} could not be removed: {exc.strerror}") from exc

    def _path(self, table: str) -> Path:
        return self._folder / f"{xxhash.xxh3_128_hexdigest(table.encode())}.graph"
