"""The step of a classifier before it is written: of a backbone and a class head, beside nn.Linear in its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from geartrain.ams.programs.selection import Selection
from geartrain.ams.values.arguments import integer
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.optimizers.registry import RowOptimizerSpec
from geartrain.ams.values.specs import DTypeName
from geartrain.bridge.head.backends.backend import HeadSettings
from geartrain.bridge.head.config import HeadConfig
from geartrain.bridge.head.defaults import linear_initializer
from geartrain.bridge.parallel.plan.auto import plan_line, planned_candidates
from geartrain.bridge.parallel.plan.build import OptimizerMaker, request_for
from geartrain.bridge.parallel.plan.costs.head_costs import HeadSkeleton
from geartrain.bridge.parallel.plan.hardware.hardware import Hardware
from geartrain.bridge.parallel.plan.plan import Plan
from geartrain.bridge.parallel.scopes import Replicate, Scope, Split


def plan_classifier(
    backbone: nn.Module,
    images: Tensor,
    *,
    num_classes: int,
    dim: int,
    ranks: int,
    batch: int,
    hardware: Hardware,
    select: Selection,
    row_optimizer: RowOptimizerSpec,
    dtype: DTypeName = "float32",
    slot_dtype: DTypeName = "float32",
    sub_centers: int = 1,
    optimizer: OptimizerMaker = torch.optim.AdamW,
    micro_batches: int = 1,
    sparsity: float | None = None,
) -> Plan:
    """A step of ``backbone`` under DDP and a ``ClassHead`` with ``rows="ranks"``; its ``reasons`` say what rivals take.

    Nothing is allocated. The rivals are those of :func:`auto_plan`: the same backbone and an ``nn.Linear`` with cross
    entropy, replicated, split and sharded, which look at every class in every step.

    Args:
        backbone: Gives features [B, D] of images; best on the meta device.
        images: An example [n, …]; only its shape and dtype count.
        num_classes: Of the head.
        dim: Width D of features.
        ranks: That train together.
        batch: Samples of a rank.
        hardware: What to divide by.
        select: Which classes of the head are active.
        row_optimizer: Of the head's rows.
        dtype: Of the rows.
        slot_dtype: Of their slots.
        sub_centers: Of each class.
        optimizer: Of the backbone, and of the rivals' layers.
        micro_batches: Of a step, as in :class:`MicroBatches`; the rivals' are computed at once.
        sparsity: Of the backbone's gradients, as in :class:`TopKGradients`; of the rivals', too.

    Raises InvalidArgument for a backbone that gives no features [B, D], or that needs values.
    """
    num_classes, dim = integer("num_classes", num_classes, 1), integer("dim", dim, 1)
    _require_features(backbone, images, dim)
    head = HeadSkeleton("head", _settings(num_classes, dim, select, row_optimizer, dtype, slot_dtype, sub_centers))
    example = (images, torch.zeros(len(images), dtype=torch.int64))
    asked: dict[str, Any] = {"batch": batch, "optimizer": optimizer, "sparsity": sparsity}
    scopes: dict[str, Scope] = {"backbone": Replicate(), "head": Split()}
    ours = request_for(
        _Classifier(backbone, head), scopes, ranks, hardware, example, loss=None, micro_batches=micro_batches, **asked
    ).plan()
    with torch.device("meta"):
        rival = _Linear(backbone, nn.Linear(dim, num_classes))
    tried, refused = planned_candidates(rival, ranks, hardware, example, loss=nn.CrossEntropyLoss(), **asked)
    return replace(ours, reasons=_reasons(ours, tried, refused))


class _Classifier(nn.Module):
    """A head takes labels, and gives the loss."""

    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.head(self.backbone(images), labels)
        return loss


class _Linear(nn.Module):
    """A layer gives the logits."""

    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.backbone(images))
        return logits


def _reasons(ours: Plan, tried: dict[str, Plan], refused: Sequence[str]) -> tuple[str, ...]:
    lines = [plan_line("ClassHead on the ranks", ours)]
    lines += [plan_line(f"nn.Linear, {name}", plan) for name, plan in tried.items()]
    return (*lines, *(f"nn.Linear, {one}" for one in refused))


def _require_features(backbone: nn.Module, images: Tensor, dim: int) -> None:
    try:
        with torch.no_grad():
            found = backbone(images)
    except (RuntimeError, NotImplementedError, ValueError, TypeError) as exc:
        raise InvalidArgument(
            f"{type(backbone).__name__} does not take images {list(images.shape)} without values: {exc}. Give the "
            "number of channels and the size of images that it is made for"
        ) from exc
    shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
    if shape != [len(images), dim]:
        raise InvalidArgument(f"{type(backbone).__name__} gives {shape} of a batch; it must give features [B, {dim}]")


def _settings(
    num_classes: int,
    dim: int,
    select: Selection,
    optimizer: RowOptimizerSpec,
    dtype: DTypeName,
    slot_dtype: DTypeName,
    sub_centers: int,
) -> HeadSettings:
    return HeadSettings(
        name="head",
        num_classes=num_classes,
        num_living=None,
        dim=dim,
        bias=False,
        sub_centers=sub_centers,
        select=select,
        margin=None,
        optimizer=optimizer,
        initializer=linear_initializer(dim),
        cluster=None,
        reuse=False,
        sync=False,
        config=HeadConfig(dtype=dtype, slot_dtype=slot_dtype, rows_cache_bytes=0),
    )
