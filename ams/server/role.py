"""Server role: a process's shards, their ports and their registration in the cluster."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType

from geartrain.ams.kernels._core import Lease, boot_seconds
from geartrain.ams.observe import failpoints
from geartrain.ams.observe.metrics import Metric
from geartrain.ams.programs.hosted import HostedModels
from geartrain.ams.rpc.carrier import AttemptFailed
from geartrain.ams.rpc.client.scheduler import GrpcSchedulerCarrier
from geartrain.ams.rpc.credentials import Credentials
from geartrain.ams.rpc.server.server import GrpcServer
from geartrain.ams.rpc.wire import WIRE
from geartrain.ams.server.leave import await_snapshots
from geartrain.ams.server.machine import (
    bind_to_cpus,
    limit_row_memory,
    memory_pool,
    prefer_memory_of,
    recycle_large_buffers,
    threads_per_shard,
)
from geartrain.ams.server.metrics import ServedShard, server_metrics
from geartrain.ams.server.service import ShardService
from geartrain.ams.server.shard import Shard, new_incarnation
from geartrain.ams.storage.snapshot.roots import SnapshotRoots
from geartrain.ams.values.config import ServerConfig, split_address
from geartrain.ams.values.errors import (
    ClusterNotReady,
    ConfigError,
    GeartrainError,
    SchedulerUnavailable,
    ShardHeld,
    StaleBucketMap,
)
from geartrain.ams.values.expiry.rules import import_rules
from geartrain.ams.values.placement import BucketMap, buckets_of_shard
from geartrain.ams.values.rpc import version
from geartrain.ams.values.scheduler_messages import Heartbeat, LeaveCluster, ReadRevoked, Register
from geartrain.ams.values.text import counted, sized

logger = logging.getLogger(__name__)

REGISTER_TIMEOUT_SECONDS = 60.0
_CALL_TIMEOUT_SECONDS = 5.0
_RETRY_SECONDS = 0.2
_HELD_RETRY_SECONDS = 1.0
"""Retry interval for a shard that another process holds, possibly for days."""
_PULSES_PER_LEASE = 10
"""Least number of pulses of a running process per lease."""
_BEATS_PER_LEASE = 3
"""Least number of heartbeats per lease."""


class _HeldShard:
    """A shard of this process: its port, its service and its registration."""

    def __init__(
        self,
        config: ServerConfig,
        listen: str,
        wanted: int | None,
        models: HostedModels,
        roots: SnapshotRoots,
        memory_pool: str,
        cpus: Sequence[int],
    ) -> None:
        self.config = config
        self.memory_pool = memory_pool
        self.pool_shards = 0
        """Shards that share the memory, by the last heartbeat; 0: unknown."""
        self.pause_seconds = 0.0
        """Least time between two heartbeats, by the last one."""
        self.models = models
        self.wanted = wanted
        self.service = ShardService(
            config.max_message_bytes,
            roots,
            host=split_address(config.listen)[0],
            port=config.data_port,
            uses_tls=bool(Credentials.mine(listen).names),
            cpus=cpus,
        )
        self.server = GrpcServer(listen, config.max_message_bytes, reflection=config.reflection)
        self.server.add(self.service.bound, waiting=self.service.waiting_methods)
        self.address = config.advertise or _reachable(self.server.address)
        self.incarnation = new_incarnation()
        self.shard: Shard | None = None
        self.lease: Lease | None = None
        self.bucket_map: BucketMap | None = None
        """Map by which it holds its rows, from its first registration."""
        self.publish_readiness()

    @property
    def number(self) -> int:
        """Number of the shard, once it is registered."""
        assert self.shard is not None
        return self.shard.shard

    def join(self, scheduler: GrpcSchedulerCarrier) -> None:
        """Register and serve; also register again with a restarted scheduler."""
        known = self.shard
        request = Register(
            address=self.address,
            shard=self.wanted if known is None else known.shard,
            incarnation=self.incarnation,
            cluster_version=0 if known is None else known.cluster_version,
            heartbeat_seconds=self.config.heartbeat_seconds,
            tables=() if known is None else known.specs,
            highest_incarnation=0 if known is None else known.highest_incarnation,
            restoring_tables=() if known is None else known.restoring_tables,
            bucket_map=self.bucket_map,
            version=version(),
            wire=WIRE,
        )
        began = boot_seconds()
        reply = scheduler.call(request, _CALL_TIMEOUT_SECONDS)
        if known is not None:
            known.cluster_version = reply.cluster_version
            known.record_incarnation(reply.highest_incarnation)
            self._confirm(began)
            self._receive_revoked(scheduler, reply.revoked)
            return
        self._receive_revoked(scheduler, reply.revoked)  # before the first call
        self.bucket_map = reply.bucket_map
        self.lease = Lease(reply.shard, reply.lease_seconds)
        self.shard = Shard(
            reply.shard,
            buckets_of_shard(self.bucket_map.bucket_shards, reply.shard),
            incarnation=self.incarnation,
            cluster_version=reply.cluster_version,
            sync_timeout_seconds=self.config.sync_timeout_seconds,
            threads=self.config.threads or threads_per_shard(self.config.shards),
            lease=self.lease,
            models=self.models,
            shards_of_process=self.config.shards,
        )
        self.shard.record_incarnation(reply.highest_incarnation)
        self.service.serve(self.shard)
        self.server.ready()
        self.publish_readiness()
        logger.info("shard %d of %d serves at %s", reply.shard, reply.num_shards, self.address)

    def publish_readiness(self) -> None:
        """Report in the health service whether the shard is restored and ready."""
        restored = self.shard is not None and not self.shard.restoring_tables
        try:
            if is_ready := restored and self.lease is not None:
                self.lease.check()
        except GeartrainError:  # it was stopped for too long, and waits for the scheduler's confirmation
            is_ready = False
        self.server.set_readiness({"restored": restored, "ready": is_ready})

    def beat(self, scheduler: GrpcSchedulerCarrier) -> bool:
        """Send a heartbeat; return False if another process holds the shard now."""
        assert self.shard is not None
        failpoints.reach("lease.heartbeat.before")
        began = boot_seconds()
        alive = Heartbeat(
            shard=self.shard.shard,
            incarnation=self.incarnation,
            highest_incarnation=self.shard.highest_incarnation,
            memory_pool=self.memory_pool,
            unix_seconds=time.time(),
            version=version(),
            wire=WIRE,
        )
        reply = scheduler.call(alive, _CALL_TIMEOUT_SECONDS)
        failpoints.reach("lease.heartbeat.after")
        if reply.replaced:
            return False
        if reply.unknown:
            logger.warning("the scheduler was restarted; shard %d registers again", self.shard.shard)
            self.join(scheduler)
        else:
            # A table may have been altered while the heartbeat was on its way.
            self.shard.cluster_version = max(self.shard.cluster_version, reply.cluster_version)
            self.shard.record_incarnation(reply.highest_incarnation)
            self._confirm(began)
            self.pool_shards, self.pause_seconds = reply.pool_shards, reply.pause_seconds
            self._receive_revoked(scheduler, reply.revoked)
        return True

    def close(self, grace_seconds: float) -> None:
        """Finish the calls under way and close the port. Idempotent."""
        self.service.close()  # first: it would start new calls meanwhile
        self.server.stop(grace_seconds)
        if self.shard is not None:
            self.shard.close()

    def _receive_revoked(self, scheduler: GrpcSchedulerCarrier, digest: str) -> None:
        tokens = self.server.tokens
        if tokens is not None and digest not in ("", tokens.heard):
            tokens.add_revoked(scheduler.call(ReadRevoked(known=tokens.heard), _CALL_TIMEOUT_SECONDS))

    def _confirm(self, began: float) -> None:
        assert self.lease is not None
        self.lease.confirm(began)


def _reachable(bound: str) -> str:
    """Return an address that others can use: a wildcard is replaced by this machine's name."""
    host, port = split_address(bound)
    return f"{socket.gethostname()}:{port}" if host in ("0.0.0.0", "::") else bound


class ShardServer:
    """Shards of a process: start, serve until stopped. Not thread-safe; use from one thread."""

    def __init__(self, config: ServerConfig, models: HostedModels = MappingProxyType({})) -> None:
        """Hold the shards of ``config``; they host ``models``. Raises ConfigError."""
        import_rules(config.rule_modules or ())
        self._config = config
        self._roots = SnapshotRoots("server", config.listen, config.snapshot_roots)
        self._models = models
        self._scheduler = GrpcSchedulerCarrier(config.scheduler, max_message_bytes=config.max_message_bytes)
        self._held: list[_HeldShard] = []
        self._stopping = threading.Event()
        self._ended = threading.Event()
        self._hearts: list[threading.Thread] = []
        """Heartbeat thread of each shard."""
        self._ending = threading.Lock()
        self._sharing = threading.Lock()
        self._pool_shards = 0
        """Number of shards by which the memory was last divided; 0: not yet."""
        self._end_reasons: list[str] = []
        """Reasons why shards are no longer served."""
        self._pulse = threading.Thread(target=self._run_pulse, name="pulse", daemon=True)
        self.stop_reason: str | None = None
        """Reason why it ended by itself; None if it did not."""
        self._started = False

    def start(self) -> list[str]:
        """Bind, register, serve; return the address of each shard.

        Raises ConfigError (port in use, shard held by another process, no such CPU) or SchedulerUnavailable.
        """
        if self._config.cpus is not None:
            bind_to_cpus(self._config.cpus)
        if self._config.memory_node is not None:
            prefer_memory_of(self._config.memory_node)
        recycle_large_buffers()
        limit_row_memory(self._config.memory_bytes)
        pool = memory_pool().name
        first = (
            self._config.shard if self._config.shard is not None else Credentials.mine(self._config.listen).first_shard
        )
        host, _ = split_address(self._config.listen)
        host = f"[{host}]" if ":" in host else host
        try:
            for index in range(self._config.shards):
                listen = self._config.listen if index == 0 else f"{host}:0"
                if self._config.ports is not None:
                    listen = f"{host}:{self._config.ports[index]}"
                wanted = None if first is None else first + index
                cpus = self._config.cpus or ()
                own = cpus[index :: self._config.shards] or cpus[index % max(1, len(cpus)) :][:1]
                held = _HeldShard(self._config, listen, wanted, self._models, self._roots, pool, own)
                self._held.append(held)
                held.server.start()
            self._join_all()
        except BaseException:
            self.stop(0)
            raise
        for held in self._held:
            name = f"heartbeat-{held.number}"
            self._hearts.append(threading.Thread(target=self._beat, args=(held,), name=name, daemon=True))
        for heart in self._hearts:
            heart.start()
        self._pulse.start()
        self._started = True
        return [held.address for held in self._held]

    @property
    def bound_addresses(self) -> list[str]:
        """Bound address of each shard; clients may use another one (``advertise``)."""
        return [held.server.address for held in self._held]

    @property
    def shards(self) -> list[int]:
        """Numbers of the shards held."""
        return [held.shard.shard for held in self._held if held.shard is not None]

    def metrics(self) -> Iterator[Metric]:
        """Yield the metrics of its shards."""
        return server_metrics(
            [
                ServedShard(held.shard, held.server.counts, held.service.data_plane.num_connections)
                for held in list(self._held)
                if held.shard is not None
            ]
        )

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Block until the server has ended by itself or was stopped; return False if the time ran out first."""
        return self._ended.wait(timeout_seconds)

    def stop(self, grace_seconds: float = 5.0) -> None:
        """Leave the cluster, finish the calls under way, stop. Idempotent.

        Unless ``grace_seconds`` is 0, running jobs first take a snapshot. Logs what is lost.
        """
        if grace_seconds > 0 and self._started and not self._ended.is_set():
            shards = [held.shard for held in self._held if held.shard is not None]
            await_snapshots(self._scheduler, shards, self._config.leave_timeout_seconds)
        self._stopping.set()
        if self._started:
            for thread in (*self._hearts, self._pulse):
                thread.join()
        for held in self._held:
            if held.shard is not None:
                try:
                    gone = LeaveCluster(shard=held.shard.shard, incarnation=held.incarnation)
                    self._scheduler.call(gone, timeout_seconds=1.0)
                except (GeartrainError, AttemptFailed) as exc:
                    logger.info("shard %d left, but cannot tell the scheduler: %s", held.shard.shard, exc)
        with ThreadPoolExecutor(len(self._held) or 1, "close") as threads:  # all within one grace
            list(threads.map(lambda held: held.close(grace_seconds), self._held))
        self._held.clear()
        self._scheduler.close()
        self._ended.set()

    def _join_all(self) -> None:
        deadline = time.monotonic() + REGISTER_TIMEOUT_SECONDS
        is_told = False
        for held in self._held:
            while True:
                try:
                    held.join(self._scheduler)
                    break
                except (ClusterNotReady, ShardHeld) as exc:
                    is_held = isinstance(exc, ShardHeld)
                    if not self._config.wait and (is_held or time.monotonic() > deadline):
                        raise
                    if not is_told:
                        logger.info("waiting: %s", exc)
                    is_told = True
                    if self._stopping.wait(_HELD_RETRY_SECONDS if is_held else _RETRY_SECONDS):
                        raise
                except AttemptFailed as exc:
                    if time.monotonic() > deadline:
                        raise SchedulerUnavailable(
                            f"{exc} (for {REGISTER_TIMEOUT_SECONDS:g} s); "
                            "start 'geartrain scheduler' first, or correct --scheduler"
                        ) from exc
                    if not is_told:
                        logger.warning("%s; retrying for up to %g s", exc, REGISTER_TIMEOUT_SECONDS)
                    is_told = True
                    if self._stopping.wait(_RETRY_SECONDS):
                        raise SchedulerUnavailable("stopped before the scheduler answered") from exc

    @property
    def _leases(self) -> list[Lease]:
        return [held.lease for held in self._held if held.lease is not None]

    def _run_pulse(self) -> None:
        interval = min(lease.seconds for lease in self._leases) / _PULSES_PER_LEASE
        while not self._stopping.wait(interval):
            for held in list(self._held):
                if held.lease is not None:
                    held.lease.pulse()
                    held.publish_readiness()

    def _beat(self, held: _HeldShard) -> None:
        """Send the heartbeats of one shard; a delay of them costs no other shard its lease."""
        assert held.lease is not None
        silent = False
        longest = held.lease.seconds / _BEATS_PER_LEASE
        while not self._stopping.wait(min(max(self._config.heartbeat_seconds, held.pause_seconds), longest)):
            try:
                if held.shard is not None and held.shard.stop_reason is not None:
                    self._stop_shard(held, f"shard {held.number} is broken: {held.shard.stop_reason}")
                    return
                if not held.beat(self._scheduler):
                    self._stop_shard(
                        held, f"shard {held.number} was taken over by another process while this one was silent"
                    )
                    return
                self._share_memory(held.pool_shards)
                silent = False
            except AttemptFailed as exc:
                if not silent:
                    logger.warning("the scheduler does not answer; still serving shard %d: %s", held.number, exc)
                silent = True
            except (ConfigError, StaleBucketMap) as exc:
                self._stop_shard(held, f"the scheduler refuses shard {held.number}: {exc}")
                return
            except GeartrainError as exc:
                logger.warning("heartbeat of shard %d failed: %s", held.number, exc)
            except Exception:  # a defect here must not cost the shard its lease
                logger.exception("heartbeat of shard %d failed", held.number)

    def _share_memory(self, pool_shards: int) -> None:
        """Set the rows' memory limit to this process's share, unless a setting gives the limit."""
        with self._sharing:
            if self._config.memory_bytes is not None or pool_shards in (0, self._pool_shards):
                return
            self._pool_shards = pool_shards
            others = max(0, pool_shards - len(self._held))
            memory_bytes = limit_row_memory(None, len(self._held) / (len(self._held) + others))
        logger.debug("rows may take %s: the memory is that of %s", sized(memory_bytes), counted(pool_shards, "shard"))

    def _stop_shard(self, held: _HeldShard, reason: str) -> None:
        """Stop one shard and drop its rows, which are no longer valid; the server ends with the last."""
        assert held.lease is not None
        held.lease.revoke(f"{reason}; ask the scheduler again")
        with self._ending:
            self._end_reasons.append(reason)
            left = [other for other in self._held if other is not held]
            self._held = left or self._held
        if left:
            logger.error("%s; still serving shards %s", reason, ", ".join(str(other.number) for other in left))
            held.close(0)
            return
        self.stop_reason = "; ".join(self._end_reasons)
        self._ended.set()
