"""Cluster on Ray: start, workers, checks and end."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Self

import ray
from ray.exceptions import (
    GetTimeoutError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
    WorkerCrashedError,
)
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from geartrain.ams.values.config import (
    FOLDER_VARIABLE,
    NO_FOLDER,
    TOKEN_VARIABLE,
    ClusterConfig,
    SchedulerConfig,
    identify,
    split_address,
)
from geartrain.ams.values.errors import ClusterNotReady, ConfigError, InvalidArgument, RunHeld, SourceError
from geartrain.launch import configuration
from geartrain.launch.role import KILL_AFTER_SECONDS
from geartrain.launch.up import ClusterFacts, next_address
from geartrain.ray.actors import RoleActor, WorkerActor, free_address

logger = logging.getLogger(__name__)

_SCHEDULER = "scheduler"
_WORKER_ERRORS = (RayActorError, RayTaskError, ObjectLostError, WorkerCrashedError, NodeDiedError, OutOfMemoryError)
"""Errors of a worker or its result: it failed, its node went, or Ray's head lost it."""
_ERRORS_OF_ARGUMENTS = (ConfigError, InvalidArgument, SourceError)


def cluster(
    num_shards: int | None = None,
    workers: int = 0,
    gpus_per_worker: float = 0,
    *,
    cpus_per_worker: float = 1,
    cpus_per_shard: float = 1,
    port: int = 0,
    more: Sequence[str] = (),
    max_restarts: int = -1,
    insecure: bool = False,
    timeout_seconds: float = 120.0,
    config: ClusterConfig | None = None,
) -> RayCluster:
    """Start a cluster on Ray, and reserve resources for training processes; returns once all shards serve.

        with gt.ray.cluster(num_shards=4, workers=2, gpus_per_worker=1) as cluster:
            losses = cluster.run(train, cluster.address)    # train(address) on each of the two

    Shards are spread over the nodes of Ray and workers packed, by a placement group each. An actor whose process dies
    is restarted: a shard on any node, empty, as under ``geartrain up``; the scheduler at its address, on the node of
    this program. All actors end with this program, however it ends. Joins Ray as ``ray.init()`` does, unless this
    program has.

    Args:
        num_shards: shards of the cluster; None: ``scheduler.num_shards`` of ``config``.
        workers: number of processes that :meth:`RayCluster.run` starts.
        gpus_per_worker: GPUs that each worker reserves at Ray.
        cpus_per_worker: CPUs that each worker reserves at Ray.
        cpus_per_shard: CPUs that each process with shards reserves at Ray (``server.shards`` shards each).
        port: port of the scheduler; 0: a free one.
        more: further roles, as ``"graph"``, on the scheduler's node.
        max_restarts: number of restarts of an actor; -1: unlimited, 0: none.
        insecure: Allow other machines to reach roles without certificates: any process there can read all rows.
        timeout_seconds: time until all of them must serve; minutes where Ray has to add nodes.
        config: settings of all roles; None: as the environment says. With ``security.folder`` roles listen at the
            address of their node; the folder must be at that path on every node, with the certificates of the roles
            there. Without it, all roles are on loopback.

    Raises:
        ConfigError: Ray has several machines and neither a folder of certificates nor ``insecure`` is given; or a role
            cannot run with its settings.
        ClusterNotReady: Ray lacks the resources, or it took longer than ``timeout_seconds``.
    """
    config = config or configuration.load()
    identify(config.security.folder, token=config.security.token)
    if config.server.advertise is not None or config.server.ports is not None:
        raise ConfigError(
            f"server.advertise is {config.server.advertise!r} and server.ports {config.server.ports!r}: addresses of "
            "one server; leave them out, on Ray each has that of its node"
        )
    if workers < 0 or gpus_per_worker < 0 or min(cpus_per_worker, cpus_per_shard) <= 0:
        raise ConfigError(
            f"workers is {workers}, gpus_per_worker {gpus_per_worker}, cpus_per_worker {cpus_per_worker} and "
            f"cpus_per_shard {cpus_per_shard}; the first two are at least 0, the last two more than that"
        )
    if num_shards is not None:
        scheduler = {**config.scheduler.model_dump(exclude_unset=True), "num_shards": num_shards}
        config = config.model_copy(update={_SCHEDULER: SchedulerConfig(**scheduler)})
    shard = {"CPU": cpus_per_shard}
    if config.server.memory_bytes is not None:
        shard["memory"] = config.server.memory_bytes
    worker = {"CPU": cpus_per_worker, "GPU": gpus_per_worker}
    made = RayCluster(config, insecure or config.scheduler.insecure, max_restarts)
    try:
        made._reserve([shard] * config.num_servers, [worker] * workers)
        made._start(port, more, time.monotonic() + timeout_seconds)
    except BaseException:
        made.close()
        raise
    return made


class RayCluster:
    """A cluster on Ray, as :func:`cluster` returns it. A context manager: leaving it closes the cluster."""

    def __init__(self, config: ClusterConfig, insecure: bool, max_restarts: int) -> None:
        self.address = ""
        """host:port of the scheduler, for :func:`geartrain.connect`: constant while the cluster lives."""
        self.facts = ClusterFacts("", (), {}, {})
        """Addresses and process ids when all shards first served."""
        self._config = config
        self._insecure = insecure
        self._max_restarts = max_restarts
        self._host = None if insecure or config.security.folder not in (None, NO_FOLDER) else "127.0.0.1"
        """Host at which roles listen; None: the address of their node."""
        self._actors: dict[str, Any] = {}
        self._groups: list[PlacementGroup] = []
        """Placement groups of the shards and, if there are any, of the workers."""
        self._started_ray = not ray.is_initialized()
        if self._started_ray:
            ray.init()

    def actor(self, name: str) -> Any:
        """Return the actor of a role: ``"scheduler"``, ``"server 0"`` and so on, or one of ``more``."""
        return self._actors[name]

    def run(self, function: Callable[..., Any], *arguments: Any, max_failures: int = 10) -> list[Any]:
        """Call ``function(*arguments)`` in every worker at once; return each result, by rank.

        A worker is an actor with ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK`` (0: Ray shows each its own GPUs) in its
        environment; :func:`geartrain.init_process_group` joins them through the scheduler. If one dies or raises, all
        are restarted and the function is called again; it should resume from its last snapshot.

        Args:
            function: pickled by Ray, as are its arguments and result.
            max_failures: number of restarts, -1: unlimited; after the last one the failure is raised.

        Raises:
            ConfigError: The cluster was made without workers.
            Exception: The error of the function. ConfigError, InvalidArgument and SourceError without a restart; but
                RunHeld with one: a worker that was killed may still hold its run.
        """
        if len(self._groups) < 2:
            raise ConfigError("this cluster has no workers; say how many: gt.ray.cluster(..., workers=2)")
        failures = 0
        while True:
            workers = self._start_workers()
            calls = [worker.run.remote(function, arguments) for worker in workers]
            try:
                waiting = calls
                while waiting:  # the first failure is enough: the others may wait for that one
                    done, waiting = ray.wait(waiting)
                    ray.get(done)
                return list(ray.get(calls))
            except _WORKER_ERRORS as exc:
                cause = exc.cause if isinstance(exc, RayTaskError) else exc
                failures += 1
                is_mistake = isinstance(cause, _ERRORS_OF_ARGUMENTS) and not isinstance(cause, RunHeld)
                if is_mistake or 0 <= max_failures < failures:
                    raise cause from exc
                reason = str(cause).partition("\n")[0]  # Ray adds lines about possible causes
                logger.warning("the workers are started again (%d so far): %s", failures, reason)
            finally:
                for worker in workers:
                    ray.kill(worker)

    def check(self, timeout_seconds: float = 1.0) -> None:
        """Raise ClusterNotReady if an actor has died for good; takes at most ``timeout_seconds``."""
        asked = {actor.facts.remote(): name for name, actor in self._actors.items()}
        done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=timeout_seconds)
        for call in done:
            try:
                with suppress(ObjectLostError):  # only the answer was lost: it is asked for again
                    ray.get(call)
            except RayActorError as exc:
                raise ClusterNotReady(f"the actor of {asked[call]} is not started again any more: {exc}") from exc

    def close(self) -> None:
        """Stop all roles, servers first, and free Ray's resources. Idempotent.

        Servers wait for snapshots of running jobs (``server.leave_timeout_seconds``), but not if the cluster was never
        ready. Snapshots stay, as do the folders that settings name (``scheduler.data``).
        """
        servers = [actor for name, actor in self._actors.items() if name.startswith("server ")]
        others = [actor for actor in self._actors.values() if actor not in servers]
        for actors, leave in ((servers, self._config.server.leave_timeout_seconds), (others, 0.0)):
            # Servers that never served may still wait for their scheduler, and hear nothing until then.
            if self.facts.scheduler and (calls := [actor.close.remote() for actor in actors]):
                ray.wait(calls, num_returns=len(calls), timeout=KILL_AFTER_SECONDS + leave)
            for actor in actors:
                ray.kill(actor)
        for group in self._groups:
            remove_placement_group(group)
        self._actors.clear()
        self._groups.clear()
        if self._started_ray:
            ray.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _reserve(self, shards: list[dict[str, float]], workers: list[dict[str, float]]) -> None:
        """Reserve Ray's resources. Raises ConfigError if rows would travel between machines unencrypted."""
        nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        if self._host is not None:
            if len(machines := set(nodes.values())) > 1:
                raise ConfigError(
                    f"Ray has nodes at {', '.join(sorted(machines))}, and traffic would be neither encrypted "
                    "nor authenticated; set security.folder to a folder that 'geartrain certs init' fills and that is "
                    "at that path on every node, or accept the risk on a private network with insecure=True"
                )
            # Nodes that Ray adds later cannot hold shards: they have another loopback.
            here = {f"node:{nodes[ray.get_runtime_context().get_node_id()]}": 0.001}
            shards, workers = ([room | here for room in rooms] for rooms in (shards, workers))
        self._shards = shards
        self._workers = workers
        self._groups.append(placement_group(shards, "SPREAD"))
        if workers:
            self._groups.append(placement_group(workers, "PACK"))

    def _start(self, port: int, more: Sequence[str], deadline: float) -> None:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        find = ray.remote(num_cpus=0)(free_address).options(scheduling_strategy=here)
        self.address = ray.get(find.remote(self._host, port))
        self._start_actor(_SCHEDULER, _SCHEDULER, split_address(self.address)[1], {}, here)
        first = split_address(self._config.server.listen)[1]
        for index in range(len(self._shards)):
            place = PlacementGroupSchedulingStrategy(self._groups[0], placement_group_bundle_index=index)
            held = {"scheduler": self.address, "shard": index * self._config.server.shards, "wait": True}
            if self._config.server.metrics is not None:  # several may be on one node
                held["metrics"] = next_address(self._config.server.metrics, index)
            self._start_actor(f"server {index}", "server", first and first + index, held, place, self._shards[index])
        for name in more:
            own = ray.get(find.remote(self._host, split_address(getattr(self._config, name).listen)[1]))
            self._start_actor(name, name, split_address(own)[1], {"scheduler": self.address}, here)
        for group in self._groups:
            if not group.wait(max(0.0, deadline - time.monotonic())):
                raise ClusterNotReady(
                    f"Ray has no room for servers {self._shards} and workers {self._workers}: of "
                    f"{ray.cluster_resources()} there is {ray.available_resources()}"
                )
        asked = [actor.facts.remote() for actor in self._actors.values()]
        try:
            told = dict(zip(self._actors, ray.get(asked, timeout=max(0.0, deadline - time.monotonic())), strict=True))
        except GetTimeoutError as exc:
            late = [name for name, call in zip(self._actors, asked, strict=True) if not ray.wait([call], timeout=0)[0]]
            raise ClusterNotReady(f"not ready in time: {', '.join(late)}; their log lines say why") from exc
        except RayTaskError as exc:
            raise exc.cause from exc
        except RayActorError as exc:
            raise ClusterNotReady(f"an actor ended before it served (is geartrain on every node?): {exc}") from exc
        self.facts = ClusterFacts(
            self.address,
            tuple(address for facts in told.values() for address in facts.get("addresses", ())),
            {name: facts["pid"] for name, facts in told.items()},
            {name: told[name]["address"] for name in more},
            {name: facts["metrics"] for name, facts in told.items() if "metrics" in facts},
        )

    def _start_actor(
        self,
        title: str,
        name: str,
        port: int,
        settings: Mapping[str, Any],
        place: Any,
        room: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        kind = ray.remote(RoleActor).options(
            scheduling_strategy=place,
            max_restarts=self._max_restarts,
            max_task_retries=-1,
            **_options(room),
        )
        settings = {**settings, "insecure": self._insecure}
        self._actors[title] = kind.remote(title, name, self._config, self._host, port, settings)

    def _start_workers(self) -> list[Any]:
        from geartrain.bridge.collectives.scheduler_store import VARIABLE  # loads torch, which a cluster does without

        count = len(self._workers)
        environ = {"WORLD_SIZE": str(count), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        environ[VARIABLE] = f"{self.address}/ray-{secrets.token_hex(8)}"
        security = self._config.security
        environ |= {FOLDER_VARIABLE: security.folder} if security.folder else {}
        environ |= {TOKEN_VARIABLE: security.token} if security.token else {}
        workers = []
        for rank, room in enumerate(self._workers):
            place = PlacementGroupSchedulingStrategy(self._groups[1], placement_group_bundle_index=rank)
            kind = ray.remote(WorkerActor).options(scheduling_strategy=place, **_options(room))
            workers.append(kind.remote(rank, {**environ, "RANK": str(rank)}))
        return workers


def _options(room: Mapping[str, float]) -> dict[str, Any]:
    """Return the options of an actor with these resources."""
    own = {name: amount for name, amount in room.items() if name.startswith("node:")}
    return {
        "num_cpus": room.get("CPU", 0),
        "num_gpus": room.get("GPU", 0),
        "memory": room.get("memory"),
        "resources": own,
    }
