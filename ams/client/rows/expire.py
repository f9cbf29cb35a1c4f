"""Scan of all rows of a table that removes expired ones, shard by shard and block by block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from geartrain.ams.values.errors import InternalError
from geartrain.ams.values.expiry.rules import Expiry
from geartrain.ams.values.shard_messages import Expire, Expired, Reply, Request


class ExpiredRows(NamedTuple):
    """Result of a scan for expired rows."""

    looked_at: int
    """Rows scanned."""
    expired: int
    """Rows removed, or that would be."""


def expire_rows(
    ask: Callable[[list[tuple[int, Request]]], Sequence[Reply]],
    table: str,
    num_shards: int,
    expiry: Expiry | None,
    *,
    dry_run: bool,
    progress: Callable[[ExpiredRows], None] | None,
) -> ExpiredRows:
    """Scan every shard block by block until all rows were looked at. ``ask`` makes calls side by side; a block that is
    asked for twice is scanned twice, and its rows are removed once.
    """
    positions = dict.fromkeys(range(num_shards), 0)
    total = ExpiredRows(0, 0)
    while positions:
        calls: list[tuple[int, Request]] = [
            (shard, Expire(table=table, expiry=expiry, position=position, dry_run=dry_run))
            for shard, position in positions.items()
        ]
        for (shard, _), reply in zip(calls, ask(calls), strict=True):
            if not isinstance(reply, Expired):
                raise InternalError(f"shard {shard} answered {type(reply).__name__} to a call for rows to expire")
            total = ExpiredRows(total.looked_at + reply.looked_at, total.expired + reply.expired)
            if reply.position < 0:
                del positions[shard]
            else:
                positions[shard] = reply.position
        if progress is not None:
            progress(total)
    return total
