"""The dedup state of a shard in a snapshot: which writes its rows hold, and which step each sync group and table is at.

A shard reads that of every shard that wrote rows for it. With the bucket map unchanged that is one, and what holds
is exact: a write is known to be applied if, and only if, the restored rows hold it. With another map, that of
another number of shards, each source holds a part of a write's rows:

- At a step boundary, where every write sent was answered, nothing can be sent again and the groups agree.
- In the middle of a step a write counts as applied only if all sources have it, or were told that it is acknowledged.
  One that some had and others had not, be it that they had no row of it, is applied anew where it is sent again: the
  part that was there then counts twice. So take the snapshot at a step boundary.

A job that goes back and will use numbers anew fences its past first and restores then: what a live shard knows beyond
the snapshot is kept here.

Steps are those of tables whose untouched rows move. Every shard counts every push, so that at a step boundary all of
them say the same and a snapshot may go to any number of shards: rows keep their last steps. Taken in the middle of a
step, shards differ by the pushes under way; the most advanced source counts, and rows of the others are taken to have
had those steps without a gradient.
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
    """A write that was applied."""

    sequence: int
    created: int
    table: str


class StreamWrites(NamedTuple):
    """What a shard knows of a stream."""

    incarnation: int
    oldest_unacknowledged: int
    done: list[CompletedWrite]


class GroupStep(NamedTuple):
    """The step that a sync group is at."""

    table: str
    job: str
    world_size: int
    next_sequence: int


class ShardDedup(BaseModel):
    """What one shard knew of the writes to some of its tables."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    streams: dict[str, StreamWrites]
    groups: list[GroupStep]
    steps: dict[str, TableSteps]
    """By table, where untouched rows move."""
    writes: dict[str, int] = {}
    """By table, the writes applied to it."""
    clocks: dict[str, TableClock] = {}
    """By table, the largest step and time that pushes said, where there are such."""
    expiry: dict[str, ExpiryState] = {}
    """By table, where rows expire."""


class HeldDedup:
    """That of one moment. Held in the shard's turn; :meth:`to_json` takes 30 times as long, and may follow it."""

    def __init__(self, streams: HeldStreams, others: dict[str, Any]) -> None:
        self._streams = streams
        self._others = others

    def to_json(self) -> dict[str, Any]:
        """As JSON values, those of a :class:`ShardDedup`. Any thread."""
        return {"streams": dict(self._streams), **self._others}


def held_dedup(
    completed_writes: CompletedWrites,
    groups: SyncGroups,
    names: Collection[str],
    tables: Mapping[str, RowTable] = MappingProxyType({}),
    expiry: Mapping[str, ExpiryState] = MappingProxyType({}),
) -> HeldDedup:
    """Return the dedup state of tables with these ``names``: with the writes, steps and clocks of ``tables``, and with
    ``expiry``, by table.

    A stream that never wrote to one of them is not among them: its numbers are of no concern to who restores these.
    """
    held = ShardDedup(
        streams={},
        groups=[step for step in map(GroupStep._make, groups.steps()) if step.table in names],
        steps={name: steps for name, table in tables.items() if (steps := table.steps) is not None},
        writes={name: table.served.all_writes for name, table in tables.items()},
        clocks={name: table.clock for name, table in tables.items() if any(table.clock)},
        expiry=dict(expiry),
    )
    return HeldDedup(completed_writes.streams(names), held.model_dump(mode="json", exclude={"streams"}))


class RestoredDedup:
    """What the source shards knew of ``tables``, merged, for a shard that has their rows. Made before its turn: that
    takes longer than :meth:`apply`.
    """

    def __init__(self, sources: Sequence[dict[str, Any]], tables: Collection[str]) -> None:
        """Raises SnapshotDamaged."""
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
        """Let the shard know it, in its turn."""
        for name, marked in self._streams.items():
            completed_writes.restore(name, marked, self._tables)
        for step in self._steps:
            groups.restore(step)


def writes_before(sources: Sequence[Mapping[str, Any]], table: str) -> int:
    """Return the writes to a restored table, which count on from there: those of the source shard that had the most."""
    return max((int(source["writes"].get(table, 0)) for source in sources), default=0)


def merged_stream(sources: Sequence[StreamWrites | None], tables: Collection[str]) -> StreamWrites:
    """Return what holds of a stream on a shard whose rows come from all ``sources`` (None: it never wrote there)."""
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
    """Let restored tables go on from the latest of their sources' clocks; at the present, where that has not come."""
    present = int(time.time())
    for source in sources:
        for name, clock in _CLOCKS.validate_python(source["clocks"]).items():
            if name in tables:
                seconds = clock.seconds if clock.seconds <= present + SECONDS_AHEAD else present
                tables[name].advance_clock(clock._replace(seconds=seconds))


def restored_expiry(sources: Sequence[Mapping[str, Any]], name: str, clock: TableClock) -> ExpiryState:
    """Return what a restored table, whose clock is ``clock`` now, must know: what any of its sources did.

    A source whose own clock was behind makes a leap to it, as its next push would have been. One that does not say (its
    rows did not expire then) is in doubt.
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

    How far depends on when a shard's oldest rows were last caught up, and rows of several may come together now.
    Raises InvalidArgument for a step between that none remembers.
    """
    latest = max(known, key=lambda steps: (steps.now, len(steps.lrs)))
    rates: dict[int, float] = {}
    for steps in (*known, latest):  # what the latest says holds
        rates.update(enumerate(steps.lrs, steps.now - len(steps.lrs)))
    wanted = range(min(rates, default=latest.now), latest.now)
    if unknown := [step for step in wanted if step not in rates]:
        raise InvalidArgument(f"no shard remembers the learning rate of step {unknown[0] + 1}")
    return latest._replace(lrs=[rates[step] for step in wanted])


def restore_steps(sources: Sequence[Mapping[str, Any]], tables: Mapping[str, RowTable]) -> None:
    """Let restored tables count on where the shards that wrote their rows were; ``sources`` are those of the shards.

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
