"""Row gradients until the optimizer's step: in memory by id, or as factors (``chunk_pass.py`` computes them).

Legend: A active rows, B samples, D width, N rows of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from geartrain.ams.client.table import Table
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.specs import Ids
from geartrain.bridge.head.backends.active_rows import HostActive, LocalActive, add_log_q_correction
from geartrain.bridge.head.backends.row_stream import Block, RowStream
from geartrain.bridge.head.loss.batch import Batch
from geartrain.bridge.head.loss.block_loop import gradient_blocks
from geartrain.bridge.head.loss.chunk_pass import ChunkPass
from geartrain.bridge.head.loss.chunk_pool import CHUNKS
from geartrain.bridge.head.loss.kept_logits import KeptLogits
from geartrain.bridge.placements.workspace import Buffer, BufferPool, Workspace
from geartrain.bridge.rows.gradient_carrier import squared_sum
from geartrain.bridge.rows.ranks import SyncRanks
from geartrain.bridge.rows.row_update import RowGradient, RowUpdate
from geartrain.bridge.rows.tables import as_numpy, gradient_view
from geartrain.bridge.rows.transfers import DeviceEvent, start_download

_ROWS_PER_SUM = 4096
_HOST = torch.device("cpu")


def _step_stopped(prepared: int, num: int) -> InvalidArgument:
    return InvalidArgument(
        f"the last step() stopped with an error after {prepared} of {num} rows; "
        "call step() again, or zero_grad() to give the rest up, before the next backward()"
    )


class HeldGradient:
    """Gradients [A, D] of the active classes, in host memory; a copy from a device may still be under way."""

    is_one_push = True
    prepared = 0

    def __init__(
        self,
        active: HostActive,
        ids: Ids,
        gradients_AD: Tensor,
        buffer: Buffer,
        pool: BufferPool,
        device: torch.device,
        checksum: Tensor | None,
        squares: Tensor | None = None,
    ) -> None:
        """``ids`` are those of ``active``. ``checksum`` (0-dim) is finite only if all gradients are; None: unchecked.
        ``squares`` is Σ g² (0-dim, float64), None: not known yet."""
        self._active, self._ids = active, ids
        self._gradients_AD = gradients_AD
        self._buffer = buffer
        self._pool = pool
        self._device = device
        self._checksum = None if checksum is None else start_download(checksum)
        self._squares = squares
        self._arrival = DeviceEvent(device)

    def merge(self, other: RowGradient) -> None:
        """Add the gradient of another micro-batch, which is used up; memory is that of the union of classes."""
        assert isinstance(other, HeldGradient), "a head either holds its rows or streams them"
        if self.prepared:
            raise _step_stopped(self._active.num, self._active.num)
        self._arrival.wait()
        other._arrival.wait()
        self._squares = None
        self._checksum = None  # a sum may be infinite where its terms are finite
        union = self._active.union(other._active)
        if union.num > self._active.num:
            self._widen(union)
        if union.num == other._active.num:
            self._gradients_AD += other._gradients_AD
        else:
            positions = torch.from_numpy(self._active.positions(other._ids))
            self._gradients_AD.index_add_(0, positions, other._gradients_AD)
        other.discard()

    def _widen(self, active: HostActive) -> None:
        dim = self._gradients_AD.shape[1]
        num_bytes = active.num * dim * self._gradients_AD.dtype.itemsize
        buffer = self._pool.acquire(num_bytes, torch.device("cpu"), pinned=self._device.type == "cuda")
        wider_AD = buffer.tensor((active.num, dim), self._gradients_AD.dtype).zero_()
        wider_AD.index_copy_(0, torch.from_numpy(active.positions(self._ids)), self._gradients_AD)
        self._pool.release(self._buffer)
        self._active, self._ids, self._gradients_AD, self._buffer = active, active.ids, wider_AD, buffer

    def push(self, update: RowUpdate) -> None:
        """Prepare everything as one push, once."""
        if not self.prepared:
            self._arrival.wait()
            known_finite = self._checksum is not None and bool(torch.isfinite(self._checksum))
            gradients = as_numpy(self._gradients_AD)
            update.prepare_push(partial(update.table.prepare_push, self._ids, gradients, known_finite=known_finite))

    @property
    def squares(self) -> Tensor:
        """Σ g², as :class:`CollectedGradient`; costs a pass over the gradients unless it is known."""
        if self._squares is None:
            self._arrival.wait()
            # PyTorch's threads would wait for cores on which other threads still spin; the data is read only once.
            self._squares = CHUNKS.apart(partial(squared_sum, self._gradients_AD), _HOST)
        return self._squares

    def squared_norm(self) -> float:
        """Return Σ g² over all rows, in float64."""
        return float(self.squares)

    def joint_squared_norm(self, ranks: SyncRanks, weight: float) -> float:
        """Return Σ g² as :class:`RowGradient`. Ranks have the same active classes: an all-reduce of 4·A·D bytes, in
        parts."""
        self._arrival.wait()
        parts = torch.split(self._gradients_AD, _ROWS_PER_SUM)
        return math.fsum(float(squared_sum(ranks.sum(part.float() * weight))) for part in parts)

    def discard(self) -> None:
        """Release the memory."""
        self._pool.release(self._buffer, self._arrival)


@dataclass(frozen=True, kw_only=True, eq=False)
class Factors:
    """One batch and the factors of its row gradients."""

    batch: Batch
    chunk_pass: ChunkPass | None
    """Pass over chunks; None until it is needed: kernels may make the gradients."""
    active: LocalActive
    labels_B: Ids | Tensor
    """Labels of the batch, as row numbers."""
    positives: Ids | Tensor
    """Labels of all ranks, whose logits are not corrected."""
    log2_weight: float | Tensor | None
    """Sampling correction, to base 2, of the logits of the other active classes."""
    factor: Tensor
    """Factor of all row gradients, from ``Batch.row_factors``; the pass has the samples' weights."""
    kept: KeptLogits | None = None
    """Kept logits, used up by the step."""


class FactoredGradient:
    """Row gradients as the factors they are made of, of one or several micro-batches; memory O(B·D) each."""

    squares = None
    """None: the gradients are never in memory together."""

    def __init__(self, factors: Factors) -> None:
        self._factors = [factors]
        self._active = factors.active

    def merge(self, other: Any) -> None:
        """Add the gradient of another micro-batch, which is used up."""
        assert isinstance(other, FactoredGradient), "a head either holds its rows or streams them"
        mine, its = (gradient._factors[0].batch.arithmetic for gradient in (self, other))
        if mine != its:
            raise InvalidArgument(
                f"micro-batches of one step were computed in different types or places: {mine} and {its}; "
                "use the same autocast, dtype and device until step()"
            )
        self._factors += other._factors
        self._active = self._active.union(other._active)

    def _parts(self) -> tuple[list[BatchPart], ChunkPass]:
        """Return the gradients of all batches over the union of their classes, and the pass with the smallest
        chunks."""
        parts = [BatchPart(factors, self._active) for factors in self._factors]
        return parts, min(
            (factors.chunk_pass for factors in self._factors if factors.chunk_pass is not None),
            key=lambda chunk_pass: chunk_pass.chunk_rows,
        )


class BatchPart:
    """Row gradients of one batch within the union of the active classes of several."""

    def __init__(self, factors: Factors, union: LocalActive) -> None:
        self._factors = factors
        self._absent_U: Tensor | None = None
        if factors.active.fills(union):
            return
        factors.batch.targets = union.targets(factors.labels_B)
        add_log_q_correction(factors.batch, union, factors.positives, factors.log2_weight)
        self._absent_U = ~factors.active.holds(union, factors.batch.arithmetic.device)

    def overwrite(self, work: Workspace, rows_ND: Tensor, start: int, kept_NB: Tensor | None = None) -> Tensor:
        """Overwrite the rows from position ``start`` on by their gradients, as ``Overwrite`` says."""
        assert self._factors.chunk_pass is not None
        checksum = self._factors.chunk_pass.overwrite(work, rows_ND, start, self._factors.factor, kept_NB)
        if self._absent_U is not None:  # their exponentials have no bound and may be infinite or NaN here
            rows_ND.masked_fill_(self._absent_U[start : start + len(rows_ND)].unsqueeze(1), 0.0)
        return checksum


def overwrite_by_sum(
    parts: Sequence[BatchPart], work: Workspace, rows_ND: Tensor, start: int, kept_NB: Tensor | None
) -> Tensor:
    """Overwrite the rows by the sum of their gradients over several micro-batches; the checksum is of the first."""
    plain_ND = work.empty("plain rows", *rows_ND.shape).copy_(rows_ND) if len(parts) > 1 else rows_ND
    checksum = parts[0].overwrite(work, rows_ND, start, kept_NB)
    for part in parts[1:]:
        more_ND = work.empty("further gradient", *rows_ND.shape).copy_(plain_ND)
        part.overwrite(work, more_ND, start)
        rows_ND += more_ND
    return checksum


class StreamedGradient(FactoredGradient):
    """Gradients of more rows than fit in memory: at the step each block is pulled again, and its gradient pushed.

    Costs one pull and one push per block; memory O(B·D) until the step, four blocks during it. With asynchronous
    workers the rows may have moved since the forward pass; the gradient is then that of the new rows under the old
    log-sum-exp.
    """

    is_one_push = False
    prepared = 0

    def __init__(self, table: Table, pool: BufferPool, factors: Factors) -> None:
        super().__init__(factors)
        self._table = table
        self._pool = pool

    def merge(self, other: RowGradient) -> None:
        """Add the gradient of another micro-batch, which is used up."""
        if self.prepared:
            raise _step_stopped(self.prepared, self._active.num)
        super().merge(other)

    def push(self, update: RowUpdate) -> None:
        """Send block after block; a second call continues behind the last block that was prepared."""
        update.finish_push()
        stream, num = self._stream(), self._active.num
        with closing(self._blocks(stream, self.prepared)) as blocks:
            for stop, ids, gradients_ND in blocks:
                gradients = as_numpy(gradients_ND)
                update.prepare_push(partial(update.table.prepare_push, ids, gradients, step_goes_on=stop < num), stop)
                update.send_in_background()
        update.finish_push()
        stream.close()

    def squared_norm(self) -> float:
        """Return Σ g² over all rows, in float64; costs one more pull of all active rows."""
        stream = self._stream()
        with closing(self._blocks(stream, 0)) as blocks:
            total = math.fsum(float(squared_sum(gradients_ND)) for _, _, gradients_ND in blocks)
        stream.close()
        return total

    def joint_squared_norm(self, ranks: SyncRanks, weight: float) -> float:
        """Return Σ g² as :class:`RowGradient`. Costs one more pull of all active rows, and an all-reduce of 4·A·D
        bytes.

        A rank that fails continues with NaN, or the others would wait for it; then all raise.
        """
        stream = self._stream()
        squares: list[float] = []
        failure: Exception | None = None
        with closing(self._blocks(stream, 0)) as blocks:
            for start, stop in stream.bounds():
                weighted_ND = torch.full(
                    (stop - start, self._table.spec.dim), torch.nan, dtype=torch.float32, device="cpu"
                )
                try:
                    if failure is None:
                        weighted_ND = next(blocks)[2].float() * weight
                except Exception as exc:  # of any kind: the others wait for this rank
                    failure = exc
                squares.append(float(squared_sum(ranks.sum(weighted_ND))))
        ranks.raise_on_all_ranks(failure, f"the gradients of {self._table.spec.name!r} have no norm")
        stream.close()
        return math.fsum(squares)

    def discard(self) -> None:
        """Do nothing: only the factors are held."""

    def _stream(self) -> RowStream:
        assert isinstance(self._active, HostActive), "rows of a cluster are named by the host"
        return RowStream(self._table, self._active, self._pool, self._factors[0].batch.arithmetic.device)

    def _blocks(self, stream: RowStream, first: int) -> Generator[tuple[int, Ids, Tensor]]:
        """Yield (stop, ids [N], gradients [N, D]) of block after block; the next is computed meanwhile."""
        arithmetic = self._factors[0].batch.arithmetic
        parts, chunk_pass = self._parts()

        def store(block: Block, start: int, stop: int, rows_ND: Tensor, checksum: Tensor) -> DeviceEvent:
            del checksum
            out_ND = gradient_view(block.rows_ND[start - block.start : stop - block.start])
            if rows_ND.data_ptr() != out_ND.data_ptr():
                out_ND.copy_(rows_ND, non_blocking=True)
            return DeviceEvent(arithmetic.device)

        overwrite = partial(overwrite_by_sum, parts)
        for block, stored in gradient_blocks(overwrite, chunk_pass, arithmetic, stream.blocks(first), store):
            stored[-1].wait()
            yield block.stop, block.ids, gradient_view(block.rows_ND)
