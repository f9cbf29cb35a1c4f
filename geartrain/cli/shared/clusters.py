"""Settings of a command's cluster, and a client of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from geartrain.ams.values.config import ClusterConfig
from geartrain.launch import configuration

if TYPE_CHECKING:
    from geartrain.ams.client.cluster import Cluster


def settings(file: Path | None, scheduler: str | None, graph: str | None = None) -> ClusterConfig:
    """Return the configuration of the file, the environment and these flags."""
    given = configuration.flags("server", scheduler=scheduler) + configuration.flags("client", graph=graph)
    return configuration.load(file, given)


@contextmanager
def connected(file: Path | None, scheduler: str | None, graph: str | None = None) -> Iterator[Cluster]:
    """Yield a client of the cluster that :func:`settings` describes."""
    config = settings(file, scheduler, graph)
    from geartrain.ams.client.factory import connect  # slow to import: only after the settings are checked

    with connect(config.server.scheduler, config=config.client) as cluster:
        yield cluster
