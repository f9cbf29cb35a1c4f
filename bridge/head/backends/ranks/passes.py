"""Passes of a class head over rows on the ranks' devices. Rows stay in place: features are sent to them.

Per training step and rank, with B samples of R ranks, D width, A active classes (all of them together):
one exchange of twelve integers between the hosts, an all-gather of the labels (8·B bytes) and of the features (their
type · B·D), the all-reduces of ``softmax.py`` (24·B bytes), a reduce-scatter of 4·B·D, and an all-gather of R
numbers in the backward; with sample weights, and for the sum of losses, an all-reduce of the loss. Time O(B·D·A / R).
Memory beside the rows: O(B·D) and some chunks; a row's gradient is made, used and forgotten chunk by chunk at the
optimizer's step.

Legend: B samples of all ranks, S of this one, L rows on this rank, A active ones of them, D width, N rows of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from geartrain.ams.programs.hosted import chunk_bounds
from geartrain.ams.values.optimizers.registry import RowOptimizerSpec
from geartrain.ams.values.specs import Ids
from geartrain.bridge.head.backends.active_rows import DeviceActive, LocalActive, add_log_q_correction
from geartrain.bridge.head.backends.pending_gradients import BatchPart, FactoredGradient, Factors, overwrite_by_sum
from geartrain.bridge.head.backends.ranks.fused import FusedGradient, FusedPass
from geartrain.bridge.head.loss.batch import Batch
from geartrain.bridge.head.loss.block_loop import add_rows, gradient_blocks
from geartrain.bridge.head.loss.chunk_pass import ChunkPass, pass_for
from geartrain.bridge.head.loss.chunk_pool import CHUNKS
from geartrain.bridge.head.loss.kept_logits import KeptLogits
from geartrain.bridge.head.loss.softmax import OnlineSoftmax
from geartrain.bridge.kernels.launch import runs_kernels
from geartrain.bridge.placements.device_rows import DeviceRows, RowIndex
from geartrain.bridge.placements.workspace import Workspace
from geartrain.bridge.rows.gradient_carrier import squared_sum
from geartrain.bridge.rows.transfers import upload

T = TypeVar("T")

PARTS = 8
"""Number of partial sums, added in order: the result does not depend on the number of threads."""


class _RowsHere:
    """Active rows of this rank, as a block: copies, or with ``in_place`` the rows themselves where only read."""

    start = 0

    def __init__(self, table: DeviceRows, active: LocalActive, in_place: torch.dtype | None = None) -> None:
        self._table, self._places, self.stop = table, active.places(table.device), active.num
        self._reads_in_place = active.has_all and in_place is not None and table.reads_in_place(in_place)

    def index(self, start: int, stop: int) -> RowIndex:
        """Return the index of the rows at these positions."""
        return self._places.chunk(start, stop)

    def load(self, work: Workspace, start: int, stop: int) -> Tensor:
        """Load rows, as :class:`~geartrain.bridge.head.loss.block_loop.BlockOfRows`."""
        if self._reads_in_place:
            return self._table.rows_LD[start:stop]
        return self._table.load(work, self.index(start, stop), name="rows")


class RankRows:
    """Rows of one forward pass."""

    def __init__(
        self,
        table: DeviceRows,
        active: LocalActive,
        batch: Batch,
        numbers_B: Ids | Tensor,
        sizes: Sequence[int],
        wants_gradient: bool,
        log2_weight: float | Tensor | None = None,
        *,
        fuses: bool = False,
    ) -> None:
        """``active`` are classes of this rank, ``numbers_B`` the labels' row numbers, outside [0, L) for other ranks'.

        ``log2_weight`` is added to the logits, to base 2, of active classes that are not labels. ``fuses``: kernels
        compute the passes (:mod:`~.fused`).
        """
        self._table = table
        self._wants_gradient = wants_gradient
        self.batch = batch
        self._sizes = sizes
        self._active = active
        self._numbers_B = numbers_B
        self._log2_weight = log2_weight
        self._fused: FusedPass | None = None
        self._kept: KeptLogits | None = None
        if fuses:
            assert isinstance(active, DeviceActive), "the device's"
            self._fused = FusedPass(table, active, batch, 0.0 if log2_weight is None else log2_weight)
            return
        if isinstance(active, DeviceActive):
            self._active = active = active.trimmed()
        add_log_q_correction(batch, active, numbers_B, log2_weight)
        self._pass = pass_for(batch)

    def forward(self, *, want_gradient: bool, keep_bytes: int) -> tuple[Tensor, Tensor | None]:
        """Return losses of the own samples [S] and feature gradients [S, D]; keeps logits of up to ``keep_bytes``.

        Collective, as :class:`OnlineSoftmax`.
        """
        joint_want = want_gradient or self._wants_gradient  # another rank's features may need theirs
        softmax = self._sums(joint_want, keep_bytes)
        losses_S, gradient_SD = self._finish(softmax)
        if self.batch.counts_B is not None and not softmax.leaves_out:
            self.batch.losses_B = self.batch.losses_B * self.batch.counts_B
            losses_S = self.batch.losses_B[softmax.own]
            if gradient_SD is not None:
                gradient_SD.masked_fill_((self.batch.counts_B[softmax.own] != 1).unsqueeze(1), 0.0)
        return losses_S, gradient_SD if want_gradient else None

    def _sums(self, joint_want: bool, keep_bytes: int) -> OnlineSoftmax:
        """Return the sums over the rows of this rank."""
        table, batch = self._table, self.batch
        if self._fused is not None:
            return self._fused.forward(
                want_gradient=joint_want, keep_bytes=keep_bytes, link=table.link, sizes=self._sizes
            )
        chunks = chunk_bounds(self._active.num, self._pass.chunk_rows)
        num_parts = max(1, min(PARTS, len(chunks)))
        softmax = OnlineSoftmax(batch, num_parts, want_gradient=joint_want, link=table.link, sizes=self._sizes)
        if self._pass.keeps_logits:
            self._kept = KeptLogits(table.pool, batch, self._active.num, self._pass.chunk_rows, keep_bytes)
        add_rows(softmax, self._pass, [_RowsHere(table, self._active, batch.arithmetic.compute)], self._kept)
        return softmax

    def _finish(self, softmax: OnlineSoftmax) -> tuple[Tensor, Tensor | None]:
        if self._table.link.world_size > 1:
            return softmax.finish()
        # Alone, no rank is waited for, and the next operation needs every core.
        return CHUNKS.apart(softmax.finish, self.batch.arithmetic.device)

    def gradient(self, upstream: Tensor) -> tuple[RankGradient, Tensor]:
        """Return the row gradients, to be made at the step, and a number that is finite only if they are, on every
        rank.

        Collective: one all-gather of R numbers or, where samples count differently, of B.
        """
        batch = self.batch
        if self._fused is not None and runs_kernels(self._table.device):
            factor, weights_B, checksum = self._fused.row_factors(*self._gathered(upstream.detach()))
        else:
            factor, weights_B = batch.row_factors(self._joint_upstream(upstream.detach()))
            checksum = factor + torch.dot(batch.lse2_B, batch.target_weight_B)  # 0 · ∞ is NaN, too
            if batch.num_counted is not None:
                checksum = checksum + batch.num_counted
        if self._fused is not None:
            self._fused.add_terms(weights_B)
        else:
            self._pass = self._pass if weights_B is None else pass_for(batch, weights_B)
        factors = Factors(
            batch=batch,
            chunk_pass=None if self._fused is not None else self._pass,
            active=self._active,
            labels_B=self._numbers_B,
            positives=self._numbers_B,
            log2_weight=self._log2_weight,
            factor=factor,
            kept=self._kept,
        )
        return RankGradient(self._table, factors, self._fused, weights_B), checksum

    def _gathered(self, upstream: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the derivative of all samples [B] or by the mean (0-dim), or of each rank [R] with its samples' end
        [R]."""
        link = self._table.link
        if upstream.ndim > 0:
            return link.gather(upstream, self._sizes), None
        if link.world_size == 1:
            return upstream, None
        upstream_R = link.gather(upstream.reshape(1), [1] * link.world_size)
        size = self._sizes[0]
        if size and min(self._sizes) == max(self._sizes):  # a CUDA graph may hold this
            return upstream_R, torch.arange(size, size * len(upstream_R) + 1, size, device=upstream_R.device)
        return upstream_R, upload(np.cumsum(self._sizes), upstream_R.device)

    def _joint_upstream(self, upstream: Tensor) -> Tensor:
        """Return the derivative by the mean over all ranks (0-dim) if all are known to have it, else of each sample."""
        joint, ends_R = self._gathered(upstream)
        if ends_R is None:
            return joint
        if joint.device.type == "cpu" and bool((joint == joint[0]).all()):
            return joint[0]
        counts_R = ends_R.diff(prepend=ends_R.new_zeros(1))
        return joint.repeat_interleave(counts_R, output_size=self.batch.size) / self.batch.divisor

    def discard(self) -> None:
        """Release kept memory."""
        if self._kept is not None:
            self._kept.clear()
        if self._fused is not None:
            self._fused.clear()


class RankGradient(FactoredGradient):
    """Row gradients as the factors they are made of, and the kept logits."""

    def __init__(
        self, table: DeviceRows, factors: Factors, fused: FusedPass | None, weights_B: Tensor | None = None
    ) -> None:
        super().__init__(factors)
        self._table = table
        self._weights = [weights_B]
        self._fused = [] if fused is None else [fused]
        """Fused passes of all batches; empty if one batch, or all together, do not suit the kernels."""

    def merge(self, other: RankGradient) -> None:
        """Add the gradient of another micro-batch, which is used up."""
        super().merge(other)
        are_fused = bool(self._fused) and bool(other._fused)
        are_fused = are_fused and all(factors.active.fills(self._active) for factors in self._factors)
        self._weights += other._weights
        self._fused = [*self._fused, *other._fused]
        self._return_buffers()
        if not are_fused:
            self._fused = []

    @property
    def _fused_gradient(self) -> FusedGradient:
        return FusedGradient(self._fused, [factors.factor for factors in self._factors])

    def _return_buffers(self) -> None:
        for fused in self._fused:
            fused.clear()
        for factors in self._factors:
            if factors.kept is not None:
                factors.kept.clear()

    def _parts(self) -> tuple[list[BatchPart], ChunkPass]:
        for place, (factors, weights_B) in enumerate(zip(self._factors, self._weights, strict=True)):
            if factors.chunk_pass is None:
                add_log_q_correction(factors.batch, factors.active, factors.positives, factors.log2_weight)
                self._factors[place] = replace(factors, chunk_pass=pass_for(factors.batch, weights_B))
        return super()._parts()

    def apply(self, optimizer: RowOptimizerSpec, scale: Tensor) -> None:
        """Update the rows and slots by ``optimizer`` with ``scale`` (0-dim) times the gradient; that ends the step.

        Sends nothing and waits for no rank.
        """
        table = self._table
        if self._fused:
            self._fused_gradient.update(table, self._active, optimizer, scale)
            table.end_step(optimizer.lr)
            return

        def update(index: RowIndex, gradient_ND: Tensor) -> None:
            table.update(index, gradient_ND, optimizer, scale)

        self._over_chunks(update, use_kept=True)
        table.end_step(optimizer.lr)

    def squared_norm(self) -> float:
        return float(self.squares_on_device())

    def squares_on_device(self) -> Tensor:
        """Return Σ g² (0-dim, float64) over the rows of all ranks; computes the gradient once more. Collective: an
        all-reduce of one number."""

        def squares(index: RowIndex, gradient_ND: Tensor) -> Tensor:
            del index
            return squared_sum(gradient_ND)

        table = self._table
        if self._fused:
            return table.link.sum(self._fused_gradient.squares())
        parts = self._over_chunks(squares, use_kept=False)
        if table.device.type == "cpu":
            return table.link.sum(
                torch.tensor(math.fsum(float(part) for part in parts), dtype=torch.float64, device="cpu")
            )
        nothing = torch.zeros((), dtype=torch.float64, device=table.device)
        return table.link.sum(torch.stack([nothing, *parts]).sum())

    def discard(self) -> None:
        """Release the factors."""
        self._return_buffers()
        self._factors = []

    def _over_chunks(self, action: Callable[[RowIndex, Tensor], T], *, use_kept: bool) -> list[T]:
        """Return the results of ``action(index, gradient_ND)`` for each chunk; the tensor is scratch."""
        parts, chunk_pass = self._parts()
        factors = self._factors[0]

        def act(rows: _RowsHere, start: int, stop: int, gradient_ND: Tensor, checksum: Tensor) -> T:
            del checksum
            return action(rows.index(start, stop), gradient_ND)

        rows = _RowsHere(self._table, self._active)
        overwrite, kept = partial(overwrite_by_sum, parts), factors.kept if use_kept else None
        made = gradient_blocks(overwrite, chunk_pass, factors.batch.arithmetic, [rows], act, kept)
        return next(made)[1]
