"""``geartrain up --on ray``: a cluster on Ray, from start to stop."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from typing import Any, Self

import ray

from geartrain.ams.values.config import ClusterConfig, split_address
from geartrain.ams.values.errors import ConfigError
from geartrain.launch.up import ClusterFacts
from geartrain.ray.launch import RayCluster, cluster

_POLL_SECONDS = 1.0


class RayLauncher:
    """Launcher of a cluster on Ray, used like :class:`geartrain.launch.up.Launcher`, from the main thread."""

    def __init__(self, config: ClusterConfig, address: str | None, more: Sequence[str], *, restart: bool) -> None:
        """Store the settings. ``address`` is that of Ray; None: ``RAY_ADDRESS``, else the Ray that runs on this
        machine, else a new one that lives as long as this cluster."""
        self._config = config
        self._address = address or os.environ.get("RAY_ADDRESS")
        self._more = more
        self._restart = restart
        self._cluster: RayCluster | None = None

    def __enter__(self) -> Self:
        """Connect to Ray. Raises ConfigError if there is none at the address."""
        quiet = {"logging_level": "WARNING"}
        try:
            ray.init(self._address or "auto", **quiet)
        except (ConnectionError, ValueError) as exc:
            if self._address is not None:
                raise ConfigError(f"cannot join Ray at {self._address}: {exc}") from exc
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a Ray that we start sends no usage statistics
            servers = max(os.cpu_count() or 1, self._config.num_servers)  # servers share the processors, as under 'up'
            ray.init(num_cpus=servers, include_dashboard=False, **quiet)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.default_int_handler)
        return self

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):  # a second signal does not wait for snapshots
            signal.signal(number, lambda *_: os._exit(1))  # Ray ends the actors of a program that is gone
        if self._cluster is not None:
            self._cluster.close()
        ray.shutdown()

    def start(self) -> ClusterFacts | None:
        """Start every role; return once all shards serve, or with None if stopped meanwhile. Raises as
        :func:`cluster`."""
        settings: dict[str, Any] = {"port": split_address(self._config.scheduler.listen)[1], "more": self._more}
        try:
            self._cluster = cluster(config=self._config, max_restarts=-1 if self._restart else 0, **settings)
        except KeyboardInterrupt:
            return None
        return self._cluster.facts

    def wait(self) -> None:
        """Serve until SIGTERM or SIGINT. Raises ClusterNotReady if an actor has died for good."""
        assert self._cluster is not None
        try:
            while True:
                self._cluster.check()
                time.sleep(_POLL_SECONDS)
        except KeyboardInterrupt:
            return
