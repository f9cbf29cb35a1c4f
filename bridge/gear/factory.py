"""Creation of a slow gear's engine, in the process of a fast gear or in its own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.optimizers.registry import SGD, RowOptimizerSpec
from geartrain.bridge.dense.dense_table import attach
from geartrain.bridge.gear.config import SlowGearConfig
from geartrain.bridge.gear.dense_cache import FeatureCache
from geartrain.bridge.gear.dense_pass import DensePass
from geartrain.bridge.gear.engine import DenseEngine, Mode
from geartrain.bridge.gear.gradient_batcher import GradientBatcher
from geartrain.bridge.gear.gradient_journal import GradientJournal
from geartrain.bridge.gear.sample_source import Decode, DenseSamples, Samples


def open_pass(
    build: Callable[[], nn.Module],
    samples: DenseSamples,
    decode: Decode | None,
    dim: int,
    config: SlowGearConfig,
    device: torch.device | str | None = None,
) -> DensePass:
    """Build the module and combine it with its samples. Raises InvalidArgument."""
    module = build()
    if not isinstance(module, nn.Module):
        raise InvalidArgument(f"build() returned {type(module).__name__}; it must return a torch.nn.Module")
    kept = Samples(samples, decode, cache_bytes=config.sample_cache_bytes)
    return DensePass(module, kept, dim, config, device=device)


def open_engine(
    cluster: Cluster,
    name: str,
    dense_pass: DensePass,
    config: SlowGearConfig,
    *,
    gradients_per_id: int,
    optimizer: RowOptimizerSpec | None = None,
    reuse: bool = False,
    mode: Mode,
    cache: FeatureCache | None = None,
    worker_cache: FeatureCache | None = None,
    journal: GradientJournal | None = None,
) -> DenseEngine:
    """Attach the module of ``dense_pass`` to the dense table ``name`` and return its engine.

    The arguments are those of ``gt.SlowGear`` and :class:`~geartrain.bridge.gear.engine.DenseEngine`.

    Raises:
        InvalidArgument: A setting is outside its range; then no table is created.
        TableExists, SpecMismatch: The table exists, or belongs to another module.
    """
    batcher = GradientBatcher(dense_pass.dim, gradients_per_id, config)
    with dense_pass.lock:
        rule = SGD(0.01) if optimizer is None else optimizer
        dense = attach(dense_pass.module, cluster, name=name, mode="async", optimizer=rule, reuse=reuse)
    if journal is not None:
        journal.acknowledge = cluster.acknowledge
    return DenseEngine(
        dense_pass, dense, batcher, config, cache=cache, worker_cache=worker_cache, mode=mode, journal=journal
    )
