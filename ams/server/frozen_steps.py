"""The steps of tables whose untouched rows move, in a snapshot: they lie with the marks of each shard.

Every shard counts every push, so that at a step boundary all of them say the same and a snapshot may go to any number
of shards: rows keep their last steps. Taken in the middle of a step, shards differ by the pushes under way; the most
advanced source counts, and rows of the others are taken to have had those steps without a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError

from geartrain.ams.tables.row_table import RowTable, TableSteps
from geartrain.ams.values.errors import InvalidArgument, SnapshotDamaged

_STEPS = TypeAdapter(TableSteps)


def steps_of(tables: Mapping[str, RowTable]) -> dict[str, TableSteps]:
    """Return the steps of those tables that count them."""
    return {name: steps for name, table in tables.items() if (steps := table.steps) is not None}


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
    """Let restored tables count on where the shards that wrote their rows were; ``sources`` are those shards' marks.

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
