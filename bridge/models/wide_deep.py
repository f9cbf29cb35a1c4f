"""Wide & Deep: a linear model of ids and crossed ids beside a deep network.

Legend: B samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from geartrain.bridge.models.click_model import ClickModel
from geartrain.bridge.models.inputs import FieldVectors, LevelTower


class WideDeep(ClickModel):
    """Click logits of a linear model, which remembers, and a deep network, which generalises.

    With the weights w_i of ids and crossed ids (fields of width 1) and the embeddings v_i (all others)::

        logit = b + Σ_i w_i + MLP(v_1, …, v_F)

    A cross of two fields is a field as any other, whose ids stand for pairs. The paper trains the wide part by FTRL:
    ``gt.Field("user_x_genre", dim=1, optimizer=gt.FTRL(0.1))``. Without fields of width 1 it is the deep network alone.
    Of nodes that samples share, the first layer is computed once a node.

    Source: Cheng et al., "Wide & Deep Learning for Recommender Systems" (2016), section 3.
    """

    per_node = True

    def __init__(self, dims: Mapping[str, int], hidden: Sequence[int] = (64, 32), *, dropout: float = 0.0) -> None:
        """Make the dense part; the weights and embeddings are those of the fields.

        Args:
            dims: Width of the vectors by field: 1 in the wide part, any other in the deep one.
            hidden: Widths of the deep network's layers, each with ReLU.
            dropout: After each of them, in [0, 1).

        Raises:
            InvalidArgument: There is no embedding; ``hidden`` or ``dropout`` is out of range.
        """
        super().__init__()
        self._fields = FieldVectors("WideDeep", dims)
        self.deep = LevelTower(self._fields.embedded_dims, hidden, dropout)
        self.bias = nn.Parameter(torch.zeros(()))

    def logits(self, vectors: Mapping[str, Tensor], batch: Any = None) -> Tensor:
        """Logits [B] of the vectors [N, dim] of each field. Raises InvalidArgument, which names the wrong field."""
        wide_B, embedded = self._fields.by_level(vectors, batch)
        logits_B: Tensor = self.bias + wide_B + self.deep(embedded).squeeze(1)
        return logits_B
