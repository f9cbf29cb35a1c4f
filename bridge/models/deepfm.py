"""DeepFM: a factorisation machine and a deep network over the same embeddings.

Legend: B samples, F embedded fields, D their width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor, nn

from geartrain.ams.values.errors import InvalidArgument
from geartrain.bridge.models.click_model import ClickModel
from geartrain.bridge.models.inputs import FieldVectors, LevelTower


class DeepFM(ClickModel):
    """Click logits of a factorisation machine and a deep network that share their embeddings.

        fields = gt.EmbeddingGroup(cluster, "ctr", [gt.Field("user", dim=16), gt.Field("item", dim=16),
                                                    gt.Field("user_bias", dim=1)], optimizer=gt.Adagrad(0.05))
        model = DeepFM({"user": 16, "item": 16, "user_bias": 1})
        logits_B = model(fields(batch))

    With the first-order weights w_i (fields of width 1) and the embeddings v_i (all others)::

        logit = b + Σ_i w_i + Σ_{i<j} <v_i, v_j> + MLP(v_1, …, v_F)

    The pairs are computed as ½ Σ_D ((Σ_i v_i)² - Σ_i v_i²), in O(F·D). Source: Guo et al., "DeepFM" (2017),
    section 2.1. Of nodes that samples share, sums and the first layer are computed once a node.
    """

    per_node = True

    def __init__(self, dims: Mapping[str, int], hidden: Sequence[int] = (64, 32), *, dropout: float = 0.0) -> None:
        """Make the dense part; the embeddings are those of the fields.

        Args:
            dims: Width of the vectors by field: 1 for first-order weights, one D for all others.
            hidden: Widths of the deep network's layers, each with ReLU.
            dropout: After each of them, in [0, 1).

        Raises:
            InvalidArgument: The embeddings differ in width, or are none; ``hidden`` or ``dropout`` is out of range.
        """
        super().__init__()
        self._fields = FieldVectors("DeepFM", dims)
        if len(set(self._fields.widths)) > 1:
            raise InvalidArgument(
                f"the fields of DeepFM have dims {dict(dims)}; those wider than 1 must be equal, since their products "
                "are summed"
            )
        self.deep = LevelTower(self._fields.embedded_dims, hidden, dropout)
        self.bias = nn.Parameter(torch.zeros(()))

    def logits(self, vectors: Mapping[str, Tensor], batch: Any = None) -> Tensor:
        """Logits [B] of the vectors [N, dim] of each field. Raises InvalidArgument, which names the wrong field."""
        first_order_B, embedded = self._fields.by_level(vectors, batch)
        dim = self._fields.widths[0]
        sums_BD = reduce(add, (part.expand(torch.unflatten(part.vectors, 1, (-1, dim)).sum(1)) for part in embedded))
        squares_B = reduce(add, (part.expand(part.vectors.square().sum(1)) for part in embedded))
        pairs_B = (sums_BD.square().sum(1) - squares_B) / 2
        deep_B = self.deep(embedded).squeeze(1)
        logits_B: Tensor = self.bias + first_order_B + pairs_B + deep_B
        return logits_B
