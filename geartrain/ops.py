"""Roles inside a program, as ``geartrain ROLE`` but without signals, for Ray, notebooks and tests; and the metrics of a
training program.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Self

from geartrain.ams.observe.metrics import MetricsServer
from geartrain.ams.observe.metrics import serve_metrics as serve
from geartrain.ams.values.config import (
    NO_FOLDER,
    ClusterConfig,
    identify,
    is_loopback,
    private_folder,
    require_private,
    suggestion,
)
from geartrain.ams.values.errors import ConfigError
from geartrain.launch import configuration
from geartrain.launch.ports import require_free
from geartrain.launch.role import STOP_GRACE_SECONDS, warn_if_open
from geartrain.launch.roles import ROLES, started

__all__ = ["Role", "serve_metrics"]


def serve_metrics(address: str) -> MetricsServer:
    """Serve this program's metrics to Prometheus at ``"host:port"`` (port 0: a free one) until it is closed.

        with gt.ops.serve_metrics("127.0.0.1:9102") as port:      # port.address says where
            ...train...

    Cache hits, ages of features, steps ahead of other workers, lag behind a topic: docs/explanation/metrics.md lists
    them. ``geartrain worker`` has ``--metrics`` for the same. Thread-safe.

    Raises ConfigError: the address cannot be bound, strangers could reach it, or prometheus_client is not installed.
    """
    from geartrain.ams.rpc.credentials import Credentials  # imports gRPC

    require_private("address", address, insecure=False)
    return serve(address, tuple, "worker", Credentials.mine(address))


class Role:
    """A scheduler, a server or another role in this process, which serves until closed.

        with gt.ops.Role("scheduler", listen="127.0.0.1:0", num_shards=1) as scheduler:
            with gt.ops.Role("server", scheduler=scheduler.address), gt.connect(scheduler.address) as cluster:
                ...

    A context manager: leaving it closes the role. Thread-safe. Under ``security.folder`` the process shows one
    certificate, also as a client: that of the role it started last.
    """

    def __init__(self, name: str, config: ClusterConfig | None = None, **settings: Any) -> None:
        """Start the role; it serves when this returns.

        Args:
            name: name of the role's command: ``"scheduler"``, ``"server"``, ``"graph"`` or ``"slowgear"``.
            config: settings of the whole cluster; None: from the environment (``GEARTRAIN_SERVER__LISTEN`` and so on).
            settings: replace those of the role's section, as ``listen="127.0.0.1:0"``.

        Raises:
            ConfigError: There is no such role or setting, a setting cannot be right, its port is in use, or its
                certificate is missing.
            SchedulerUnavailable: The scheduler of a server did not answer for 60 s.
        """
        if name not in ROLES:
            raise ConfigError(f"there is no role {name!r}; {suggestion(name, ROLES)}")
        config = config or configuration.load()
        section = getattr(config, name)
        without = NO_FOLDER if settings.get("insecure", section.insecure) else None
        identify(config.security.folder or without, name)
        section = type(section)(**{**section.model_dump(exclude_unset=True), **settings})
        ports = {"--listen": section.listen} | ({"--metrics": section.metrics} if section.metrics else {})
        if any(map(is_loopback, ports.values())) and not private_folder().is_dir():
            from geartrain.launch.certificates import create_private_folder

            create_private_folder()
        for flag, address in ports.items():
            if flag == "--metrics" or getattr(section, "ports", None) is None:
                require_free(address, flag)
            warn_if_open(address)
        self.name = name
        """Name of the role's command."""
        self._opened = ExitStack()
        whole = config.model_copy(update={name: section})
        self.service, self.facts = self._opened.enter_context(started(ROLES[name], whole))

    @property
    def address(self) -> str:
        """host:port of the role; of a server with several shards that of the first."""
        return str(self.facts["address"] if "address" in self.facts else self.facts["addresses"][0])

    def wait(self) -> str:
        """Block until the role has ended; return the reason, or ``""`` if it was closed."""
        self.service.wait()
        return self.service.stop_reason or ""

    def close(self, grace_seconds: float = STOP_GRACE_SECONDS) -> None:
        """Stop the role; calls in progress have ``grace_seconds``. Idempotent.

        A server waits for snapshots of running jobs first (``server.leave_timeout_seconds``), unless that is 0.
        """
        self.service.stop(grace_seconds)
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
