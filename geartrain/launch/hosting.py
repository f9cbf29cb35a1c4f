"""Embedded clusters with the hosted models that all shards of Geartrain have."""

from __future__ import annotations

from geartrain.ams.client import factory
from geartrain.ams.client.cluster import Cluster
from geartrain.ams.programs.models import hosted_models
from geartrain.ams.values.config import ClientConfig


def local(
    num_shards: int = 1,
    *,
    config: ClientConfig | None = None,
    stream: str | None = None,
    incarnation: int | None = None,
) -> Cluster:
    """Return a cluster embedded in this process: the same shards on threads, without sockets.

    ``stream`` and ``incarnation`` are as in :func:`connect`. Raises ConfigError if ``num_shards`` is not 1 … 4096.
    """
    return factory.local(num_shards, config=config, stream=stream, incarnation=incarnation, models=hosted_models())
