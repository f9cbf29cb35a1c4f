"""Store of graphs on disk, a file each, with the version of the rows they were built from.

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
    """Version of the rows that a graph was built from."""

    table: str
    """Name of the class table."""
    table_version: int
    """Writes applied by its shards, summed; a graph with fewer is older than the rows."""
    fingerprint: str = ""
    """Hash of the rows, if it is known."""
    step: int = 0
    """Training step of the rows, as given with the build."""
    built_unix_seconds: float = 0.0
    """Time at which the graph was finished."""
    graph_version: int = 1
    """Number of the graph among those of the class table."""
    table_incarnation: int = 0
    """Incarnation of the class table, which tells it from others of its name; 0: unknown, saved by an older version."""


@dataclass(frozen=True)
class GraphSizes:
    """Bytes of a graph; ``print`` it."""

    whole_bytes: int
    shard_bytes: tuple[int, ...]
    """Bytes of the lists of each shard's classes."""

    def __str__(self) -> str:
        """Return a text such as "graph 372.5 GiB, on 256 shards 1.5 GiB each at most"."""
        largest = max(self.shard_bytes)
        return f"graph {sized(self.whole_bytes)}, on {len(self.shard_bytes)} shards {sized(largest)} each at most"


def graph_sizes(num_classes: int, k: int, num_buckets: Sequence[int]) -> GraphSizes:
    """Return the bytes of a graph, whole and on each shard: 8 · (P + 1) + 4 · P · min(k, C - 1).

    ``num_buckets`` are those of each shard, which has their share P of the C classes, to a few classes.
    """
    width = np.dtype(id_dtype(num_classes)).itemsize * min(k, num_classes - 1)
    owned = np.diff(np.cumsum([0, *num_buckets]) * num_classes // NUM_BUCKETS)
    sizes = 8 * (owned + 1) + width * owned
    return GraphSizes(8 * (num_classes + 1) + width * num_classes, tuple(sizes.tolist()))


class GraphStore:
    """Graphs in a folder, one for each class table."""

    def __init__(self, folder: Path) -> None:
        create_folders(folder)
        self._folder = folder

    def save(self, graph: NeighbourTable, version: RowsVersion) -> None:
        """Replace the graph of a class table, all or nothing. Raises StateFailed."""
        head = {"rows": dataclasses.asdict(version), "k": graph.k}
        arrays = {"offsets": graph.offsets, "neighbours": graph.neighbours}
        write_arrays(self._path(version.table), head, arrays, "free space there, or give another folder")

    def load(self, table: str) -> tuple[NeighbourTable, RowsVersion] | None:
        """Return the graph of a class table and the version of its rows; None if there is none. Raises StateDamaged."""
        try:
            head, arrays = read_arrays(self._path(table))
        except FileNotFoundError:
            return None
        except (OSError, StateDamaged) as exc:
            raise StateDamaged(f"the graph of table {table!r}: {exc}; build it again") from exc
        return NeighbourTable(arrays["offsets"], arrays["neighbours"], int(head["k"])), RowsVersion(**head["rows"])

    def tables(self) -> list[str]:
        """Return the class tables with a graph, sorted."""
        found = []
        for path in self._folder.glob("*.graph"):
            try:
                found.append(str(read_head(path)["rows"]["table"]))
            except (OSError, StateDamaged, LookupError) as exc:
                _log.warning("%s is no graph that can be read: %r", path, exc)
        return sorted(found)

    def remove(self, table: str) -> None:
        """Remove the graph of a class table, if there is one. Raises StateFailed."""
        try:
            self._path(table).unlink(missing_ok=True)
            sync_folder(self._folder)
        except OSError as exc:
            raise StateFailed(f"{self._path(table)} could not be removed: {exc.strerror}") from exc

    def _path(self, table: str) -> Path:
        return self._folder / f"{xxhash.xxh3_128_hexdigest(table.encode())}.graph"
