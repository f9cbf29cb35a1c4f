"""A table of neighbours on disk, versioned with the rows it was built from.

Kept in a ``KeyValueStore`` of ``ams/storage/kv``: arrays in chunks under keys of their own (LMDB seals each
with its XXH3 and names the one that is damaged), and a head that is written last, in one step with the removal of the
older table. So a save that is cut short leaves the older table.

Legend: C classes, P classes of a shard, k neighbours.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from geartrain.ams.graph.building.neighbours import NeighbourTable, id_dtype
from geartrain.ams.storage.kv.store import REMEDY, KeyValueStore
from geartrain.ams.values.errors import StateDamaged
from geartrain.ams.values.placement import NUM_BUCKETS

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "GraphSizes",
    "GraphStore",
    "RowsVersion",
    "graph_sizes",
]

CHUNK_BYTES = 4 << 20
_WRITE_BYTES = 64 << 20
_ARRAYS = ("offsets", "neighbours")


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
        """Such as "graph 372.53 GiB, on 256 shards 1.46 GiB each at most"."""
        largest = max(self.shard_bytes)
        return f"graph {_gib(self.whole_bytes)}, on {len(self.shard_bytes)} shards {_gib(largest)} each at most"


def graph_sizes(num_classes: int, k: int, num_buckets: Sequence[int]) -> GraphSizes:
    """Say how many bytes the table takes whole and on each shard: 8 · (P + 1) + 4 · P · min(k, C - 1).

    ``num_buckets`` are those of each shard, which has their share P of the C classes, to a few classes.
    """
    width = np.dtype(id_dtype(num_classes)).itemsize * min(k, num_classes - 1)
    owned = np.diff(np.cumsum([0, *num_buckets]) * num_classes // NUM_BUCKETS)
    sizes = 8 * (owned + 1) + width * owned
    return GraphSizes(8 * (num_classes + 1) + width * num_classes, tuple(sizes.tolist()))


class GraphStore:
    """Tables of neighbours in a store, one for each class table. As thread-safe as the store is."""

    def __init__(self, store: KeyValueStore) -> None:
        self._store = store

    def save(self, graph: NeighbourTable, version: RowsVersion) -> None:
        """Keep a table in place of the one of the same class table, all or nothing.

        Raises StateFailed; then the older one is as it was.
        """
        prefix = _prefix(version.table)
        values = self._store.read_all()
        older = _head(values, version.table)
        generation = 0 if older is None else int(older["generation"]) + 1
        arrays = {name: getattr(graph, name) for name in _ARRAYS}
        head = {
            "rows": dataclasses.asdict(version),
            "k": graph.k,
            "num_classes": graph.num_classes,
            "generation": generation,
            "arrays": {name: [array.dtype.str, len(array), _sum(array)] for name, array in arrays.items()},
        }
        kept = f"{prefix}{generation - 1}/"
        leftover = [key for key in values if key.startswith(prefix) and not key.startswith((kept, f"{prefix}head"))]
        for batch in _batches(arrays, f"{prefix}{generation}/", leftover):
            self._store.write(batch)
        gone: dict[str, bytes | None] = {key: None for key in values if key.startswith(kept)}
        self._store.write({**gone, f"{prefix}head": json.dumps(head, sort_keys=True).encode()})

    def load(self, table: str) -> tuple[NeighbourTable, RowsVersion] | None:
        """The table kept for a class table and the version of its rows; None if there is none.

        Raises StateDamaged, naming the key.
        """
        values = self._store.read_all()
        head = _head(values, table)
        if head is None:
            return None
        prefix = f"{_prefix(table)}{head['generation']}/"
        offsets, neighbours = (_load_array(values, f"{prefix}{name}", *head["arrays"][name]) for name in _ARRAYS)
        return NeighbourTable(offsets, neighbours, int(head["k"])), RowsVersion(**head["rows"])

    def tables(self) -> list[str]:
        """The class tables that something is kept for, sorted."""
        heads = [json.loads(value) for key, value in self._store.read_all().items() if _is_head(key)]
        return sorted(str(head["rows"]["table"]) for head in heads)

    def remove(self, table: str) -> None:
        """Remove what is kept for a class table, if anything. Raises StateFailed."""
        gone: dict[str, bytes | None] = {k: None for k in self._store.read_all() if k.startswith(_prefix(table))}
        if gone:
            self._store.write(gone)


def _prefix(table: str) -> str:
    """How the keys of a table begin: with its name where that is short and plain, else with a digest of it."""
    is_plain = re.fullmatch(r"[\w.-]{1,100}", table, re.ASCII)
    return f"graph/{table if is_plain else '~' + xxhash.xxh3_128_hexdigest(table.encode())}/"


def _is_head(key: str) -> bool:
    return key.startswith("graph/") and key.endswith("/head")


def _head(values: Mapping[str, bytes], table: str) -> dict[str, Any] | None:
    value = values.get(f"{_prefix(table)}head")
    if value is None:
        return None
    head: dict[str, Any] = json.loads(value)
    return head


def _chunks(array: npt.NDArray[Any]) -> Iterator[Buffer]:
    data = np.ascontiguousarray(array).view(np.uint8)
    for start in range(0, len(data), CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES].data


def _sum(array: npt.NDArray[Any]) -> str:
    seen = xxhash.xxh3_64()
    for chunk in _chunks(array):
        seen.update(chunk)
    return seen.hexdigest()


def _batches(
    arrays: Mapping[str, npt.NDArray[Any]], prefix: str, leftover: Sequence[str]
) -> Iterator[dict[str, bytes | None]]:
    """Changes of at most 64 MiB each, so that no table is in memory twice. What a save left half done goes first."""
    batch: dict[str, bytes | None] = dict.fromkeys(leftover)
    if batch:
        yield batch
    batch, size = {}, 0
    for name, array in arrays.items():
        for number, chunk in enumerate(_chunks(array)):
            batch[f"{prefix}{name}/{number:06d}"] = bytes(chunk)
            size += CHUNK_BYTES
            if size >= _WRITE_BYTES:
                yield batch
                batch, size = {}, 0
    if batch:
        yield batch


def _load_array(values: Mapping[str, bytes], prefix: str, dtype: str, length: int, checksum: str) -> npt.NDArray[Any]:
    array = np.empty(length, np.dtype(dtype))
    data, at = array.view(np.uint8), 0
    for number in range(-(-len(data) // CHUNK_BYTES)):
        key = f"{prefix}/{number:06d}"
        chunk, room = values.get(key), min(CHUNK_BYTES, len(data) - at)
        if chunk is None or len(chunk) != room:
            found = "missing" if chunk is None else f"of {len(chunk)} bytes instead of {room}"
            raise StateDamaged(f"the graph's value of key {key!r} is {found}; build the graph again, or {REMEDY}")
        data[at : at + room] = np.frombuffer(chunk, np.uint8)
        at += room
    if _sum(array) != checksum:
        raise StateDamaged(f"the graph's values of keys {prefix}/… are of another graph; build it again, or {REMEDY}")
    return array


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**28 else f"{size / 2**20:.2f} MiB"
