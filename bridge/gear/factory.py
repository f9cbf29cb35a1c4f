"""Makes the engine of a slow gear, and finds the slow gears of a :class:`~geartrain.bridge.gear.slow_gear.SlowGear`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.table import Table
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.gear_messages import Freshness, GearPort
from geartrain.ams.values.optimizers.registry import SGD, RowOptimizerSpec
from geartrain.bridge.dense.dense_table import attach
from geartrain.bridge.gear.dense_cache import FeatureCache
from geartrain.bridge.gear.dense_pass import DensePass, TrainMode
from geartrain.bridge.gear.engine import DenseEngine, Mode
from geartrain.bridge.gear.gradient_batcher import GradientBatcher
from geartrain.bridge.gear.samples import Decode, Samples, SampleSource

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What a slow gear is told of its dense part, beside module and samples; as in ``gt.SlowGear``."""

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
    settings: EngineSettings,
    *,
    mode: Mode,
    cache: FeatureCache | None = None,
    worker_cache: FeatureCache | None = None,
    clock: Callable[[], float] = time.time,
) -> DenseEngine:
    """Attach the module of ``dense_pass`` to the dense table ``name`` and return its engine.

    Args:
        cluster: where the dense table is.
        name: of the dense table, and of the dense part.
        dense_pass: see :func:`open_pass`.
        settings: of the dense part.
        mode: see :class:`~geartrain.bridge.gear.engine.DenseEngine`.
        cache: of features, of this slow gear.
        worker_cache: that of a fast gear in this process.
        clock: unix seconds.

    Raises:
        InvalidArgument: a setting is outside its range; then there is no table.
        TableExists, SpecMismatch: there is one of that name, or of another module.
    """
    batcher = GradientBatcher(
        settings.dim,
        gradients_per_id=settings.gradients_per_id,
        ids_per_update=settings.ids_per_update,
        reduction=settings.reduction,
        flush_seconds=settings.flush_seconds,
        stale=settings.stale,
        max_gradient_lag=settings.max_gradient_lag,
        clock=clock,
    )
    optimizer = SGD(0.01) if settings.optimizer is None else settings.optimizer
    with dense_pass.lock:
        dense = attach(dense_pass.module, cluster, name=name, mode="async", optimizer=optimizer, reuse=settings.reuse)
    return DenseEngine(
        dense_pass,
        dense,
        batcher,
        cache=cache,
        worker_cache=worker_cache,
        mode=mode,
        tick_seconds=max(0.01, min(1.0, (settings.flush_seconds or 4.0) / 4)),
        max_wait_seconds=settings.max_wait_seconds,
        refresh_seconds=settings.refresh_seconds,
        clock=clock,
    )


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
