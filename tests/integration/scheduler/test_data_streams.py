"""Leases of data streams as a worker sees them, over every carrier."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.factory import connect
from geartrain.ams.scheduler.service import SchedulerServer
from geartrain.ams.values import errors
from geartrain.ams.values.config import SchedulerConfig
from geartrain.ams.values.scheduler_messages import Cursor


def test_two_workers_share_the_streams_of_a_job(cluster: Cluster) -> None:
    first, second = (
        cluster.streams("job", worker=worker, num_streams=8, num_workers=2, incarnation=1) for worker in ("a", "b")
    )
    assert first.cursors() == {}
    lease = first.lease()
    assert (lease.epoch, lease.lease_seconds, len(lease.cursors)) == (0, 60.0, 4)
    mine = sorted(lease.cursors)
    renewal = first.commit({mine[0]: Cursor(0, 10), mine[1]: Cursor(1, 0)})
    assert (renewal.epoch, renewal.held, renewal.release, renewal.can_lease) == (0, tuple(mine), (), False)
    assert len(second.lease().cursors) == 4
    with pytest.raises(errors.StaleClient, match="is held by worker 'a'"):
        second.commit({mine[0]: Cursor(0, 11)})
    first.release([mine[0]], {mine[0]: Cursor(0, 12)})
    first.release()
    kept = second.cursors()
    assert kept == dict.fromkeys(range(8), Cursor(0, 0)) | {mine[0]: Cursor(0, 12), mine[1]: Cursor(1, 0)}
    assert second.commit().can_lease
    assert second.lease().cursors == kept


def test_a_commit_of_a_lease_that_has_ended_is_refused(cluster: Cluster) -> None:
    streams = cluster.streams("job", worker="a", num_streams=2)
    first = streams.lease()
    streams.restore(first.cursors)
    streams.lease()
    with pytest.raises(errors.StaleClient, match="has ended, and it has lease"):
        streams.commit({0: (0, 5)}, lease_number=first.lease_number)
    assert streams.cursors()[0] == (0, 0)
    streams.commit({0: (0, 5)})
    streams.release()


def test_a_scheduler_that_is_away_costs_no_lease(served: Callable[..., object]) -> None:
    cluster = served(1)
    with connect(cluster.address) as ours:  # type: ignore[attr-defined]
        streams = ours.streams("job", worker="a", num_streams=2)
        streams.lease()
        cluster.scheduler.stop(0)  # type: ignore[attr-defined]
        with pytest.raises(errors.SchedulerUnavailable, match="repeat it: that does no harm"):
            streams.commit()
        cluster.scheduler = SchedulerServer(SchedulerConfig(listen=cluster.address))  # type: ignore[attr-defined]
        cluster.scheduler.start()  # type: ignore[attr-defined]
        with pytest.raises(errors.StaleClient, match="its scheduler may have lost them"):  # it had no data folder
            while True:
                try:
                    streams.commit()
                except errors.SchedulerUnavailable:
                    continue
