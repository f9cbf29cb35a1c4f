"""Division of a batch into micro-batches, for any inputs of a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.text import quoted


def sizes_of_parts(num_samples: int, num: int) -> list[int]:
    """Return the samples of each of ``num`` micro-batches: as even as possible, larger ones first."""
    return [num_samples // num + (part < num_samples % num) for part in range(num)]


def micro_batch(value: Any, part: int, num: int, num_samples: int, *, with_settings: bool = False) -> Any:
    """Return micro-batch ``part`` of a model's inputs: of each tensor [``num_samples``, …], in tuples, lists and dicts.

    ``with_settings``: other values are the same in each of them. Raises InvalidArgument for inputs without samples.
    """

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == num_samples:
            return torch.tensor_split(leaf, num)[part]
        if with_settings and not isinstance(leaf, Tensor):
            return leaf
        found = list(leaf.shape) if isinstance(leaf, Tensor) else quoted(leaf)
        raise InvalidArgument(
            f"images are {found}; they must be a tensor [{num_samples}, …], one entry for each sample, or a tuple, "
            "list or dict of such"
        )

    return tree_map(cut, value)
