"""Dedup state of a shard in a snapshot: the writes its rows contain, and the step of each sync group and table.

A shard reads the state of every shard that wrote rows for it. With the same bucket map that is one shard, and the state
is exact: a write counts as applied if, and only if, the restored rows contain it. With another map, that of another
number of shards, each source holds a part of a write's rows:

- At a step boundary, where every write was answered, nothing can be retried and the groups agree. - In the middle of a
step a write counts as applied only if all sources have it, or know that it is acknowledged.   One that some have and
others lack, even if they had no row of it, is applied anew when it is retried: the   part that was there then counts
twice. So take the snapshot at a step boundary.

A job that goes back and will reuse numbers fences its past first and restores then: what a live shard knows beyond the
snapshot is kept here.

Steps are those of tables whose untouched rows move. Every shard counts every push, so that at a step boundary all of
them agree and a snapshot may go to any number of shards: rows keep their last steps. In the middle of a step, shards
differ by the pushes under way; the most advanced source counts, and rows of the others are taken to have had those
steps without a gradient.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from geartrain.ams.kernels._core import CompletedWrites, HeldStreams, SyncGroups
from geartrain.ams.tables.expiry import NEVER, ExpiryState, farthest
from geartrain.ams.tables.row_table import RowTable, TableClock, TableSteps
from geartrain.ams.values.arguments import SECONDS_AHEAD
from geartrain.ams.values.errors import InvalidArgument, SnapshotDamaged

_STEPS = TypeAdapter(TableSteps)
_CLOCKS = TypeAdapter(dict[str, TableClock])
_EXPIRY = TypeAdapter(ExpiryState)


class CompletedWrite(NamedTuple):
    """Applied write."""

    sequence: int
    created: int
    table: str


class StreamWrites(NamedTuple):
    """Applied writes of a stream on a shard."""

    incarnation: int
    oldest_unacknowledged: int
    done: list[CompletedWrite]


class GroupStep(NamedTuple):
    """Step of a sync group."""

    table: str
    job: str
    world_size: int
    next_sequence: int


class ShardDedup(BaseModel):
    """Dedup state of one shard for some of its tables."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    streams: dict[str, StreamWrites]
    groups: list[GroupStep]
    steps: dict[str, TableSteps]
    """Steps by table, where untouched rows move."""
    writes: dict[str, int] = {}
    """Number of writes applied, by table."""
    clocks: dict[str, TableClock] = {}
    """Largest step and time of any push, by table, where there are such."""
    expiry: dict[str, ExpiryState] = {}
    """Expiry state by table, where rows expire."""
    undated: list[str] = []
    """Tables with rows that are older than their record of pushes (:attr:`RowTable.has_undated`)."""


class HeldDedup:
    """Dedup state of one moment, made in the shard's turn; :meth:`to_json` takes 30 times as long, outside of it."""

    def __init__(self, streams: HeldStreams, others: dict[str, Any]) -> None:
        self._streams = streams
        self._others = others

    def to_json(self) -> dict[str, Any]:
        """Return JSON values of a :class:`ShardDedup`. Any thread."""
        return {"streams": dict(self._streams), **self._others}


def held_dedup(
    completed_writes: CompletedWrites,
    groups: SyncGroups,
    names: Collection[str],
    tables: Mapping[str, RowTable] = MappingProxyType({}),
    expiry: Mapping[str, ExpiryState] = MappingProxyType({}),
) -> HeldDedup:
    """Return the dedup state of the tables ``names``, with the writes, steps and clocks of ``tables``, and ``expiry``.

    Streams that never wrote to one of them are left out: a restore of these tables does not need them.
    """
    held = ShardDedup(
        streams={},
        groups=[step for step in map(GroupStep._make, groups.steps()) if step.table in names],
        steps={name: steps for name, table in tables.items() if (steps := table.steps) is not None},
        writes={name: table.served.all_writes for name, table in tables.items()},
        clocks={name: table.clock for name, table in tables.items() if any(table.clock)},
        expiry=dict(expiry),
        undated=[name for name, table in tables.items() if table.has_undated],
    )
    return HeldDedup(completed_writes.streams(names), held.model_dump(mode="json", exclude={"streams"}))


class RestoredDedup:
    """Merged state of the source shards for ``tables``, for a shard that restores their rows. Made before its turn:
    that takes longer than :meth:`apply`.
    """

    def __init__(self, sources: Sequence[dict[str, Any]], tables: Collection[str]) -> None:
        """Raise SnapshotDamaged if a source is invalid."""
        try:
            known = [ShardDedup.model_validate(source) for source in sources]
        except ValidationError as exc:
            raise SnapshotDamaged(f"the dedup state of the snapshot is not of this version: {exc}") from exc
        self._tables = tables
        names = sorted({name for source in known for name in source.streams})
        self._streams = {name: merged_stream([source.streams.get(name) for source in known], tables) for name in names}
        steps: dict[tuple[str, str], list[GroupStep]] = {}
        for step in (step for source in known for step in source.groups if step.table in tables):
            steps.setdefault((step.table, step.job), []).append(step)
        self._steps = [min(found, key=lambda step: step.next_sequence) for found in steps.values()]

    def apply(self, completed_writes: CompletedWrites, groups: SyncGroups) -> None:
        """Apply it to the shard, in its turn."""
        for name, marked in self._streams.items():
            completed_writes.restore(name, marked, self._tables)
        for step in self._steps:
            groups.restore(step)


def writes_before(sources: Sequence[Mapping[str, Any]], table: str) -> int:
    """Return the number of writes of a restored table, which counts on from there: the largest of its source shards."""
    return max((int(source["writes"].get(table, 0)) for source in sources), default=0)


def merged_stream(sources: Sequence[StreamWrites | None], tables: Collection[str]) -> StreamWrites:
    """Return the state of a stream on a shard whose rows come from all ``sources`` (None: it never wrote there)."""
    known = [source for source in sources if source is not None]
    done_by = [{write.sequence: write for write in source.done} for source in known]
    everywhere = [
        write
        for write in {write.sequence: write for source in known for write in source.done}.values()
        if write.table in tables
        and len(known) == len(sources)
        and all(
            write.sequence in done or write.sequence < source.oldest_unacknowledged
            for done, source in zip(done_by, known, strict=True)
        )
    ]
    return StreamWrites(
        incarnation=max(source.incarnation for source in known),
        oldest_unacknowledged=max(source.oldest_unacknowledged for source in known),
        done=[
            CompletedWrite(
                sequence=write.sequence,
                created=sum(done[write.sequence].created for done in done_by if write.sequence in done),
                table=write.table,
            )
            for write in sorted(everywhere, key=lambda write: write.sequence)
        ],
    )


def restore_clocks(sources: Sequence[Mapping[str, Any]], tables: Mapping[str, RowTable]) -> None:
    """Set the clocks of restored tables to the latest of their sources; to the present, if that is in the future."""
    present = int(time.time())
    for name in {name for source in sources for name in source.get("undated", ())}.intersection(tables):
        tables[name].adopt_undated()
    clocks = [_CLOCKS.validate_python(source["clocks"]) for source in sources]
    for name, table in tables.items():
        known = [its[name] for its in clocks if name in its]
        sound = [its if its.seconds <= present + SECONDS_AHEAD else its._replace(seconds=present) for its in known]
        table.advance_clock(farthest(sound))  # at once: rows that were never watched are dated by the first clock


def restored_expiry(sources: Sequence[Mapping[str, Any]], name: str, clock: TableClock) -> ExpiryState:
    """Return the expiry state of a restored table, whose clock is now ``clock``, from its sources.

    A source whose own clock was behind jumps to it, as at its next push. One without expiry state (its rows did not
    expire then) is in doubt.
    """
    known = [_EXPIRY.validate_python(source["expiry"][name]) for source in sources if name in source["expiry"]]
    clocks = [TableClock(*source["clocks"].get(name, (0, 0))) for source in sources]
    behind = [TableClock(clock.step - its.step, clock.seconds - its.seconds) for its in clocks]
    return ExpiryState(
        is_doubtful=not known or len(known) < len(sources) or any(state.is_doubtful for state in known),
        leap=farthest([*(state.leap for state in known), *behind]),
        due=TableClock(*map(min, zip(*(state.due for state in known), strict=True))) if known else TableClock(0, NEVER),
    )


def joint_steps(known: Sequence[TableSteps]) -> TableSteps:
    """Return the steps of the most advanced of several shards, as far back as any of them remembers.

    How far depends on when a shard's oldest rows were last caught up, and rows of several may be joined here. Raises
    InvalidArgument for a step between that none remembers.
    """
    latest = max(known, key=lambda steps: (steps.now, len(steps.lrs)))
    rates: dict[int, float] = {}
    for steps in (*known, latest):  # the latest overrides the others
        rates.update(enumerate(steps.lrs, steps.now - len(steps.lrs)))
    wanted = range(min(rates, default=latest.now), latest.now)
    if unknown := [step for step in wanted if step not in rates]:
        raise InvalidArgument(f"no shard remembers the learning rate of step {unknown[0] + 1}")
    return latest._replace(lrs=[rates[step] for step in wanted])


def restore_steps(sources: Sequence[Mapping[str, Any]], tables: Mapping[str, RowTable]) -> None:
    """Set the steps of restored tables to those of the shards that wrote their rows, ``sources``.

    Raises SnapshotDamaged.
    """
    for name, table in tables.items():
        if table.spec.counts_steps:
            restore_table_steps(sources, name, table.adopt_steps)


def restore_table_steps(sources: Sequence[Mapping[str, Any]], name: str, adopt: Callable[[TableSteps], None]) -> None:
    """Call ``adopt``, which may raise InvalidArgument, with the steps of table ``name``. Raises SnapshotDamaged."""
    try:
        adopt(joint_steps([_STEPS.validate_python(source["steps"][name]) for source in sources]))
    except (KeyError, ValueError, ValidationError, InvalidArgument) as exc:
        raise SnapshotDamaged(f"the snapshot does not say which steps table {name!r} had made: {exc!r}") from exc
