"""Memory report of a class head: bytes by part, for each kind of row backend.

Every part computes its own bytes, by the formulas of its code; this module gathers them.
Legend: that of ``memory_plan.py``.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from geartrain.ams.graph.building.neighbours import NeighbourTable
from geartrain.ams.programs.class_head import MAX_SUB_CENTERS
from geartrain.ams.programs.selection import Selection
from geartrain.ams.values.arguments import integer
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.optimizers.registry import RowOptimizerSpec
from geartrain.ams.values.placement import MAX_SHARDS
from geartrain.ams.values.specs import TableSpec, checked_wire_dtype
from geartrain.ams.values.text import counted
from geartrain.bridge.head.backends.memory_plan import Holder, MemoryPart, MemoryPlan
from geartrain.bridge.head.backends.registry import backend_named
from geartrain.bridge.head.defaults import DEFAULT_OPTIMIZER, DEFAULT_SELECT
from geartrain.bridge.head.loss.config import HeadConfig, checked_config

_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """Bytes of a class head by part; ``print`` it for a table. See :func:`memory_report`."""

    num_classes: int
    dim: int
    sub_centers: int
    rows: str
    dtype: str
    slot_dtype: str | None
    """Storage type of the slots; None: the optimizer has none."""
    batch_size: int
    num_active: int
    num_shards: int
    """Number of shards; 0 with ``rows="ranks"``."""
    num_ranks: int
    table_bytes: int
    """Rows, slots and index over all shards or ranks, once every row was written."""
    plsc_bytes: int
    """Bytes by PLSC's formulas for the same head on ``num_ranks`` cards, over all of them."""
    parts: tuple[MemoryPart, ...]

    @property
    def bytes_per_class(self) -> float:
        """Bytes of rows, slots and index for each class."""
        return self.table_bytes / self.num_classes

    @property
    def shard_bytes(self) -> int:
        """Peak of the fullest shard; 0 with ``rows="ranks"``."""
        return self._peak("shard")

    @property
    def rank_bytes(self) -> int:
        """Peak of a rank, without its backbone."""
        return self._peak("rank")

    @property
    def step_bytes(self) -> int:
        """Bytes that a step adds, over all shards and ranks."""
        count = {"shard": self.num_shards, "rank": self.num_ranks}
        return sum(part.bytes * count[part.holder] for part in self.parts if not part.standing)

    @property
    def total_bytes(self) -> int:
        """Peak over all shards and ranks: ``table_bytes`` + ``step_bytes``."""
        return self.table_bytes + self.step_bytes

    def _peak(self, holder: Holder) -> int:
        return sum(part.bytes for part in self.parts if part.holder == holder)

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        sums = {name: getattr(self, name) for name in ("shard_bytes", "rank_bytes", "step_bytes", "total_bytes")}
        return {**asdict(self), "bytes_per_class": self.bytes_per_class, **sums}

    def __str__(self) -> str:
        slots = "no slots" if self.slot_dtype is None else f"{self.slot_dtype} slots"
        centers = f" and {self.sub_centers} centers" if self.sub_centers > 1 else ""
        lines = [
            f"{self.num_classes:,} classes of width {self.dim}{centers}, {self.dtype} rows, {slots}, "
            f"rows={self.rows!r}, {counted(self.num_shards, 'shard')}, {counted(self.num_ranks, 'rank')} of "
            f"{self.batch_size} samples, {self.num_active:,} classes active",
            "",
        ]
        width = max(len(part.name) for part in self.parts)
        holders: tuple[Holder, ...] = ("shard", "rank")
        for holder in holders:
            held = [part for part in self.parts if part.holder == holder]
            for part in held:
                when = "always" if part.standing else "in a step"
                lines.append(f"{holder:<5}  {part.name:<{width}}  {_gib(part.bytes)}  {when:<9}  {part.formula}")
            if held:
                lines.append(f"{holder:<5}  {'together':<{width}}  {_gib(self._peak(holder))}")
        lines += [
            "",
            f"per class {self.bytes_per_class:,.1f} bytes; all shards and ranks {_gib(self.total_bytes).strip()}; "
            f"PLSC's formulas {_gib(self.plsc_bytes).strip()}",
        ]
        return "\n".join(lines)

    def explained(self) -> str:
        """Return an explanation of its terms and letters, the assumptions, and what is not counted."""
        lines = [
            "shard: each server process with rows; rank: each process that trains. Bytes are those of the fullest.",
            "always: as long as the table is there. in a step: while one runs, and no longer.",
            "rows: the class centers. slots: what the optimizer keeps of each (momentum, moments). index: which rows",
            "are there, and where. rest of chunks: rows take memory by the chunk, and not all fill theirs; where",
            "several shards share a range of rows, one that has half of it or more keeps memory for all of it.",
            "active: the classes that a step looks at, those of its labels among them.",
            f"C = {self.num_classes:,} classes, D = {self.dim} their width, A = {self.num_active:,} active classes, "
            f"B = {self.batch_size} samples of a rank,",
            "n = rows of the fullest shard or rank, k = neighbours kept of a class; other numbers are bytes or counts.",
            "Assumed: every class was written once. While fewer are, a shard takes at most twice their rows and slots,",
            "up to 5 bytes for each id around them, and a few pages of 2 MiB. 1 GiB = 2^30 bytes.",
            "Not counted: the backbone, its activations and optimizer; Python and its libraries (about 0.3 GiB a",
            "rank); what gRPC holds of messages under way; snapshots, which lie on a disk.",
            "PLSC's formulas: a softmax with all rows on the cards, for comparison (PLSC, sections 3 and 4).",
        ]
        return "\n".join(lines)


def memory_report(
    *,
    num_classes: int,
    dim: int,
    sub_centers: int = 1,
    bias: bool = False,
    rows: str = "pull",
    optimizer: RowOptimizerSpec = DEFAULT_OPTIMIZER,
    select: Selection = DEFAULT_SELECT,
    config: HeadConfig | None = None,
    batch_size: int = 128,
    num_shards: int = 1,
    num_ranks: int = 1,
    device: str = "cpu",
    num_threads: int | None = None,
) -> MemoryReport:
    """Return the bytes of a head by part; the arguments are those of :class:`ClassHead`, and some more.

    Every row is taken to be written; while few are, a shard takes little more than those. Not counted: the backbone,
    libraries, and what gRPC holds of messages under way, or the memory shared with shards instead. Tests find it within
    5 % of what is measured on a CPU for each place and precision, one process holding all. Raises InvalidArgument.

    Args:
        num_classes: See :class:`ClassHead`, as the other arguments that are not explained here.
        dim: Width of features.
        sub_centers: Centers of a class; rows are so many times as wide.
        bias: Whether rows have one more column.
        rows: Name of the way that rows are worked on.
        optimizer: Decides the slots.
        select: Decides how many classes are active.
        config: Types of rows and slots, and what is kept in a step.
        batch_size: Samples of a rank.
        num_shards: Shards of the cluster.
        num_ranks: Ranks that train together.
        device: Device of the features: "cpu" or "cuda".
        num_threads: PyTorch's; None: this process's.

    PLSC's formulas (its section 3 and 4), per card: weight and velocity C·D/R each, logits and their gradient
    A·B each; dense momentum has a gradient of C·D/R besides.
    """
    config = checked_config(config)
    backend = backend_named(rows)
    for name, value, most in (
        ("num_classes", num_classes, None),
        ("num_shards", num_shards, MAX_SHARDS),
        ("num_ranks", num_ranks, None),
        ("batch_size", batch_size, None),
    ):
        integer(name, value, 1, most)
    centers = integer("sub_centers", sub_centers, 1, MAX_SUB_CENTERS)
    spec = TableSpec(
        name="plan",
        dim=dim * centers + bias,
        num_rows=num_classes,
        optimizer=optimizer,
        dtype=config.dtype,
        slot_dtype=config.slot_dtype,
    )
    active = min(num_classes, max(select.budget(num_classes), min(num_classes, batch_size * num_ranks)))
    plan = MemoryPlan(
        spec=spec,
        sub_centers=centers,
        num_classes=num_classes,
        active=active,
        neighbours=select.neighbours_of(num_classes) if active < num_classes else 0,
        batch=batch_size,
        shards=num_shards if backend.needs_cluster else 0,
        ranks=num_ranks,
        device=_checked_device(device),
        threads=(num_threads or torch.get_num_threads()) if device == "cpu" else 1,
        config=config,
    )
    checked_wire_dtype(config.wire_dtype, "plan", config.dtype)
    parts = plan.table() + backend.step_memory(plan)
    if plan.neighbours:
        is_cut = not backend.needs_cluster
        size = NeighbourTable.bytes_for(num_classes, plan.neighbours, num_ranks if is_cut else 1)
        formula = "(4·C·k + 8·C) / R" if is_cut else "4·C·k + 8·C"
        parts.append(MemoryPart(name="graph of classes", holder="rank", bytes=size, standing=True, formula=formula))
    return MemoryReport(
        num_classes=num_classes,
        dim=dim,
        sub_centers=centers,
        rows=rows,
        dtype=config.dtype,
        slot_dtype=config.slot_dtype if spec.has_slots else None,
        batch_size=batch_size,
        num_active=active,
        num_shards=plan.shards,
        num_ranks=num_ranks,
        table_bytes=plan.table_bytes(),
        plsc_bytes=_plsc_bytes(plan),
        parts=tuple(part for part in parts if part.bytes),
    )


def _plsc_bytes(plan: MemoryPlan) -> int:
    spec, optimizer = plan.spec, plan.spec.optimizer
    row = spec.row_bytes * (1 + (not optimizer.saves_gradient_buffer)) + spec.slot_dim * spec.numpy_dtype.itemsize
    logits_of_a_card = plan.active * plan.batch * spec.numpy_dtype.itemsize
    return row * plan.num_classes + 2 * logits_of_a_card * plan.ranks


def _checked_device(name: str) -> torch.device:
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise InvalidArgument(f"device is {name!r}; it must be 'cpu' or 'cuda'")
    return torch.device(name)


def _gib(size: int) -> str:
    return f"{size / _GIB:10,.3f} GiB"
