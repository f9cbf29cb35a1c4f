"""Creation of a module's tables: the first worker creates them with its values, all others open them."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.table import Table
from geartrain.ams.values.errors import ClusterNotReady, SpecMismatch, TableExists, TableNotFound
from geartrain.ams.values.optimizers.registry import SGD, RowOptimizerSpec
from geartrain.ams.values.specs import Constant, DTypeName
from geartrain.bridge.dense.layout import Layout
from geartrain.bridge.rows.tables import as_numpy

BUFFERS_SUFFIX = ".buffers"
_POLL_SECONDS = 0.05
_WIDTH = 4096
"""Default row width. A shard goes from a row to its slots to the next row: with 1,024 values each ends before memory
is at full speed, and a push with Adam takes a quarter longer. Wider rows gain little, and are few to spread over
shards.
"""


@dataclass(frozen=True)
class Store:
    """A table and the layout of its rows. The table's seed is the layout's fingerprint, so that every spec, also in
    snapshots, identifies the layout."""

    table: Table
    layout: Layout

    @property
    def ids(self) -> np.ndarray:
        """Ids of all rows [R]."""
        return np.arange(self.layout.num_rows, dtype=np.int64)

    def with_wire(self, wire_dtype: DTypeName) -> Store:
        """Return this table with another wire dtype."""
        return Store(self.table.with_wire(wire_dtype), self.layout)

    def assign(self, rows_RD: Tensor) -> None:
        """Overwrite all rows: one write."""
        self.table.assign(self.ids, as_numpy(rows_RD))


def width_of(cluster: Cluster, name: str, dim: int | None, *, reuse: bool) -> int:
    """Return the width of the rows: ``dim``; else that of the table to ``reuse``; else the default."""
    if dim is not None:
        return dim
    if reuse:
        with suppress(TableNotFound):
            return cluster.table(name).spec.dim
    return _WIDTH


def open_stores(
    cluster: Cluster,
    name: str,
    trained: Layout,
    others: Layout,
    optimizer: RowOptimizerSpec,
    *,
    reuse: bool,
    values: Callable[[], tuple[Tensor, Tensor]],
    wait_seconds: float,
) -> tuple[Store, Store | None]:
    """Return the tables of the parameters and of the other tensors (None if there are none).

    The first worker creates them and assigns ``values()``, parameters last: a table version of at least 1 means that
    all values are there. With ``reuse`` later workers open them. Raises TableExists, SpecMismatch, ClusterNotReady.
    """
    try:
        weights = _create(cluster, name, trained, optimizer)
    except TableExists:
        if not reuse:
            raise
        weights = _reuse(cluster, name, trained, optimizer)
        _await_values(weights, wait_seconds)  # the buffers' values were assigned before
        return weights, _reuse(cluster, name + BUFFERS_SUFFIX, others, SGD(1.0)) if others.num_values else None
    made, buffers = [weights], None
    try:
        if others.num_values:
            buffers = _create_buffers(cluster, name, others)
            made.append(buffers)
        weight_rows_RD, other_rows_RD = values()
        if buffers is not None:
            buffers.assign(other_rows_RD)
        weights.assign(weight_rows_RD)
    except BaseException:
        for store in made:  # otherwise others would wait for their values
            cluster.drop_table(store.table.spec.name)
        raise
    return weights, buffers


def _create_buffers(cluster: Cluster, name: str, layout: Layout) -> Store:
    try:
        return _create(cluster, name + BUFFERS_SUFFIX, layout, SGD(1.0))
    except TableExists as exc:
        left = name + BUFFERS_SUFFIX
        raise TableExists(
            f"table {left!r} is left of an earlier {name!r}, which was dropped without it; drop it, too: "
            f"cluster.drop_table({left!r})"
        ) from exc


def _create(cluster: Cluster, name: str, layout: Layout, optimizer: RowOptimizerSpec, *, reuse: bool = False) -> Store:
    table = cluster.create_table(
        name,
        dim=layout.dim,
        optimizer=optimizer,
        num_rows=layout.num_rows,
        initializer=Constant(0.0),
        seed=layout.fingerprint,
        reuse=reuse,
    )
    return Store(table, layout)


def _reuse(cluster: Cluster, name: str, layout: Layout, optimizer: RowOptimizerSpec) -> Store:
    found = cluster.table(name).spec
    if (found.seed, found.num_rows, found.dim) != (layout.fingerprint, layout.num_rows, layout.dim):
        raise SpecMismatch(
            f"table {name!r} holds a module of layout {found.seed:016x} ({found.num_rows} rows of {found.dim}); this "
            f"one has {layout} ({layout.num_rows} rows of {layout.dim}). Attach a module of the same parameter names, "
            "shapes and requires_grad, or give it a name of its own"
        )
    return _create(cluster, name, layout, optimizer, reuse=True)


def _await_values(store: Store, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while store.table.version() == 0:
        if time.monotonic() >= deadline:
            raise ClusterNotReady(
                f"table {store.table.spec.name!r} has had no values for {seconds:g} s: the process that made it has "
                f"ended before it gave it any; drop it and {store.table.spec.name + BUFFERS_SUFFIX!r} "
                "(cluster.drop_table) and attach again"
            )
        time.sleep(_POLL_SECONDS)
