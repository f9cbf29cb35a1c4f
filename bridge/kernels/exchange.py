"""Layout of all-to-all buffers: ids for the ranks of their rows, sums and gradients of vectors for the way back.

One pass covers all fields and ranks. A pair is a vector and a rank that has rows of it. Pairs are numbered by rank,
then field, then vector; in this order one buffer holds the sums, or the gradients, of fields of any width.

Legend: R ranks, F fields, Q = R · F pieces, N ids, V vectors of all fields, D width of a field.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from geartrain.bridge.kernels.launch import Cost, launch, runs_kernels
from geartrain.bridge.kernels.lookup import PLACE_BITS, BagPiece, Entries, address, in_rows, on_device

_BLOCK = 512
_VECTOR = (1 << PLACE_BITS) - 1
_ALIGNED = 4
"""Alignment of the gradients behind the flags, in numbers."""


class RoutedIds(NamedTuple):
    """Ids sorted by the ranks of their rows."""

    words: Tensor
    """int64: the key (or the id, where some tables have no bound); the pair's number in the low half and the weight's
    bits in the high one. Ids that count for nothing come last, and are not sent."""
    pairs_RV: Tensor
    """int32 [1 + R · V]: 0, then the running count of pairs up to each rank and vector."""
    starts_Q: Tensor
    """int64 [2, Q + 1]: the start of each rank and field's ids, and the number of its first pair; the ends last."""


def route(asked: Entries, shares: Sequence[int], num_ranks: int) -> RoutedIds:
    """Sort the ids ``asked`` by rank: an id's row is on rank id // share, with the ``shares`` of its table."""
    device, num_ids, num_fields = asked.key_N.device, len(asked.key_N), len(asked.pieces)
    first_vectors, num_parts = asked.first_vectors, num_ranks * num_fields
    num_vectors = first_vectors[-1]
    numbers = on_device([*shares, *first_vectors], device)
    if not runs_kernels(device):
        return _route_reference(asked, numbers[: asked.num_tables], numbers[asked.num_tables :], num_ranks)
    from geartrain.bridge.kernels.triton import exchange as kernels

    # 16 bits: half the passes of a sort.
    rank_N = torch.empty(num_ids, dtype=torch.int16 if num_ranks < 2**15 else torch.int32, device=device)
    has_RV = torch.zeros(1 + num_ranks * num_vectors, dtype=torch.int32, device=device)
    key_bytes = num_ids * asked.key_N.itemsize
    launch(
        kernels.find_ranks,
        (-(-num_ids // _BLOCK),),
        numbers,
        asked.key_N,
        asked.place_N,
        rank_N,
        has_RV,
        num_ids,
        asked.num_tables,
        num_vectors,
        num_ranks,
        asked.bits,
        asked.none,
        cost=Cost(key_bytes + asked.place_N.nbytes + rank_N.nbytes + min(4 * num_ids, has_RV.nbytes)),
        BLOCK=_BLOCK,
    )
    rank_N, order_N = torch.sort(rank_N, stable=True)
    pairs_RV = has_RV.cumsum(0, dtype=torch.int32)
    words = torch.empty(num_ids, 2, dtype=torch.int64, device=device)
    starts_Q = torch.empty(2, num_parts + 1, dtype=torch.int64, device=device)
    each = rank_N.itemsize + 8 + 8 + 4 + (0 if asked.weights_N is None else 4)
    launch(
        kernels.pack_ids,
        (num_ids // _BLOCK + 1,),
        numbers,
        rank_N,
        order_N,
        asked.key_N if asked.ids_N is None else asked.ids_N,
        asked.place_N,
        pairs_RV if asked.weights_N is None else asked.weights_N,
        pairs_RV,
        words,
        starts_Q,
        num_ids,
        asked.num_tables,
        num_fields,
        num_vectors,
        num_ranks,
        cost=Cost(key_bytes + num_ids * each + words.nbytes + starts_Q.nbytes),
        WEIGHTED=asked.weights_N is not None,
        BLOCK=_BLOCK,
    )
    return RoutedIds(words, pairs_RV, starts_Q)


def _route_reference(asked: Entries, share_T: Tensor, first_F: Tensor, num_ranks: int) -> RoutedIds:
    device, num_fields = asked.key_N.device, len(asked.pieces)
    num_vectors, num_parts = asked.first_vectors[-1], num_ranks * num_fields
    key_N, field_N = asked.key_N.to(torch.int64), asked.place_N >> PLACE_BITS
    vector_N = first_F[field_N] + (asked.place_N & _VECTOR)
    counts_N = (key_N < asked.none) & (vector_N < first_F[field_N + 1])
    rank_N = (key_N & ((1 << asked.bits) - 1)) // share_T[(key_N >> asked.bits).clamp_(max=asked.num_tables - 1)]
    rank_N = torch.where(counts_N, rank_N, num_ranks)
    at_N = torch.where(counts_N, rank_N * num_vectors + vector_N + 1, 0)
    has_RV = torch.zeros(1 + num_ranks * num_vectors, dtype=torch.int32, device=device).index_fill_(0, at_N, 1)
    has_RV[0] = 0
    pairs_RV = has_RV.cumsum(0, dtype=torch.int32)
    order_N = torch.argsort(rank_N, stable=True)  # the fields one after the other for each rank
    part_N = (rank_N * num_fields + field_N).clamp_(max=num_parts)[order_N]
    weights_N = (
        torch.ones(len(key_N), dtype=torch.float32, device=device) if asked.weights_N is None else asked.weights_N
    )
    halves = [pairs_RV[at_N] - 1, weights_N.view(torch.int32)]
    sent_N = key_N if asked.ids_N is None else asked.ids_N
    words = torch.stack([sent_N, torch.stack(halves, 1).view(torch.int64).view(-1)], 1)[order_N]
    parts_Q = torch.arange(num_parts + 1, device=device)
    first_Q = pairs_RV[parts_Q // num_fields * num_vectors + first_F[parts_Q % num_fields]].to(torch.int64)
    return RoutedIds(words, pairs_RV, torch.stack([torch.searchsorted(part_N, parts_Q), first_Q]))


def arrived(
    words: Tensor,
    asked: Entries,
    pieces: Sequence[BagPiece],
    first_pairs: Sequence[int],
    *,
    are_weighted: bool,
) -> Entries:
    """Return the ids that all ranks ask of this one.

    Args:
        words: :attr:`RoutedIds.words` for this rank from rank 0, then rank 1, ….
        asked: The ids of this rank; only their tables are used here.
        pieces: Numbers of ids and vectors that came from each rank and field.
        first_pairs: Number of the first pair of each rank and field, as counted there.
        are_weighted: Whether any rank's ids have weights.
    """
    device, num_ids = words.device, len(words)
    firsts = [0, *accumulate(piece.num_vectors for piece in pieces)]
    first_ids = [0, *accumulate(piece.num_ids for piece in pieces)]
    shifts = [there - here for there, here in zip(first_pairs, firsts, strict=False)]
    numbers = on_device([*first_ids, *firsts, *shifts], device)
    if not runs_kernels(device):
        halves = words.view(torch.int32)
        first_Q, shift_Q = numbers[len(first_ids) :].split_with_sizes([len(firsts), len(shifts)])
        ids_Q = numbers[: len(first_ids)].diff()
        piece_N = torch.repeat_interleave(torch.arange(len(pieces), device=device), ids_Q, output_size=num_ids)
        vector_N = halves[:, 2] - shift_Q[piece_N]
        return Entries(
            asked.bits,
            asked.num_tables,
            tuple(pieces),
            words[:, 0].to(asked.key_N.dtype),
            (piece_N << PLACE_BITS) | (vector_N - first_Q[piece_N]),
            torch.searchsorted(vector_N, torch.arange(firsts[-1] + 1, device=device)),
            halves[:, 3].contiguous().view(torch.float32) if are_weighted else None,
        )
    from geartrain.bridge.kernels.triton import exchange as kernels

    key_N = torch.empty(num_ids, dtype=asked.key_N.dtype, device=device)
    place_N = torch.empty(num_ids, dtype=torch.int64, device=device)
    bounds_V = torch.empty(firsts[-1] + 1, dtype=torch.int64, device=device)
    weights_N = torch.empty(num_ids, dtype=torch.float32, device=device) if are_weighted else None
    written = key_N.nbytes + place_N.nbytes + bounds_V.nbytes + (4 * num_ids if are_weighted else 0)
    launch(
        kernels.group_ids,
        (num_ids // _BLOCK + 1,),
        numbers,
        words,
        key_N,
        place_N,
        bounds_V,
        bounds_V if weights_N is None else weights_N,
        num_ids,
        len(pieces),
        firsts[-1],
        cost=Cost(words.nbytes + written),
        WEIGHTED=are_weighted,
        BLOCK=_BLOCK,
    )
    return Entries(asked.bits, asked.num_tables, tuple(pieces), key_N, place_N, bounds_V, weights_N)


@dataclass(frozen=True)
class RankPairs:
    """Pairs of vectors and ranks, and their places in the buffers that are sent."""

    pairs_RV: Tensor
    """:attr:`RoutedIds.pairs_RV`."""
    counts_RF: Sequence[Sequence[int]]
    """Number of pairs of each rank and field."""
    num_vectors: Sequence[int]
    """Vectors of each field [F]."""
    dims: Sequence[int]
    """Widths of the fields [F]."""

    @cached_property
    def sizes(self) -> list[int]:
        """Numbers (elements) for each rank [R], without flags."""
        return [sum(num * dim for num, dim in zip(own, self.dims, strict=True)) for own in self.counts_RF]

    @property
    def num_flags(self) -> int:
        """Number of flags before each rank's gradients, padded: a field's flag is 1 if it has gradients, else 0."""
        return -(-len(self.dims) // _ALIGNED) * _ALIGNED

    @cached_property
    def _vectors_RF(self) -> list[Tensor]:
        """Vectors of each rank and field, as positions in the field; in tensor operations."""
        num_vectors, counts = sum(self.num_vectors), [num for own in self.counts_RF for num in own]
        found = torch.nonzero_static(self.pairs_RV.diff(), size=sum(counts))[:, 0]
        firsts = [0, *accumulate(self.num_vectors)]
        starts = [rank * num_vectors + first for rank in range(len(self.counts_RF)) for first in firsts[:-1]]
        return [own - start for own, start in zip(found.split_with_sizes(counts), starts, strict=True)]

    def _numbers(self, tensors: Sequence[Tensor | None], num_flags: int) -> Tensor:
        """Return the arguments of the kernels: for each field its number of vectors, the first one, D and the tensor's
        address, and for each rank where pair 0 would be; then the start of each rank's part."""
        starts = [0, *accumulate(size + num_flags for size in self.sizes)]
        shifts_FR: list[list[int]] = [[] for _ in self.dims]
        pair = 0
        for own, start in zip(self.counts_RF, starts, strict=False):
            at = start + num_flags
            for shifts, num, dim in zip(shifts_FR, own, self.dims, strict=True):
                shifts.append(at - pair * dim)
                at, pair = at + num * dim, pair + num
        numbers: list[int] = []
        first = 0
        for num, dim, tensor, shifts in zip(self.num_vectors, self.dims, tensors, shifts_FR, strict=True):
            stride = 0 if tensor is None else tensor.stride(0)
            numbers += [num, first, dim, address(tensor), stride, tensor is not None, *shifts]
            first += num
        return on_device([*numbers, *starts[:-1]], self.pairs_RV.device)

    def _start(
        self, kernel_name: str, tensors: Sequence[Tensor | None], flat: Tensor, factor_V: Tensor | None, num_flags: int
    ) -> None:
        from geartrain.bridge.kernels.triton import exchange as kernels

        most = max((num * dim for num, dim in zip(self.num_vectors, self.dims, strict=True)), default=0)
        num_bytes = sum(4 * num * dim for num, dim in zip(self.num_vectors, self.dims, strict=True))
        launch(
            getattr(kernels, kernel_name),
            (max(1, -(-most // _BLOCK)), len(self.dims)),
            self._numbers(tensors, num_flags),
            flat,
            self.pairs_RV,
            flat if factor_V is None else factor_V,
            sum(self.num_vectors),
            len(self.counts_RF),
            cost=Cost(num_bytes + flat.nbytes + self.pairs_RV.nbytes + (0 if factor_V is None else factor_V.nbytes)),
            FACTORED=factor_V is not None,
            BLOCK=_BLOCK,
        )

    def combine(self, flat: Tensor, factor_V: Tensor | None) -> list[Tensor]:
        """Return factor · Σ over the ranks' sums, added in rank order: float32 [V, D] for each field.

        ``flat`` [Σ sizes] holds the sums of all pairs, one after another.
        """
        shapes = list(zip(self.num_vectors, self.dims, strict=True))
        if runs_kernels(flat.device):
            found = [torch.empty(shape, dtype=torch.float32, device=flat.device) for shape in shapes]
            self._start("combine_pairs", found, flat, factor_V, 0)
            return found
        found = [flat.new_zeros(shape) for shape in shapes]
        sizes = [num * dim for own in self.counts_RF for num, dim in zip(own, self.dims, strict=True)]
        for place, (vectors, part) in enumerate(zip(self._vectors_RF, flat.split_with_sizes(sizes), strict=True)):
            field = place % len(self.dims)
            found[field].index_add_(0, vectors, part.view(-1, self.dims[field]))
        if factor_V is not None:
            for own, factor in zip(found, factor_V.split_with_sizes(list(self.num_vectors)), strict=True):
                own *= factor[:, None]
        return found

    def spread(self, upstream: Sequence[Tensor | None], factor_V: Tensor | None) -> Tensor:
        """Return factor · gradient for each pair, float32 [Σ (num_flags + sizes)]: by rank, each part behind its flags.

        ``upstream`` holds the gradients of each field's vectors [V, D]; None: zero.
        """
        device, num_flags = self.pairs_RV.device, self.num_flags
        if runs_kernels(device):
            flat = torch.empty(sum(self.sizes) + num_flags * len(self.sizes), dtype=torch.float32, device=device)
            self._start("spread_pairs", in_rows(upstream), flat, factor_V, num_flags)
            return flat
        used = on_device([own is not None for own in upstream], device).to(torch.float32)
        flags = torch.cat([used, used.new_zeros(num_flags - len(used))])
        factors = None if factor_V is None else factor_V.split_with_sizes(list(self.num_vectors))
        scaled = [None if own is None else own.detach().to(torch.float32) for own in upstream]
        if factors is not None:
            scaled = [
                None if own is None else own * factor[:, None] for own, factor in zip(scaled, factors, strict=True)
            ]
        parts: list[Tensor] = []
        for place, vectors in enumerate(self._vectors_RF):
            field = place % len(self.dims)
            own = scaled[field]
            if not field:
                parts.append(flags)
            parts.append(flags.new_zeros(len(vectors) * self.dims[field]) if own is None else own[vectors].reshape(-1))
        return torch.cat(parts)
