"""The three products of a class head over the rows of one rank, each fused with the work on its result.

    exponentials:     E = exp(logit), and their sums
    feature_gradient: dX = E·Ŵ
    update_rows:      dW = Eᵀ·X̂ / Σ, back through the normalisation, and the optimizer's step

With a margin, logits use unit rows: |cos| ≤ 1, so exponentials need no shift. Without a margin each tile of 128 classes
has its own shift for every sample, the largest of its logits. A sample's own class is in none of these sums. Between
the products only E is stored, 2 bytes a class and sample (4 where products are in float32), or parts of it that are
recomputed: every function takes the range of positions that it works on.

E is stored times the inverse length of its row, which both other products need, and without a shift times
2^(−largest logit / 2), so that neither E nor 1 / Σ leaves the range of bfloat16.

For 8-bit rows the products use codes. Inverse lengths are those of the codes, in which the rows' scales cancel; without
a margin E is stored times the scale. A row's gradient is that of its codes over the scale.

Legend: L rows of this rank, A active ones (positions 0 … A − 1), N of one range, T tiles of 128 positions, B samples,
D width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from geartrain.ams.programs.class_head import NO_LOGIT
from geartrain.ams.values.optimizers.registry import RowOptimizerSpec
from geartrain.bridge.kernels import row_update
from geartrain.bridge.kernels.launch import Cost, launch, runs_kernels
from geartrain.bridge.kernels.optimizers import StepNumbers, step_numbers
from geartrain.bridge.kernels.row_update import RowArrays

TILE = 128
"""Classes that share a sum, and a shift. Ranges begin at its multiples."""
_NORM_FLOOR = 1e-12
_SMALLEST_FACTOR = 2.0**-40
"""Least factor of E in place of a row's scale: the scale of a row of zeros would carry E beyond float32."""
_UPDATE_TILE = 64
"""Rows that one program of an update handles."""
_NO_STEP = StepNumbers("SGD", 0.0)
_OF_ONE_SLOT = ("SGD", "MOMENTUM", "NESTEROV")
_PROCESSORS = 132
"""Processors of an H100. A feature gradient starts one or two programs for each, on every card, so that no sum depends
on the card."""


@dataclass(frozen=True, eq=False, kw_only=True)
class HeadPass:
    """One batch and the active rows of this rank: the operands that the three products share."""

    rows_LD: Tensor
    """float32, bfloat16, float16, or codes of float8_e4m3fn."""
    scales_LK: Tensor | None
    """bfloat16 [L, 1], scales of codes; None: rows are no codes."""
    numbers_A: Tensor | None
    """int64, ascending: the active rows; None: rows 0 … A − 1."""
    num_active: int
    """Number of active rows (A), padding included."""
    count: Tensor | None
    """int64 (0-dim) on the device: number of active rows, after which all is padding; None: A."""
    queries_BD: Tensor
    """Features (of unit length with a margin) times scale · log2 e, in the dtype of the products."""
    positions_B: Tensor
    """int64: position of each sample's own class; −1: not on this rank."""
    owners_A: Tensor
    """int32: a sample whose own class is at this position; −1: none. See :func:`owners`."""
    log2_weight: Tensor | None
    """float32 (0-dim): added to the base-2 logits of classes without an owner; None: 0."""
    logit_limit: float | None
    """scale · log2 e with a margin, where rows count as unit rows; None: without a margin."""
    shifted: bool
    """Whether exponentials are shifted: always without a margin."""
    dtype: torch.dtype
    """Type of E and of the products with it: float32 or bfloat16; float16 cannot hold exp(64)."""
    inverse_A: Tensor
    """float32, written by :func:`exponentials`: 1 / length of each row, or of its codes. Empty without a margin."""
    sums_TB: Tensor
    """float32, written by :func:`exponentials`: sums of exp2(logit − shift)."""
    highest_TB: Tensor | None
    """float32, written by :func:`exponentials`: largest base-2 logits, used as shifts; None: not wanted."""

    @staticmethod
    def of(
        rows_LD: Tensor,
        numbers_A: Tensor | None,
        queries_BD: Tensor,
        positions_B: Tensor,
        *,
        count: Tensor | None = None,
        log2_weight: float | Tensor = 0.0,
        logit_limit: float | None,
        shifted: bool,
        wants_highest: bool,
        scales_LK: Tensor | None = None,
    ) -> HeadPass:
        """Create a pass with empty buffers for the results of :func:`exponentials`. ``numbers_A`` None: all rows."""
        num_active = len(rows_LD) if numbers_A is None else len(numbers_A)
        num_tiles = -(-num_active // TILE)
        weight: Tensor | None = None
        if isinstance(log2_weight, Tensor):
            weight = log2_weight.float()
        elif log2_weight:
            weight = torch.full((), log2_weight, dtype=torch.float32, device=rows_LD.device)
        empty = partial(torch.empty, dtype=torch.float32, device=rows_LD.device)
        return HeadPass(
            rows_LD=rows_LD,
            scales_LK=scales_LK,
            numbers_A=numbers_A,
            num_active=num_active,
            count=count,
            queries_BD=queries_BD.contiguous(),
            positions_B=positions_B,
            owners_A=owners(positions_B, num_active),
            log2_weight=weight,
            logit_limit=logit_limit,
            shifted=shifted,
            dtype=torch.float32 if queries_BD.dtype == torch.float32 else torch.bfloat16,
            inverse_A=empty(num_active if logit_limit is not None else 0),
            sums_TB=empty(num_tiles, len(queries_BD)),
            highest_TB=empty(num_tiles, len(queries_BD)) if shifted or wants_highest else None,
        )

    @property
    def dim(self) -> int:
        """Width (D) of rows and features."""
        return self.queries_BD.shape[1]

    @property
    def middle(self) -> float:
        """Base-2 constant in place of a shift where there is none: one for all samples and ranges."""
        return 0.0 if self.shifted or self.logit_limit is None else self.logit_limit / 2

    @property
    def bits_LD(self) -> Tensor:
        """The rows as kernels read them: codes as uint8."""
        return self.rows_LD if self.scales_LK is None else self.rows_LD.view(torch.uint8)

    def rows(self, start: int, stop: int) -> Tensor:
        """Return the rows [N, D] at these positions as stored (codes as bfloat16); row 0 for padding."""
        rows_ND = self.rows_LD[self._index(start, stop)]
        return rows_ND if self.scales_LK is None else rows_ND.to(torch.bfloat16)

    def scales(self, start: int, stop: int) -> Tensor | None:
        """Return the scales of the rows at these positions, float32 [N]; None: rows are no codes."""
        return None if self.scales_LK is None else self.scales_LK[self._index(start, stop), 0].float()

    def _index(self, start: int, stop: int) -> slice | Tensor:
        if self.numbers_A is None:
            return slice(start, stop)
        return torch.where(self.is_active(start, stop), self.numbers_A[start:stop], 0)

    def is_active(self, start: int, stop: int) -> Tensor:
        """Return whether each position is active, not padding: bool [N]."""
        places_N = torch.arange(start, stop, device=self.rows_LD.device)
        return places_N < (self.num_active if self.count is None else self.count)

    def tiles(self, start: int, stop: int) -> slice:
        """Return the tiles of a range of positions."""
        return slice(start // TILE, -(-stop // TILE))

    def shift(self, start: int = 0, stop: int | None = None) -> Tensor | None:
        """Return each sample's largest base-2 logit among the classes of a range, [B]; None: there are no shifts."""
        if not self.shifted or self.highest_TB is None:
            return None
        return self.highest_TB[self.tiles(start, self.num_active if stop is None else stop)].amax(0)

    def sums(self, shift_B: Tensor | None, start: int = 0, stop: int | None = None) -> Tensor:
        """Return Σ exp2(logit − shift) over a range's classes, float64 [B]; without ``shift_B`` by :attr:`middle`."""
        tiles = self.tiles(start, self.num_active if stop is None else stop)
        sums_TB = self.sums_TB[tiles]
        if shift_B is None or self.highest_TB is None:
            return sums_TB.sum(0, dtype=torch.float64)
        return torch.exp2(self.highest_TB[tiles] - shift_B).mul_(sums_TB).sum(0, dtype=torch.float64)

    def own_rows(self) -> Tensor:
        """Return the (unit) rows of the samples' own classes, float32 [B, D]; zeros where they are not on this rank."""
        if self.num_active == 0:
            return torch.zeros_like(self.queries_BD, dtype=torch.float32)
        places_B = self.positions_B.clamp(min=0)
        factor_B = (self.positions_B >= 0).float()
        if self.logit_limit is not None:
            factor_B.mul_(self.inverse_A[places_B])
        rows_B = places_B if self.numbers_A is None else self.numbers_A[places_B]
        if self.logit_limit is None and self.scales_LK is not None:
            factor_B.mul_(self.scales_LK[rows_B, 0])
        # masked_fill, as 0 · NaN is NaN: bad values in another sample's row must not reach these samples.
        own_BD = self.rows_LD[rows_B].float().mul_(factor_B.unsqueeze(1))
        return own_BD.masked_fill_((self.positions_B < 0).unsqueeze(1), 0.0)


def owners(positions_B: Tensor, num_active: int) -> Tensor:
    """Return a sample whose own class is at each position, int32 [A]; any if there are several; −1: none."""
    samples_B = torch.arange(len(positions_B), dtype=torch.int32, device=positions_B.device)
    owners_A = torch.full((num_active + 1,), -1, dtype=torch.int32, device=positions_B.device)
    # Index −1 is the extra last element: it collects samples whose class is not on this rank.
    return owners_A.index_put_((positions_B,), samples_B)[:-1]


def exponentials(head: HeadPass, out_NB: Tensor, start: int, stop: int) -> None:
    """Write E [N, B] (``head.dtype``) of positions ``start`` … ``stop`` − 1, their inverse lengths, sums and maxima.

    E is 0 for a sample's own class. Padding may be left unwritten.
    """
    if runs_kernels(head.rows_LD.device):
        _launch_exponentials(head, out_NB, start, stop)
        return
    stored_ND, scales_N = head.rows(start, stop), head.scales(start, stop)
    logits_NB = stored_ND.to(head.queries_BD.dtype).float() @ head.queries_BD.float().t()
    inverse_N: Tensor | None = None
    if head.logit_limit is not None:
        lengths_N = torch.linalg.vector_norm(stored_ND, dim=1, dtype=torch.float32)
        floor = lengths_N.new_tensor(_NORM_FLOOR) if scales_N is None else _NORM_FLOOR / scales_N
        inverse_N = torch.maximum(lengths_N, floor).reciprocal_()
        head.inverse_A[start:stop] = inverse_N
        logits_NB *= inverse_N.unsqueeze(1)
    elif scales_N is not None:
        logits_NB *= scales_N.unsqueeze(1)
        inverse_N = scales_N.clamp(min=_SMALLEST_FACTOR)
    places_N = torch.arange(start, stop, device=logits_NB.device).unsqueeze(1)
    left_out_NB = (places_N == head.positions_B) | ~head.is_active(start, stop).unsqueeze(1)
    logits_NB.masked_fill_(left_out_NB, NO_LOGIT)
    tiles = head.tiles(start, stop)
    if head.highest_TB is not None:
        head.highest_TB[tiles] = torch.stack([tile.amax(0) for tile in torch.split(logits_NB, TILE)])
    logits_NB += _weights(head, start, stop).unsqueeze(1)
    logits_NB -= _shifts(head, start, stop)
    exponentials_NB = logits_NB.exp2_().masked_fill_(left_out_NB, 0.0)
    head.sums_TB[tiles] = torch.stack([tile.sum(0) for tile in torch.split(exponentials_NB, TILE)])
    out_NB.copy_(exponentials_NB if inverse_N is None else exponentials_NB * inverse_N.unsqueeze(1))


def _weights(head: HeadPass, start: int, stop: int) -> Tensor:
    """Return the weights [N] that are added to the base-2 logits of each position."""
    weight = head.inverse_A.new_zeros(()) if head.log2_weight is None else head.log2_weight
    return torch.where(head.owners_A[start:stop] < 0, weight, 0.0)


def _launch_exponentials(head: HeadPass, out_NB: Tensor, start: int, stop: int) -> None:
    from geartrain.bridge.kernels.triton import head as kernels

    batch, num_tiles = len(head.queries_BD), -(-(stop - start) // TILE)
    is_wide = batch > 128 and not head.shifted and head.rows_LD.dtype == head.queries_BD.dtype
    is_coded = head.shifted and head.scales_LK is not None
    options = kernels.exponentials_options(head.queries_BD.dtype, wide=is_wide, codes=is_coded)
    statistics = 4.0 * num_tiles * batch * (1 + (head.highest_TB is not None))
    launch(
        kernels.exponentials,
        (num_tiles * -(-batch // options["TILE_B"]),),
        head.bits_LD,
        head.scales_LK,
        head.numbers_A,
        head.count,
        head.queries_BD,
        head.positions_B,
        head.owners_A,
        out_NB,
        None if head.logit_limit is None else head.inverse_A,
        head.sums_TB,
        head.highest_TB,
        head.log2_weight,
        start,
        stop,
        batch,
        head.middle,
        SHIFTED=head.shifted,
        DIM=head.dim,
        PRECISION=_precision(),
        **options,
        cost=_cost(head, out_NB, head.queries_BD.nbytes + statistics),
    )


def _cost(head: HeadPass, exponentials_NB: Tensor, more_bytes: float, products: int = 1) -> Cost:
    """Return the cost of one product over these classes, or of ``products`` that read the rows once."""
    num = len(exponentials_NB)
    scale_bytes = 0 if head.scales_LK is None else head.scales_LK.itemsize
    num_bytes = float(num * (head.dim * head.rows_LD.itemsize + scale_bytes + 8)) + exponentials_NB.nbytes
    flops = 2.0 * products * exponentials_NB.numel() * head.dim
    return Cost(num_bytes + more_bytes, flops, exponentials_NB.dtype)


def _precision() -> str:
    """Return Triton's precision of float32 products, by torch's setting."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


def _shifts(head: HeadPass, start: int, stop: int) -> Tensor | float:
    """Return the shift of each position and sample, [N, B]; or the one constant of all."""
    if not head.shifted or head.highest_TB is None:
        return head.middle
    return head.highest_TB[head.tiles(start, stop)].repeat_interleave(TILE, 0)[: stop - start]


def feature_gradient(
    head: HeadPass,
    exponentials_NB: Tensor,
    start: int,
    stop: int,
    shift_B: Tensor | None,
    earlier_PBD: Tensor | None = None,
) -> Tensor:
    """Return Σ_a exp2(logit − shift) ŵ_a over a range, in P partial sums: float32 [P, B, D].

    A sample's own class is left out.

    Args:
        head: The batch and rows.
        exponentials_NB: E of the range.
        start: First position.
        stop: End of the range.
        shift_B: Shift of each sample, at least that of the range; None: ``head.middle``.
        earlier_PBD: Result for other ranges with the same shift, to which this one is added in place; None: none.
    """
    if runs_kernels(head.rows_LD.device):
        return _launch_feature_gradient(head, exponentials_NB, start, stop, shift_B, earlier_PBD)
    active_N = head.is_active(start, stop).unsqueeze(1)
    weights_NB = exponentials_NB.float()
    if shift_B is not None:
        weights_NB = weights_NB * torch.exp2(_shifts(head, start, stop) - shift_B)
    weights_NB = weights_NB.to(exponentials_NB.dtype).float().masked_fill(~active_N, 0.0)
    keys_ND = head.rows(start, stop).to(exponentials_NB.dtype).float().masked_fill(~active_N, 0.0)
    gradient_PBD = (weights_NB.t() @ keys_ND).unsqueeze(0)
    return gradient_PBD if earlier_PBD is None else earlier_PBD.add_(gradient_PBD)


def _launch_feature_gradient(
    head: HeadPass,
    exponentials_NB: Tensor,
    start: int,
    stop: int,
    shift_B: Tensor | None,
    earlier_PBD: Tensor | None,
) -> Tensor:
    from geartrain.bridge.kernels.triton import head as kernels

    is_whole = stop - start == head.num_active
    is_plain = is_whole and shift_B is None and head.rows_LD.dtype == exponentials_NB.dtype
    options = kernels.feature_gradient_options(exponentials_NB.dtype, plain=is_plain, picked=head.numbers_A is not None)
    batch = len(head.queries_BD)
    blocks = -(-batch // options["TILE_B"]) * -(-head.dim // options["TILE_D"])
    programs = _PROCESSORS if options["TILE_D"] == 256 else 2 * _PROCESSORS
    parts = max(1, min(programs // max(1, blocks), head.num_active // TILE))
    out_PBD = earlier_PBD
    if out_PBD is None:
        out_PBD = torch.empty(parts, batch, head.dim, dtype=torch.float32, device=head.rows_LD.device)
    launch(
        kernels.feature_gradient,
        (blocks * parts,),
        head.bits_LD,
        head.numbers_A,
        head.count,
        exponentials_NB,
        None if shift_B is None else head.highest_TB,
        shift_B,
        out_PBD,
        start,
        stop,
        batch,
        parts,
        ADDS=earlier_PBD is not None,
        DIM=head.dim,
        SUM_TILE=TILE,
        PRECISION=_precision(),
        **options,
        cost=_cost(head, exponentials_NB, out_PBD.nbytes * (1 + (earlier_PBD is not None))),
    )
    return out_PBD


@dataclass(frozen=True, eq=False, kw_only=True)
class SampleTerms:
    """The samples' side of the rows' gradients."""

    keys_BD: Tensor
    """Features in the dtype of E, times their weight; without shifts also over Σ."""
    factors_B: Tensor
    """float32: factor by which ``keys_BD`` were multiplied."""
    lse2_B: Tensor
    """float32: log2 Σ, own class included."""
    own_BD: Tensor
    """float32: sum of what all samples of the own class add to the gradient of its (unit) row."""
    own_along_B: Tensor
    """float32: component of ``own_BD`` along that row."""
    bounds_B: Tensor
    """float32: bounds whose sum no (unit) row's gradient exceeds in length."""


def sample_terms(
    head: HeadPass, features_BD: Tensor, lse2_B: Tensor, own_weight_B: Tensor, weights_B: Tensor | None
) -> SampleTerms:
    """Prepare the rows' gradients Σ_b weight_b · (p_ab · feature_b, or own_weight_b · feature_b for the own class).

    ``features_BD`` (of unit length with a margin), ``lse2_B`` and ``own_weight_B`` (dloss/dcos over the scale) are
    float32; ``weights_B`` of at most 1, None: 1.
    """
    if runs_kernels(head.rows_LD.device):
        return _launch_sample_terms(head, features_BD, lse2_B, own_weight_B, weights_B)
    weights_B = torch.ones_like(lse2_B) if weights_B is None else weights_B
    factors_B = weights_B if head.shifted else weights_B * torch.exp2(head.middle - lse2_B)
    own_weight_B = own_weight_B * weights_B
    is_same_BB = (head.positions_B.unsqueeze(1) == head.positions_B) & (head.positions_B >= 0)
    own_BD = torch.where(is_same_BB, own_weight_B, 0.0) @ features_BD
    return SampleTerms(
        keys_BD=(features_BD * factors_B.unsqueeze(1)).to(head.dtype),
        factors_B=factors_B,
        lse2_B=lse2_B,
        own_BD=own_BD,
        own_along_B=(own_BD * head.own_rows()).sum(1),
        bounds_B=torch.linalg.vector_norm(features_BD, dim=1) * (weights_B.abs() + own_weight_B.abs()),
    )


def _launch_sample_terms(
    head: HeadPass, features_BD: Tensor, lse2_B: Tensor, own_weight_B: Tensor, weights_B: Tensor | None
) -> SampleTerms:
    from geartrain.bridge.kernels.triton import head as kernels

    batch, dim = features_BD.shape
    terms = SampleTerms(
        keys_BD=torch.empty_like(features_BD, dtype=head.dtype),
        factors_B=torch.empty_like(lse2_B),
        lse2_B=lse2_B,
        own_BD=torch.empty_like(features_BD),
        own_along_B=torch.empty_like(lse2_B),
        bounds_B=torch.empty_like(lse2_B),
    )
    launch(
        kernels.sample_terms,
        (batch,),
        head.bits_LD,
        head.numbers_A,
        None if head.logit_limit is None else head.inverse_A,
        head.positions_B,
        features_BD,
        lse2_B,
        own_weight_B,
        weights_B,
        terms.keys_BD,
        terms.factors_B,
        terms.own_BD,
        terms.own_along_B,
        terms.bounds_B,
        batch,
        head.middle,
        SHIFTED=head.shifted,
        DIM=dim,
        **kernels.sample_terms_options(dim),
        cost=Cost(batch * dim * (12.0 + head.dtype.itemsize + head.rows_LD.itemsize)),
    )
    return terms


def row_gradients(
    head: HeadPass, exponentials_NB: Tensor, start: int, stop: int, terms: SampleTerms, factor: Tensor
) -> Tensor:
    """Return ``factor`` (0-dim) times the gradients of the stored rows, float32 [N, D]; zeros for padding."""
    if runs_kernels(head.rows_LD.device):
        out_ND = torch.empty(stop - start, head.dim, dtype=torch.float32, device=factor.device)
        _launch_update(head, exponentials_NB, start, stop, terms, factor, out_ND=out_ND)
        return out_ND
    active_N = head.is_active(start, stop).unsqueeze(1)
    stored_NB = exponentials_NB.float()
    weights_NB = stored_NB * torch.exp2(_shifts(head, start, stop) - terms.lse2_B) if head.shifted else stored_NB
    gradient_ND = weights_NB.to(exponentials_NB.dtype).float() @ terms.keys_BD.float()
    owners_N = head.owners_A[start:stop].long()
    owned_N, owners_N = owners_N >= 0, owners_N.clamp(min=0)
    own_ND = torch.where(owned_N.unsqueeze(1), terms.own_BD[owners_N], 0.0)
    scales_N = head.scales(start, stop)
    if head.logit_limit is None:
        if scales_N is not None:
            gradient_ND /= scales_N.clamp(min=_SMALLEST_FACTOR).unsqueeze(1)
        return (gradient_ND + own_ND).mul_(factor).masked_fill_(~active_N, 0.0)
    inverse_N = head.inverse_A[start:stop]
    # Σ p · cos, with the cosine from the logarithm of E: no sum over D is needed.
    offset_N = _weights(head, start, stop) + torch.log2(inverse_N)
    logits_NB = torch.log2(stored_NB.clamp(min=torch.finfo(torch.float32).tiny)) - offset_N.unsqueeze(1)
    logits_NB += _shifts(head, start, stop)
    along_N = (weights_NB * logits_NB) @ terms.factors_B / (inverse_N * head.logit_limit)
    along_N += torch.where(owned_N, terms.own_along_B[owners_N], 0.0)
    gradient_ND.addcmul_(own_ND, inverse_N.unsqueeze(1))
    gradient_ND.addcmul_(head.rows(start, stop).float(), (along_N * inverse_N.square()).unsqueeze(1), value=-1)
    if scales_N is not None:
        gradient_ND /= scales_N.unsqueeze(1)
    return gradient_ND.mul_(factor).masked_fill_(~active_N, 0.0)


def squared_norm(
    head: HeadPass, exponentials_NB: Tensor, start: int, stop: int, terms: SampleTerms, factor: Tensor
) -> Tensor:
    """Return Σ g² over the gradients of a range, float64 (0-dim)."""
    if runs_kernels(head.rows_LD.device):
        squares_P = torch.empty(-(-(stop - start) // _UPDATE_TILE), dtype=torch.float32, device=factor.device)
        _launch_update(head, exponentials_NB, start, stop, terms, factor, squares_P=squares_P)
        return squares_P.sum(dtype=torch.float64)
    gradient_ND = row_gradients(head, exponentials_NB, start, stop, terms, factor)
    return gradient_ND.square_().sum(dtype=torch.float64)


def update_rows(
    head: HeadPass,
    exponentials_NB: Tensor,
    start: int,
    stop: int,
    terms: SampleTerms,
    factor: Tensor,
    optimizer: RowOptimizerSpec,
    stored: RowArrays,
    *,
    lr: float | Tensor,
) -> None:
    """Make one step of ``optimizer`` with ``factor`` (float32, 0-dim) times the gradients of a range's rows.

    Equals :func:`row_gradients` followed by ``row_update.update``. One kernel does both if it supports the optimizer:
    row-wise ones need the mean of a whole row and run as two, and so does any but SGD and momentum with 8 bits.
    ``stored`` holds the rows of ``head``; ``lr`` is a number or, 0-dim float32, on the device.
    """
    numbers = step_numbers(optimizer)
    is_known = numbers is not None and (
        not numbers.kind.startswith("ROWWISE") if stored.clock is None else numbers.kind in _OF_ONE_SLOT
    )
    if numbers is not None and is_known and runs_kernels(head.rows_LD.device):
        _launch_update(head, exponentials_NB, start, stop, terms, factor, numbers, stored, lr)
        return
    gradient_ND = row_gradients(head, exponentials_NB, start, stop, terms, factor)
    index = slice(start, stop) if head.numbers_A is None else head.numbers_A[start:stop]
    num_valid = None if head.count is None else head.count - start
    row_update.update(stored, index, gradient_ND, optimizer, lr=lr, scale=torch.ones_like(factor), num_valid=num_valid)


def _calm(numbers: StepNumbers, row: torch.dtype, slot: torch.dtype) -> tuple[float, float]:
    """Return (limit, loss): bounds within which an update cannot overflow.

    A row whose numbers, slots and gradient are at most ``limit`` / (1 + ``loss`` · lr) stays within the range of its
    dtypes.
    """
    largest = 0.9 * min(torch.finfo(row).max, torch.finfo(slot).max)
    direction = 1.0 + numbers.decay  # the gradient plus decay, in units of the bound
    if numbers.kind in _OF_ONE_SLOT:
        return largest / (2.0 * direction + 1.0), 1.0
    rest = 1.0 if numbers.kind == "ADAGRAD" else -math.expm1(numbers.a)
    step = numbers.decay + 1.0 / (rest * numbers.eps)
    return math.sqrt(largest) / (2.0 * direction), step


def _launch_update(
    head: HeadPass,
    exponentials_NB: Tensor,
    start: int,
    stop: int,
    terms: SampleTerms,
    factor: Tensor,
    numbers: StepNumbers = _NO_STEP,
    stored: RowArrays | None = None,
    lr: float | Tensor = 0.0,
    squares_P: Tensor | None = None,
    out_ND: Tensor | None = None,
) -> None:
    """Update the ``stored`` rows; or write each program's sum of squares, or the gradients."""
    from geartrain.bridge.kernels.triton import head as kernels
    from geartrain.bridge.kernels.triton import row_step

    device, slots_LS = head.rows_LD.device, None if stored is None else stored.slots_LS
    slots = head.rows_LD[:0] if slots_LS is None else slots_LS
    num_slots = 0 if slots_LS is None else slots_LS.shape[1] // head.dim
    is_light = head.rows_LD.itemsize == slots.itemsize == 2 and num_slots < 2 and not head.shifted
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    is_scaled = stored is not None and stored.clock is not None
    by_block = stored is not None and stored.slot_scales_LK is not None
    options = kernels.update_options(exponentials_NB.dtype, light=is_light and is_hopper, by_block=by_block)
    keeps = is_scaled and head.dim <= 4 * options["TILE_D"]
    more_bytes = 0.0 if out_ND is None else float(out_ND.nbytes)
    if stored is not None:
        row_bytes = row_update.bytes_per_row(stored) - head.dim * head.rows_LD.itemsize  # _cost counts the rows once
        more_bytes = float((stop - start) * row_bytes)
    limit, loss = (0.0, 0.0) if is_scaled else _calm(numbers, head.rows_LD.dtype, slots.dtype)
    launch(
        kernels.update_rows,
        (-(-(stop - start) // _UPDATE_TILE),),
        head.bits_LD,
        slots_LS,
        None if stored is None else stored.updates_L,
        head.scales_LK,
        None if stored is None else stored.slot_scales_LK,
        None if stored is None else stored.clock,
        head.numbers_A,
        head.count,
        exponentials_NB,
        terms.keys_BD,
        terms.factors_B,
        terms.lse2_B,
        head.highest_TB if head.shifted else None,
        head.owners_A,
        terms.own_BD,
        terms.own_along_B,
        terms.bounds_B,
        None if head.logit_limit is None else head.inverse_A,
        factor,
        None if stored is None else stored.refused,
        squares_P,
        out_ND,
        head.log2_weight,
        start,
        stop,
        len(head.queries_BD),
        head.middle,
        head.logit_limit or 1.0,
        0 if stored is None else stored.first,
        0 if stored is None else stored.key,
        limit,
        loss,
        lr,
        numbers.decay,
        numbers.a,
        numbers.b,
        numbers.eps,
        LR_ON_DEVICE=isinstance(lr, Tensor),
        KIND=getattr(row_step, numbers.kind).value,
        KEEPS=keeps,
        SLOTS=num_slots,
        SHIFTED=head.shifted,
        DIM=head.dim,
        SUM_TILE=TILE,
        TILE_N=_UPDATE_TILE,
        PRECISION=_precision(),
        **options,
        cost=_cost(head, exponentials_NB, more_bytes, products=1 + (is_scaled and not keeps)),
    )
