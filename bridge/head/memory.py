"""Will it fit? Bytes of a class head by part, for each place of the rows, from the formulas that its code follows.

Legend: C classes, D width, B samples of a rank, A active classes, S shards, R ranks, n rows of one shard or rank,
O < C what C lacks to a power of two.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Protocol

import torch

from geartrain.ams.programs.class_head import CHUNK_ROWS as HOSTED_CHUNK_ROWS
from geartrain.ams.programs.class_head import PART_BYTES as HOSTED_PART_BYTES
from geartrain.ams.programs.class_head import PARTS as HOSTED_PARTS
from geartrain.ams.programs.selection import PartialFC
from geartrain.ams.server.hosting import HELD_BYTES
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.optimizers.registry import RowOptimizerSpec, SparseMomentum
from geartrain.ams.values.placement import MAX_SHARDS, NUM_BUCKETS
from geartrain.ams.values.specs import DTypeName, TableSpec
from geartrain.bridge.head.backends.place import logits_bytes
from geartrain.bridge.head.backends.pull import held_rows, streamed_rows
from geartrain.bridge.head.backends.pull.stream import NUM_BUFFERS, block_rows_for
from geartrain.bridge.head.batch import chunk_rows_for
from geartrain.bridge.head.loss.chunk_pass import CompiledPass, parts_for
from geartrain.bridge.head.loss.kept_logits import kept_rows
from geartrain.bridge.head.selection.knn_selection import KNNSoftmax
from geartrain.bridge.head.selection.torch_selection import choice_bytes

RowPlace = Literal["pull", "hosted", "ranks"]
Holder = Literal["shard", "rank"]

_PLACES = ("pull", "hosted", "ranks")
_DEFAULT_SELECT = PartialFC(sample_rate=0.1)
_DEFAULT_OPTIMIZER = SparseMomentum(lr=0.1)
_INDEX_PAGE_BYTES = 4096
_COMPUTE_BYTES = 4
_ID_ARRAYS = 6
"""int64 arrays as long as the active classes at the moment of a push: the sample, the ids, their order and parts."""
_ROUNDING_WIDTHS = 7
"""Chunks of float32 that random bits and what they round take on a device, at most."""
_ELAPSED_WIDTHS = 8
"""Chunks of float32 that catching up rows and slots takes on a device: four of float64."""
_PULL_WIDTHS, _HOSTED_WIDTHS, _RANK_WIDTHS = 12, 13, 9
"""Matrices [B, D] beside the sums: features, packed, target rows, gradients, and what of them the allocator keeps for
the next step; measured, in the processes of the tests."""
_GIB = 2**30


class Budget(Protocol):
    """The part of a selection that decides how many classes are active."""

    def budget(self, num_classes: int) -> int:
        """How many classes are active unless the positives alone are more."""
        ...


@dataclass(frozen=True, kw_only=True)
class MemoryPart:
    """One thing that takes memory."""

    name: str
    holder: Holder
    """Who holds it: every shard, or every rank."""
    bytes: int
    """Of the fullest shard or rank."""
    standing: bool
    """True: held all the time; False: in a step only."""
    formula: str
    """Where the bytes come from, in the letters of this file."""


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """Bytes of a class head by part; ``print`` it for a table. See :func:`memory_report`."""

    num_classes: int
    dim: int
    rows: RowPlace
    dtype: str
    slot_dtype: str | None
    """None: the optimizer keeps no slots."""
    batch_size: int
    num_active: int
    num_shards: int
    """0 with ``rows="ranks"``."""
    num_ranks: int
    table_bytes: int
    """Rows, slots and index over all shards or ranks, once every row was written."""
    plsc_bytes: int
    """What PLSC's formulas give for the same head on ``num_ranks`` cards, over all of them."""
    parts: tuple[MemoryPart, ...]

    @property
    def bytes_per_class(self) -> float:
        """Of rows, slots and index."""
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
        """What a step adds, over all shards and ranks."""
        count = {"shard": self.num_shards, "rank": self.num_ranks}
        return sum(part.bytes * count[part.holder] for part in self.parts if not part.standing)

    @property
    def total_bytes(self) -> int:
        """Peak over all shards and ranks: ``table_bytes`` + ``step_bytes``."""
        return self.table_bytes + self.step_bytes

    def _peak(self, holder: Holder) -> int:
        return sum(part.bytes for part in self.parts if part.holder == holder)

    def to_json(self) -> dict[str, Any]:
        """All of it as plain values."""
        sums = {name: getattr(self, name) for name in ("shard_bytes", "rank_bytes", "step_bytes", "total_bytes")}
        return {**asdict(self), "bytes_per_class": self.bytes_per_class, **sums}

    def __str__(self) -> str:
        slots = "no slots" if self.slot_dtype is None else f"{self.slot_dtype} slots"
        lines = [
            f"{self.num_classes:,} classes of width {self.dim}, {self.dtype} rows, {slots}, rows={self.rows!r}, "
            f"{self.num_shards} shards, {self.num_ranks} ranks of {self.batch_size}, {self.num_active:,} active",
            "",
        ]
        width = max(len(part.name) for part in self.parts)
        for holder in ("shard", "rank"):
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


def memory_report(
    *,
    num_classes: int,
    dim: int,
    rows: RowPlace = "pull",
    dtype: DTypeName = "float32",
    slot_dtype: DTypeName = "float32",
    optimizer: RowOptimizerSpec = _DEFAULT_OPTIMIZER,
    select: Budget = _DEFAULT_SELECT,
    batch_size: int = 128,
    num_shards: int = 1,
    num_ranks: int = 1,
    device: str = "cpu",
    num_threads: int | None = None,
    rows_cache_bytes: int = 64 << 20,
    logits_cache_bytes: int | None = None,
) -> MemoryReport:
    """Bytes that a head of these settings takes, by part; the arguments are those of :class:`ClassHead`.

    ``batch_size`` is that of a rank, ``device`` that of its features, ``num_threads`` PyTorch's (by default this
    process's). A row is counted from its first write on; memory of rows never written is not taken. Not counted: the
    backbone, libraries, and what gRPC holds of messages under way, or the memory shared with shards instead. Tests find
    it within 5 % of what is measured on a CPU for each place and precision, one process holding all. Raises
    InvalidArgument.

    PLSC's formulas (its section 3 and 4), per card: weight and velocity C·D/R each, logits and their gradient
    A·B each; dense momentum has a gradient of C·D/R besides.
    """
    if rows not in _PLACES:
        raise InvalidArgument(f"rows is {rows!r}; it must be one of {', '.join(_PLACES)}")
    for name, value, most in (
        ("num_shards", num_shards, MAX_SHARDS),
        ("num_ranks", num_ranks, None),
        ("batch_size", batch_size, None),
    ):
        if not isinstance(value, int) or value < 1 or (most is not None and value > most):
            raise InvalidArgument(f"{name} is {value!r}; it must be an integer >= 1{f' and <= {most}' if most else ''}")
    spec = TableSpec(
        name="plan", dim=dim, num_rows=num_classes, optimizer=optimizer, dtype=dtype, slot_dtype=slot_dtype
    )
    plan = _Plan(
        spec=spec,
        num_classes=num_classes,
        active=min(num_classes, max(select.budget(num_classes), min(num_classes, batch_size * num_ranks))),
        batch=batch_size,
        shards=0 if rows == "ranks" else num_shards,
        ranks=num_ranks,
        device=_checked_device(device),
        threads=(num_threads or torch.get_num_threads()) if device == "cpu" else 1,
        rows_cache_bytes=rows_cache_bytes,
        logits_cache_bytes=logits_bytes(rows, logits_cache_bytes),
    )
    parts = {"pull": plan.pull, "hosted": plan.hosted, "ranks": plan.on_ranks}[rows]()
    if isinstance(select, KNNSoftmax) and plan.active < num_classes:
        parts.append(_graph(num_classes, select.k))
    if rows == "ranks" and plan.device.type != "cpu" and plan.active < num_classes:
        parts += _choice_on_device(plan, select.k if isinstance(select, KNNSoftmax) else 0)
    return MemoryReport(
        num_classes=num_classes,
        dim=dim,
        rows=rows,
        dtype=dtype,
        slot_dtype=slot_dtype if spec.has_slots else None,
        batch_size=batch_size,
        num_active=plan.active,
        num_shards=plan.shards,
        num_ranks=num_ranks,
        table_bytes=plan.table_bytes(),
        plsc_bytes=plan.plsc_bytes(),
        parts=tuple(part for part in parts if part.bytes),
    )


@dataclass(frozen=True, kw_only=True)
class _Plan:
    spec: TableSpec
    num_classes: int
    active: int
    batch: int
    shards: int
    ranks: int
    device: torch.device
    threads: int
    rows_cache_bytes: int
    logits_cache_bytes: int

    @property
    def slot_bytes(self) -> int:
        return self.spec.slot_bytes

    def index_bytes(self, shard: int) -> int:
        """Presence bits of the positions of a shard, in pages: one for each round of 4096 ids and owned bucket."""
        rounds = (self.num_classes - 1) // NUM_BUCKETS + 1
        positions = rounds * len(range(shard, NUM_BUCKETS, self.shards))
        return -(-positions // (8 * _INDEX_PAGE_BYTES)) * _INDEX_PAGE_BYTES

    def table_bytes(self) -> int:
        index = sum(self.index_bytes(shard) for shard in range(self.shards))
        return self.num_classes * (self.spec.row_bytes + self.slot_bytes + self.spec.step_bytes) + index

    def plsc_bytes(self) -> int:
        item = self.spec.numpy_dtype.itemsize
        copies = 1 + len(self.spec.optimizer.slots) + (not self.spec.optimizer.saves_gradient_buffer)
        logits_of_a_card = self.active * self.batch * item
        return copies * self.num_classes * self.spec.row_bytes + 2 * logits_of_a_card * self.ranks

    def table(self, holder: Holder) -> list[MemoryPart]:
        """Rows, slots and index of the fullest holder."""
        if holder == "rank":
            most = -(-self.num_classes // self.ranks)
        else:  # buckets go to the shards in turn, so that the first has the most
            rounds, rest = divmod(self.num_classes, NUM_BUCKETS)
            most = rounds * len(range(0, NUM_BUCKETS, self.shards)) + len(range(0, rest, self.shards))
        parts = [("rows", most * self.spec.row_bytes, f"n·D·{self.spec.numpy_dtype.itemsize}, n = {most:,}")]
        if self.slot_bytes:
            slots = ", ".join(slot.name for slot in self.spec.optimizer.slots)
            parts.append((f"slots ({slots})", most * self.slot_bytes, f"n·D·{self.slot_bytes // self.spec.dim}"))
        if self.spec.step_bytes:
            steps = "updates" if self.spec.counts_updates else "last steps (elapsed)"
            parts.append((steps, most * self.spec.step_bytes, f"n·{self.spec.step_bytes}"))
        if holder == "shard":
            parts.append(("index", self.index_bytes(0), "n/8, in pages of 4 KiB"))
        return [
            MemoryPart(name=name, holder=holder, bytes=size, standing=True, formula=formula)
            for name, size, formula in parts
        ]

    def pull(self) -> list[MemoryPart]:
        """Rows travel: a rank holds the active ones and overwrites them by their gradients, or streams them."""
        row, budget_bytes = self.spec.row_bytes, self.active * self.spec.row_bytes
        held = budget_bytes <= self.rows_cache_bytes
        chunk_rows = self._chunk_rows()
        if held:
            buffers, formula = budget_bytes, f"A·D·{self.spec.numpy_dtype.itemsize}"
            push, kept = budget_bytes, self._kept_logits(self.active, self.batch, 1 if self._walks else chunk_rows)
            sums = parts_for(self.active, self.batch, self.spec.dim) if self._walks else held_rows.PARTS
        else:
            block = min(block_rows_for(row), self.active) * row
            buffers, formula = NUM_BUFFERS * block, f"{NUM_BUFFERS} blocks of 8 MiB"
            push, kept, sums = block, 0, streamed_rows.PARTS
        ids = self.active if held else buffers // row
        return self.table("shard") + _in_step(
            "rank",
            ("active rows, then their gradients", buffers, formula),
            ("gradients cut by shard", push if self.shards > 1 else 0, "as much as one push, if S > 1"),
            ("kept logits", kept, "A·B·4, at most logits_cache_bytes"),
            ("ids", _ID_ARRAYS * 8 * ids, f"{_ID_ARRAYS}·8·A"),
            *self._batch_parts(
                self.batch, sums, chunk_rows, row_copies=0 if self.spec.dtype == "float32" else 1, others=_PULL_WIDTHS
            ),
        )

    def hosted(self) -> list[MemoryPart]:
        """Features travel: each shard works beside its part of the active rows. It has the sums of a forward pass or
        the gradients of an update, never both; more than HELD_BYTES of gradients are made chunk by chunk."""
        wide = self.batch * self.ranks * self.spec.dim * _COMPUTE_BYTES
        active = -(-self.active // self.shards)
        gradients = active * self.spec.dim * _COMPUTE_BYTES
        chunks = -(-active // HOSTED_CHUNK_ROWS)
        sums = max(1, min(HOSTED_PARTS, chunks, HOSTED_PART_BYTES // wide))
        chunk = min(HOSTED_CHUNK_ROWS, active) * self.spec.dim * _COMPUTE_BYTES
        copies = 2 if self.spec.dtype == "float32" else 2.5  # one of them is what the allocator keeps
        return (
            self.table("shard")
            + _in_step(
                "shard",
                self._sampled_ids(self.active),
                (
                    "partial sums, then gradients",
                    max((sums + 1) * wide, 2 * gradients if gradients <= HELD_BYTES else 0),
                    f"({sums} + 1)·R·B·D·4 or 2·A·D·4/S, if that is at most 2 · 32 MiB",
                ),
                ("features, packed, and target rows", 2 * wide, "2·R·B·D·4"),
                ("scratch of the threads", int(self.threads * copies * chunk), "2 chunks of rows a thread"),
            )
            + _in_step(
                "rank",
                (
                    "features, answers and gradients",
                    (_HOSTED_WIDTHS + self.shards) * self.batch * self.spec.dim * _COMPUTE_BYTES,
                    f"({_HOSTED_WIDTHS} + S)·B·D·4",
                ),
            )
        )

    def on_ranks(self) -> list[MemoryPart]:
        """Rows and momentum on the ranks: features are gathered, gradients made and used chunk by chunk."""
        joint, chunk_rows = self.batch * self.ranks, self._chunk_rows()
        active = -(-self.active // self.ranks)
        return self.table("rank") + _in_step(
            "rank",
            ("kept logits", self._kept_logits(active, joint, chunk_rows), "A·B·4, at most logits_cache_bytes"),
            self._sampled_ids(self.active),
            *self._batch_parts(joint, held_rows.PARTS, chunk_rows, row_copies=self._rank_copies(), others=_RANK_WIDTHS),
        )

    def _rank_copies(self) -> float:
        """Chunks of float32 that a thread holds, and half a one for what the allocator keeps.

        On a CPU, where compiled code updates rows where they lie: the gradient, and rows of the forward pass that
        cannot be read in place. Elsewhere those of the step too: rows and slots, what 16 bits are rounded with, and
        what rows are caught up with.
        """
        picked, narrow = self.active < self.num_classes, self.spec.dtype != "float32"
        moves = self.spec.counts_steps
        if self.device.type == "cpu":
            return 1.5 + (picked or narrow or moves) + (picked and narrow and not moves)
        narrow_slots = bool(self.slot_bytes) and self.spec.slot_dtype != "float32"
        in_step = 2 + bool(self.slot_bytes) + 0.5 * (narrow + narrow_slots)
        picked_from = picked * (1.5 * narrow + 0.5 * narrow_slots)
        rounding = _ROUNDING_WIDTHS * (narrow or narrow_slots)
        copies = picked or narrow or narrow_slots or moves
        return 0.5 + in_step + picked_from + copies + rounding + _ELAPSED_WIDTHS * moves

    def _sampled_ids(self, active: int) -> tuple[str, int, str]:
        ids = 0 if active == self.num_classes else _ID_ARRAYS * 8 * active
        return "ids", ids, f"{_ID_ARRAYS}·8·A; none if all are active"

    @property
    def _walks(self) -> bool:
        """Whether one call of C++ goes through all rows that are held."""
        return self.device.type == "cpu" and self.spec.dtype == "float32"

    def _chunk_rows(self) -> int:
        if self.device.type == "cpu":
            return CompiledPass.chunk_rows
        return chunk_rows_for(self.batch, self.spec.dim, self.device)

    def _kept_logits(self, active: int, batch: int, chunk_rows: int) -> int:
        row_bytes = batch * _COMPUTE_BYTES
        return kept_rows(active, chunk_rows, row_bytes, self.logits_cache_bytes) * row_bytes

    def _batch_parts(
        self, batch: int, sums: int, chunk_rows: int, *, row_copies: float, others: int
    ) -> list[tuple[str, int, str]]:
        """What is kept of a batch, ``others`` matrices [B, D] beside the sums, and the scratch of the threads."""
        wide = batch * self.spec.dim * _COMPUTE_BYTES
        rows = min(chunk_rows, self.active)
        on_cpu = self.device.type == "cpu"  # elsewhere unit rows, gradients and logits are tensors of their own
        copies = row_copies if on_cpu else row_copies + 3
        chunk = (copies * self.spec.dim + (0 if on_cpu else 2 * batch)) * rows * _COMPUTE_BYTES
        return [
            ("partial sums", (sums + 1) * wide, f"({sums} + 1)·B·D·4"),
            ("features and gradients, packed, joined", others * wide, f"{others}·B·D·4"),
            ("scratch of the threads", int(self.threads * chunk), "chunks of rows and logits, a few a thread"),
        ]


def _checked_device(name: str) -> torch.device:
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise InvalidArgument(f"device is {name!r}; it must be 'cpu' or 'cuda'")
    return torch.device(name)


def _graph(num_classes: int, k: int) -> MemoryPart:
    """The lists of a :class:`NeighbourTable` and where they begin, which every rank keeps."""
    size = num_classes * 4 * min(k, num_classes - 1) + (num_classes + 1) * 8
    return MemoryPart(name="graph of classes", holder="rank", bytes=size, standing=True, formula="4·C·k + 8·C")


def _choice_on_device(plan: _Plan, k: int) -> list[MemoryPart]:
    """What rows on ranks' devices take there to choose the classes: the graph once more, and candidates."""
    num_classes = plan.num_classes
    size = choice_bytes(num_classes, plan.active, min(num_classes, plan.batch * plan.ranks), k)
    name = "choosing of the active classes"
    parts = [
        MemoryPart(name=name, holder="rank", bytes=size, standing=False, formula="40·(B·R·(1 + k) + A) + 75·(A + O)")
    ]
    return [replace(_graph(num_classes, k), name="graph of classes, on the device"), *parts] if k else parts


def _in_step(holder: Holder, *parts: tuple[str, int, str]) -> list[MemoryPart]:
    return [
        MemoryPart(name=name, holder=holder, bytes=size, standing=False, formula=formula)
        for name, size, formula in parts
    ]


def _gib(size: int) -> str:
    return f"{size / _GIB:10,.3f} GiB"
