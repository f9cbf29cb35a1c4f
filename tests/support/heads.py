"""Heads, batches and training steps that the tests of heads have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

import geartrain as gt
from geartrain.ams.values.specs import Ids

PLACES: dict[str, dict[str, Any]] = {
    "held": {"rows": "pull"},
    "streamed": {"rows": "pull", "rows_cache_bytes": 0},
    "hosted": {"rows": "hosted"},
    "ranks": {"rows": "ranks"},
}
"""Where rows may be: settings of a head."""
_OF_CONFIG = {field.name for field in fields(gt.HeadConfig)}


def head_settings(**settings: Any) -> dict[str, Any]:
    """The keywords of ``ClassHead``, those of its ``config`` put there."""
    config = {name: settings.pop(name) for name in _OF_CONFIG & settings.keys()}
    return {**settings, "config": gt.HeadConfig(**config)} if config else settings


def make_head(
    cluster: Any = None,
    name: str = "classes",
    *,
    on_device: bool = False,
    late: bool = False,
    fused: bool = False,
    **settings: Any,
) -> gt.ClassHead:
    """A head of these settings, its config's among them; without a cluster (or beside it, if they say so) on ranks.

    ``on_device``: it chooses classes, ``late``: it checks labels, and ``fused``: it works on rows as on a GPU, the last
    by the references of kernels.
    """
    settings.setdefault("rows", "ranks" if cluster is None else "pull")
    head = gt.ClassHead(None if settings["rows"] == "ranks" else cluster, name, **head_settings(**settings))
    if on_device or late or fused:
        head.backend.selector.on_device = True
    if late:
        head.backend.checks_late = True
    if fused:
        head.backend.fuses = True
    return head


def make_batch(
    size: int, num_classes: int, dim: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Features [size, dim], whose gradient is wanted, and labels."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(size, dim, generator=generator, dtype=dtype, requires_grad=True)
    return features, torch.randint(num_classes, (size,), generator=generator)


def living_ids(head: gt.ClassHead) -> Ids:
    """Ascending ids of the classes that take part."""
    return np.setdiff1d(np.arange(head.num_classes), head.retired.numpy())


def living_batch(head: gt.ClassHead, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """A batch whose labels are live classes."""
    ids = torch.from_numpy(living_ids(head))
    features, numbers = make_batch(size, len(ids), head.dim, seed)
    return features, ids[numbers]


def train(
    head: gt.ClassHead,
    steps: Iterable[int],
    rank: int = 0,
    ranks: int = 1,
    *,
    batch: Callable[[int], tuple[Tensor, Tensor]],
    **settings: Any,
) -> list[float]:
    """Losses of a rank's share of the batch of each step, as parts of the joint mean."""
    rows, losses = gt.RowOptimizer(head, **settings), []
    for step in steps:
        features, labels = batch(step)
        share = slice(rank * len(labels) // ranks, (rank + 1) * len(labels) // ranks)
        loss = head(features.detach()[share], labels[share])
        loss.backward()
        rows.step()
        rows.zero_grad()
        losses.append(float(loss.detach()) * len(labels[share]) / len(labels))
    return losses
