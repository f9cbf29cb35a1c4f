"""gRPC service of the scheduler role."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from functools import partial

from geartrain.ams.observe.call_counts import call_metrics
from geartrain.ams.observe.event_log import EventLog
from geartrain.ams.observe.metrics import Metric
from geartrain.ams.rpc.client.shard import GrpcCarrier
from geartrain.ams.rpc.server.binding import bind
from geartrain.ams.rpc.server.server import GrpcServer
from geartrain.ams.rpc.server.threads import CallThreads
from geartrain.ams.rpc.services import SCHEDULER
from geartrain.ams.scheduler.data_streams import StreamLeases
from geartrain.ams.scheduler.handlers import SchedulerHandlers
from geartrain.ams.scheduler.incarnations import Incarnations
from geartrain.ams.scheduler.metrics import scheduler_metrics
from geartrain.ams.scheduler.probe_holder import incarnations_at
from geartrain.ams.scheduler.scheduler import Scheduler
from geartrain.ams.scheduler.worker_steps import WorkerSteps
from geartrain.ams.storage.kv.store import KeyValueStore, MemoryStore
from geartrain.ams.values.config import SchedulerConfig
from geartrain.ams.values.scheduler_messages import Revoked

logger = logging.getLogger(__name__)

_PULSES_PER_LEASE = 10
_POLL_SECONDS = 0.1

# A change of tables may wait minutes for shards and other changes. Heartbeats that waited behind such calls would cost
# live shards their place.
_MEMBERSHIP_THREADS = 8
_MEMBERSHIP = ("Register", "Heartbeat", "Leave")
_TABLE_THREADS = 64
_TABLES = ("CreateClusterTable", "AlterClusterTable", "DropClusterTable", "PublishClusterTables")

_CONNECT_SECONDS = 5.0
"""Wait for an overloaded or paused shard when a table change is sent to it."""


class SchedulerServer:
    """The scheduler of a cluster: start, serve until stopped."""

    def __init__(
        self,
        config: SchedulerConfig,
        restorer: Callable[[Scheduler, StreamLeases, str], AbstractContextManager[object]] | None = None,
    ) -> None:
        """``restorer`` makes the job restorer, given the address, which runs while this serves; None: jobs that ask to
        be restored are refused, as they are without a durable store."""
        self._config = config
        self._restorer = restorer
        self._server: GrpcServer | None = None
        self._membership = CallThreads(_MEMBERSHIP_THREADS, "membership")
        self._tables = CallThreads(_TABLE_THREADS, "tables")
        self._scheduler: Scheduler | None = None
        self._counted: Callable[[], Iterable[Metric]] = tuple
        self._on_stop = ExitStack()
        """Shutdown actions, run in reverse order."""
        self._grace_seconds = 0.0
        self._stopping = threading.Event()
        self._ended = threading.Event()
        self.stop_reason: str | None = None
        """Reason why it ended by itself: never set."""

    def start(self) -> str:
        """Bind and serve; return the address.

        Raises ConfigError (the port or the data folder is in use, or the state is another cluster's), StateDamaged.
        """
        try:
            return self._start()
        except BaseException:
            self.stop(0)
            raise

    def _start(self) -> str:
        store: KeyValueStore = MemoryStore()
        if self._config.data is not None:
            # Loaded only where it is used.
            from geartrain.ams.storage.kv.lmdb_store import LmdbStore

            store = LmdbStore(self._config.data)
            self._on_stop.callback(store.close)
        events = EventLog(self._config.data)  # once this process alone holds the folder
        self._on_stop.callback(events.close)
        incarnations = Incarnations(store)
        streams = StreamLeases(store, self._config.stream_lease_seconds, incarnations=incarnations)
        steps = WorkerSteps(self._config.stream_lease_seconds)
        scheduler = self._scheduler = Scheduler(
            self._config.num_shards,
            lambda address, shard: GrpcCarrier(
                address, shard, max_message_bytes=self._config.max_message_bytes, connect_seconds=_CONNECT_SECONDS
            ),
            lease_seconds=self._config.lease_seconds,
            store=store,
            incarnations=incarnations,
            incarnations_at=incarnations_at,
            events=events,
        )
        server = self._server = GrpcServer(
            self._config.listen, self._config.max_message_bytes, reflection=self._config.reflection
        )
        self._on_stop.callback(lambda: server.stop(self._grace_seconds))
        tokens = server.tokens
        revoked = Revoked if tokens is None else lambda: tokens.revoked
        handlers = SchedulerHandlers(scheduler, streams, steps, events, revoked)
        server.add(
            bind(SCHEDULER, handlers.by_request),
            lanes=dict.fromkeys(_MEMBERSHIP, self._membership) | dict.fromkeys(_TABLES, self._tables),
        )
        self._counted = partial(scheduler_metrics, scheduler, handlers.jobs, streams, steps)

        def publish_readiness() -> None:
            server.set_readiness(scheduler.readiness())

        publish_readiness()
        server.start()
        server.ready()
        # Each pulse in the queue of the calls that it stands for: if these wait, so does the pulse.
        pulses = dict.fromkeys((streams.pulse, steps.pulse, handlers.jobs.pulse, publish_readiness), server.calls)
        pulses[scheduler.pulse] = self._membership
        pulse = threading.Thread(target=self._run_pulse, args=(pulses,), name="pulse", daemon=True)
        pulse.start()
        self._on_stop.callback(pulse.join)
        if self._restorer is not None and self._config.data is not None:
            self._on_stop.enter_context(self._restorer(scheduler, streams, server.address))
        return server.address

    def _run_pulse(self, pulses: dict[Callable[[], None], ThreadPoolExecutor]) -> None:
        shortest = min(self._config.lease_seconds, self._config.stream_lease_seconds)
        last: dict[Callable[[], None], Future[None]] = {}
        while not self._stopping.wait(shortest / _PULSES_PER_LEASE):
            for pulse, queue in pulses.items():
                if pulse not in last or last[pulse].done():
                    last[pulse] = queue.submit(pulse)

    def metrics(self) -> Iterator[Metric]:
        """Yield the counters of the scheduler and its calls."""
        yield from self._counted()
        if (server := self._server) is not None:
            yield from call_metrics(((), counted) for counted in server.counts.read())

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Block until stopped; False if the time ran out first."""
        return self._ended.wait(timeout_seconds)

    def stop(self, grace_seconds: float = 5.0) -> None:
        """Finish the calls in progress and stop. Idempotent.

        Unless ``grace_seconds`` is 0, it first waits for servers that are shutting down: jobs save through it before.
        """
        if grace_seconds > 0 and self._scheduler is not None:
            if leaving := self._scheduler.leaving_shards():
                logger.info("waiting for shards that are shutting down: %s", ", ".join(map(str, leaving)))
            while self._scheduler.leaving_shards():
                time.sleep(_POLL_SECONDS)
        self._scheduler = None
        self._stopping.set()  # before the threads of the pulses end
        self._grace_seconds = grace_seconds
        self._on_stop.close()
        for lane in (self._membership, self._tables):
            lane.close()
            lane.shutdown(wait=False)
        self._ended.set()
