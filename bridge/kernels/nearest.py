"""Nearest of many rows: the K largest products of each row with blocks of other rows, offered one after another.

A product and the id of the other row are packed in one int64 key, so sorting keys is enough: the float32 product, its
bits ordered as an integer, in the upper half, 2^31 − 1 − id in the lower. The largest key is the best; equal products
rank by ascending id.

A block is searched in one of two ways. While a row has seen few others, all products are sorted. Later a kernel keeps
only products above the row's threshold, the smallest of its K so far: these are rare (K / seen of all), and are merged
when a row has about K of them. A product equal to the threshold is dropped, so of equal products at the K-th place the
lowest ids are kept if blocks come in ascending order.

Legend: M rows that search, N others, D width, K kept for each row, W = 2·K places for products to be merged.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from geartrain.ams.kernels import neighbours as ops
from geartrain.bridge.kernels.launch import Cost, launch, runs_kernels

Products = Callable[[Tensor, Tensor], Tensor]

STRIP = 8192
"""Most rows, and most others, whose products are sorted at a time: about 28·STRIP² bytes."""
_LOW = 0x7FFFFFFF
_INFINITY_BITS = -0x800000
NONE = (_INFINITY_BITS ^ _LOW) << 32
"""Key of −∞: no row."""


def to_keys(scores: Tensor, ids: Tensor) -> Tensor:
    """Return keys, int64, of float32 products with ids in [0, 2^31)."""
    bits = (scores + 0.0).view(torch.int32)  # −0 becomes 0
    return (bits ^ ((bits >> 31) & _LOW)).long() << 32 | (_LOW - ids)


def scores_of(keys: Tensor) -> Tensor:
    """Return the float32 products of keys."""
    ordered = (keys >> 32).int()
    return (ordered ^ ((ordered >> 31) & _LOW)).view(torch.float32)


def ids_of(keys: Tensor) -> Tensor:
    """Return the ids, int32, of keys."""
    return (_LOW - (keys & _LOW)).int()


class RunningNearest:
    """Keeps the K largest products of rows ``first`` … ``first + num_rows`` − 1 with all others offered.

    Memory: 8·M·K bytes, with kernels 24·M·K. The host waits once a call when thresholds are used, else never.
    """

    def __init__(self, first: int, num_rows: int, keep: int, device: torch.device, products: Products) -> None:
        """``products`` maps [M, D] and [N, D] to float32 [M, N]."""
        self.first, self._keep, self._products = first, keep, products
        self.best_MK = torch.full((num_rows, keep), NONE, dtype=torch.int64, device=device)
        """Keys, descending."""
        self.offered_M = torch.zeros(num_rows, dtype=torch.int64, device="cpu")
        """Number of others offered to each row."""
        self._width = 2 * keep
        self._hits_MW: Tensor | None = None
        if runs_kernels(device):
            self._hits_MW = self.best_MK.new_empty(num_rows, self._width)
            self._counts_M = torch.zeros(num_rows, dtype=torch.int32, device=device)
            self._thresholds_M = torch.empty(num_rows, dtype=torch.float32, device=device)

    def offer(self, start: int, rows_MD: Tensor, others_ND: Tensor, first: int) -> None:
        """Offer ``others_ND``, of ids ``first`` …, to the rows ``rows_MD`` from ``start`` on; to none itself.

        Both are contiguous and of one dtype. Offer each other row to a row only once.
        """
        stop = start + len(rows_MD)
        while len(others_ND):
            seen = int(self.offered_M[start:stop].min()) if stop > start else 0
            # With as many others as were seen, about K of them or fewer are above a row's threshold.
            piece_ND = others_ND[: max(STRIP, seen)]
            if self._hits_MW is not None and seen >= self._keep:
                self._by_thresholds(start, rows_MD, piece_ND, first)
            else:
                self._by_sorting(start, rows_MD, piece_ND, first)
            self.offered_M[start:stop] += len(piece_ND)
            self.offered_M[max(start, first - self.first) : max(0, min(stop, first + len(piece_ND) - self.first))] -= 1
            others_ND, first = others_ND[len(piece_ND) :], first + len(piece_ND)

    def merge_waiting(self) -> None:
        """Merge the products that were found above thresholds."""
        for start in range(0, len(self.best_MK), STRIP):
            self._merge_hits(slice(start, start + STRIP))

    def restore(self, best_MK: Tensor, offered_M: Tensor) -> None:
        """Continue from the ``best_MK`` and ``offered_M`` of another object after its :meth:`merge_waiting`."""
        self.best_MK.copy_(best_MK)
        self.offered_M.copy_(offered_M)
        if self._hits_MW is not None:
            self._thresholds_M.copy_(scores_of(self.best_MK[:, -1]))

    def _by_sorting(self, start: int, rows_MD: Tensor, others_ND: Tensor, first: int) -> None:
        for at in range(0, len(rows_MD), STRIP):
            for column in range(0, len(others_ND), STRIP):
                scores_MN = self._products(rows_MD[at : at + STRIP], others_ND[column : column + STRIP])
                num_rows, num_others = scores_MN.shape
                itself = self.first + start + at - first - column
                if -num_rows < itself < num_others:
                    scores_MN.diagonal(itself).fill_(-torch.inf)
                ids_N = torch.arange(first + column, first + column + num_others, device=scores_MN.device)
                self._merge(slice(start + at, start + at + num_rows), to_keys(scores_MN, ids_N))

    def _by_thresholds(self, start: int, rows_MD: Tensor, others_ND: Tensor, first: int) -> None:
        before_M = self._counts_M[start : start + len(rows_MD)].clone()
        for at, most in enumerate(self._append_hits(start, rows_MD, others_ND, first)):
            place = at * STRIP
            some_MD = rows_MD[place : place + STRIP]
            rows = slice(start + place, start + place + len(some_MD))
            if most > self._width:
                # Drop the hits, which did not all fit, and retry with the higher thresholds of earlier ones.
                self._counts_M[rows] = before_M[place : place + STRIP]
                self._merge_hits(rows)
                if self._append_hits(rows.start, some_MD, others_ND, first)[0] > self._width:
                    self._counts_M[rows] = 0
                    self._by_sorting(rows.start, some_MD, others_ND, first)
            if 2 * most > self._width:
                self._merge_hits(rows)

    def _append_hits(self, start: int, rows_MD: Tensor, others_ND: Tensor, first: int) -> list[int]:
        """Start the kernel and return the most hits of a row in each strip. The host waits."""
        from geartrain.bridge.kernels.triton.nearest import nearest_hits, tiles

        assert self._hits_MW is not None
        rows = slice(start, start + len(rows_MD))
        (num_rows, dim), num_others = rows_MD.shape, len(others_ND)
        constants = tiles(rows_MD.dtype, dim)
        grid = (-(-num_rows // constants["tile_m"]) * -(-num_others // constants["tile_n"]),)
        num_bytes = (num_rows + num_others) * dim * rows_MD.element_size() + 8 * num_rows
        launch(
            nearest_hits,
            grid,
            rows_MD,
            others_ND,
            self._thresholds_M[rows],
            self._counts_M[rows],
            self._hits_MW[rows],
            num_rows,
            num_others,
            self.first + start,
            first,
            self._width,
            dim=dim,
            **constants,
            cost=Cost(num_bytes, 2.0 * num_rows * num_others * dim, rows_MD.dtype),
        )
        padded = torch.nn.functional.pad(self._counts_M[rows], (0, -num_rows % STRIP)).view(-1, STRIP)
        most: list[int] = padded.amax(1).tolist()
        return most

    def _merge_hits(self, rows: slice) -> None:
        if self._hits_MW is None:
            return
        is_hit = torch.arange(self._width, device=self.best_MK.device) < self._counts_M[rows].unsqueeze(1)
        self._merge(rows, torch.where(is_hit, self._hits_MW[rows], NONE))
        self._counts_M[rows] = 0

    def _merge(self, rows: slice, keys_MN: Tensor) -> None:
        self.best_MK[rows] = torch.cat([self.best_MK[rows], keys_MN], 1).topk(self._keep, dim=1).values
        if self._hits_MW is not None:
            self._thresholds_M[rows] = scores_of(self.best_MK[rows, -1])


def exact_scores(
    rows_MD: Tensor, ids_MW: Tensor, counts_M: Tensor, others_ND: Tensor, first: int, scores_MW: Tensor
) -> None:
    """Write exact products of each row with its candidates ``ids_MW`` among ``others_ND``; other scores stay.

    Args:
        rows_MD: float32.
        ids_MW: int32, of which the first ``counts_M`` of each row are candidates.
        counts_M: int32.
        others_ND: float32, rows of the classes from ``first`` on.
        first: Class of row 0 of the others.
        scores_MW: float64, written.

    All are contiguous, on a CPU or on a device that runs kernels. Sums are in the order of
    ``csrc/neighbours/neighbour_exact.cpp`` and equal to the bit, as products of two float32 are exact.
    """
    (num_rows, width), (num_others, dim) = ids_MW.shape, others_ND.shape
    if not runs_kernels(rows_MD.device):
        rows, ids, counts, others = (tensor.numpy() for tensor in (rows_MD, ids_MW, counts_M, others_ND))
        ops.exact_scores(rows, ids, counts, others, first, scores_MW.numpy(), threads=torch.get_num_threads())
        return
    from geartrain.bridge.kernels.triton.nearest import EXACT
    from geartrain.bridge.kernels.triton.nearest import exact_scores as kernel

    cost = Cost(4.0 * (num_rows * (1 + width + dim) + num_others * dim))  # ids, and each row once
    args = (rows_MD, ids_MW, counts_M, others_ND, scores_MW, width, first, num_others)
    launch(kernel, (num_rows,), *args, dim=dim, **EXACT, cost=cost)
