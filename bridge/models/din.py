"""DIN: a network that looks at a user's history with the eyes of the item at hand.

Legend: B samples, N events of all histories, H the width of an event.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.text import quoted
from geartrain.bridge.models.activations import ActivationName
from geartrain.bridge.models.attention import AttentionUnit, weighted_sum
from geartrain.bridge.models.click_model import ClickModel
from geartrain.bridge.models.inputs import FieldVectors, tower
from geartrain.bridge.models.sequences import concatenated, sequences_of


class DIN(ClickModel):
    """Click logits from embeddings, and from the events of a history by how much each has to do with the item.

        fields = gt.EmbeddingGroup(cluster, "ctr", [gt.Field("user", dim=16), gt.Field("item", dim=16),
                                                    gt.Field("history", table="item", pooling=None)], optimizer=...)
        model = DIN({"user": 16, "item": 16, "history": 16}, history={"history": "item"})
        logits_B = model(fields(batch))

    With the item's embedding q, the events e_j of the history, the other embeddings v and first-order weights w
    (fields of width 1)::

        a_j   = MLP(q, e_j, q - e_j, q∘e_j)              a number of any size: they do not add up to 1
        logit = b + Σ_i w_i + MLP(v_1, …, v_F, Σ_j a_j·e_j)

    An empty history gives 0. Source: Zhou et al., "Deep Interest Network for Click-Through Rate Prediction" (2018),
    section 4.3, with q - e_j and q∘e_j in the place of the outer product; the activation is that of section 5.3.

    Costs O(N) attention units: nothing is computed for padding.
    """

    def __init__(
        self,
        dims: Mapping[str, int],
        history: Mapping[str, str],
        hidden: Sequence[int] = (64, 32),
        *,
        attention: Sequence[int] = (32, 16),
        activation: ActivationName = "dice",
        dropout: float = 0.0,
    ) -> None:
        """Make the dense part; the embeddings are those of the fields.

        Args:
            dims: Width of the vectors by field, those of the history among them: 1 for first-order weights.
            history: Fields of the history, and for each the field of the item at hand that it is compared with, of the
                same width: ``{"history": "item", "history_shop": "shop"}``. Their sequences have equal lengths.
            hidden: Widths of the deep network's layers.
            attention: Widths of the attention unit's layers.
            activation: Activation of all of them: "dice", "prelu" or "relu".
            dropout: After each layer of the deep network, in [0, 1).

        Raises:
            InvalidArgument: A field of ``history`` has no dim, or another than its counterpart; another argument is
                out of range.
        """
        super().__init__()
        self._fields = FieldVectors("DIN", dims, history)
        self._history = history_dims("DIN", dims, history)
        self._targets = list(history.values())
        width = sum(self._history.values())
        self.attention = AttentionUnit(width, attention, activation)
        self.deep = tower(sum(self._fields.widths) + width, hidden, dropout, activation=activation)
        self.bias = nn.Parameter(torch.zeros(()))

    def logits(self, vectors: Mapping[str, Tensor]) -> Tensor:
        """Logits [B] of the vectors [B, dim] of each field, and [B, L, dim] or jagged [B, ?, dim] of the history's.

        Raises InvalidArgument, which names the wrong field.
        """
        first_order_B, embedded = self._fields.split(vectors)
        events = sequences_of("DIN", vectors, self._history)
        query_BH = concatenated(vectors, self._targets)
        interest_BH = weighted_sum(events, self.attention(events, query_BH))
        deep_B = self.deep(torch.cat([*embedded, interest_BH], 1)).squeeze(1)
        logits_B: Tensor = self.bias + first_order_B + deep_B
        return logits_B


def history_dims(model: str, dims: Mapping[str, int], history: Mapping[str, str]) -> dict[str, int]:
    """The width of each field of ``history``. Raises InvalidArgument unless its counterpart is a field as wide."""
    if not isinstance(history, Mapping) or not history:
        raise InvalidArgument(
            f"history of {model} is {quoted(history)}; it must map fields of the history to fields of the item: "
            "{'history': 'item'}"
        )
    for name, target in history.items():
        if target not in dims or target in history or dims[target] != dims[name]:
            raise InvalidArgument(
                f"field {name!r} of the history, of dim {dims[name]}, is compared with field {target!r}, which "
                f"{model} has {f'with dim {dims[target]}' if target in dims else 'not'}; name a field of the item "
                "that is as wide"
            )
    return {name: dims[name] for name in history}
