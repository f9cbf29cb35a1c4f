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
"""With more of them, they are asked for at every so many-th look: they tell less often, too."""


class Rates(NamedTuple):
    """Of a shard, a second, since the look before."""

    calls: float = 0.0
    """For rows."""
    writes: float = 0.0
    cpu: float = 0.0
    """Cores that its process kept busy."""


class ClusterLook(NamedTuple):
    """What there was at one look."""

    status: ClusterStatus
    rates: dict[int, Rates]
    """By shard, of those that the look before saw, too."""
    jobs: tuple[JobEntry, ...]
    events: list[ClusterEvent]
    """New ones, the oldest first."""


class ClusterWatch:
    """Looks at a cluster. Not thread-safe."""

    def __init__(self, config: ClusterConfig, most_events: int) -> None:
        """``most_events``: of those that the first look finds."""
        self.address = config.server.scheduler
        self.config = config.client.model_copy(update={"connect_timeout_seconds": _ANSWER_SECONDS})
        self._events = EventReader(self._read_events, most=most_events)
        self._scheduler: SchedulerCarrier | None = None
        self._shards: dict[tuple[str, int], ShardCarrier] = {}
        self._looks = 0
        self._jobs: tuple[JobEntry, ...] = ()
        self._before: tuple[float, dict[tuple[int, int], Rates]] = (0.0, {})
        """When, and what each process of a shard had done."""

    def poll(self) -> ClusterLook:
        """Ask scheduler and shards once. Raises SchedulerUnavailable, AccessDenied; another look tries anew."""
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
        for key in self._shards.keys() - up:  # a connection that failed waits before it tries again; a new one does not
            self._shards.pop(key).close()
        now, (at, before) = time.monotonic(), self._before
        done = {
            (shard.shard, shard.incarnation): Rates(shard.row_calls, shard.writes, shard.cpu_seconds)
            for shard in status.shards
            if shard.state in ("up", "leaving")  # of others nothing is known, not even that they did nothing
        }
        self._before = now, done
        rates = {
            key[0]: Rates(*(max(0.0, new - old) / (now - at) for new, old in zip(done[key], before[key], strict=True)))
            for key in done.keys() & before.keys()
        }
        return ClusterLook(status, rates, self._jobs, events)

    def close(self) -> None:
        """Hang up."""
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
    """``ready``, ``degraded`` if all shards are up and tables lack rows, or ``not ready``."""
    if any(shard.state != "up" for shard in status.shards):
        return "not ready"
    if status.incomplete_tables:
        return "degraded"
    return "ready" if status.ready else "not ready"


class _KeptOpen:
    """A carrier that whoever borrows it does not close."""

    def __init__(self, carrier: ShardCarrier) -> None:
        self.submit = carrier.submit

    def close(self) -> None:
        pass
