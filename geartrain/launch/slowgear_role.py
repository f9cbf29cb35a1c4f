"""The slow-gear role: connects the user's module and samples, the cluster, the stores and the service."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import fields
from functools import partial

import torch

from geartrain.ams.client.factory import connect
from geartrain.ams.gear.client.status import describe_gears
from geartrain.ams.gear.held_partitions import HeldPartitions, Ticker
from geartrain.ams.gear.partitions import NUM_PARTITIONS, job_of
from geartrain.ams.observe.call_counts import call_metrics
from geartrain.ams.observe.metrics import Metric
from geartrain.ams.rpc.client.gear import GrpcGearCarrier
from geartrain.ams.rpc.client.revoked import RevokedWatch
from geartrain.ams.rpc.server.binding import bind
from geartrain.ams.rpc.server.server import GrpcServer
from geartrain.ams.rpc.services import GEAR
from geartrain.ams.storage.features.factory import open_store
from geartrain.ams.values.config import ClientConfig, SlowGearRoleConfig
from geartrain.ams.values.errors import ConfigError, SpecMismatch
from geartrain.ams.values.gear_messages import process_at
from geartrain.ams.values.scheduler_messages import StreamHolders
from geartrain.ams.values.text import shown_url
from geartrain.bridge.gear.config import SlowGearConfig
from geartrain.bridge.gear.dense_cache import FeatureCache, SharedCache
from geartrain.bridge.gear.factory import open_engine, open_pass
from geartrain.bridge.gear.gradient_journal import GradientJournal
from geartrain.workers.devices import choose_device
from geartrain.workers.gear.handler import SlowGearHandler
from geartrain.workers.gear.objects import load_function, open_samples, optimizer_named

logger = logging.getLogger(__name__)

_DTYPES = {"none": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
_MEMORY, _FOLDER = "memory", "lmdb:"
_POLL_SECONDS = 0.02


class SlowGearRole:
    """One slow gear: started, then serving until stopped."""

    def __init__(self, config: SlowGearRoleConfig, client: ClientConfig) -> None:
        """Raise ConfigError if its module or samples are not set, or cannot be loaded."""
        for key in ("name", "module", "samples", "dim"):
            if getattr(config, key) is None:
                raise ConfigError(f"which {key}? Give --{key}, or slowgear.{key} (GEARTRAIN_SLOWGEAR__{key.upper()})")
        self.name = str(config.name)
        self._config = config
        # It may start together with its scheduler.
        patient = {"refused_timeout_seconds": client.connect_timeout_seconds}
        self._client = client.model_copy(update={"graph": None} | patient)
        self._build = load_function(str(config.module), "module")
        self._samples, self._decode = open_samples(str(config.samples), config.decode)
        self._optimizer = optimizer_named(config.optimizer)
        self._device = choose_device(config.device)
        self._dim = config.dim or 1
        self._settings = _settings(config)
        self._server: GrpcServer | None = None
        self._ended = threading.Event()
        self.stop_reason: str | None = None
        """Reason why it ended by itself; None if it did not."""
        self._handler: SlowGearHandler | None = None
        self._opened = ExitStack()
        self.partitions = 0
        """Number of partitions held when it began to serve."""

    def start(self) -> str:
        """Bind, join the cluster and serve; return the address.

        Raises ConfigError, SpecMismatch (the dense table is of another module), Unavailable, StateDamaged.
        """
        try:
            return self._start()
        except BaseException:
            self.stop(0)
            raise

    def metrics(self) -> Iterator[Metric]:
        """Yield the counters of the gear and its port."""
        if (handler := self._handler) is not None and (server := self._server) is not None:
            yield from handler.metrics()
            yield from call_metrics(((), counted) for counted in server.counts.read())

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Block until stopped; False if the time ran out first."""
        return self._ended.wait(timeout_seconds)

    def stop(self, grace_seconds: float = 5.0) -> None:
        """Apply waiting gradients, hand over partitions and deduplication ledger, and stop. Idempotent."""
        (server, self._server), (handler, self._handler) = (self._server, None), (self._handler, None)
        try:
            if server is not None:
                if handler is not None:
                    handler.drain()  # while calls are still answered
                server.stop(grace_seconds)
        finally:
            self._ended.set()
            self._opened.close()

    def _stop(self, reason: str) -> None:
        self.stop_reason = reason
        self._ended.set()

    def _start(self) -> str:
        config = self._config
        self._server = GrpcServer(config.listen, config.max_message_bytes, reflection=config.reflection)
        address = config.advertise or self._server.address
        journal = self._journal(address)
        stream = None if journal is None else f"gear/{self.name}/{journal.stream}"  # its writes are deduplicated
        joined = self._opened.enter_context(connect(config.scheduler, config=self._client, stream=stream))
        self._opened.callback(RevokedWatch(self._server.tokens, config.scheduler).close)
        incarnation = joined.write_stream.incarnation
        streams = joined.streams(job_of(self.name), worker=address, incarnation=incarnation)
        self._compare_widths(streams.holders)
        partitions = HeldPartitions(streams, before_release=self._flush)
        self._opened.callback(
            partitions.release_all
        )  # also after a failed start: nobody then waits for its lease to expire
        ticker = Ticker(lambda: self._tick(partitions), lambda: partitions.tick_seconds, self._stop)
        self._opened.callback(ticker.stop)
        dense_pass = open_pass(self._build, self._samples, self._decode, self._dim, self._settings, self._device)
        self._await_partitions(partitions)
        open_here = partial(
            open_engine,
            joined,
            self.name,
            dense_pass,
            self._settings,
            gradients_per_id=config.gradients_per_id,
            optimizer=self._optimizer,
            reuse=True,
            mode="async",
            cache=self._cache(),
            journal=journal,
        )
        engine = open_here()
        handler = SlowGearHandler(
            self.name,
            address,
            engine,
            partitions,
            incarnation=incarnation,
            gradients_per_id=config.gradients_per_id,
            max_message_bytes=config.max_message_bytes,
            holders=streams.holders,
            open_peer=GrpcGearCarrier,
            journal=journal,
            open_engine=open_here,
        )
        if journal is not None:
            engine.flush()  # gradients from before: another gear may hold their ids by now
            journal.joined(process_at(address, incarnation))
        self._handler = handler
        # A thread of its own: it may wait for a table while the lease must be renewed.
        going_back = Ticker(handler.follow_restore, lambda: partitions.tick_seconds, self._stop)
        self._opened.callback(going_back.stop)
        self._server.add(bind(GEAR, handler.by_request))
        self._server.start()
        self._server.ready()
        self.partitions = len(partitions.now)
        return address

    def _compare_widths(self, holders: Callable[[], StreamHolders]) -> None:
        """Raise SpecMismatch, before it holds a partition, if another slow gear makes features of another width."""
        states, _ = describe_gears([self.name], lambda _: holders())
        for state in states:
            if state.dim != self._config.dim:
                raise SpecMismatch(
                    f"dim is {self._config.dim}; the slow gear of {self.name!r} at {state.address} makes features of "
                    f"width {state.dim}: start this one with --dim {state.dim}, or under another name"
                )

    def _tick(self, partitions: HeldPartitions) -> None:
        if (handler := self._handler) is not None:
            handler.require_whole()
        partitions.tick()

    def _flush(self) -> None:
        if (handler := self._handler) is not None:
            handler.flush()

    def _await_partitions(self, partitions: HeldPartitions) -> None:
        """Wait for a share of the partitions; with more slow gears than partitions some have none, and need none."""
        deadline = time.monotonic() + self._client.connect_timeout_seconds
        while not partitions.now and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        logger.info("%d of %d partitions of %r are held", len(partitions.now), NUM_PARTITIONS, self.name)

    def _journal(self, address: str) -> GradientJournal | None:
        """Open the journal of gradients in the store; None: they are in memory only. In a Redis server, which may be
        shared, each address has a journal of its own."""
        config = self._config
        if config.store == _MEMORY:
            return None
        place = f"gradients/{self.name}"
        if not config.store.startswith(_FOLDER):
            place += "/" + re.sub(r"[^0-9A-Za-z.]", "-", address)
            if config.advertise is None and config.listen.endswith(":0"):
                logger.warning(
                    "listen is %r: the gradients in %s are found again by a slow gear at the address %s alone; give "
                    "--listen or --advertise a port that stays",
                    *(config.listen, shown_url(config.store), address),
                )
        store = open_store(config.store, namespace=place, record_seconds=None)
        self._opened.callback(store.close)
        return GradientJournal(store, max_bytes=config.store_bytes)

    def _cache(self) -> FeatureCache | None:
        config = self._config
        if config.expire_seconds == 0:
            return None
        bound = config.store_bytes if config.store == _MEMORY or config.store.startswith(_FOLDER) else None
        store = open_store(config.store, namespace=f"features/{self.name}", max_bytes=bound)
        self._opened.callback(store.close)
        return SharedCache(
            store,
            self._dim,
            expire_seconds=config.expire_seconds,
            max_version_lag=config.max_version_lag,
            name=self.name,
        )


def _settings(config: SlowGearRoleConfig) -> SlowGearConfig:
    same = {setting.name for setting in fields(SlowGearConfig)} & set(SlowGearRoleConfig.model_fields)
    given = {name: getattr(config, name) for name in same}
    return SlowGearConfig(
        **given | {"autocast": _DTYPES[config.autocast], "max_wait_seconds": config.max_wait_millis / 1000}
    )
