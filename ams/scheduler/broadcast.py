"""Broadcast of table changes to all shards in parallel, so that the delay is that of the slowest shard alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from geartrain.ams.rpc.carrier import AttemptFailed, NotSent, ShardCarrier
from geartrain.ams.values.errors import GeartrainError, ShardUnavailable
from geartrain.ams.values.scheduler_messages import ShardEntry
from geartrain.ams.values.shard_messages import CallContext, Request

_TIMEOUT_SECONDS = 30.0
_RETRY_SECONDS = 3.0
_PAUSE_SECONDS = 0.2


def broadcast(
    open_carrier: Callable[[str, int], ShardCarrier],
    shards: Sequence[ShardEntry],
    request: Request,
    *,
    best_effort: bool = False,
) -> bool:
    """Send a request to every shard at once; return whether all succeeded, once every one has answered or failed.

    A shard that cannot be reached (a name that does not resolve yet, an overloaded machine) is retried for 3 s, unless
    ``best_effort``; one that does not answer is given up after 30 s. Raises the failure of the first failed shard
    (ShardUnavailable, or the shard's error), unless ``best_effort``.
    """
    deadline = time.monotonic() + (0.0 if best_effort else _RETRY_SECONDS)
    failures: dict[int, GeartrainError | AttemptFailed] = {}
    carriers = {entry.shard: open_carrier(entry.address, entry.shard) for entry in shards}
    try:
        pending = list(shards)
        while pending:
            calls = [
                carriers[entry.shard].submit(
                    CallContext(shard_incarnation=entry.incarnation), request, _TIMEOUT_SECONDS
                )
                for entry in pending
            ]
            unreached = []
            for entry, call in zip(pending, calls, strict=True):
                try:
                    call.result()
                except NotSent as exc:
                    failures[entry.shard] = exc
                    unreached.append(entry)
                except (GeartrainError, AttemptFailed) as exc:
                    failures[entry.shard] = exc
                else:
                    failures.pop(entry.shard, None)
            if not unreached or time.monotonic() >= deadline:
                break
            pending = unreached
            time.sleep(_PAUSE_SECONDS)
    finally:
        for carrier in carriers.values():
            carrier.close()
    if failures and not best_effort:
        _raise_first(failures)
    return not failures


def _raise_first(failures: dict[int, GeartrainError | AttemptFailed]) -> None:
    shard = min(failures)
    failure = failures[shard]
    if isinstance(failure, AttemptFailed):
        raise ShardUnavailable(
            f"shard {shard} does not answer a request about the table: {failure}. Check that its server runs and is "
            "not overloaded ('geartrain status'), then try again"
        ) from failure
    raise failure
