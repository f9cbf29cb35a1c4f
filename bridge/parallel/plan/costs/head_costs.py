"""What a class head on the ranks costs, by the formulas that its code follows: compiled code cannot be traced.

Legend: A active classes of all ranks, B samples of all ranks, D width, R ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from geartrain.ams.values.errors import InvalidArgument
from geartrain.bridge.head.backends.backend import HeadSettings
from geartrain.bridge.head.memory import MemoryReport, memory_report
from geartrain.bridge.parallel.plan.costs.dry_link import DryLink
from geartrain.bridge.parallel.plan.costs.trace import Operation, StepTrace

_EXCHANGED = 11
"""Integers that the ranks tell each other before a step; see ``RankStep.agree``."""


class HeadSkeleton(nn.Module):
    """Stands for a :class:`ClassHead` with ``rows="ranks"``: notes its collectives and work; its loss has no value."""

    def __init__(self, name: str, settings: HeadSettings | None) -> None:
        """``settings`` are those of the head ``name``; None: its rows are in a cluster."""
        super().__init__()
        self.name, self._settings = name, settings
        self._link: DryLink | None = None

    @property
    def is_on_ranks(self) -> bool:
        """Whether its rows are in the workers."""
        return self._settings is not None

    @property
    def settings(self) -> HeadSettings:
        """What the head was made with. Raises InvalidArgument if its rows are in a cluster."""
        if self._settings is None:
            raise InvalidArgument(
                f"class head {self.name!r} has its rows in a cluster, whose costs depend on its shards; make it with "
                "rows='ranks', or ask geartrain plan for the memory of such a head"
            )
        return self._settings

    def on_ranks(self, link: DryLink, trace: StepTrace) -> None:
        """Let it be rank 0 of ``link``."""
        self._link, self._trace = link, trace

    def forward(self, features: Tensor, labels: Tensor, weight: Tensor | None = None) -> Tensor:
        """A loss (0-dim) without value; features [S, D], labels [S]. Raises InvalidArgument with sample weights."""
        if self.settings and (self._link is None or weight is not None):
            raise InvalidArgument("a plan counts a class head without sample weights, on ranks; leave the weights out")
        loss: Tensor = _HeadPass.apply(features, labels, self, self._link, self._trace)  # type: ignore[no-untyped-call]
        return loss

    def memory(self, batch: int, ranks: int) -> MemoryReport:
        """Bytes by part, of ``batch`` samples a rank."""
        settings = self.settings
        return memory_report(
            num_classes=settings.num_classes,
            dim=settings.dim,
            sub_centers=settings.sub_centers,
            bias=settings.bias,
            rows="ranks",
            optimizer=settings.optimizer,
            select=settings.select,
            batch_size=batch,
            num_ranks=ranks,
            config=settings.config,
        )

    def update(self, samples: int, ranks: int) -> list[Operation]:
        """The step's: gradients of the active rows, from features and kept logits, and the update of each."""
        report = self.memory(samples, ranks)
        rows, width = -(-report.num_active // ranks), self.settings.width
        row_bytes = report.table_bytes // report.num_classes
        return [_product(rows, samples * ranks, width, row_bytes * 2 * rows)]


class _HeadPass(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, features_SD: Tensor, labels: Tensor, head: HeadSkeleton, link: DryLink, trace: StepTrace
    ) -> Tensor:
        ctx.shape, ctx.link = features_SD, link
        samples, ranks = len(features_SD), link.world_size
        sizes = [samples] * ranks
        link.exchange([0] * _EXCHANGED)
        own_SD = features_SD.new_empty(samples, head.settings.dim + head.settings.bias)
        joint_BD = link.gather(own_SD, sizes)
        link.gather(labels, sizes)
        width, rows = own_SD.shape[1], -(-head.memory(samples, ranks).num_active // ranks)
        element = own_SD.element_size()
        for _ in range(1 + features_SD.requires_grad):  # logits, and the features' gradient as they pass
            trace.note(_product(rows, len(joint_BD), width, rows * width * element, exponentials=True))
        if head.settings.margin is None:
            link.max(joint_BD.new_empty(1, len(joint_BD)))
        sums = 3 if head.settings.config.label_smoothing else 2
        link.sum(joint_BD.new_empty(sums, len(joint_BD), dtype=torch.float64))
        if features_SD.requires_grad:
            link.sum_to_owners(joint_BD, sizes)
        return features_SD.new_empty(())

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        link = ctx.link
        link.gather(upstream.reshape(1), [1] * link.world_size)
        return torch.empty_like(ctx.shape), None, None, None, None


def _product(rows: int, samples: int, width: int, num_bytes: int, *, exponentials: bool = False) -> Operation:
    return Operation(
        name="class head",
        dtype="float32",
        flops=2 * rows * samples * width,
        bytes=num_bytes,
        exponentials=rows * samples if exponentials else 0,
    )
