"""Identity of a saved module's rows: the writes of its table in one cluster, else hashes of some rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from geartrain.ams.client.table import Table, pull_together
from geartrain.ams.kernels.ops import sample_ids
from geartrain.ams.values.errors import GeartrainError, SpecMismatch
from geartrain.ams.values.specs import Ids
from geartrain.bridge.rows.tables import ReadableTable

LABELS, OTHERS = 64, 64
"""Number of hashed rows: of classes of the last batch, which have certainly moved, and of any."""


def identity_of(table: ReadableTable, recent_labels: Ids) -> dict[str, Any]:
    """Return the identity for :func:`require_same_rows`, as JSON values: the table's writes, and hashes of some rows by
    id. A small request per shard, and one pull of up to 128 rows.

    If rows cannot be read (the cluster is closed) it is the incarnation alone: the rest of a model can be saved.
    """
    ids = _looked_at(table, recent_labels)
    try:
        return _identity(table, ids, _pulled(table, ids))
    except GeartrainError:
        return {"incarnation": table.incarnation}


def identities_of(tables: Sequence[Table], recent_ids: Sequence[Ids]) -> list[dict[str, Any]]:
    """Return :func:`identity_of` each of a cluster's tables, in one pull: so a dead shard is waited for once."""
    looked_at = [_looked_at(table, recent) for table, recent in zip(tables, recent_ids, strict=True)]
    rows = [_room(table, ids) for table, ids in zip(tables, looked_at, strict=True)]
    try:
        pull_together(list(zip(tables, looked_at, rows, strict=True)))
        return [_identity(*item) for item in zip(tables, looked_at, rows, strict=True)]
    except GeartrainError:
        return [{"incarnation": table.incarnation} for table in tables]


def _looked_at(table: ReadableTable, recent_labels: Ids) -> Ids:
    num_rows = table.spec.num_rows  # the other ids of a hashed table are unknown here
    others = np.arange(OTHERS) if num_rows is None else sample_ids(num_rows, min(OTHERS, num_rows), 0, 0)
    return np.unique(np.concatenate([recent_labels[:LABELS], others]))


def _identity(table: ReadableTable, ids: Ids, rows: npt.NDArray[Any]) -> dict[str, Any]:
    return {
        "incarnation": table.incarnation,
        "writes": _writes_of(table),
        "ids": ids.tolist(),
        "row_digests": row_digests(rows),
    }


def _writes_of(table: ReadableTable) -> list[int] | None:
    """Return the writes on each shard; None where writes are not counted."""
    return list(table.versions()) if isinstance(table, Table) else None


def require_same_rows(table: ReadableTable, identity: Mapping[str, Any] | None) -> None:
    """Raise SpecMismatch unless the table is that of ``identity`` without a write since, or another one with the same
    rows, but those that have expired or been evicted. None: of an earlier version, and not checked. A small request per
    shard, or for another table one pull of up to 128 rows, two where rows expire.
    """
    if identity is None:
        return
    if identity["incarnation"] and identity["incarnation"] == table.incarnation:
        try:
            has_moved = identity.get("writes") not in (None, _writes_of(table))
        except GeartrainError:  # the cluster is closed, so training is over
            return
        if has_moved:
            raise moved_rows(table.spec.name)
        return
    digests = identity.get("row_digests")
    if digests is None:  # the state was taken of a closed cluster
        raise other_rows(table.spec.name)
    ids = np.array(identity["ids"], np.int64)
    changed = [found != known for found, known in zip(row_digests(_pulled(table, ids)), digests, strict=True)]
    if any(changed) and not _have_gone(table, ids, np.array(changed)):
        raise other_rows(table.spec.name)


def _have_gone(table: ReadableTable, ids: Ids, changed: npt.NDArray[np.bool_]) -> bool:
    """Return whether the ``changed`` rows are missing from a table that has others of them: they expired between the
    state and the snapshot, or a restore had no room for them."""
    spec = table.spec
    if not isinstance(table, Table) or (spec.expiry is None and spec.max_bytes is None):
        return False
    present = table.present(ids)
    return bool(present.any() and not present[changed].any())


def row_digests(rows: npt.NDArray[Any]) -> list[str]:
    """Return a hash of each of the rows [N, D]."""
    return [xxhash.xxh3_64_hexdigest(row.tobytes()) for row in rows]


def moved_rows(name: str) -> SpecMismatch:
    """Return the error for a state of earlier rows of table ``name``, which were trained since."""
    return SpecMismatch(
        f"rows of table {name!r} have moved since the state was taken, and a state_dict holds no rows to go back to. "
        "Save a model with geartrain.save(model, path), which keeps its rows, and go back by geartrain.load(model, "
        "path, replace=True). To go on with the rows as they are, load the state with strict=False and without "
        "the '_extra_state' of their modules"
    )


def other_rows(name: str) -> SpecMismatch:
    """Return the error for a state of other rows than those of table ``name``."""
    return SpecMismatch(
        f"the saved state is of other rows than table {name!r} has here: rows are in no state_dict. Save a "
        "model with geartrain.save(model, path), which keeps its rows, and load it with geartrain.load(model, path). "
        "Or restore the rows first: the snapshot taken beside this state (cluster.restore(...), then the head with "
        "reuse=True; head.restore(...) for rows='ranks'), or geartrain.import_class_weights(...) of exported ones. To "
        "go on with the rows as they are, load the state with strict=False and without the '_extra_state' of the module"
    )


def _pulled(table: ReadableTable, ids: Ids) -> npt.NDArray[Any]:
    rows = _room(table, ids)
    table.pull_into(ids, rows)
    return rows


def _room(table: ReadableTable, ids: Ids) -> npt.NDArray[Any]:
    return np.empty((len(ids), table.spec.dim), table.spec.numpy_dtype)
