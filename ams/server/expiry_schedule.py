"""Schedule of expiry scans of a shard's tables, by the clocks that pushes advance, between other requests."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from geartrain.ams.kernels._core import Engine
from geartrain.ams.server.tables import ShardTable, ShardTables
from geartrain.ams.tables.expiry import NEVER, expire_block, next_scan
from geartrain.ams.tables.row_table import TableClock
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.expiry.rules import Expiry
from geartrain.ams.values.shard_messages import Expire, Expired

logger = logging.getLogger(__name__)

_NOW = 0.0
_LEAP_SECONDS = 3600
"""Plausible advance of the clock by one push, for rules without a scan interval in seconds."""


@dataclass
class ExpiryPass:
    """Scan of a table's rows under way."""

    clock: TableClock
    """Clock at its start."""
    only_counts: bool
    """Whether expired rows are only counted, to know first how many there are."""
    position: int = 0
    looked_at: int = 0
    found: int = 0


class ExpirySchedule:
    """Schedule of the tables with expiry. Used by the thread that has the shard's turn.

    A scan of all rows starts when a table's clock has reached a multiple of ``every``, and is done in blocks; other
    requests have the turn in between.

    If one push advanced the clock by more than that, and by more than a quarter of the steps after which rows expire,
    most rows may look old at once by mistake: a worker counts or dates its pushes wrongly, a snapshot is old, a job was
    paused. Then rows are counted first, and none is removed if they are most of the table: until most were pushed
    again, or an Expire request asks for it.
    """

    def __init__(self, tables: ShardTables, engine: Engine) -> None:
        self._tables = tables
        self._engine = engine
        self._next = 0
        """Place in ``tables.expiring`` after that of the table with the last scanned block."""

    def next_deadline(self) -> float | None:
        """Return the time of the next call to :meth:`scan` on any clock: at once, or None if no scan is due."""
        return _NOW if any(_wants(table) for table in self._tables.expiring) else None

    def scan(self) -> None:
        """Scan a block of rows of a table, if one is due. Several take turns: a large one may always be due."""
        expiring = self._tables.expiring
        in_turn = expiring[self._next :] + expiring[: self._next]
        table = next((table for table in in_turn if _wants(table)), None)
        if table is None:
            return
        self._next = expiring.index(table) + 1
        expiry, served = table.spec.expiry, table.rows.served
        assert expiry is not None
        if table.expiry_pass is None:
            table.expiry_doubtful |= _is_leap(expiry, table.expiry_state.leap)
            table.expiry_leap = TableClock(0, 0)
            table.expiry_pass = ExpiryPass(table.rows.clock, only_counts=table.expiry_doubtful)
            served.expiry_step = served.expiry_seconds = NEVER
        under_way = table.expiry_pass
        try:
            found = self._block(table, expiry, under_way.position, under_way.clock, dry_run=under_way.only_counts)
            under_way.position = found.position
            under_way.looked_at += found.looked_at
            under_way.found += found.expired
            if found.position < 0 and under_way.only_counts and 2 * under_way.found <= under_way.looked_at:
                table.expiry_doubtful = False
                table.expiry_pass = ExpiryPass(under_way.clock, only_counts=False)
                return
            if found.position < 0 and under_way.only_counts:
                logger.warning(
                    "table %r: the step or time of pushes jumped, and %d of %d rows here would expire at once; none "
                    "expires before most are pushed again. 'geartrain table expire %s' removes them now",
                    table.spec.name,
                    under_way.found,
                    under_way.looked_at,
                    table.spec.name,
                )
        except BaseException:  # from a user's rule
            logger.exception("expiry of table %r failed; retrying when it is next due", table.spec.name)
            under_way.position = -1
        if under_way.position < 0:
            table.expiry_pass = None
            served.expiry_step, served.expiry_seconds = next_scan(expiry, under_way.clock)

    def command(self, table: ShardTable, request: Expire) -> Expired:
        """Expire a block of rows at a client's request. Raises InvalidArgument."""
        expiry = request.expiry or table.spec.expiry
        if expiry is None:
            raise InvalidArgument(
                f"table {table.spec.name!r} has no expiry rule; give one: gt.Unseen(steps=1_000_000), or "
                "'geartrain table expire' with --unseen-steps 1000000"
            )
        if request.position < 0:
            raise InvalidArgument(f"position is {request.position}; it must be 0, or what the last reply said")
        expiry.require_usable()
        found = self._block(table, expiry, request.position, table.rows.clock, dry_run=request.dry_run)
        if not request.dry_run:
            table.expiry_doubtful &= found.position >= 0 or expiry != table.spec.expiry
        return found

    def _block(self, table: ShardTable, expiry: Expiry, position: int, clock: TableClock, *, dry_run: bool) -> Expired:
        found = Expired(position=-1)

        def apply() -> int:
            nonlocal found
            found = expire_block(table.rows, expiry, position, clock, dry_run=dry_run)
            return 0 if dry_run else found.expired

        table.expired += self._engine.expire(table.spec.name, apply)
        return found


def _is_leap(expiry: Expiry, leap: TableClock) -> bool:
    most = {"unseen_steps": (leap.step, expiry.leap_steps), "unseen_seconds": (leap.seconds, expiry.every_seconds)}
    return any(moved > (usual or _LEAP_SECONDS) for moved, usual in map(most.__getitem__, expiry.goes_by))


def _wants(table: ShardTable) -> bool:
    return table.is_open and not table.rows.torn and (table.expiry_pass is not None or table.rows.served.is_expiry_due)
