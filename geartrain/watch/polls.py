"""Status polls of a cluster over connections that stay open, for ``geartrain top`` and the page."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from geartrain.ams.client.cluster_status import ClusterStatus, describe_cluster
from geartrain.ams.rpc.carrier import AttemptFailed, SchedulerCarrier, ShardCarrier, remedy
from geartrain.ams.rpc.client.dial import dial
from geartrain.ams.values.config import ClusterConfig
from geartrain.ams.values.errors import SchedulerUnavailable
from geartrain.ams.values.scheduler_messages import ClusterEvent, DescribeJobs, EventPage, JobEntry, ReadEvents
from geartrain.watch.events import EventReader

_ANSWER_SECONDS = 2.0
JOBS_PER_LOOK = 100
"""Jobs above which reports are read at every n-th look only: each job then reports less often, too."""


class Rates(NamedTuple):
    """Rates of a shard per second since the last look."""

    calls: float = 0.0
    """Calls for rows."""
    writes: float = 0.0
    cpu: float = 0.0
    """CPU cores that its process kept busy."""


class ClusterPoll(NamedTuple):
    """Result of one poll: status, rates, jobs and events."""

    status: ClusterStatus
    rates: dict[int, Rates]
    """Rates by shard, of shards that the last poll saw, too."""
    jobs: tuple[JobEntry, ...]
    events: list[ClusterEvent]
    """New events, oldest first."""


class ClusterWatch:
    """Polls a cluster. Not thread-safe."""

    def __init__(self, config: ClusterConfig, max_events: int) -> None:
        """``max_events`` limits the past events that the first poll returns."""
        self.address = config.server.scheduler
        self.config = config.client.model_copy(update={"connect_timeout_seconds": _ANSWER_SECONDS})
        self._events = EventReader(self._read_events, most=max_events)
        self._scheduler: SchedulerCarrier | None = None
        self._shards: dict[tuple[str, int], ShardCarrier] = {}
        self._looks = 0
        self._jobs: tuple[JobEntry, ...] = ()
        self._before: tuple[float, dict[tuple[int, int], Rates]] = (0.0, {})
        """Time of the last poll, and the totals of each process of a shard."""

    def poll(self) -> ClusterPoll:
        """Poll scheduler and shards once. Raises SchedulerUnavailable, AccessDenied; the next poll retries."""
        if self._scheduler is None:
            self._scheduler, self._dial_shard = dial(self.address, self.config, once=True)
        try:
            status = describe_cluster(self._scheduler, self._open, _ANSWER_SECONDS)
            if self._looks % max(1, len(self._jobs) // JOBS_PER_LOOK) == 0:
                self._jobs = self._scheduler.call(DescribeJobs(), _ANSWER_SECONDS)
            self._looks += 1
            events = list(self._events.new())
        except AttemptFailed as exc:
            self.close()
            raise SchedulerUnavailable(f"{exc}; {remedy(exc)}") from None
        up = {(shard.address, shard.shard) for shard in status.shards if shard.state in ("up", "leaving")}
        for key in self._shards.keys() - up:  # a failed connection backs off before it retries; a new one does not
            self._shards.pop(key).close()
        now, (at, before) = time.monotonic(), self._before
        done = {
            (shard.shard, shard.incarnation): Rates(shard.row_calls, shard.writes, shard.cpu_seconds)
            for shard in status.shards
            if shard.state in ("up", "leaving")  # the totals of other shards are unknown, not 0
        }
        self._before = now, done
        rates = {
            key[0]: Rates(*(max(0.0, new - old) / (now - at) for new, old in zip(done[key], before[key], strict=True)))
            for key in done.keys() & before.keys()
        }
        return ClusterPoll(status, rates, self._jobs, events)

    def close(self) -> None:
        """Close the connections."""
        for carrier in self._shards.values():
            carrier.close()
        self._shards.clear()
        if self._scheduler is not None:
            self._scheduler.close()
            self._scheduler = None

    def _open(self, address: str, shard: int) -> Any:
        if (address, shard) not in self._shards:
            self._shards[address, shard] = self._dial_shard(address, shard)
        return _KeptOpen(self._shards[address, shard])

    def _read_events(self, since: int) -> EventPage:
        assert self._scheduler is not None
        return self._scheduler.call(ReadEvents(since=since), _ANSWER_SECONDS)


def health_of(status: ClusterStatus) -> str:
    """Return ``ready``, ``degraded`` if all shards are up and tables lack rows, or ``not ready``."""
    if any(shard.state != "up" for shard in status.shards):
        return "not ready"
    if status.incomplete_tables:
        return "degraded"
    return "ready" if status.ready else "not ready"


class _KeptOpen:
    """A carrier that stays open when a borrower closes it."""

    def __init__(self, carrier: ShardCarrier) -> None:
        self.submit = carrier.submit

    def close(self) -> None:
        pass
