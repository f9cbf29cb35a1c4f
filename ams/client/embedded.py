"""Scheduler and shards inside one process: what ``local()`` is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from geartrain.ams.kernels.memory import UNLIMITED, memory_limit
from geartrain.ams.programs.hosted import HostedModels
from geartrain.ams.rpc.carrier import ClusterView, Cursor, StreamHolders, StreamLease, StreamRenewal
from geartrain.ams.rpc.local import LocalCarrier
from geartrain.ams.scheduler.data_streams import DataStreams
from geartrain.ams.scheduler.incarnations import Incarnations
from geartrain.ams.scheduler.scheduler import Scheduler
from geartrain.ams.server.machine import limit_row_memory, threads_per_shard
from geartrain.ams.server.shard import Shard, new_incarnation
from geartrain.ams.storage.kv.store import MemoryStore
from geartrain.ams.values.config import SchedulerConfig
from geartrain.ams.values.messages import CallContext
from geartrain.ams.values.placement import buckets_of_shard, even_placement
from geartrain.ams.values.specs import TableSpec

_NEVER_LOST = float("inf")
_STREAM_LEASE_SECONDS = SchedulerConfig().stream_lease_seconds


class LocalSchedulerCarrier:
    """Calls a scheduler of this process."""

    def __init__(self, scheduler: Scheduler, streams: DataStreams) -> None:
        self._scheduler = scheduler
        self._streams = streams

    def describe(self, timeout_seconds: float | None) -> ClusterView:  # noqa: ARG002
        """See :class:`SchedulerCarrier`."""
        return self._scheduler.describe()

    def create_table(
        self,
        spec: TableSpec,
        *,
        reuse: bool,
        timeout_seconds: float | None,  # noqa: ARG002
        caller: CallContext | None = None,
        for_restore: bool = False,
        replace: bool = False,
    ) -> TableSpec:
        """See :class:`SchedulerCarrier`."""
        return self._scheduler.create_table(
            spec,
            reuse=reuse,
            require_current=lambda: self._streams.require_current(caller),
            for_restore=for_restore,
            replace=replace,
        )

    def publish_tables(
        self,
        tables: Mapping[str, int],
        timeout_seconds: float | None,  # noqa: ARG002
        *,
        caller: CallContext | None = None,
    ) -> None:
        """See :class:`SchedulerCarrier`."""
        self._scheduler.publish_tables(tables, require_current=lambda: self._streams.require_current(caller))

    def drop_table(
        self,
        table: str,
        timeout_seconds: float | None,  # noqa: ARG002
        *,
        caller: CallContext | None = None,
        incarnation: int = 0,
    ) -> None:
        """See :class:`SchedulerCarrier`."""
        self._scheduler.drop_table(
            table, incarnation=incarnation, require_current=lambda: self._streams.require_current(caller)
        )

    def take_incarnation(self, chosen: int, timeout_seconds: float | None) -> int:  # noqa: ARG002
        """See :class:`SchedulerCarrier`."""
        return self._scheduler.take_incarnation(chosen)

    def check_caller(self, caller: CallContext, timeout_seconds: float | None) -> None:  # noqa: ARG002
        """See :class:`SchedulerCarrier`."""
        self._streams.require_current(caller)

    def fence_job(self, job: str, incarnation: int, timeout_seconds: float | None) -> None:  # noqa: ARG002
        """See :class:`SchedulerCarrier`."""
        self._streams.fence(job, incarnation)

    def lease_streams(
        self,
        job: str,
        worker: str,
        incarnation: int,
        *,
        num_streams: int,
        num_workers: int,
        timeout_seconds: float | None,  # noqa: ARG002
    ) -> StreamLease:
        """See :class:`SchedulerCarrier`."""
        return self._streams.lease(job, worker, incarnation, num_streams=num_streams, num_workers=num_workers)

    def renew_streams(
        self,
        job: str,
        worker: str,
        incarnation: int,
        cursors: Mapping[int, Cursor],
        timeout_seconds: float | None,  # noqa: ARG002
    ) -> StreamRenewal:
        """See :class:`SchedulerCarrier`."""
        return self._streams.renew(job, worker, incarnation, cursors)

    def release_streams(
        self,
        job: str,
        worker: str,
        incarnation: int,
        cursors: Mapping[int, Cursor],
        streams: Sequence[int] | None,
        timeout_seconds: float | None,  # noqa: ARG002
    ) -> None:
        """See :class:`SchedulerCarrier`."""
        self._streams.release(job, worker, incarnation, cursors, streams)

    def stream_cursors(self, job: str, timeout_seconds: float | None) -> dict[int, Cursor]:  # noqa: ARG002
        """See :class:`SchedulerCarrier`."""
        return self._streams.cursors(job)

    def stream_holders(self, job: str, timeout_seconds: float | None) -> StreamHolders:  # noqa: ARG002
        """See :class:`SchedulerCarrier`."""
        return self._streams.holders(job)

    def restore_streams(
        self,
        job: str,
        incarnation: int,
        cursors: Mapping[int, Cursor],
        timeout_seconds: float | None,  # noqa: ARG002
    ) -> None:
        """See :class:`SchedulerCarrier`."""
        self._streams.restore(job, incarnation, cursors)

    def close(self) -> None:
        """The scheduler ends with its cluster."""


class EmbeddedCluster:
    """A scheduler and ``num_shards`` shards on threads of this process."""

    def __init__(self, num_shards: int, models: HostedModels = MappingProxyType({})) -> None:
        store = MemoryStore()
        incarnations = Incarnations(store)
        scheduler = Scheduler(
            num_shards, self.open_carrier, lease_seconds=_NEVER_LOST, store=store, incarnations=incarnations
        )
        placement = even_placement(num_shards)
        self._shards: dict[str, Shard] = {}
        threads = threads_per_shard(num_shards)
        if memory_limit() == UNLIMITED:
            limit_row_memory(None)
        for number in range(num_shards):
            owned = buckets_of_shard(placement, number)
            shard = Shard(number, owned, incarnation=new_incarnation(), threads=threads, models=models)
            address = f"local:{number}"
            self._shards[address] = shard
            scheduler.register(address, number, shard.incarnation)
        self.scheduler = LocalSchedulerCarrier(
            scheduler, DataStreams(store, _STREAM_LEASE_SECONDS, incarnations=incarnations)
        )

    def open_carrier(self, address: str) -> LocalCarrier:
        """Return the way to the shard at ``address``."""
        return LocalCarrier(self._shards[address])

    def close(self) -> None:
        """End the shards; their rows are gone."""
        for shard in self._shards.values():
            shard.close()
