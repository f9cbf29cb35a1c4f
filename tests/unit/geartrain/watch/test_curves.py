"""Curves of a day have a bounded number of points; tables that lack rows stay in the picture."""

from __future__ import annotations

import itertools
from dataclasses import replace

from geartrain.ams.client.cluster_status import ClusterStatus, TableStatus
from geartrain.ams.values.config import ClusterConfig
from geartrain.ams.values.scheduler_messages import JobEntry, JobReport
from geartrain.watch.dashboard_state import _MAX_POINTS, DashboardState, Point, thinned
from geartrain.watch.polls import ClusterPoll

DAY_SECONDS = 86_400


def test_a_day_of_points_is_thinned_by_their_age() -> None:
    points: list[Point] = []
    for second in range(DAY_SECONDS + 1):
        points.append((float(second), second, 0.0))
        if len(points) > _MAX_POINTS:
            points = thinned(points)
            assert len(points) < 0.8 * _MAX_POINTS  # it is not done at every look
    times = [at for at, _, _ in points]
    assert times == sorted(set(times))
    assert (times[0], times[-1]) == (0, DAY_SECONDS)
    assert times[-150:] == [DAY_SECONDS - 149.0 + i for i in range(150)]  # the newest are all there
    gaps = [(later - earlier, DAY_SECONDS - earlier) for earlier, later in itertools.pairwise(times)]
    assert max(gap / age for gap, age in gaps if age > 300) < 1 / 40


def test_a_flood_of_tables_does_not_take_the_curves_of_cluster_and_jobs() -> None:
    tables = [TableStatus(name=f"t{i}", dim=4, num_rows=None, rows=1, memory_bytes=0, writes=0) for i in range(600)]
    status = ClusterStatus(cluster_version=1, map_version=1, num_shards=1, ready=True, shards=(), tables=tuple(tables))
    job = JobEntry(job="j", report=JobReport(loss=1.0), heard_seconds_ago=0, step_seconds_ago=0, snapshot_failures={})
    page = DashboardState(ClusterConfig())
    page._update(ClusterPoll(replace(status, tables=(replace(tables[0], name="gone"),)), {}, (), []))
    for _ in range(3):
        page._update(ClusterPoll(status, {}, (job,), []))
    curves = page.message(0, 0.0)[0]["curves"]
    assert (len(curves), *(len(curves[name]) for name in ("calls", "loss j", "rows t1"))) == (500, 4, 3, 3)
    assert "rows gone" not in curves


def test_a_table_that_is_restored_stays_with_what_was_known() -> None:
    def tables(whole: int, **lacking: tuple[object, ...]) -> list[tuple[object, ...]]:
        found = [
            TableStatus(name=name, dim=4, num_rows=None, rows=9, memory_bytes=0, writes=0) for name in "ab"[:whole]
        ]
        told = page._tables_of(
            ClusterStatus(
                cluster_version=1, map_version=1, num_shards=1, ready=True, shards=(), tables=tuple(found), **lacking
            )
        )
        return [(table["name"], table["state"], table.get("dim"), table["rows"]) for table in told]

    page = DashboardState(ClusterConfig())
    assert tables(2) == [("a", "whole", 4, 9), ("b", "whole", 4, 9)]
    lost = {"incomplete_tables": ("b",), "incomplete_rows": (5,)}
    assert tables(1, **lost) == [("a", "whole", 4, 9), ("b", "lost rows", 4, 5)]
    assert tables(1, **lost, restoring_tables=("b",)) == [("a", "whole", 4, 9), ("b", "being restored", 4, 5)]
    assert tables(1) == [("a", "whole", 4, 9)]  # dropped
    assert tables(0, **lost)[0] == ("b", "lost rows", None, 5)  # nobody told what it was
