"""The hosted models that Geartrain's shards are given: here ``ams``, which knows none, meets ``bridge``.

Whatever is named here is imported by every shard process: no torch.
"""

from __future__ import annotations

from geartrain.ams import cluster
from geartrain.ams.config import ClientConfig
from geartrain.ams.hosted import HostedModels
from geartrain.bridge.hosted import class_head


def hosted_models() -> HostedModels:
    """The models of a shard, by the names that heads ask for."""
    return {class_head.NAME: class_head.ClassHeadModel()}


def local(
    num_shards: int = 1,
    *,
    config: ClientConfig | None = None,
    stream: str | None = None,
    incarnation: int | None = None,
) -> cluster.Cluster:
    """Return a cluster embedded in this process: the same shards on threads of their own, no sockets.

    ``stream`` and ``incarnation`` are those of :func:`connect`. Raises ConfigError if ``num_shards`` is not 1 … 4096.
    """
    return cluster.local(num_shards, config=config, stream=stream, incarnation=incarnation, models=hosted_models())
