"""The rarer settings of a slow gear."""

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
"""Settings of the process that asks for features; the others are those of the slow gear, wherever it runs."""


@dataclass(frozen=True, kw_only=True)
class SlowGearConfig:
    """What ``gt.SlowGear`` takes as ``config=``. Raises InvalidArgument for a value outside its range.

    Slow gears of other processes are told all but :data:`HERE` where they are
    started: ``geartrain slowgear``.
    """

    ids_per_update: int = 1
    """Ids with full batches of gradients wait for so many of their kind; the size of a batch makes few good updates
    instead of many noisy ones (see :mod:`~geartrain.bridge.gear.gradient_batcher`)."""
    reduction: Reduction = "mean"
    """Of the M gradients of an id. ``"mean"`` is of M steps, so it divides an SGD learning rate by M against M
    updates."""
    flush_seconds: float | None = None
    """The longest that a gradient waits for others of its id (with ``mode="sync"`` looked at by the next step); None:
    no bound."""
    stale: StaleRule = "apply"
    """What becomes of gradients of features too many dense updates old."""
    max_gradient_lag: int | None = None
    """With ``stale="drop"``: so many."""
    train_mode: TrainMode = "backward"
    """See :class:`~geartrain.bridge.gear.dense_pass.DensePass`. With "always" or "never" what a backward pass computed
    again is a fresh feature, too."""
    autocast: torch.dtype | None = None
    """Mixed precision of the module: torch.bfloat16 or torch.float16."""
    max_batch: int = 256
    """Most ids of one device batch."""
    max_wait_seconds: float = 0.0
    """How long a batch of features waits for those that other threads ask for."""
    refresh_seconds: float = 1.0
    """Other slow gears' updates are looked for at most so often; with 0 before features are computed, not before
    backward passes, so that slow gears which serve one step take its gradients at the weights of its features."""
    cache_ids: int = 65_536
    """Features kept in this process."""
    device_cache_bytes: int = 0
    """Keep features on the device of the ids, as many as fit into so many bytes, in the place of ``cache_ids`` in the
    host's memory: what is there goes no way over the host. 0: on the host."""
    sample_cache_bytes: int = 256 << 20
    """Decoded samples kept in this process; 0: none."""
    clock: Callable[[], float] = field(default_factory=lambda: time.time)
    """Unix seconds."""

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
