"""Scheduler and shards inside one process, for ``local()``."""

from __future__ import annotations

from types import MappingProxyType
from typing import TypeVar

from geartrain.ams.kernels.memory import UNLIMITED, memory_limit
from geartrain.ams.programs.hosted import HostedModels
from geartrain.ams.rpc.local import LocalCarrier
from geartrain.ams.scheduler.data_streams import StreamLeases
from geartrain.ams.scheduler.handlers import SchedulerHandlers
from geartrain.ams.scheduler.incarnations import Incarnations
from geartrain.ams.scheduler.scheduler import Scheduler
from geartrain.ams.scheduler.worker_steps import WorkerSteps
from geartrain.ams.server.machine import limit_row_memory, threads_per_shard
from geartrain.ams.server.shard import Shard, new_incarnation
from geartrain.ams.storage.kv.store import MemoryStore
from geartrain.ams.values.config import SchedulerConfig
from geartrain.ams.values.placement import buckets_of_shard
from geartrain.ams.values.rpc import Rpc

R = TypeVar("R")

_NEVER_LOST = float("inf")
_STREAM_LEASE_SECONDS = SchedulerConfig().stream_lease_seconds


class LocalScheduler:
    """Carrier to a scheduler of this process, a :class:`SchedulerCarrier`."""

    def __init__(self, handlers: SchedulerHandlers) -> None:
        self._handlers = handlers.by_request

    def call(self, request: Rpc[R], timeout_seconds: float | None) -> R:  # noqa: ARG002
        """Call the handler directly; without a network there is no time-out."""
        reply: R = self._handlers[type(request)](request, self)
        return reply

    def require_waiting(self) -> None:
        """Return: a caller in this process always waits."""

    def close(self) -> None:
        """Do nothing: the scheduler ends with its cluster."""


class EmbeddedCluster:
    """A scheduler and ``num_shards`` shards on threads of this process."""

    def __init__(self, num_shards: int, models: HostedModels = MappingProxyType({})) -> None:
        store = MemoryStore()
        incarnations = Incarnations(store)
        scheduler = Scheduler(
            num_shards, self.open_carrier, lease_seconds=_NEVER_LOST, store=store, incarnations=incarnations
        )
        self._shards: dict[str, Shard] = {}
        threads = threads_per_shard(num_shards)
        if memory_limit() == UNLIMITED:
            limit_row_memory(None)
        for number in range(num_shards):
            address, incarnation = f"local:{number}", new_incarnation()
            bucket_map = scheduler.register(address, number, incarnation).bucket_map
            owned = buckets_of_shard(bucket_map.bucket_shards, number)
            self._shards[address] = Shard(number, owned, incarnation=incarnation, threads=threads, models=models)
        streams = StreamLeases(store, _STREAM_LEASE_SECONDS, incarnations=incarnations)
        self.scheduler = LocalScheduler(SchedulerHandlers(scheduler, streams, WorkerSteps(_STREAM_LEASE_SECONDS)))

    def open_carrier(self, address: str, _: int) -> LocalCarrier:
        """Return a carrier to the shard at ``address``."""
        return LocalCarrier(self._shards[address])

    def close(self) -> None:
        """Stop the shards; their rows are gone."""
        for shard in self._shards.values():
            shard.close()
