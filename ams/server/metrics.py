"""Metrics of a server: its shards, their calls and their tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from geartrain.ams.kernels.memory import memory_limit
from geartrain.ams.observe.call_counts import CallCounts, Counted, call_metrics
from geartrain.ams.observe.metrics import Buckets, Metric
from geartrain.ams.server.shard import Shard

_TURN_SECONDS = 1.0
"""Longest wait for the turn of a shard: a hanging one shows by its queue. Prometheus gives up after ten."""


_STALENESS_BOUNDS = tuple(2**bits - 1 for bits in range(17))
"""Bounds of the staleness histogram in writes."""


class ServedShard(NamedTuple):
    """Shard of this process, with the counters of its port."""

    shard: Shard
    grpc: CallCounts
    num_connections: int


def server_metrics(served: Sequence[ServedShard]) -> Iterator[Metric]:
    """Yield the metrics of these shards; without its tables if the turn of a shard does not come."""
    calls = [
        ((of.shard.shard,), counted)
        for of in served
        for counted in (*of.grpc.read(), *(Counted(*each) for each in of.shard.engine.call_counts()))
    ]
    yield from call_metrics(calls, ("shard",))
    for of in served:
        yield from _of_shard(of)
        yield from _of_tables(of.shard)
    limit = "Most bytes that all tables of the process may take together."
    yield Metric("table_memory_limit_bytes", "gauge", limit, samples=[((), memory_limit())])


def _of_shard(of: ServedShard) -> Iterator[Metric]:
    engine, labels, values = of.shard.engine, ("shard",), (of.shard.shard,)
    waiting, held = engine.turn.num_waiting, len(of.shard.held_snapshots)
    busy = "Time in which the thread for rows worked on calls."
    yield Metric("queue_length", "gauge", "Calls that wait for the shard's turn.", labels, [(values, waiting)])
    yield Metric("busy_seconds_total", "counter", busy, labels, [(values, engine.busy_seconds)])
    yield Metric("connections", "gauge", "Connections of clients for rows.", labels, [(values, of.num_connections)])
    yield Metric("snapshots_held", "gauge", "Snapshots and exports under way.", labels, [(values, held)])


def _of_tables(shard: Shard) -> Iterator[Metric]:
    labels = ("table", "shard")
    for state, created, parts in shard.counted_tables(_TURN_SECONDS):
        values = (state.spec.name, shard.shard)
        sizes = [((*values, part), size) for part, size in parts.items()]
        yield Metric("table_rows", "gauge", "Rows of the table.", labels, [(values, state.rows)])
        yield Metric("table_bytes", "gauge", "Bytes of memory, by purpose.", (*labels, "part"), sizes)
        for name, text, value in (
            ("table_writes_total", "Pushes, assigns and removals, with those before a restore.", state.writes),
            ("rows_admitted_total", "Rows that pushes and assigns made.", created),
            ("rows_expired_total", "Rows that an expiry rule removed.", state.expired),
            ("rows_evicted_total", "Rows removed to make room for others.", state.evicted),
        ):
            yield Metric(name, "counter", text, labels, [(values, value)])
        dropped = "Ids of pushes whose gradients were dropped: those that were not admitted."
        of_admission = [((*values, "not_admitted"), state.refused_gradients)]
        counts = [*state.staleness[: len(_STALENESS_BOUNDS)], sum(state.staleness[len(_STALENESS_BOUNDS) :])]
        counts[-1:-1] = [0] * (len(_STALENESS_BOUNDS) + 1 - len(counts))
        stale = "Writes to the table that came between a pull and the push of its gradients."
        of_pushes = [(values, Buckets(_STALENESS_BOUNDS, counts))]
        yield Metric("push_staleness_writes", "histogram", stale, labels, of_pushes)
        yield Metric("ids_dropped_total", "counter", dropped, (*labels, "reason"), of_admission)
