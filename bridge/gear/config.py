"""Further settings of a slow gear, beside the arguments of ``gt.SlowGear``."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch

from geartrain.ams.values.errors import InvalidArgument

Reduction = Literal["mean", "sum"]
StaleRule = Literal["apply", "scale", "drop"]
TrainMode = Literal["backward", "always", "never"]
HERE = ("cache_ids", "device_cache_bytes", "sample_cache_bytes", "clock")
"""Settings that apply in the process that requests features; the others apply where the slow gear runs."""


@dataclass(frozen=True, kw_only=True)
class SlowGearConfig:
    """Settings for ``config=`` of ``gt.SlowGear``. Raises InvalidArgument for a value outside its range.

    Slow gears in other processes get theirs when they are started (``geartrain slowgear``), except :data:`HERE`.
    """

    ids_per_update: int = 1
    """Number of ids with full batches that make one dense update; the size of a usual batch gives few good updates
    instead of many noisy ones (see :mod:`~geartrain.bridge.gear.gradient_batcher`)."""
    reduction: Reduction = "mean"
    """Reduction of the M gradients of an id. ``"mean"`` divides an SGD learning rate by M, compared with M single
    updates."""
    flush_seconds: float | None = None
    """Longest wait of a gradient for others of its id (in ``mode="sync"`` the next step checks); None: no limit."""
    stale: StaleRule = "apply"
    """Treatment of gradients whose features are too many dense updates old."""
    max_gradient_lag: int | None = None
    """Most dense updates of lag, with ``stale="drop"``."""
    train_mode: TrainMode = "backward"
    """See :class:`~geartrain.bridge.gear.dense_pass.DensePass`. With "always" or "never", features that a backward pass
    recomputed are cached as fresh ones."""
    autocast: torch.dtype | None = None
    """Mixed precision of the module: torch.bfloat16 or torch.float16."""
    max_batch: int = 256
    """Most ids of one device batch."""
    max_wait_seconds: float = 0.0
    """Longest wait of a batch of features for requests of other threads."""
    refresh_seconds: float = 1.0
    """Least time between two checks for other slow gears' updates. With 0 there is a check before every computation of
    features, and none before backward passes, so that slow gears that serve one step use the same weights for both."""
    cache_ids: int = 65_536
    """Number of features cached in this process."""
    device_cache_bytes: int = 0
    """Bytes of a feature cache on the ids' device, in place of ``cache_ids`` in host memory: hits need no transfer. 0:
    on the host."""
    sample_cache_bytes: int = 256 << 20
    """Bytes of decoded samples cached in this process; 0: none."""
    clock: Callable[[], float] = field(default_factory=lambda: time.time)
    """Returns unix seconds."""

    def __post_init__(self) -> None:
        """Raises InvalidArgument."""
        choices = {
            "reduction": ("mean", "sum"),
            "stale": ("apply", "scale", "drop"),
            "train_mode": ("backward", "always", "never"),
            "autocast": (torch.bfloat16, torch.float16, None),
        }
        for name, allowed in choices.items():
            if (value := getattr(self, name)) not in allowed:
                raise InvalidArgument(f"{name} is {value!r}; it must be one of {', '.join(map(repr, allowed))}")
        least = {
            "ids_per_update": 1,
            "max_batch": 1,
            "cache_ids": 1,
            "device_cache_bytes": 0,
            "sample_cache_bytes": 0,
            "max_gradient_lag": 0,
        }
        for name, low in {**least, "flush_seconds": 0, "max_wait_seconds": 0, "refresh_seconds": 0}.items():
            if (value := getattr(self, name)) is not None and not value >= low:
                raise InvalidArgument(f"{name} is {value!r}; it must be >= {low}")
        if (self.stale == "drop") != (self.max_gradient_lag is not None):
            raise InvalidArgument(
                f"max_gradient_lag is {self.max_gradient_lag} with stale={self.stale!r}; stale='drop' needs it, the "
                "others take None"
            )
