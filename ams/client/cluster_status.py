"""State of a cluster at one moment: its shards, their tables, and which of them answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from geartrain.ams.gear.client.status import describe_gears
from geartrain.ams.rpc.carrier import AttemptFailed, SchedulerCarrier, ShardCarrier, remedy
from geartrain.ams.rpc.client.dial import dial
from geartrain.ams.values.config import ClientConfig
from geartrain.ams.values.errors import GeartrainError, SchedulerUnavailable
from geartrain.ams.values.gear_messages import GearState
from geartrain.ams.values.scheduler_messages import (
    ClusterView,
    DescribeCluster,
    DescribeHolders,
    DescribeJobs,
    JobEntry,
    ShardCondition,
)
from geartrain.ams.values.shard_messages import CallContext, Describe, Reply, ShardState

_DESCRIBE_TIMEOUT_SECONDS = 2.0
_ADDED_UP = (
    *("rows", "memory_bytes", "writes", "expired", "evicted"),
    *("refused_ids", "refused_gradients", "refused_occurrences"),
)
"""Numbers of a table that are added up over the shards."""


@dataclass(frozen=True, kw_only=True)
class ShardStatus:
    """State of one shard, from scheduler and shard."""

    shard: int
    address: str
    state: ShardCondition
    incarnation: int
    rows: int
    memory_bytes: int
    writes: int
    """Writes to its tables, as in :class:`TableStatus`."""
    row_calls: int
    """Frames with row calls, over shared memory and TCP, that it has answered since its start."""
    uptime_seconds: float
    heartbeat_age_seconds: float
    clock_ahead_seconds: float | None = None
    """Lead of its clock over this process's, to half a round trip; None: not reported."""
    num_buckets: int = 0
    """Number of buckets, of 4096, that it owns."""
    memory_limit_bytes: int = 0
    """Memory limit of its tables, its part of its process's; 0: no limit, or it did not answer."""
    cpu_seconds: float = 0.0
    """CPU time of all cores since its process began; shards of one process share the figure."""


@dataclass(frozen=True, kw_only=True)
class TableStatus:
    """State of one table over all shards that answered."""

    name: str
    dim: int
    num_rows: int | None
    """Number of ids of a dense table; None for a hashed one."""
    rows: int
    """Number of existing rows."""
    memory_bytes: int
    writes: int
    """Applied pushes, assigns and removals, added up over the shards: a push to two of them counts twice."""
    staleness: tuple[int, ...] = ()
    """Staleness histogram of pushes that report when their rows were pulled, as those of ``gt.EmbeddingGroup`` do:
    entry i counts pushes with a number of i bits of other writes to the table in between on a shard: none, 1, 2 to 3, 4
    to 7, ... Added up over the shards, since the table was made on each."""
    expired: int = 0
    """Rows expired by a rule since the table was made on each shard."""
    evicted: int = 0
    """Rows evicted for want of room since the table was made on each shard."""
    refused_ids: int = 0
    """Approximate number of distinct ids in pushes that were counted but not admitted so far (``gt.MinCount``)."""
    refused_gradients: int = 0
    """Dropped gradients of ids not admitted: one of each id and push, since the table was made on each shard."""
    refused_occurrences: int = 0
    """Occurrences of those ids in those pushes."""


@dataclass(frozen=True, kw_only=True)
class ClusterStatus:
    """State of the whole cluster at one moment."""

    cluster_version: int
    map_version: int
    """Version of the bucket map, which assigns rows to shards."""
    num_shards: int
    ready: bool
    """All shards are up, and every table is complete, as in the health service ``ready`` of a scheduler."""
    shards: tuple[ShardStatus, ...]
    tables: tuple[TableStatus, ...]
    incomplete_tables: tuple[str, ...] = ()
    """Names of tables that lost rows with a restarted shard, or whose creation or drop was cut off, or that are being
    restored."""
    incomplete_rows: tuple[int, ...] = ()
    """Present rows of each incomplete table on the shards that answered."""
    restoring_tables: tuple[str, ...] = ()
    """Incomplete tables that are being restored (or whose restore was cut off), which cannot be opened."""


def cluster_status(address: str, *, config: ClientConfig | None = None) -> ClusterStatus:
    """Return the state of the cluster at ``address``, whether it is ready or not.

    Raises ConfigError or SchedulerUnavailable.
    """
    with _asking(address, config) as (scheduler, open_carrier, seconds):
        return describe_cluster(scheduler, open_carrier, seconds)


def scheduler_jobs(address: str, *, config: ClientConfig | None = None) -> tuple[JobEntry, ...]:
    """Return the jobs that the scheduler at ``address`` knows. Raises SchedulerUnavailable, AccessDenied."""
    with _asking(address, config) as (scheduler, _, seconds):
        return scheduler.call(DescribeJobs(), seconds)


def slow_gear_status(address: str, *, config: ClientConfig | None = None) -> tuple[list[GearState], list[str]]:
    """Return the states of the slow gears of all dense tables of the cluster at ``address``, and complaints about those
    that do not answer.

    Raises ConfigError or SchedulerUnavailable.
    """
    with _asking(address, config) as (scheduler, _, seconds):
        names = [spec.name for spec in scheduler.call(DescribeCluster(), seconds).tables]
        return describe_gears(names, lambda job: scheduler.call(DescribeHolders(job=job), seconds))


@contextmanager
def _asking(
    address: str, config: ClientConfig | None
) -> Iterator[tuple[SchedulerCarrier, Callable[[str, int], ShardCarrier], float]]:
    """Yield the scheduler's carrier, a function that opens one to a shard, and the seconds of one call."""
    config = config or ClientConfig()
    scheduler, open_carrier = dial(address, config, once=True)
    try:
        yield scheduler, open_carrier, config.connect_timeout_seconds
    except AttemptFailed as exc:
        raise SchedulerUnavailable(f"{exc}; {remedy(exc)}") from None
    finally:
        scheduler.close()


def describe_cluster(
    scheduler: SchedulerCarrier, open_carrier: Callable[[str, int], ShardCarrier], timeout_seconds: float = 10.0
) -> ClusterStatus:
    """Query the scheduler, then once every shard that is up. Raises AttemptFailed if the scheduler does not answer."""
    view = scheduler.call(DescribeCluster(), timeout_seconds)
    started = time.time()
    answered: dict[int, float] = {}

    def record(shard: int) -> Callable[[object], object]:
        return lambda _: answered.setdefault(shard, time.time())

    carriers = {
        entry.shard: open_carrier(entry.address, entry.shard)
        for entry in view.shards
        if entry.state not in ("lost", "missing")
    }
    try:
        asked = {
            shard: carrier.submit(CallContext(), Describe(), _DESCRIBE_TIMEOUT_SECONDS)
            for shard, carrier in carriers.items()
        }
        for shard, future in asked.items():
            future.add_done_callback(record(shard))
        states = {shard: state for shard, future in asked.items() if (state := _state_or_none(future)) is not None}
    finally:
        for carrier in carriers.values():
            carrier.close()
    ahead = {
        shard: state.unix_seconds - (started + answered.get(shard, started)) / 2
        for shard, state in states.items()
        if state.unix_seconds
    }
    return _joint_status(view, states, ahead)


def _state_or_none(future: Future[Reply]) -> ShardState | None:
    try:
        reply = future.result()
    except (AttemptFailed, GeartrainError):
        return None
    return reply if isinstance(reply, ShardState) else None


def _joint_status(view: ClusterView, states: dict[int, ShardState], ahead: dict[int, float]) -> ClusterStatus:
    shards = []
    num_buckets = np.bincount(view.bucket_shards, minlength=view.num_shards)
    for entry in view.shards:
        state = states.get(entry.shard)
        tables = () if state is None else state.tables
        shards.append(
            ShardStatus(
                shard=entry.shard,
                address=entry.address,
                state="silent" if state is None and entry.state in ("up", "leaving") else entry.state,
                incarnation=entry.incarnation,
                rows=sum(table.rows for table in tables),
                memory_bytes=sum(table.memory_bytes for table in tables),
                writes=sum(table.writes for table in tables),
                row_calls=0 if state is None else state.row_calls,
                uptime_seconds=0.0 if state is None else state.uptime_seconds,
                heartbeat_age_seconds=entry.heartbeat_age_seconds,
                clock_ahead_seconds=ahead.get(entry.shard),
                num_buckets=int(num_buckets[entry.shard]),
                memory_limit_bytes=0 if state is None else state.memory_limit_bytes,
                cpu_seconds=0.0 if state is None else state.cpu_seconds,
            )
        )
    held = [table for state in states.values() for table in state.tables]
    tables_status = []
    for spec in view.tables:
        parts = [table for table in held if table.spec.name == spec.name]
        tables_status.append(
            TableStatus(
                name=spec.name,
                dim=spec.dim,
                num_rows=spec.num_rows,
                staleness=tuple(map(sum, zip_longest(*(part.staleness for part in parts), fillvalue=0))),
                **{name: sum(getattr(part, name) for part in parts) for name in _ADDED_UP},
            )
        )
    return ClusterStatus(
        cluster_version=view.cluster_version,
        map_version=view.map_version,
        num_shards=view.num_shards,
        ready=view.ready and not view.incomplete_tables,
        shards=tuple(shards),
        tables=tuple(tables_status),
        incomplete_tables=view.incomplete_tables,
        restoring_tables=view.restoring_tables,
        incomplete_rows=tuple(
            sum(part.rows for part in held if part.spec.name == name) for name in view.incomplete_tables
        ),
    )
