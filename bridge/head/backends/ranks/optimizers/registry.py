"""Every optimizer of rows in tensor operations, by its name in ``ams/values/optimizers/registry.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from geartrain.ams.values.optimizers.registry import RowOptimizerSpec
from geartrain.bridge.head.backends.ranks.optimizers.adagrad import adagrad
from geartrain.bridge.head.backends.ranks.optimizers.adam import adam
from geartrain.bridge.head.backends.ranks.optimizers.adamw import adamw
from geartrain.bridge.head.backends.ranks.optimizers.ftrl import ftrl
from geartrain.bridge.head.backends.ranks.optimizers.momentum import momentum, sparse_momentum
from geartrain.bridge.head.backends.ranks.optimizers.rmsprop import rmsprop
from geartrain.bridge.head.backends.ranks.optimizers.rowwise import rowwise_adagrad, rowwise_adam
from geartrain.bridge.head.backends.ranks.optimizers.sgd import sgd
from geartrain.bridge.head.backends.ranks.optimizers.step import RowStep

TENSOR_OPTIMIZERS: dict[str, Callable[[Any, RowStep], None]] = {
    "sgd": sgd,
    "momentum": momentum,
    "sparse_momentum": sparse_momentum,
    "adam": adam,
    "adagrad": adagrad,
    "adamw": adamw,
    "rowwise_adagrad": rowwise_adagrad,
    "rowwise_adam": rowwise_adam,
    "rmsprop": rmsprop,
    "ftrl": ftrl,
}


def update_rows(optimizer: RowOptimizerSpec, step: RowStep) -> None:
    """Make one update as ``optimizer.updated`` specifies it."""
    TENSOR_OPTIMIZERS[optimizer.name](optimizer, step)
