"""Recall of a graph build on a torch device: half-precision products of blocks, with a proven error bound.

It is an engine for ``build_neighbours(products=...)`` and for the ring; the table equals that of any other engine.

Legend: M, N rows of two blocks, D width, K candidates kept for a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from geartrain.ams.graph.building.acceptance import ExactScores
from geartrain.ams.graph.building.recall import Candidates
from geartrain.ams.graph.building.rows import Floats
from geartrain.ams.values.errors import InvalidArgument
from geartrain.bridge.kernels.launch import runs_kernels
from geartrain.bridge.kernels.nearest import NONE, RunningNearest, exact_scores, ids_of, scores_of
from geartrain.bridge.rows.native_types import gives_float32_products
from geartrain.bridge.rows.transfers import download, upload

__all__ = ["TorchProducts"]

_UNIT_ROUNDOFF = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
_SCALE = {torch.float16: 2.0**7, torch.bfloat16: 1.0}
"""Scale of unit rows in products: small columns stay normal numbers, and products, of 2^14 at most, are finite even
where a device computes them in float16."""
_SMALLEST = {torch.float16: 2.0**-14, torch.bfloat16: 2.0**-126}
"""Least normal number: a device may flush smaller ones."""
_SHORTCUTS = {
    torch.float16: ("allow_fp16_reduced_precision_reduction", "allow_fp16_accumulation"),
    torch.bfloat16: ("allow_bf16_reduced_precision_reduction",),
}
"""Shortcuts of PyTorch for sums on CUDA; the bound is that of float32."""


_SLACK = 1e-8
"""Slack above the rounding of exact scores."""


class DeviceBlock(NamedTuple):
    """Unit rows [N, D] times the scale, on the device, in the type of the products, of classes from ``first`` on."""

    rows_ND: Tensor
    first: int


class TorchProducts:
    """Products on ``device`` in ``dtype``, summed in float32.

    float16 has the tensor cores' speed and eight times the accuracy of bfloat16, and unit rows fit its range. Device
    memory: 2·D bytes a row of each block, and what ``RunningNearest`` takes.
    """

    def __init__(self, device: torch.device | str, dtype: torch.dtype = torch.float16) -> None:
        """Raises InvalidArgument for a ``dtype`` other than float16 and bfloat16."""
        if dtype not in _UNIT_ROUNDOFF:
            raise InvalidArgument(f"dtype is {dtype}; products are made in torch.float16 or torch.bfloat16")
        self.device, self._dtype = torch.device(device), dtype
        self._widens = gives_float32_products(self.device, dtype)
        self.unit = _SCALE[dtype] ** 2
        """Factor of the products."""
        self.name = f"torch {self.device.type} {str(dtype).removeprefix('torch.')}, rows x {_SCALE[dtype]:.0f}"

    def error_bound(self, dim: int) -> float:
        """Return the bound of the rounding of both factors, the float32 sum, and the product if the device has it in
        ``dtype``.

        With |x| = |y| = 1 rounding x and y by at most u each changes x·y by 2u + u² (Cauchy–Schwarz), and by √D times
        the least normal number, over the scale, each where that is more; the sum as in ``CoreProducts.error_bound``
        (Higham, 3.5).
        """
        u, root = _UNIT_ROUNDOFF[self._dtype], math.sqrt(dim)
        smallest = _SMALLEST[self._dtype] / _SCALE[self._dtype]
        factors = 2 * u + u * u + 2 * (1 + u) * root * smallest
        lengths = (1 + u + 2.0**-23 * root + root * smallest) ** 2
        # Twice, for matrix units that truncate addends instead of rounding.
        total = 2 * (dim + 1) * 2.0**-24
        summing = total / (1 - total) * lengths + dim * 2.0**-120
        given = 0.0 if self._widens else u * (lengths + summing)
        return factors * (1 + 2.0**-22 * root) + summing + given

    def num_candidates(self, k: int) -> int:
        """Return twice as many and some: a float16 product has an error of about 2^-10."""
        return 2 * k + 32

    def row_bytes(self, keep: int) -> int:
        """Return the bytes that leave the device at the end: 8 a candidate."""
        return 8 * keep + 8

    def load(self, rows: Floats, first: int) -> DeviceBlock:
        """Return a copy on the device, times the scale, in the type of the products."""
        return DeviceBlock(torch.tensor(rows, device=self.device).mul_(_SCALE[self._dtype]).to(self._dtype), first)

    @property
    def exact_scorer(self) -> Callable[[Floats, Candidates], ExactScores] | None:
        """Scorer of exact scores on the device, if it runs kernels; None: the cores compute them."""
        return partial(_DeviceScores, self.device) if runs_kernels(self.device) else None

    def start(self, first: int, num_rows: int, keep: int) -> _TorchRecall:
        return _TorchRecall(self, first, num_rows, keep)

    def scores(self, a_MD: Tensor, b_ND: Tensor) -> Tensor:
        """Products [M, N] of rows of two blocks, float32: :attr:`unit` times those of unit rows."""
        with _float32_sums(self._dtype):
            if self._widens:
                return torch.mm(a_MD, b_ND.t(), out_dtype=torch.float32)
            return torch.mm(a_MD, b_ND.t()).float()


class _DeviceScores:
    """Exact scores of rows [M, D] on a device: 4·M·D + 12·M·W bytes there, plus the others while they are added."""

    def __init__(self, device: torch.device, rows: Floats, found: Candidates) -> None:
        self._device = device
        self._rows_MD, self._ids_MW, self._counts_M = (
            upload(np.ascontiguousarray(array), device) for array in (rows, found.ids, found.counts)
        )
        self._scores_MW = torch.zeros(found.ids.shape, dtype=torch.float64, device=device)

    def add(self, others: Floats, first: int) -> None:
        others_ND = upload(others, self._device)
        exact_scores(self._rows_MD, self._ids_MW, self._counts_M, others_ND, first, self._scores_MW)

    def result(self) -> npt.NDArray[np.float64]:
        return download(self._scores_MW).numpy()


class _TorchRecall:
    """The K best of each row; missing ones have the score −∞."""

    def __init__(self, engine: TorchProducts, first: int, num_rows: int, keep: int) -> None:
        self._best = RunningNearest(first, num_rows, keep, engine.device, engine.scores)
        self._keep, self._unit = keep, engine.unit

    def compare_inside(self, a: DeviceBlock, b: DeviceBlock) -> None:
        self.compare_outside(a, b)
        if a is not b:
            self.compare_outside(b, a)

    @torch.no_grad()
    def compare_outside(self, a: DeviceBlock, b: DeviceBlock) -> None:
        """Offer the rows of ``b`` to those of ``a``, none to itself."""
        self._best.offer(a.first - self._best.first, a.rows_ND, b.rows_ND, b.first)

    @torch.no_grad()
    def candidates(self, k: int | None = None, error_bound: float = 0.0) -> Candidates:
        """Return candidates; with ``k`` only possible members of the k best, given errors of at most
        ``error_bound``."""
        self._best.merge_waiting()
        keys_MK = self._best.best_MK
        scores_MK = scores_of(keys_MK) / self._unit
        counts = (keys_MK > NONE).sum(1).to(torch.int32)
        left_out = (self._best.offered_M > self._keep).to(keys_MK.device)
        floors = torch.where(left_out, scores_MK[:, -1], -torch.inf)
        if k is not None:
            # At least k exact scores are above the k-th product less one bound; those of products below that less two
            # are not. They fall, so the first of these is a floor for all.
            min_M = scores_MK[:, k - 1].double() - 2 * (error_bound + _SLACK)
            kept = torch.minimum((scores_MK.double() >= min_M.unsqueeze(1)).sum(1), counts).to(torch.int32)
            next_M = scores_MK.gather(1, kept.long().clamp(max=self._keep - 1).unsqueeze(1)).squeeze(1)
            floors, counts = torch.where(kept < counts, next_M, floors), kept
        return Candidates(ids_of(keys_MK).cpu().numpy(), counts.cpu().numpy(), floors.cpu().numpy())

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        self._best.merge_waiting()
        return {"keys": self._best.best_MK.cpu().numpy(), "offered": self._best.offered_M.numpy()}

    def restore(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        self._best.restore(*(torch.from_numpy(np.array(arrays[name])) for name in ("keys", "offered")))


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
