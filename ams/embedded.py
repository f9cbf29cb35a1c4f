"""Scheduler and shards inside one process: what ``local()`` is made of."""

from __future__ import annotations

import time

from geartrain.ams.placement import buckets_of_shard, even_placement
from geartrain.ams.scheduler.scheduler import Scheduler
from geartrain.ams.server.machine import threads_per_shard
from geartrain.ams.server.shard import Shard
from geartrain.ams.specs import TableSpec
from geartrain.ams.transport.carrier import ClusterView
from geartrain.ams.transport.local import LocalCarrier

_NEVER_LOST = float("inf")


class LocalSchedulerCarrier:
    """Calls a scheduler of this process."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def describe(self, timeout_seconds: float | None) -> ClusterView:  # noqa: ARG002
        """See :class:`SchedulerCarrier`."""
        return self._scheduler.describe()

    def create_table(self, spec: TableSpec, *, reuse: bool, timeout_seconds: float | None) -> None:  # noqa: ARG002
        """See :class:`SchedulerCarrier`."""
        self._scheduler.create_table(spec, reuse=reuse)

    def drop_table(self, table: str, timeout_seconds: float | None) -> None:  # noqa: ARG002
        """See :class:`SchedulerCarrier`."""
        self._scheduler.drop_table(table)

    def close(self) -> None:
        """The scheduler ends with its cluster."""


class EmbeddedCluster:
    """A scheduler and ``num_shards`` shards on threads of this process."""

    def __init__(self, num_shards: int) -> None:
        scheduler = Scheduler(num_shards, self.open_carrier, lease_seconds=_NEVER_LOST)
        placement = even_placement(num_shards)
        self._shards: dict[str, Shard] = {}
        threads = threads_per_shard(num_shards)
        for number in range(num_shards):
            shard = Shard(number, buckets_of_shard(placement, number), incarnation=time.time_ns(), threads=threads)
            address = f"local:{number}"
            self._shards[address] = shard
            scheduler.register(address, number, shard.incarnation)
        self.scheduler = LocalSchedulerCarrier(scheduler)

    def open_carrier(self, address: str) -> LocalCarrier:
        """Return the way to the shard at ``address``."""
        return LocalCarrier(self._shards[address])

    def close(self) -> None:
        """End the shards; their rows are gone."""
        for shard in self._shards.values():
            shard.close()
