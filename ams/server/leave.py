"""Shutdown of a server: jobs take a snapshot first, and lost rows are logged."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from geartrain.ams.rpc.carrier import AttemptFailed, SchedulerCarrier
from geartrain.ams.server.shard import Shard
from geartrain.ams.values.errors import GeartrainError
from geartrain.ams.values.scheduler_messages import PrepareLeave, SavingJobs
from geartrain.ams.values.shard_messages import CallContext, Describe, ShardState
from geartrain.ams.values.text import counted

logger = logging.getLogger(__name__)

_CALL_TIMEOUT_SECONDS = 2.0
_PAUSE_SECONDS = 0.2
_SCHEDULER_SECONDS = 5.0
"""Longest time that an unresponsive scheduler is retried."""


def await_snapshots(scheduler: SchedulerCarrier, shards: list[Shard], timeout_seconds: float) -> None:
    """Wait until every training job has saved, at most ``timeout_seconds``; log the rows that the shards lose."""
    leaves = [PrepareLeave(shard=shard.shard, incarnation=shard.incarnation) for shard in shards]
    rows = _rows_of(shards)
    if not rows:
        return
    saved, outcome = _await_jobs(scheduler, leaves, timeout_seconds)
    logger.warning(
        "%s %s with its rows: %s. %s",
        "shards" if len(shards) > 1 else "shard",
        f"{', '.join(str(shard.shard) for shard in shards)} {'end' if len(shards) > 1 else 'ends'}",
        ", ".join(f"{name!r} ({counted(number, 'row')})" for name, number in rows.items()),
        f"{_named('Saved first', saved)}{outcome}",
    )


def _await_jobs(
    scheduler: SchedulerCarrier, leaves: list[PrepareLeave], timeout_seconds: float
) -> tuple[set[str], str]:
    """Return the jobs that saved, and what that means for the others."""
    began = heard = time.monotonic()
    saved: set[str] = set()
    told: set[str] = set()
    jobs = SavingJobs(is_sure=False)
    while time.monotonic() - began < timeout_seconds:
        try:
            for leave in leaves:
                jobs = scheduler.call(leave, _CALL_TIMEOUT_SECONDS)
            heard = time.monotonic()
            saved.update(told.intersection(jobs.saved))
            if jobs.is_sure and not jobs.waiting:
                return saved, "What is in no snapshot is lost"
            if new := set(jobs.waiting) - told:
                logger.info("waiting up to %g s for snapshots of: %s", timeout_seconds, ", ".join(sorted(new)))
            told.update(jobs.waiting)
        except (AttemptFailed, GeartrainError) as exc:
            if time.monotonic() - heard > _SCHEDULER_SECONDS:
                return saved, f"Jobs were not asked for a snapshot ({exc}): what they trained since theirs is lost"
        time.sleep(_PAUSE_SECONDS)
    return saved, _named(f"Not saved within {timeout_seconds:g} s", jobs.waiting) + "what is in no snapshot is lost"


def _rows_of(shards: list[Shard]) -> dict[str, int]:
    rows: dict[str, int] = {}
    for shard in shards:
        try:
            state = shard.run(CallContext(), Describe()).result(_CALL_TIMEOUT_SECONDS)
        except GeartrainError:  # another process holds the shard by now
            continue
        except TimeoutError:
            rows.setdefault("(of a busy shard)", 0)
            continue
        if not isinstance(state, ShardState):
            continue
        for table in state.tables:
            rows[table.spec.name] = rows.get(table.spec.name, 0) + table.rows
    return rows


def _named(what: str, jobs: Iterable[str]) -> str:
    names = ", ".join(sorted(jobs))
    return f"{what}: {names}; " if names else ""
