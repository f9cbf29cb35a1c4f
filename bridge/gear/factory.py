"""How a :class:`~geartrain.bridge.gear.slow_gear.SlowGear` comes to its slow gears."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.table import Table
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.gear_messages import Freshness, GearPort
from geartrain.ams.values.specs import SGD, RowOptimizerSpec
from geartrain.bridge.dense.dense_table import attach
from geartrain.bridge.gear.dense_pass import DensePass, TrainMode
from geartrain.bridge.gear.embedded import EmbeddedGear, Mode
from geartrain.bridge.gear.engine import DenseEngine, FeatureCache
from geartrain.bridge.gear.gradient_batcher import GradientBatcher
from geartrain.bridge.gear.samples import Decode, Samples, SampleSource

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What a slow gear is told of its dense part, beside the module and the samples."""

    dim: int
    optimizer: RowOptimizerSpec | None = None
    """Of the dense table; None: SGD(0.01)."""
    reuse: bool = False
    """Open the dense table if it is there."""
    gradients_per_id: int = 16
    ids_per_update: int = 1
    reduction: Literal["mean", "sum"] = "mean"
    flush_seconds: float | None = None
    stale: Literal["apply", "scale", "drop"] = "apply"
    max_gradient_lag: int | None = None
    train_mode: TrainMode = "backward"
    autocast: torch.dtype | None = None
    device: torch.device | str | None = None
    max_batch: int = 256
    max_wait_seconds: float = 0.0
    refresh_seconds: float = 1.0
    sample_cache_bytes: int = 256 << 20


def open_pass(
    build: Callable[[], nn.Module], samples: SampleSource, decode: Decode | None, settings: EngineSettings
) -> DensePass:
    """Build the module and join it to its samples. Raises InvalidArgument."""
    module = build()
    if not isinstance(module, nn.Module):
        raise InvalidArgument(f"build() returned {type(module).__name__}; it must return a torch.nn.Module")
    return DensePass(
        module,
        Samples(samples, decode, cache_bytes=settings.sample_cache_bytes),
        settings.dim,
        device=settings.device,
        autocast=settings.autocast,
        train_mode=settings.train_mode,
        max_batch=settings.max_batch,
    )


def open_engine(
    cluster: Cluster,
    name: str,
    dense_pass: DensePass,
    batcher: GradientBatcher,
    settings: EngineSettings,
    clock: Callable[[], float],
    *,
    cache: FeatureCache | None = None,
    near: FeatureCache | None = None,
    acknowledge: Callable[[int], None] | None = None,
) -> DenseEngine:
    """Attach the module of ``dense_pass`` to the dense table ``name`` and return its engine."""
    optimizer = SGD(0.01) if settings.optimizer is None else settings.optimizer
    with dense_pass.lock:
        dense = attach(dense_pass.module, cluster, name=name, mode="async", optimizer=optimizer, reuse=settings.reuse)
    return DenseEngine(
        dense_pass,
        dense,
        batcher,
        cache=cache,
        near=near,
        acknowledge=acknowledge,
        max_wait_seconds=settings.max_wait_seconds,
        refresh_seconds=settings.refresh_seconds,
        clock=clock,
    )


def batcher_settings(settings: EngineSettings) -> dict[str, Any]:
    """The settings that are the gradient batcher's."""
    return {
        "gradients_per_id": settings.gradients_per_id,
        "ids_per_update": settings.ids_per_update,
        "reduction": settings.reduction,
        "flush_seconds": settings.flush_seconds,
        "stale": settings.stale,
        "max_gradient_lag": settings.max_gradient_lag,
    }


def open_embedded(
    cluster: Cluster,
    name: str,
    build: Callable[[], nn.Module],
    samples: SampleSource,
    decode: Decode | None,
    settings: EngineSettings,
    mode: Mode,
    clock: Callable[[], float],
    near: FeatureCache,
) -> tuple[GearPort, Table]:
    """Return a slow gear of this process, and its dense table; ``near`` is the cache of its fast gear."""
    dense_pass = open_pass(build, samples, decode, settings)
    batcher = GradientBatcher(settings.dim, **batcher_settings(settings), clock=clock)
    engine = open_engine(cluster, name, dense_pass, batcher, settings, clock, near=near)
    tick_seconds = min(1.0, (settings.flush_seconds or 4.0) / 4)
    return EmbeddedGear(engine, mode=mode, tick_seconds=max(tick_seconds, 0.01)), cluster.table(name)


def open_remote(
    cluster: Cluster,
    name: str,
    dim: int,
    mode: Mode,
    freshness: Freshness,
    gradients_per_id: int,
) -> tuple[GearPort, Table]:
    """Return the slow gears of other processes, and the dense table that they train."""
    port = cluster.slow_gears(name, dim=dim, wait=mode == "sync", freshness=freshness)
    if port.gradients_per_id != gradients_per_id:
        logger.warning(
            "gradients_per_id is %d, but the slow gears of %r make a backward pass of every %d gradients of an id: "
            "start them with 'geartrain slowgear --gradients-per-id %d', or say here what they do",
            gradients_per_id,
            name,
            port.gradients_per_id,
            gradients_per_id,
        )
    return port, cluster.table(name)
