"""What a shard counts of calls for rows, read while they are answered."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from geartrain.ams.observe.call_counts import Counted, call_metrics
from geartrain.ams.values import errors
from tests.integration.rows.one_table import DIM, IDS, Served, connected


def test_calls_that_ended_well_are_never_fewer_than_before(served: Served) -> None:
    """Or Prometheus takes it for a restart, and counts all of them again."""
    cluster = served(1)
    shard = cluster.servers[0]._held[0].shard
    assert shard is not None
    counts = shard.engine.call_counts
    most, ended = 0.0, threading.Event()
    with connected(cluster) as ours:
        table, bad = ours.table("t"), np.full((1, DIM), np.nan, np.float32)

        def ask() -> None:
            try:
                for _ in range(3_000):
                    with pytest.raises(errors.NonFinite):
                        table.push(IDS[:1], bad)
            finally:
                ended.set()

        asking = threading.Thread(target=ask)
        asking.start()
        fell = None
        while not ended.is_set():
            calls, *_ = call_metrics(((), Counted(*each)) for each in counts())
            well = sum(float(number) for labels, number in calls.samples if labels[2] == "OK")  # type: ignore[arg-type]
            fell = fell or ((most, well) if well < most else None)
            most = max(most, well)
        asking.join()
        assert fell is None
        assert sum(counts()[0][6].values()) == 3_000


def test_a_scrape_waits_a_moment_for_a_shard_that_hangs(served: Served) -> None:
    cluster = served(1)
    server = cluster.servers[0]
    shard = server._held[0].shard
    assert shard is not None
    with connected(cluster):
        assert "table_rows" in {metric.name for metric in server.metrics()}
        shard.engine.turn.acquire()
        try:
            names = {metric.name for metric in server.metrics()}
        finally:
            shard.engine.turn.release()
        assert "table_rows" not in names
        assert names >= {"queue_length", "calls_total", "table_memory_limit_bytes"}
        assert "table_rows" in {metric.name for metric in server.metrics()}
