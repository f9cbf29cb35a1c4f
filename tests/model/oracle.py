"""What a cluster must hold, by the rules alone: dictionaries, sets and float32 arithmetic written out.

The oracle is told of every message as it reaches a shard and says what must come of it. All its arithmetic is that of
single numbers, in the order of the optimizers' formulas, so that equality is to the bit.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, field

import numpy as np

from geartrain.ams.values.optimizers.registry import SGD, Momentum
from geartrain.ams.values.placement import bucket_of
from geartrain.ams.values.shard_messages import CallContext
from geartrain.ams.values.specs import Constant, TableSpec

Row = tuple[np.ndarray, np.ndarray]
"""Value and slot, each [D] float32."""
Content = dict[str, tuple[TableSpec, dict[int, Row]]]
"""Tables of a whole cluster."""


@dataclass
class Refused:
    """The message must be answered with an error and change nothing."""

    why: str


EITHER = Refused("it may be refused or taken; no row changes")


@dataclass
class OracleTable:
    """One table on one shard."""

    spec: TableSpec
    rows: dict[int, Row] = field(default_factory=dict)
    is_written: bool = False
    restored_from: str = ""
    """The folder whose rows it has, or is being given."""
    is_open: bool = True
    """False: made to be restored, and not published."""

    def is_meant_by(self, context: CallContext) -> bool:
        return context.table_incarnation in (0, self.spec.incarnation)

    def initial(self) -> Row:
        assert isinstance(self.spec.initializer, Constant)
        value = np.full(self.spec.dim, self.spec.initializer.value, np.float32)
        return value, np.zeros(self.spec.dim, np.float32)

    def push(self, ids: np.ndarray, gradients: np.ndarray) -> None:
        optimizer = self.spec.optimizer
        lr = np.float32(optimizer.lr)
        for item, gradient in zip(ids.tolist(), gradients, strict=True):
            value, slot = self.rows.get(item) or self.initial()
            if isinstance(optimizer, SGD):
                self.rows[item] = value - lr * gradient, slot
            else:
                assert isinstance(optimizer, Momentum)
                slot = np.float32(optimizer.momentum) * slot + gradient
                self.rows[item] = value - lr * slot, slot
        self.is_written = True

    def assign(self, ids: np.ndarray, values: np.ndarray) -> None:
        for item, value in zip(ids.tolist(), values, strict=True):
            self.rows[item] = value.copy(), np.zeros(self.spec.dim, np.float32)
        self.is_written = True


@dataclass
class OracleShard:
    """One shard since its last start."""

    number: int
    num_shards: int
    incarnation: int
    tables: dict[str, OracleTable] = field(default_factory=dict)
    applied: dict[tuple[str, int], OracleTable] = field(default_factory=dict)
    """(stream, sequence) of every write that changed rows, and whose they were."""
    newest: dict[str, int] = field(default_factory=dict)
    """Highest incarnation seen of each stream."""
    oldest: dict[str, int] = field(default_factory=dict)
    """What each stream has said to be its oldest unacknowledged write."""
    parts: dict[tuple[str, int, int], dict[int, tuple[np.ndarray, np.ndarray]]] = field(default_factory=dict)
    frozen: dict[str, list[OracleTable]] = field(default_factory=dict)
    """Tables of each snapshot whose moment is held."""
    ended: set[str] = field(default_factory=set)
    """Snapshots whose freeze has ended here."""

    def fence(self, context: CallContext, cluster_version: int) -> Refused | None:
        if context.shard_incarnation not in (0, self.incarnation):
            return Refused("another incarnation of the shard is meant")
        if 0 < context.cluster_version < cluster_version:
            return Refused("an earlier version of the cluster is meant")
        return None

    def write(
        self,
        kind: str,
        context: CallContext,
        table: str,
        ids: np.ndarray,
        values: np.ndarray,
        part: tuple[int, int] | None,
    ) -> Refused | None:
        """A push or assign arrives, whole or in part; the fence has let it pass."""
        held = self.tables.get(table)
        if held is None or not held.is_open or not held.is_meant_by(context):
            return Refused("there is no such table, it is being restored, or another is meant")
        key = (context.stream, context.incarnation, context.sequence)
        if part is not None:
            index, count = part
            for known in [k for k in self.parts if k[0] == key[0] and k[2] < context.oldest_unacknowledged]:
                del self.parts[known]
            parts = self.parts.setdefault(key, {})
            parts.setdefault(index, (ids, values))
            if len(parts) < count:
                return None
            del self.parts[key]
            ids = np.concatenate([parts[i][0] for i in range(count)])
            values = np.concatenate([parts[i][1] for i in range(count)])
        if context.incarnation < self.newest.get(context.stream, 0):
            return Refused("a newer incarnation of the client is at work")
        self.newest[context.stream] = context.incarnation
        oldest = max(self.oldest.get(context.stream, 0), context.oldest_unacknowledged)
        self.oldest[context.stream] = oldest
        if context.sequence < oldest:
            return Refused("the write was acknowledged long ago")
        number = context.stream, context.sequence
        if number in self.applied and self.applied[number] is not held:
            return EITHER  # the table was dropped since: known or not, it is not applied to the new one
        if number not in self.applied:
            self.applied[number] = held
            held.push(ids, values) if kind == "Push" else held.assign(ids, values)
        return None

    def freeze(self, snapshot: str, names: tuple[str, ...]) -> Refused | None:
        """``names`` of tables; none: all that are not being restored."""
        if snapshot in self.ended:
            return Refused("this snapshot's moment is over")
        if snapshot in self.frozen:
            return None
        if any(name not in self.tables or not self.tables[name].is_open for name in names):
            return Refused("a table is not there, or is being restored")
        held = [table for name, table in self.tables.items() if (name in names if names else table.is_open)]
        for other, tables in list(self.frozen.items()):
            if not names or any(item is table for item in tables for table in held):
                self.thaw(other)
        self.frozen[snapshot] = held
        return None

    def drop(self, table: str, incarnation: int) -> None:
        if table in self.tables and incarnation not in (0, self.tables[table].spec.incarnation):
            return
        dropped = self.tables.pop(table, None)
        for snapshot, tables in list(self.frozen.items()):
            if any(dropped is held for held in tables):
                self.thaw(snapshot)

    def thaw(self, snapshot: str) -> None:
        self.ended.add(snapshot)
        self.frozen.pop(snapshot, None)

    def restore(
        self, folder: str, content: Content | None, names: tuple[str, ...], incarnations: tuple[int, ...]
    ) -> Refused | None:
        if content is None:
            return Refused("there is no such snapshot")
        if any(name in self.tables and self.tables[name].restored_from not in ("", folder) for name in names):
            return Refused("the table was restored from another folder: two moments must not be mixed")
        for name, incarnation in zip(names, incarnations, strict=True):
            held = self.tables.get(name)
            if held is None or held.spec != content[name][0] or held.spec.incarnation != incarnation:
                return Refused("the table is not there, or another")
            if held.is_written:
                return Refused("the table has been written to: a late request must not undo that")
        for name in names:
            self.tables[name].restored_from = folder
            spec, rows = content[name]
            for item, row in rows.items():
                if shard_of(item, spec, self.num_shards) == self.number:
                    self.tables[name].rows[item] = copy.deepcopy(row)
        return None


def shard_of(one: int, spec: TableSpec, num_shards: int) -> int:
    """Return the shard that owns an id."""
    place = int(f"{_bucket(one, spec.num_rows is not None):012b}"[::-1], 2)  # shards own ranges of the bits reversed
    return place * num_shards // 4096


@functools.cache
def _bucket(one: int, dense: bool) -> int:
    return int(bucket_of(np.array([one]), dense=dense)[0])


def content_of(shards: list[OracleShard]) -> Content:
    """Return a copy of all rows of those tables that every shard holds."""
    content: Content = {}
    for name in set.intersection(*(set(shard.tables) for shard in shards)):
        rows = {item: row for shard in shards for item, row in shard.tables[name].rows.items()}
        content[name] = shards[0].tables[name].spec, copy.deepcopy(rows)
    return content
