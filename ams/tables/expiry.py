"""Removal of expired rows by a rule, a block at a time, so that no call waits for long."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from geartrain.ams.tables.row_table import RowTable, TableClock
from geartrain.ams.values.errors import GeartrainError, InvalidArgument
from geartrain.ams.values.expiry.rules import Expiry, RowBlock
from geartrain.ams.values.shard_messages import Expired
from geartrain.ams.values.specs import Ids

_MIN_ROWS, _MAX_ROWS = 64, 8_192
_MAX_BYTES = 2 << 20
"""Most bytes of a block's rows, as float32, unless those are its least rows."""
NEVER = 2**63 - 1
"""Step and second that no clock reaches."""


class ExpiryState(NamedTuple):
    """State of a table's expiry between scans. JSON values."""

    is_doubtful: bool
    """Whether the clock has jumped: then a scan that would remove most rows removes none and warns."""
    leap: TableClock
    """Largest advance of the clock by one push since the last scan began."""
    due: TableClock
    """Clock of the next scan: one of the two numbers must be reached."""


def next_scan(expiry: Expiry, clock: TableClock) -> TableClock:
    """Return the clock of the scan after one at ``clock``, as :attr:`ExpiryState.due`."""
    step, seconds = (clock.step // expiry.every + 1) * expiry.every, expiry.every_seconds
    return TableClock(min(NEVER, step), NEVER if seconds is None else min(NEVER, clock.seconds + int(seconds)))


def farthest(leaps: Iterable[TableClock]) -> TableClock:
    """Return the largest of each number, at least 0."""
    return TableClock(*map(max, zip(TableClock(0, 0), *leaps, strict=True)))


def expire_block(
    table: RowTable, expiry: Expiry, position: int, clock: TableClock, *, dry_run: bool = False
) -> Expired:
    """Scan a block of rows from a position on and remove those that the rule selects by the table's clock; with
    ``dry_run`` only count them.

    Scans at most 8,192 rows, and at most 2 MiB of them or 64 rows, whichever is more. Raises InvalidArgument if the
    rule needs values that the table does not keep, or fails.
    """
    spec = table.spec
    if expiry.needs_lives and not spec.keeps_lives:
        raise InvalidArgument(
            f"table {spec.name!r} does not record when and how often its rows are pushed; give it max_bytes or an "
            "expiry rule that needs it (gt.Unseen), or use gt.SmallerThan"
        )
    ids, lives, following = table.read_lives(position, max(_MIN_ROWS, min(_MAX_ROWS, _MAX_BYTES // (4 * spec.dim))))
    if not len(ids):
        return Expired(position=-1)
    never = np.zeros(len(ids))
    block = RowBlock(
        ids=ids,
        unseen_steps=never if lives is None else np.maximum(clock.step - lives["step"], 0).astype(np.float64),
        unseen_seconds=never if lives is None else np.maximum(clock.seconds - lives["seconds"].astype(np.float64), 0),
        count=never if lives is None else lives["count"].astype(np.float64),
        read=_reader(table, ids),
    )
    try:
        expired = ids[expiry.expired(block)]
    except GeartrainError:
        raise
    except Exception as exc:  # a rule of the user's own
        raise InvalidArgument(f"expiry of table {spec.name!r} failed: {exc!r}; none of these rows expired") from exc
    gone = len(expired) if dry_run else table.remove(expired)
    return Expired(position=following, looked_at=len(ids), expired=gone)


def _reader(table: RowTable, ids: Ids) -> Callable[[], npt.NDArray[np.float32]]:
    def read() -> npt.NDArray[np.float32]:
        rows = np.empty((len(ids), table.spec.dim), table.spec.numpy_dtype)
        table.pull(ids, rows)
        return rows.astype(np.float32, copy=False)

    return read
