"""Graphs in snapshots: blocks of the lists of some classes, ascending by index and class; the first one also describes
the graph. They are attributed to shard 0, since one service writes and reads them all.
"""

from __future__ import annotations

import dataclasses
import json

import numpy as np

from geartrain.ams.graph.building.neighbours import NeighbourIds, NeighbourTable, id_dtype
from geartrain.ams.graph.service.store import RowsVersion
from geartrain.ams.storage.snapshot.blocks import BLOCK_BYTES, write_block
from geartrain.ams.storage.snapshot.folder import Snapshot
from geartrain.ams.storage.snapshot.manifest import GRAPH, FileEntry
from geartrain.ams.values.errors import GeartrainError, SnapshotDamaged


def write_graph(folder: str, snapshot_id: str, table: NeighbourTable, version: RowsVersion) -> list[FileEntry]:
    """Write a graph into a staging folder; return the files. Raises SnapshotFailed."""
    entries: list[FileEntry] = []
    facts = json.dumps({"rows": dataclasses.asdict(version), "k": table.k, "num_classes": table.num_classes})
    each = max(1, BLOCK_BYTES // (8 + table.neighbours.itemsize * max(1, min(table.k, table.num_classes - 1))))
    for index, start in enumerate(range(0, max(table.num_classes, 1), each)):
        offsets = table.offsets[start : start + each + 1]
        arrays = {
            "lengths": np.diff(offsets),
            "neighbours": table.neighbours[offsets[0] : offsets[-1]],
            "facts": np.frombuffer(facts.encode(), np.uint8) if index == 0 else np.empty(0, np.uint8),
        }
        entries.append(
            write_block(
                folder, snapshot_id=snapshot_id, kind=GRAPH, table=version.table, shard=0, index=index, arrays=arrays
            )
        )
    return entries


def read_graph(snapshot: Snapshot, table: str) -> tuple[NeighbourTable, RowsVersion] | None:
    """Return the whole graph of a table in a snapshot; None if it has none. Raises SnapshotDamaged."""
    entries = [entry for entry in snapshot.manifest.files if entry.kind == GRAPH and entry.table == table]
    if not entries:
        return None
    try:
        blocks = [snapshot.read(entry) for entry in sorted(entries, key=lambda entry: entry.index)]
        facts = json.loads(blocks[0]["facts"].tobytes())
        lengths = np.concatenate([block["lengths"] for block in blocks])
        neighbours = np.concatenate([block["neighbours"] for block in blocks])
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        if len(lengths) != facts["num_classes"]:
            raise ValueError(f"they list {len(lengths)} of {facts['num_classes']} classes")
        ids: NeighbourIds = neighbours.astype(id_dtype(len(lengths)), copy=False)
        return NeighbourTable(offsets, ids, int(facts["k"])), RowsVersion(**facts["rows"])
    except SnapshotDamaged:
        raise
    except (GeartrainError, KeyError, TypeError, ValueError, IndexError) as exc:
        raise SnapshotDamaged(
            f"{snapshot.path}: the blocks of the graph of table {table!r} do not make one ({exc}). Use another "
            "snapshot, or restore without a graph service and build the graph anew"
        ) from exc
