"""Passes over all active rows of a rank at once, by the kernels of ``kernels/head.py``: a few launches a step.

They serve rows on a GPU and, by reference implementations in tests, on any device. The chunks of ``chunk_pass.py``
compute the rest: margins that change the logits of other classes, several centers a class, smoothed labels, rows that
are moved untouched, float64, and micro-batches of one update with different active classes.

Exponentials are stored between the two passes, 2 bytes a class and sample (4 of products in float32), up to
``keep_bytes`` and :data:`RANGE_BYTES`; those of the other classes are computed twice. Each range of classes that fits
takes two launches forward and two backward, or one if its exponentials are stored from the pass before.

Legend: A active rows, B samples of all ranks, N rows of a range, D width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from geartrain.ams.programs.class_head import NO_LOGIT
from geartrain.ams.values.optimizers.registry import RowOptimizerSpec
from geartrain.bridge.collectives.communicator import Communicator
from geartrain.bridge.head.backends.active_rows import DeviceActive, LocalActive
from geartrain.bridge.head.loss.batch import Batch, DeviceTargets
from geartrain.bridge.head.loss.margins.angular import added_angles
from geartrain.bridge.head.loss.softmax import OnlineSoftmax, PartialSums
from geartrain.bridge.kernels.head import (
    TILE,
    HeadPass,
    SampleTerms,
    exponentials,
    feature_gradient,
    row_gradients,
    sample_terms,
    squared_norm,
    update_rows,
)
from geartrain.bridge.kernels.launch import runs_kernels
from geartrain.bridge.kernels.sample_terms import (
    Losses,
    TargetAngle,
    finish_gradient,
    losses,
    own_cosines,
    row_factors,
    scale_sums,
)
from geartrain.bridge.placements.device_rows import DeviceRows
from geartrain.bridge.placements.workspace import Buffer
from geartrain.bridge.rows.gradient_carrier import squared_sum

RANGE_BYTES = 2 << 30
"""Bytes of exponentials computed and used at a time, beside those that may be kept."""


def takes(table: DeviceRows, active: LocalActive, batch: Batch, *, always: bool) -> bool:
    """Return whether :class:`FusedPass` computes the batch; equal on every rank. ``always``: on any device."""
    return (
        (always or runs_kernels(table.device))
        and isinstance(active, DeviceActive)
        and isinstance(batch.targets, DeviceTargets)
        and table.steps is None
        and batch.arithmetic.compute == torch.float32
        and batch.negatives_margin is None
        and batch.centers == 1
        and batch.smoothing == 0
        and batch.size > 0
    )


def range_rows(row_bytes: int, keep_bytes: int = 0) -> int:
    """Return rows of a range, in whole tiles, whose exponentials (``row_bytes`` a row) fit in ``keep_bytes`` and
    :data:`RANGE_BYTES`."""
    return max(1, (keep_bytes + RANGE_BYTES) // (max(1, row_bytes) * TILE)) * TILE


def _bounds(num: int, max_rows: int) -> list[tuple[int, int]]:
    """Return (start, stop) of ranges of at most ``max_rows`` of ``num`` rows, in whole tiles: the first is the
    remainder, since the last stays for the next pass."""
    first = -(-(num % max_rows or max_rows) // TILE) * TILE
    return list(pairwise([0, *range(first, num, max_rows), num])) if num else []


class FusedPass:
    """Both passes over one batch."""

    def __init__(self, table: DeviceRows, active: DeviceActive, batch: Batch, log2_weight: float | Tensor) -> None:
        assert isinstance(batch.targets, DeviceTargets), "the device's"
        self._table, self._batch = table, batch
        self._head = HeadPass.of(
            table.rows_LD[: active.num] if active.numbers_A is None else table.rows_LD,
            active.numbers_A,
            (batch.features_BD * batch.logit_factor).to(batch.arithmetic.matmul)
            if batch.queries_BD is None
            else batch.queries_BD,
            batch.targets.positions_B,
            count=active.count,
            log2_weight=log2_weight,
            logit_limit=None if batch.margin is None else batch.logit_factor,
            shifted=batch.shifted,
            wants_highest=batch.notes_highest,
            scales_LK=table.row_scales_LK,
        )
        self._buffer: Buffer | None = None
        """Buffer kept for exponentials of a range; None: each pass allocates one."""
        self._room = 0
        """Rows of a range that fit in the buffer."""
        self._there: tuple[int, int] | None = None
        """Range whose exponentials are in the buffer."""
        self._terms: SampleTerms | None = None

    @property
    def num_active(self) -> int:
        """A, padding included."""
        return self._head.num_active

    def forward(
        self, *, want_gradient: bool, keep_bytes: int, link: Communicator, sizes: Sequence[int]
    ) -> OnlineSoftmax:
        """Return the sums over the rows of this rank; keep exponentials of up to ``keep_bytes``, and of a range."""
        head, batch = self._head, self._batch
        if keep_bytes:
            self._room = range_rows(self._row_bytes, keep_bytes)
            self._buffer = self._acquire_buffer(self._room)
        shift_B: Tensor | None = None
        weighted_PBD: Tensor | None = None
        if want_gradient and not self.num_active:
            weighted_PBD = torch.zeros_like(batch.features_BD).unsqueeze(0)
        for start, stop, exponentials_NB in self.ranges():
            if not want_gradient:
                continue
            before_B, shift_B = shift_B, head.shift(0, stop)
            if weighted_PBD is not None and before_B is not None and shift_B is not None:
                weighted_PBD.mul_(torch.exp2(before_B - shift_B).unsqueeze(1))
            weighted_PBD = feature_gradient(head, exponentials_NB, start, stop, shift_B, weighted_PBD)
        return _Summed(batch, link, sizes, head, shift_B, weighted_PBD)

    def add_terms(self, weights_B: Tensor | None) -> None:
        """Compute the samples' terms of the row gradients, once the batch has the sums over all ranks; ``weights_B``
        are at most 1."""
        batch = self._batch
        self._terms = sample_terms(self._head, batch.features_BD, batch.lse2_B, batch.target_weight_B, weights_B)

    @property
    def max_rows(self) -> int:
        """Most rows of a range."""
        return range_rows(self._row_bytes)

    def ranges(self, max_rows: int | None = None) -> Iterator[tuple[int, int, Tensor]]:
        """Yield (start, stop, exponentials) of every range of at most ``max_rows`` rows, first the stored one."""
        bounds = _bounds(self.num_active, max_rows or self._room or self.max_rows)
        bounds.sort(key=lambda item: item != self._there)
        buffer = self._buffer or self._acquire_buffer(max_rows or self.max_rows)
        for start, stop in bounds:
            exponentials_NB = buffer.tensor((stop - start, self._batch.size), self._head.dtype)
            if (start, stop) != self._there:
                exponentials(self._head, exponentials_NB, start, stop)
            self._there = None if self._buffer is None else (start, stop)
            yield start, stop, exponentials_NB
        if self._buffer is None:
            self._table.pool.release(buffer)

    def row_factors(self, upstream: Tensor, ends_R: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return ``batch.row_factors`` by a kernel, and a number that is finite only if the rows' gradients are.

        ``upstream`` is the derivative by the mean loss (0-dim), by each sample's loss [B], or with ``ends_R`` [R]: by
        rank, of the mean over all ranks, where ``ends_R`` says where the samples of each rank end.
        """
        batch = self._batch
        scale = batch.scale
        if batch.num_counted is None and (upstream.ndim == 0 or ends_R is not None):
            scale /= max(1, batch.size)
        return row_factors(upstream, ends_R, scale, batch.num_counted, batch.lse2_B, batch.target_weight_B)

    def squares(self, exponentials_NB: Tensor, start: int, stop: int, factor: Tensor) -> Tensor:
        """Return Σ g² (0-dim, float64) over a range, of the gradient times ``factor``."""
        assert self._terms is not None
        return squared_norm(self._head, exponentials_NB, start, stop, self._terms, factor)

    def row_gradients(self, exponentials_NB: Tensor, start: int, stop: int, factor: Tensor) -> Tensor:
        """Return gradients [N, D] float32 of a range, times ``factor``."""
        assert self._terms is not None
        return row_gradients(self._head, exponentials_NB, start, stop, self._terms, factor)

    def update(self, optimizer: RowOptimizerSpec, factor: Tensor) -> None:
        """Update the rows by ``optimizer`` with ``factor`` (0-dim) times the gradient."""
        assert self._terms is not None
        lr = self._table.lr_of(optimizer)
        for start, stop, made_NB in self.ranges():
            update_rows(self._head, made_NB, start, stop, self._terms, factor, optimizer, self._table.stored, lr=lr)

    def clear(self) -> None:
        """Release kept exponentials; they are computed again where they are needed."""
        if self._buffer is not None:
            self._table.pool.release(self._buffer)
        self._buffer, self._room, self._there = None, 0, None

    def _acquire_buffer(self, num_rows: int) -> Buffer:
        """Return memory for the exponentials of ``num_rows`` rows."""
        return self._table.pool.acquire(min(num_rows, self.num_active) * self._row_bytes, self._table.device)

    @property
    def _row_bytes(self) -> int:
        return self._batch.size * self._head.dtype.itemsize


@dataclass(frozen=True)
class FusedGradient:
    """Gradient of all rows over one or several batches with the same active rows."""

    passes: Sequence[FusedPass]
    factors: Sequence[Tensor]
    """Factor of each batch's gradient (0-dim)."""

    def squares(self) -> Tensor:
        """Return Σ g² (0-dim, float64) over the rows of this rank."""
        if len(self.passes) > 1:
            parts = [squared_sum(gradient_ND) for _, _, gradient_ND in self._sums()]
        else:
            (only,), (factor,) = self.passes, self.factors
            parts = [only.squares(made_NB, start, stop, factor) for start, stop, made_NB in only.ranges()]
        return torch.stack(parts).sum() if parts else self.factors[0].new_zeros((), dtype=torch.float64)

    def update(self, table: DeviceRows, active: LocalActive, optimizer: RowOptimizerSpec, scale: Tensor) -> None:
        """Update the rows by ``optimizer`` with ``scale`` (0-dim) times the gradient."""
        if len(self.passes) == 1:
            self.passes[0].update(optimizer, self.factors[0] * scale)
            return
        assert isinstance(active, DeviceActive), "the device's"
        active = active.trimmed()
        places = active.places(table.device)
        for start, stop, gradient_ND in self._sums():
            if start < (stop := min(stop, active.num)):
                table.update(places.chunk(start, stop), gradient_ND[: stop - start], optimizer, scale)

    def _sums(self) -> Iterator[tuple[int, int, Tensor]]:
        """Yield (start, stop, gradients [N, D] float32) of range after range."""
        max_rows = min(item.max_rows for item in self.passes)
        for made in zip(*(item.ranges(max_rows) for item in self.passes), strict=True):
            total_ND: Tensor | None = None
            for item, factor, (start, stop, exponentials_NB) in zip(self.passes, self.factors, made, strict=True):
                gradient_ND = item.row_gradients(exponentials_NB, start, stop, factor)
                total_ND = gradient_ND if total_ND is None else total_ND.add_(gradient_ND)
            assert total_ND is not None
            yield made[0][0], made[0][1], total_ND


class _Summed(OnlineSoftmax):
    """Sums of a :class:`FusedPass`, to be joined with those of other ranks."""

    def __init__(
        self,
        batch: Batch,
        link: Communicator,
        sizes: Sequence[int],
        head: HeadPass,
        shift_B: Tensor | None,
        weighted_PBD: Tensor | None,
    ) -> None:
        self.batch, self._link, self._sizes, self._middle = batch, link, sizes, head.middle
        highest_B: Tensor | None = None
        if head.num_active:
            shift_B = head.shift() if shift_B is None else shift_B
            sum_B = head.sums(shift_B)
            if head.highest_TB is not None and batch.notes_highest:
                highest_B = head.highest_TB.amax(0)
        else:
            nothing_B = torch.full_like(batch.features_BD[:, 0], NO_LOGIT)
            shift_B = nothing_B if batch.shifted else None
            highest_B = nothing_B if batch.notes_highest else None
            sum_B = torch.zeros_like(nothing_B, dtype=torch.float64)
        self._found = shift_B, sum_B, weighted_PBD
        self._angle = _target_angle(batch)
        self.leaves_out = self._uses_kernels = runs_kernels(batch.arithmetic.device) and (
            batch.margin is None or self._angle is not None
        )
        if self._uses_kernels:
            target_rows_BD, self._cos_B = own_cosines(head, batch.features_BD)
        else:
            target_rows_BD = head.own_rows()
        self.sums = PartialSums(
            target_rows_BD=target_rows_BD,
            shift_PB=None,
            sum_PB=sum_B.unsqueeze(0),
            weighted_PBD=None,
            row_sum_PD=None,
            highest_PB=None if highest_B is None else highest_B.unsqueeze(0),
        )

    def finish(self) -> tuple[Tensor, Tensor | None]:
        if not self._uses_kernels:
            return super().finish()
        batch, own, weighted_PBD = self.batch, self.own, self._found[2]
        made = self._losses()
        if weighted_PBD is None:
            return made.losses_B[own], None
        counts_S = None if batch.counts_B is None else batch.counts_B[own]
        inverse_S = None if batch.inverse_lengths_B is None else batch.inverse_lengths_B[own]
        added: tuple[Tensor, Losses] | None = (self.sums.target_rows_BD, made)
        if self._link is not None and self._link.world_size > 1:
            weighted_BD = finish_gradient(weighted_PBD, added)
            weighted_PBD, added = self._link.sum_to_owners(weighted_BD, self._sizes).unsqueeze(0), None
        features_SD = batch.features_BD[own]
        gradient_SD = finish_gradient(weighted_PBD, added, features_SD, inverse_S, counts_S, batch.scale)
        return made.losses_B[own], gradient_SD

    def finish_part(self) -> tuple[Tensor, Tensor | None]:
        if not self._uses_kernels:
            return super().finish_part()
        made, weighted_PBD = self._losses(), self._found[2]
        weighted_BD = None if weighted_PBD is None else finish_gradient(weighted_PBD, (self.sums.target_rows_BD, made))
        return made.losses_B[self.own], weighted_BD

    def _losses(self) -> Losses:
        """Return the losses of all samples, from the sums over all ranks; fill in the batch."""
        batch, (shift_B, sum_B, _) = self.batch, self._found
        highest_B = None if self.sums.highest_PB is None else self.sums.highest_PB[0]
        joint_B, cos_B, link = shift_B, self._cos_B, self._link
        if link is not None and link.world_size > 1:
            maxima = [*([] if shift_B is None else [shift_B]), *([] if highest_B is None else [highest_B])]
            if maxima:
                joint_maxima = link.max(torch.stack(maxima))
                joint_B = None if shift_B is None else joint_maxima[0]
                highest_B = None if highest_B is None else joint_maxima[-1]
            sum_B, joint_cos_B = link.start_sum(scale_sums(sum_B, shift_B, joint_B, cos_B)).result()
            cos_B = joint_cos_B.float()
        if highest_B is None and batch.shift_is_highest:
            highest_B = joint_B
        own = self.own
        batch.target_B, batch.highest_B = cos_B[own], None if highest_B is None else highest_B[own] / batch.logit_factor
        made = losses(cos_B, sum_B, joint_B, shift_B, self._middle, batch.counts_B, self._angle)
        batch.losses_B, batch.lse2_B, batch.target_weight_B = made.losses_B, made.lse2_B, made.target_weight_B
        return made

    def _joint(self) -> tuple[Tensor, Tensor, Tensor | None]:
        shift_B, sum_B, weighted_PBD = self._found
        if shift_B is None:
            shift_B = torch.full_like(self.batch.features_BD[:, 0], self._middle)
        return shift_B, sum_B, None if weighted_PBD is None else weighted_PBD.sum(0)


def _target_angle(batch: Batch) -> TargetAngle | None:
    """Return the margin in the kernels' form; None: none, or one that kernels do not compute."""
    angles = added_angles(batch.margin)
    return None if angles is None else TargetAngle(batch.scale, *angles)
