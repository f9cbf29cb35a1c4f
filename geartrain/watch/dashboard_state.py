"""State of the open pages: the last poll of the cluster, curves, and events."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
import math
import os
import shlex
import time
from bisect import bisect
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from operator import itemgetter
from typing import Any

from geartrain.ams.client.cluster_status import ClusterStatus, slow_gear_status
from geartrain.ams.graph.client.remote import RemoteGraphs
from geartrain.ams.observe.event_log import as_json
from geartrain.ams.storage.snapshot.folder import open_snapshot
from geartrain.ams.values.config import ClusterConfig
from geartrain.ams.values.errors import GeartrainError
from geartrain.ams.values.scheduler_messages import JobReport
from geartrain.ams.values.text import counted
from geartrain.watch.events import folded
from geartrain.watch.polls import ClusterPoll, ClusterWatch, Rates, health_of

logger = logging.getLogger(__name__)

_POLL_SECONDS, _IDLE_SECONDS = 1.0, 5.0
"""Seconds between polls: while a page is open, and while none is (curves continue)."""
_GEAR_SECONDS = 5.0
"""Seconds between polls of gears and graphs."""
_MAX_EVENTS, _MAX_SNAPSHOTS, _MAX_CURVES = 300, 100, 500
_MAX_POINTS = 1500
"""Points of a curve before old ones are thinned out."""
_FINENESS = 150
"""Ratio of a thinned point's age to the distance of its neighbour: an hour ago 24 s, a day ago 10 minutes."""
_TROUBLE = ("lost", "takeover", "recovery", "restore", "snapshot_failed", "job_failed", "job_silent")
"""Events that mark curves, or that people look for: kept apart from the others, up to the same number."""
_FIRST_EVENTS = 10_000
"""Events read at first to find snapshots."""

Point = tuple[float, int | None, float]
"""Time (unix seconds), steps of the job (None: not of a job), and value."""


class DashboardState:
    """Polls a cluster and stores the content of the pages. Used by one event loop."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._watch = ClusterWatch(config, _FIRST_EVENTS)
        secured = f"GEARTRAIN_SECURITY__FOLDER={shlex.quote(folder)} " if (folder := config.security.folder) else ""
        self._state: dict[str, Any] = {
            "scheduler": self._watch.address,
            "error": "not asked yet",
            "began": time.time(),
            "start": f"{secured}geartrain worker ctr --data movielens --scheduler {self._watch.address}",
        }
        self._at = 0.0
        """Time of the last change, in unix seconds."""
        self._curves: dict[str, list[Point]] = {}
        self._tables: dict[str, dict[str, Any]] = {}
        """Each table as it last was complete, until it is dropped."""
        self._events: dict[bool, deque[dict[str, Any]]] = {of: deque(maxlen=_MAX_EVENTS) for of in (False, True)}
        """Events by whether they are trouble: a flood of others then drops none of it."""
        self._last = 0
        """Number of the last event: counted here, as a scheduler may restart its numbers."""
        self._snapshots: dict[str, dict[str, Any]] = {}
        """Snapshots that events mention, newest last."""
        self._there: set[str] = set()
        """Paths of the snapshots that exist."""
        self._verifying: asyncio.Task[None] | None = None
        self._news, self._opened = asyncio.Event(), asyncio.Event()
        self.pages = 0
        """Number of open pages."""

    @contextlib.contextmanager
    def open_page(self) -> Iterator[None]:
        """Count a page as open inside the ``with`` block."""
        self.pages += 1
        self._opened.set()
        try:
            yield
        finally:
            self.pages -= 1

    async def run(self) -> None:
        """Poll until cancelled."""
        beside = [asyncio.create_task(self._poll_gears_and_graphs()), asyncio.create_task(self._list_snapshots())]
        try:
            await self._poll_loop()
        finally:
            for task in beside:
                task.cancel()

    async def _poll_gears_and_graphs(self) -> None:
        """Poll gears and graphs in the background, so that one that does not answer delays nothing."""
        while True:
            try:
                self._state |= await asyncio.to_thread(_gears_and_graphs, self._config)
            except GeartrainError:  # the poll of the cluster shows the error
                pass
            except Exception:
                logger.exception("cannot poll gears and graphs; retrying")
            await asyncio.sleep(_GEAR_SECONDS)

    async def _list_snapshots(self) -> None:
        """Check which snapshots exist; apart from the polls, as a disk may hang."""
        while True:
            told = list(self._snapshots)
            self._there = await asyncio.to_thread(_there, told)
            for path in told:
                if path not in self._there:
                    self._snapshots.pop(path, None)
            for path in list(self._snapshots)[:-_MAX_SNAPSHOTS]:
                del self._snapshots[path]
            await asyncio.sleep(_POLL_SECONDS)

    async def _poll_loop(self) -> None:
        while True:
            try:
                look = await asyncio.to_thread(self._watch.poll)
                self._update(look)
            except GeartrainError as exc:  # the cluster may come back
                self._state["error"] = f"{exc}; asked again until it answers"
            except Exception:
                logger.exception("a look failed")
                self._state["error"] = "a look failed; the log of the dashboard says why"
            self._publish()
            self._opened.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._opened.wait(), _POLL_SECONDS if self.pages else _IDLE_SECONDS)

    async def is_newer(self, at: float) -> bool:
        """Wait up to a second for a change after ``at``; return whether there was one."""
        if self._at <= at:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), _POLL_SECONDS)
        return self._at > at

    def message(self, seen: int, at: float) -> tuple[dict[str, Any], int, float]:
        """Return the message for a page that has events up to number ``seen`` and curves up to ``at``, and both numbers
        now.
        """
        message = {
            **self._state,
            "now": time.time(),
            "first": not at,
            "curves": {name: points[bisect(points, at, key=itemgetter(0)) :] for name, points in self._curves.items()},
            "events": sorted(
                (event for kept in self._events.values() for event in kept if event["n"] > seen), key=itemgetter("n")
            ),
            "snapshots": sorted(
                (found for path, found in self._snapshots.items() if path in self._there),
                key=lambda found: (found["job"], -found["unix_seconds"]),
            ),
        }
        return message, self._last, self._at

    def start_verification(self, path: object) -> str:
        """Start to verify a snapshot that events mention; return why not, or ""."""
        if not isinstance(path, str) or path not in self._snapshots:
            return "no event tells of this snapshot"
        if self._verifying is not None and not self._verifying.done():
            return "another snapshot is being read"
        self._verifying = asyncio.create_task(self._verify(self._snapshots[path]))
        return ""

    async def _verify(self, snapshot: dict[str, Any]) -> None:
        def progress(done: int, total: int) -> None:
            snapshot["verified"] = f"reading, {100 * done / max(total, 1):.0f} %"

        try:
            progress(0, 1)
            self._publish()
            found = await asyncio.to_thread(lambda: open_snapshot(snapshot["path"]).verify(progress))
            faults = f"{counted(len(found), 'fault')}: {found[0]}" if found else ""
            snapshot["verified"] = faults or "sound: every byte was read"
        except (GeartrainError, OSError) as exc:
            snapshot["verified"] = f"not read: {exc}"
        except Exception as exc:
            logger.exception("a snapshot was not verified")
            snapshot["verified"] = f"not read: {type(exc).__name__}"
        self._publish()

    def _publish(self) -> None:
        self._at = time.time()
        self._news.set()
        self._news = asyncio.Event()

    def _update(self, look: ClusterPoll) -> None:
        now, status = round(time.time(), 3), look.status
        total = Rates(*map(sum, zip(*look.rates.values(), strict=True)))
        self._state |= {
            "error": "",
            "health": health_of(status),
            "cluster_version": status.cluster_version,
            "per_second": total._asdict(),
            "rows": sum(shard.rows for shard in status.shards),
            "memory_bytes": sum(shard.memory_bytes for shard in status.shards),
            "shards": [
                asdict(shard) | {"per_second": look.rates.get(shard.shard, Rates())._asdict()}
                for shard in status.shards
            ],
            "tables": self._tables_of(status),
            "incomplete_tables": status.incomplete_tables,
            "restoring_tables": status.restoring_tables,
            "jobs": [
                {**asdict(job), "report": None, **{name: _finite(value) for name, value in asdict(job.report).items()}}
                for job in look.jobs
            ],
        }
        points: dict[str, tuple[int | None, float]] = {name: (None, value) for name, value in total._asdict().items()}
        for job in look.jobs:
            if job.report.state == "training":
                for name, value in _curves_of(job.report).items():
                    if value is not None and math.isfinite(value):
                        points[f"{name} {job.job}"] = (job.report.step, value)
        points |= {f"rows {table.name}": (None, table.rows) for table in status.tables}  # last: as far as there is room
        drawn = dict(itertools.islice(points.items(), _MAX_CURVES))
        for name, (step, value) in drawn.items():
            self._add_point(name, now, step, value)
        if (surplus := len(self._curves) - _MAX_CURVES) > 0:
            ended = self._curves.keys() - drawn.keys()
            for name in heapq.nsmallest(surplus, ended, key=lambda name: self._curves[name][-1][0]):
                del self._curves[name]
        for event in folded(look.events):
            self._last += 1
            self._events[event.kind in _TROUBLE].append(as_json(event) | {"n": self._last})
            if event.kind == "snapshot":
                self._snapshots.pop(event.snapshot, None)
                self._snapshots[event.snapshot] = {
                    "path": event.snapshot,
                    "job": event.job,
                    "step": event.step,
                    "seconds": event.seconds,
                    "unix_seconds": event.unix_seconds,
                    "verified": "",
                }

    def _tables_of(self, status: ClusterStatus) -> list[dict[str, Any]]:
        """Return all tables; an incomplete one as it last was complete, as the scheduler has only its name and rows."""
        whole = {
            table.name: asdict(table) | {"staleness": _staleness(table.staleness), "state": "whole"}
            for table in status.tables
        }
        lacking = {}
        for name, rows in zip(status.incomplete_tables, status.incomplete_rows, strict=True):
            state = "being restored" if name in status.restoring_tables else "lost rows"
            lacking[name] = {**self._tables.get(name, {"name": name}), "rows": rows, "state": state}
        self._tables = dict(sorted((whole | lacking).items()))
        return list(self._tables.values())

    def _add_point(self, name: str, at: float, step: int | None, value: float) -> None:
        points = self._curves.setdefault(name, [])
        points.append((at, step, float(f"{value:.6g}")))  # a new page gets hundreds of thousands of them
        if len(points) > _MAX_POINTS:
            self._curves[name] = thinned(points)


def thinned(points: Sequence[Point]) -> list[Point]:
    """Return the first and last point, and points between them whose distance grows with their age."""
    now, kept = points[-1][0], [points[-1]]
    for point in reversed(points[1:-1]):
        if kept[-1][0] - point[0] >= (now - point[0]) / _FINENESS:
            kept.append(point)
    return [points[0], *reversed(kept)]


def _curves_of(report: JobReport) -> dict[str, float | None]:
    """Return the values of a job's curves, by the first word of the curve's name."""
    return {
        "loss": report.loss,
        "metric": report.metric_value,
        "steps": report.steps_per_second,
        "samples": report.samples_per_second or None,
        "pull": report.pull_ms,
        "push": report.push_ms,
    }


def _there(paths: list[str]) -> set[str]:
    """Return the paths without those that are missing from a folder of this machine. Snapshots in an object store, or
    on a disk of other machines, are known by events alone.
    """
    exists, is_here = os.path.exists, os.path.isdir  # a path from a client may be no path
    return {path for path in paths if exists(path) or not is_here(os.path.dirname(path))}  # noqa: PTH120


def _finite(value: Any) -> Any:
    """Replace a number that JSON lacks (NaN, infinity) by None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _staleness(counts: Sequence[int]) -> str:
    """Return in words the staleness of half of the pushes, and of 99 %, in writes."""
    if not sum(counts):
        return ""
    reached = [total / sum(counts) for total in itertools.accumulate(counts)]
    half, most = (2 ** next(i for i, part in enumerate(reached) if part >= share) - 1 for share in (0.5, 0.99))
    return f"half ≤ {half:,}, 99 % ≤ {most:,}" if most else "none"


def _gears_and_graphs(config: ClusterConfig) -> dict[str, Any]:
    quick = config.client.model_copy(update={"connect_timeout_seconds": 2.0, "recovery_timeout_seconds": 0.0})
    gears, complaints = slow_gear_status(config.server.scheduler, config=quick)
    told: dict[str, Any] = {"gears": [asdict(gear) for gear in gears], "graphs": [], "building": []}
    if quick.graph is not None:
        service = RemoteGraphs(quick.graph, quick)
        try:
            found = asdict(service.describe())
            told |= {"graphs": found["graphs"], "building": found["building"]}
        except GeartrainError as exc:
            complaints.append(str(exc))
        finally:
            service.close()
    return told | {"complaints": complaints}
