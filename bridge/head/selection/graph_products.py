"""The recall of a graph build on a torch device: half-precision products of blocks, with a proven bound on their error.

An engine for ``build_neighbours(products=...)`` and for the ring; the table it gives is that of any other engine.

Legend: M, N rows of two blocks, D width, K candidates kept for a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from geartrain.ams.graph.building.recall import Candidates
from geartrain.ams.graph.building.rows import Floats
from geartrain.ams.values.errors import InvalidArgument
from geartrain.bridge.rows.native_types import gives_float32_products

__all__ = ["TorchProducts"]

_UNIT_ROUNDOFF = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
_SMALLEST = {torch.float16: 2.0**-14, torch.bfloat16: 2.0**-126}
"""Least normal number: what is below it may be flushed."""
_SHORTCUTS = {
    torch.float16: ("allow_fp16_reduced_precision_reduction", "allow_fp16_accumulation"),
    torch.bfloat16: ("allow_bf16_reduced_precision_reduction",),
}
"""What PyTorch may be allowed to do to sums on CUDA; the bound is that of float32."""


class _Block(NamedTuple):
    rows_ND: Tensor
    first: int


class TorchProducts:
    """Products on ``device`` in ``dtype``, summed in float32.

    float16 has the tensor cores' speed and eight times the accuracy of bfloat16, and unit rows fit its range. Device
    memory: 2·D bytes a row of each block, 8·K a row of the running best, and 4·M·N of scores.
    """

    def __init__(self, device: torch.device | str, dtype: torch.dtype = torch.float16) -> None:
        """Raises InvalidArgument for a ``dtype`` other than float16 and bfloat16."""
        if dtype not in _UNIT_ROUNDOFF:
            raise InvalidArgument(f"dtype is {dtype}; products are made in torch.float16 or torch.bfloat16")
        self.device, self._dtype = torch.device(device), dtype
        self._widens = gives_float32_products(self.device, dtype)
        self.name = f"torch {self.device.type} {str(dtype).removeprefix('torch.')}"

    def error_bound(self, dim: int) -> float:
        """Rounding of both factors, of the sum in float32, and of the product where the device gives it in ``dtype``.

        With |x| = |y| = 1 rounding x and y by at most u each changes x·y by 2u + u² (Cauchy–Schwarz), and by √D times
        the least normal number each where that is more; the sum as in ``CoreProducts.error_bound`` (Higham, 3.5).
        """
        u, root = _UNIT_ROUNDOFF[self._dtype], math.sqrt(dim)
        factors = 2 * u + u * u + 2 * (1 + u) * root * _SMALLEST[self._dtype]
        lengths = (1 + u + 2.0**-23 * root + root * _SMALLEST[self._dtype]) ** 2
        # Twice, for matrix units that cut what they add instead of rounding it.
        total = 2 * (dim + 1) * 2.0**-24
        summing = total / (1 - total) * lengths + dim * 2.0**-120
        given = 0.0 if self._widens else u * (lengths + summing)
        return factors * (1 + 2.0**-22 * root) + summing + given

    def keep(self, k: int) -> int:
        """Twice as many and some: a float16 product leaves about 2^-10 open."""
        return 2 * k + 32

    def row_bytes(self, keep: int) -> int:
        """What leaves the device at the end: 8 bytes a candidate."""
        return 8 * keep + 8

    def load(self, rows: Floats, first: int) -> _Block:
        """A copy on the device, in the type of the products."""
        return _Block(torch.tensor(rows, device=self.device).to(self._dtype), first)

    def begin(self, first: int, num_rows: int, keep: int) -> _TorchRecall:
        return _TorchRecall(self, first, num_rows, keep)

    def scores(self, a_MD: Tensor, b_ND: Tensor) -> Tensor:
        """Products [M, N], float32."""
        with _float32_sums(self._dtype):
            if self._widens:
                return torch.mm(a_MD, b_ND.t(), out_dtype=torch.float32)
            return torch.mm(a_MD, b_ND.t()).float()


class _TorchRecall:
    """The K best of each row, best first; what is missing has the score −∞."""

    def __init__(self, engine: TorchProducts, first: int, num_rows: int, keep: int) -> None:
        self._engine, self._first = engine, first
        self._scores = torch.full((num_rows, keep), -torch.inf, device=engine.device)
        self._ids = torch.zeros(num_rows, keep, dtype=torch.int32, device=engine.device)
        self._left_out = torch.zeros(num_rows, dtype=torch.bool, device=engine.device)

    @torch.no_grad()
    def compare_inside(self, a: _Block, b: _Block) -> None:
        scores_MN = self._engine.scores(a.rows_ND, b.rows_ND)
        if a is b:
            scores_MN.fill_diagonal_(-torch.inf)
        self._offer(a, scores_MN, b.first)
        if a is not b:
            self._offer(b, scores_MN.t(), a.first)

    @torch.no_grad()
    def compare_outside(self, a: _Block, b: _Block) -> None:
        self._offer(a, self._engine.scores(a.rows_ND, b.rows_ND), b.first)

    def _offer(self, block: _Block, scores_MN: Tensor, first: int) -> None:
        at = slice(block.first - self._first, block.first - self._first + len(block.rows_ND))
        keep = self._scores.shape[1]
        best, columns = scores_MN.topk(min(keep, scores_MN.shape[1]), dim=1)
        scores = torch.cat([self._scores[at], best], 1)
        ids = torch.cat([self._ids[at], (columns + first).to(torch.int32)], 1)
        offered = torch.isfinite(self._scores[at]).sum(1) + torch.isfinite(scores_MN).sum(1)
        self._left_out[at] |= offered > keep
        self._scores[at], places = scores.topk(keep, dim=1)
        self._ids[at] = ids.gather(1, places)

    def candidates(self) -> Candidates:
        counts = torch.isfinite(self._scores).sum(1).to(torch.int32)
        floors = torch.where(self._left_out, self._scores[:, -1], -torch.inf)
        return Candidates(self._ids.cpu().numpy(), counts.cpu().numpy(), floors.cpu().numpy())

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        named = {"scores": self._scores, "ids": self._ids, "left_out": self._left_out}
        return {name: tensor.cpu().numpy() for name, tensor in named.items()}

    def restore(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        for tensor, name in ((self._scores, "scores"), (self._ids, "ids"), (self._left_out, "left_out")):
            tensor.copy_(torch.from_numpy(np.array(arrays[name])))


@contextmanager
def _float32_sums(dtype: torch.dtype) -> Iterator[None]:
    switches = torch.backends.cuda.matmul
    before = {name: getattr(switches, name) for name in _SHORTCUTS[dtype] if hasattr(switches, name)}
    try:
        for name in before:
            setattr(switches, name, False)
        yield
    finally:
        for name, value in before.items():
            setattr(switches, name, value)
