"""The registry of roles: what the command line, ``up``, ``status``, ``doctor`` and ``health`` know of each.

A new role is one entry here. What it runs stays in its own room and is imported when it starts, so that no role loads
another's libraries.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from geartrain.ams.values.config import (
    ClusterConfig,
    GraphConfig,
    RoleConfig,
    SchedulerConfig,
    ServeConfig,
    ServerConfig,
    SlowGearRoleConfig,
)
from geartrain.ams.values.rpc import Pong

if TYPE_CHECKING:
    from geartrain.ams.observe.metrics import Metric
    from geartrain.ams.rpc.services import Service
    from geartrain.launch.role import RunningRole

Started = tuple["RunningRole", dict[str, Any]]
"""A role that serves, and what its ready line says of it."""


@dataclass(kw_only=True)
class Report:
    """Part of ``geartrain status`` about the processes of a role."""

    addresses: Mapping[str, str]
    """Role of every known process, by address."""
    facts: dict[str, Any]
    """For ``--json``."""
    show: Callable[[Mapping[str, Pong]], None]
    """Print it; given what each process says of itself, by address."""
    complaints: list[str] = field(default_factory=list)
    """Sentences about processes that do not answer, or are not ready."""
    ready: bool = True


@dataclass(frozen=True, kw_only=True)
class RoleKind:
    """A kind of process of a cluster. Texts ``module:name`` are imported when they are needed."""

    name: str
    """Name of its command, its section of the configuration, its ready line, and its answer to a ping."""
    title: str
    """Name for people."""
    settings: type[RoleConfig]
    start: Callable[[ClusterConfig], Started]
    help: str
    """Help text of its command."""
    service: str | None = None
    """Its :class:`~geartrain.ams.rpc.services.Service`; None: it is not asked by gRPC's."""
    commands: str | None = None
    """A typer application of what a person asks of one that runs; None: nothing."""
    in_up: bool = False
    """``geartrain up --NAME`` starts one, with the cluster's scheduler."""
    report: str | None = None
    """A function ClusterConfig -> Report | None, for ``geartrain status``; None: another role's report has it."""

    def rpc_service(self) -> Service:
        """Load :attr:`service`, which must be there."""
        assert self.service is not None
        service: Service = load(self.service)
        return service


def load(place: str) -> Any:
    """Import what ``module:name`` names."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def _start_scheduler(config: ClusterConfig) -> Started:
    from geartrain.ams.scheduler.service import SchedulerServer
    from geartrain.launch.connected.restorer import JobRestorer

    service = SchedulerServer(config.scheduler, JobRestorer)
    return service, {"address": service.start(), "num_shards": config.scheduler.num_shards}


def _start_server(config: ClusterConfig) -> Started:
    from geartrain.ams.programs.models import hosted_models
    from geartrain.ams.server.role import ShardServer

    service = ShardServer(config.server, hosted_models())
    return service, {"addresses": service.start()}


def _start_graph(config: ClusterConfig) -> Started:
    from geartrain.ams.graph.service.role import GraphServer
    from geartrain.launch.connected.graph_role import ConnectedCluster

    service = GraphServer(config.graph, ConnectedCluster(config.graph.scheduler, config.client))
    return service, {"address": service.start()}


def _start_slowgear(config: ClusterConfig) -> Started:
    from geartrain.launch.slowgear_role import SlowGearRole

    service = SlowGearRole(config.slowgear, config.client)
    address = service.start()
    return service, {"address": address, "name": service.name, "partitions": service.partitions}


def _start_serve(config: ClusterConfig) -> Started:
    from geartrain.launch.serving.role import ServeRole

    service = ServeRole(config)
    facts = {"address": service.address, "url": service.url, "models": service.models}
    return service, facts if service.grpc is None else {**facts, "grpc": service.grpc}


@contextmanager
def started(role: RoleKind, config: ClusterConfig) -> Iterator[Started]:
    """Start a role, and first the port of its counters, if it is to have one (``metrics`` of what it says then).

    The caller stops the role before it leaves the block, which closes that port. Raises the errors of its start.
    """
    address = getattr(config, role.name).metrics
    services: list[RunningRole] = []

    def collect() -> Iterable[Metric]:  # none, while it starts
        for service in services:
            yield from getattr(service, "metrics", tuple)()

    with ExitStack() as opened:
        told = {}
        if address is not None:
            from geartrain.ams.observe.metrics import serve_metrics
            from geartrain.ams.rpc.credentials import Credentials

            port = opened.enter_context(serve_metrics(address, collect, role.name, Credentials.mine(address)))
            told = {"metrics": port.address}
        service, facts = role.start(config)
        services.append(service)
        yield service, facts | told


ROLES: dict[str, RoleKind] = {
    role.name: role
    for role in (
        RoleKind(
            name="scheduler",
            title="scheduler",
            settings=SchedulerConfig,
            service="geartrain.ams.rpc.services:SCHEDULER",
            start=_start_scheduler,
            help="""Run the scheduler: membership, placement and tables of a cluster.

When it serves it says so: with --json, and where stdout is no terminal, in one line of JSON,
{"ready": "scheduler", "address": ..., "num_shards": ..., "pid": ...}.""",
            report="geartrain.cli.cluster.status:report_of_cluster",
        ),
        RoleKind(
            name="server",
            title="server",
            settings=ServerConfig,
            service="geartrain.ams.rpc.services:SHARD",
            start=_start_server,
            help="""Run a server: a process that holds one or more shards.

When it has joined the cluster it says so: with --json, and where stdout is no terminal, in one line of JSON,
{"ready": "server", "addresses": [...], "pid": ...}.""",
        ),
        RoleKind(
            name="graph",
            title="graph service",
            settings=GraphConfig,
            service="geartrain.ams.rpc.services:GRAPH",
            start=_start_graph,
            help="""Run the graph service, which builds and keeps the nearest classes of every class; or ask one that
runs.

When it serves it says so: with --json, and where stdout is no terminal, in one line of JSON,
{"ready": "graph", "address": ..., "pid": ...}.""",
            commands="geartrain.cli.cluster.graph:app",
            in_up=True,
            report="geartrain.cli.cluster.graph:report_of_graphs",
        ),
        RoleKind(
            name="slowgear",
            title="slow gear",
            settings=SlowGearRoleConfig,
            service="geartrain.ams.rpc.services:GEAR",
            start=_start_slowgear,
            help="""Run a slow gear: it serves the dense features of a module by id, and trains the module with their
gradients.

Start as many as you like: they share the ids out among them. SIGTERM: it applies what waits and gives its ids to the
others. When it serves it says so: with --json, and where stdout is no terminal, in one line of JSON,
{"ready": "slowgear", "address": ..., "name": ..., "partitions": ..., "pid": ...}.""",
            report="geartrain.cli.cluster.status:report_of_gears",
        ),
        RoleKind(
            name="serve",
            title="service of models",
            settings=ServeConfig,
            start=_start_serve,
            help="""Serve trained models over HTTP: what 'geartrain export RUN --to DIR' wrote, or folders of versions.

Ask it with curl: 'curl --data-binary @a.png 127.0.0.1:8000/v1/classify'. 'geartrain rollback' makes an older version
current again. SIGTERM: it answers what is under way, and ends. When it serves it says where: with --json, and where
stdout is no terminal, in one line of JSON,
{"ready": "serve", "address": ..., "url": ..., "models": [...], "pid": ...}.""",
        ),
    )
}
