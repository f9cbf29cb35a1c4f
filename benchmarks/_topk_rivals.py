"""Two ways to select the k largest magnitudes of each of many tensors, of Table 6 of the 100-million-class paper.

They are the rivals of ``bridge/parallel/topk/grouping.py``. Divide and conquer is exact: where magnitudes are equal,
the lower index is selected.
Tensors are float32, of any shape; indices count in C order.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from geartrain.bridge.parallel.topk.grouping import GroupedTopK


class SelectedElements(NamedTuple):
    """Elements of many tensors, one tensor after the other, with rising indices in each."""

    indices: Tensor
    """int32 [K] within the tensor."""
    values: Tensor
    """float32 [K], signed."""
    counts: list[int]
    """How many of each tensor."""


def select_by_sampling(tensors: Sequence[Tensor], ks: Sequence[int], *, seed: int = 0) -> SelectedElements:
    """Take what exceeds a threshold found in a sample of 1 % (Lin 2017). Approximate: may select fewer than k.

    Where more than k exceed it, the k largest of them are taken, which are the k largest of all.
    """
    generator = torch.Generator().manual_seed(seed)
    return _joined([_above_sampled(tensor.reshape(-1), k, generator) for tensor, k in zip(tensors, ks, strict=True)])


def select_divided(tensors: Sequence[Tensor], ks: Sequence[int]) -> SelectedElements:
    """Divide each tensor into chunks and conquer by their maxima, one tensor after the other. Exact."""
    parts = []
    for tensor, k in zip(tensors, ks, strict=True):
        grouping = _grouping((tensor.numel(),), (k,), tensor.device)
        flat = tensor.reshape(-1)[: grouping.buffer_numel]
        missing = grouping.buffer_numel - len(flat)
        indices, _ = grouping.select(functional.pad(flat, (0, missing)) if missing else flat)
        parts.append((indices, flat[indices]))
    return _joined(parts)


@functools.lru_cache(maxsize=512)
def _grouping(numels: tuple[int, ...], ks: tuple[int, ...], device: torch.device) -> GroupedTopK:
    """What depends on sizes alone, kept for the next step."""
    return GroupedTopK(numels, ks, device)


def _joined(parts: Sequence[tuple[Tensor, Tensor]]) -> SelectedElements:
    indices, values = zip(*parts, strict=True)
    return SelectedElements(torch.cat(indices).to(torch.int32), torch.cat(values), [len(index) for index in indices])


def _largest(flat: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Indices, rising, and values of the k largest; topk itself does not say which of equal ones it takes."""
    if k == 0:
        return flat.new_zeros(0, dtype=torch.int64), flat[:0]
    magnitudes = flat.abs()
    least = magnitudes.topk(k, sorted=False).values.min()
    above = (magnitudes > least).nonzero().flatten()
    level = (magnitudes == least).nonzero().flatten()
    indices = torch.cat([above, level[: k - len(above)]]).sort().values
    return indices, flat[indices]


def _above_sampled(flat: Tensor, k: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    if k == 0:
        return _largest(flat, 0)
    size = min(len(flat), max(len(flat) // 100, 1024))
    sample = flat[torch.randint(len(flat), (size,), generator=generator).to(flat.device)].abs()
    threshold = sample.topk(max(1, round(size * k / len(flat))), sorted=False).values.min()
    above = (flat.abs() >= threshold).nonzero().flatten()
    if len(above) <= k:
        return above, flat[above]
    places, values = _largest(flat[above], k)
    return above[places], values
