"""A bias for each class: one more column of its row, met by a one at the end of each feature.

So it is stored, trained, sampled and saved as the row is, wherever rows are. Legend: B samples, N rows, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from geartrain.ams.values.errors import InvalidArgument
from geartrain.bridge.head.loss.margins.margin import AnyMargin


def with_ones(features_BD: Tensor) -> Tensor:
    """[B, D + 1]: the features, each followed by a one."""
    return torch.cat([features_BD, features_BD.new_ones(len(features_BD), 1)], dim=1)


def with_zeros(rows_ND: Tensor, width: int) -> Tensor:
    """[N, ``width``]: the rows themselves, or with biases of zero where rows have such."""
    return rows_ND if rows_ND.shape[1] == width else torch.cat([rows_ND, rows_ND.new_zeros(len(rows_ND), 1)], dim=1)


def require_no_margin(margin: AnyMargin | None) -> None:
    """Raise InvalidArgument: a margin is about directions, which a bias is no part of."""
    if margin is not None:
        raise InvalidArgument(f"margin is {margin!r} and bias is True; a margin has no biases: leave one of them out")
