"""Attention of a query over the vectors of a sequence: scores and the weighted sum.

Legend: B samples, N vectors of all sequences, D their width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from geartrain.bridge.models.activations import ActivationName
from geartrain.bridge.models.inputs import tower
from geartrain.bridge.models.sequences import Sequences


class AttentionUnit(nn.Module):
    """A score for each vector e of a sequence and the query q of its sample: MLP(q, e, q - e, q∘e)."""

    def __init__(self, width: int, hidden: Sequence[int], activation: ActivationName) -> None:
        super().__init__()
        self.network = tower(4 * width, hidden, 0.0, activation=activation)
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, sequences: Sequences, query_BD: Tensor) -> Tensor:
        """Return the scores [N]."""
        query_ND, values_ND = sequences.expand(query_BD), sequences.values_ND
        both = torch.cat([query_ND, values_ND, query_ND - values_ND, query_ND * values_ND], 1)
        scores_N: Tensor = self.network(both).squeeze(1) + self.bias
        return scores_N


def weighted_sum(sequences: Sequences, weights_N: Tensor) -> Tensor:
    """Σ w·e over each sequence [B, D]; 0 if it is empty."""
    return sequences.sum(weights_N.unsqueeze(1) * sequences.values_ND)


def attentive_mean(sequences: Sequences, query: Tensor, network: nn.Module) -> Tensor:
    """The mean [B, D] of each sequence by the softmax of ``network``'s scores of (query, vector); 0 if it is empty."""
    scores_N = network(torch.cat([sequences.expand(query), sequences.values_ND], 1)).squeeze(1)
    return weighted_sum(sequences, sequences.softmax(scores_N))
