"""Clusters on Ray: roles and training processes are actors, which Ray places and restarts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from geartrain.ams.values.errors import ConfigError

if TYPE_CHECKING:
    from geartrain.ray.launch import RayCluster as RayCluster
    from geartrain.ray.launch import cluster as cluster

__all__ = ["RayCluster", "cluster"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'geartrain.ray' has no attribute {name!r}; it has {', '.join(__all__)}")
    try:
        from geartrain.ray import launch
    except ModuleNotFoundError as exc:
        raise ConfigError(f"gt.ray needs Ray, which cannot be imported: {exc}; pip install 'geartrain[ray]'") from exc
    return getattr(launch, name)
