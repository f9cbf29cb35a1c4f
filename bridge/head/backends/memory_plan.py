"""Plan of a head and the memory of its parts, which :func:`memory_report` gathers.

Legend: C classes, K centers of each, D width, B samples of a rank, A active classes, S shards, R ranks, n rows of one
shard or rank, k neighbours, O < C the number of classes missing to a power of two.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from geartrain.ams.kernels.full_table import FullDenseTable
from geartrain.ams.values.placement import buckets_of_shard, even_placement
from geartrain.ams.values.specs import DTYPES, SCALE_BYTES, SCALED, TableSpec
from geartrain.bridge.head.loss.config import HeadConfig

Holder = Literal["shard", "rank"]

COMPUTE_BYTES = 4
_ID_ARRAYS = 6
"""int64 arrays as long as the active classes during a push: the sample, the ids, their order and parts."""


@dataclass(frozen=True, kw_only=True)
class MemoryPart:
    """Memory of one part of a head."""

    name: str
    holder: Holder
    """Holder of the memory: every shard, or every rank."""
    bytes: int
    """Bytes on the fullest shard or rank."""
    standing: bool
    """True: held all the time; False: in a step only."""
    formula: str
    """Formula of the bytes, in the letters of this file."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Settings of a head whose memory is estimated."""

    spec: TableSpec
    sub_centers: int
    num_classes: int
    active: int
    neighbours: int
    """k of the graph of the selection; 0: it has none."""
    batch: int
    shards: int
    """Number of shards; 0: the rows are in no cluster."""
    ranks: int
    device: torch.device
    """Device of the features."""
    threads: int
    config: HeadConfig

    @property
    def dim(self) -> int:
        """Width of a feature, with the column for a bias."""
        return self.spec.dim // self.sub_centers

    @property
    def wide(self) -> int:
        """Bytes of a matrix [B, D] in the compute dtype."""
        return self.batch * self.dim * COMPUTE_BYTES

    def table_bytes(self) -> int:
        """Return bytes of rows, slots and index over all shards or ranks."""
        if self.shards:
            return sum(table.memory_bytes for table in self._tables_of_shards)
        return self.num_classes * self._item_bytes

    def table(self) -> list[MemoryPart]:
        """Return rows, slots and index of the fullest shard or rank."""
        spec = self.spec
        holder: Holder = "shard" if self.shards else "rank"
        fullest = max(self._tables_of_shards, key=lambda table: table.memory_bytes, default=None)
        most = -(-self.num_classes // self.ranks) if fullest is None else fullest.rows
        width = "D" if self.sub_centers == 1 else f"{self.sub_centers}·D"
        wide = f"({width} + {SCALE_BYTES})" if spec.dtype in SCALED else f"{width}·{spec.numpy_dtype.itemsize}"
        parts = [("rows", most * spec.row_bytes, f"n·{wide}, n = {most:,}")]
        if spec.slot_bytes:
            parts.append((f"slots ({spec.optimizer.state})", most * spec.slot_bytes, f"n·{_slot_formula(spec, width)}"))
        if spec.step_bytes:
            steps = "updates" if spec.counts_updates else "last steps (elapsed)"
            parts.append((steps, most * spec.step_bytes, f"n·{spec.step_bytes}"))
        if fullest is not None:
            parts.append(("rest of chunks", fullest.spare_bytes, "chunks of up to 64 KiB, or of one row"))
            parts.append(("index", fullest.index_bytes, "n/8, in pages of 4 KiB; 4 of each chunk"))
        return [
            MemoryPart(name=name, holder=holder, bytes=size, standing=True, formula=formula)
            for name, size, formula in parts
        ]

    def wire_parts(self, push_bytes: int) -> list[MemoryPart]:
        """Return memory of a rank whose gradients, ``push_bytes`` of float32 in a push, are sent in 16 bits."""
        if self.config.wire_dtype is None:
            return []
        return in_step("rank", ("gradients in 16 bits", push_bytes // 2, "A·D·2"))

    def batch_parts(
        self, batch: int, sums: int, chunk_rows: int, *, row_copies: float, others: int
    ) -> list[tuple[str, int, str]]:
        """Return memory of a batch, ``others`` matrices [B, D] beside the sums, and the scratch of the threads."""
        wide = batch * self.dim * COMPUTE_BYTES
        rows = min(chunk_rows, self.active)
        on_cpu = self.device.type == "cpu"  # elsewhere unit rows, gradients and logits are separate tensors
        copies = row_copies if on_cpu else row_copies + 3
        chunk = (copies * self.spec.dim + (0 if on_cpu else 2 * batch * self.sub_centers)) * rows * COMPUTE_BYTES
        return [
            ("partial sums", (sums + 1) * wide, f"({sums} + 1)·B·D·4"),
            ("features and gradients, packed, joined", others * wide, f"{others}·B·D·4"),
            ("scratch of the threads", int(self.threads * chunk), "chunks of rows and logits, a few a thread"),
        ]

    def sampled_ids(self) -> tuple[str, int, str]:
        """Return memory of the active ids; none if all classes are active."""
        held = 0 if self.active == self.num_classes else self.active
        return id_arrays(held, f"{_ID_ARRAYS}·8·A; none if all are active")

    @property
    def _item_bytes(self) -> int:
        """Bytes of a row with its slots and step count."""
        return self.spec.row_bytes + self.spec.slot_bytes + self.spec.step_bytes

    @cached_property
    def _tables_of_shards(self) -> list[FullDenseTable]:
        """Tables of the shards once every row was written, by the buckets of each shard of a new cluster."""
        if not self.shards:
            return []
        owners = even_placement(self.shards)
        return [FullDenseTable.of(self.spec, buckets_of_shard(owners, shard)) for shard in range(self.shards)]


def _slot_formula(spec: TableSpec, width: str) -> str:
    """Return a formula for the bytes of one row's slots, in terms of the row's ``width``."""
    if spec.slot_dtype in SCALED:
        return f"({width} + {spec.slot_bytes - spec.slot_dim})"
    size, num_per_row = DTYPES[spec.slot_dtype].itemsize, sum(slot.per_row for slot in spec.optimizer.slots)
    num_wide = len(spec.optimizer.slots) - num_per_row
    terms = [f"{width}·{num_wide * size}"] * bool(num_wide) + [str(num_per_row * size)] * bool(num_per_row)
    return terms[0] if len(terms) == 1 else f"({' + '.join(terms)})"


def id_arrays(num: int, formula: str = f"{_ID_ARRAYS}·8·A") -> tuple[str, int, str]:
    """Return the memory of the ids of ``num`` rows."""
    return "ids", _ID_ARRAYS * 8 * num, formula


def in_step(holder: Holder, *parts: tuple[str, int, str]) -> list[MemoryPart]:
    """Return parts (name, bytes, formula) as memory of a step."""
    return [
        MemoryPart(name=name, holder=holder, bytes=size, standing=False, formula=formula)
        for name, size, formula in parts
    ]
