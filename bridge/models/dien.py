"""DIEN: a history read as a sequence, whose interests grow and change towards the item at hand.

Legend: B samples, N events of all histories, L events of the longest, H the width of an event.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from geartrain.ams.values.errors import InvalidArgument
from geartrain.bridge.models.activations import ActivationName
from geartrain.bridge.models.click_model import ClickModel
from geartrain.bridge.models.din import history_dims
from geartrain.bridge.models.inputs import FieldVectors, tower
from geartrain.bridge.models.sequences import Sequences, concatenated, sequences_of


class AUGRU(nn.Module):
    """A GRU whose update gate is scaled by how much a step matters.

    With the input x, the state h and the attention a of a step::

        u = σ(W_u x + U_u h + b_u),  r = σ(W_r x + U_r h + b_r),  g = tanh(W_g x + r∘(U_g h) + b_g)
        h' = (1 - a·u)∘h + a·u∘g

    Where a = 0 the state stays. Source: Zhou et al., "Deep Interest Evolution Network for Click-Through Rate
    Prediction" (2019), section "Interest Evolving Layer".
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inputs = nn.Linear(width, 3 * width)
        self.states = nn.Linear(width, 3 * width, bias=False)
        for weight in (self.inputs.weight, self.states.weight):
            nn.init.uniform_(weight, -(width**-0.5), width**-0.5)

    def forward(self, inputs_BLH: Tensor, attention_BL: Tensor) -> Tensor:
        """Return the state [B, H] after the last step, 0 before the first."""
        state_BH = inputs_BLH.new_zeros(inputs_BLH.shape[0], inputs_BLH.shape[2])
        for of_input, attention_B in zip(self.inputs(inputs_BLH).unbind(1), attention_BL.unbind(1), strict=True):
            update_in, reset_in, new_in = of_input.chunk(3, 1)
            update, reset, new = self.states(state_BH).chunk(3, 1)
            step_BH = attention_B.unsqueeze(1) * (update_in + update).sigmoid()
            new_BH = (new_in + (reset_in + reset).sigmoid() * new).tanh()
            # under autocast layers give 16 bits and the softmax 32
            state_BH = torch.lerp(state_BH, new_BH.to(state_BH.dtype), step_BH.to(state_BH.dtype))
        return state_BH


class DIEN(ClickModel):
    """Click logits from embeddings, and from what a history has led to, seen from the item.

        model = DIEN({"user": 16, "item": 16, "history": 16}, history={"history": "item"})
        loss = model(fields(batch), clicks_B)      # log loss + auxiliary loss; model(fields(batch)): logits

    A GRU over the events e_t gives interests h_t; with the item's embedding q their attention is
    a_t = softmax_t(h_t W q), and an :class:`AUGRU` over h_t ends in the state that goes, beside the embeddings v and
    the first-order weights w (fields of width 1), into the network::

        logit = b + Σ_i w_i + MLP(v_1, …, v_F, h'_T)

    In training each h_t is also to tell the event that follows from another one, ê, of the same batch::

        L_aux = - mean over t of  log σ(h_t·e_{t+1}) + log(1 - σ(h_t·ê_{t+1}))

    An empty history gives 0. Events are in the order of time, the oldest first. Source: Zhou et al., "Deep Interest
    Evolution Network for Click-Through Rate Prediction" (2019). Costs L steps one after the other.
    """

    def __init__(
        self,
        dims: Mapping[str, int],
        history: Mapping[str, str],
        hidden: Sequence[int] = (64, 32),
        *,
        auxiliary: float = 1.0,
        activation: ActivationName = "dice",
        dropout: float = 0.0,
    ) -> None:
        """Make the dense part; the embeddings are those of the fields.

        Args:
            dims: Width of the vectors by field, those of the history among them: 1 for first-order weights.
            history: Fields of the history, and for each the field of the item at hand that it is compared with, of the
                same width: ``{"history": "item"}``. Their sequences have equal lengths.
            hidden: Widths of the deep network's layers.
            auxiliary: Factor of the auxiliary loss, >= 0.
            activation: Activation of the deep network: "dice", "prelu" or "relu".
            dropout: After each layer of it, in [0, 1).

        Raises:
            InvalidArgument: A field of ``history`` has no dim, or another than its counterpart; another argument is
                out of range.
        """
        super().__init__()
        if not auxiliary >= 0:
            raise InvalidArgument(f"auxiliary is {auxiliary!r}; it must be >= 0")
        self.auxiliary = auxiliary
        self._fields = FieldVectors("DIEN", dims, history)
        self._history = history_dims("DIEN", dims, history)
        self._targets = list(history.values())
        width = sum(self._history.values())
        self.extractor = nn.GRU(width, width, batch_first=True)
        self.relevance = nn.Linear(width, width, bias=False)
        self.evolution = AUGRU(width)
        self.deep = tower(sum(self._fields.widths) + width, hidden, dropout, activation=activation)
        self.bias = nn.Parameter(torch.zeros(()))

    def logits(self, vectors: Mapping[str, Tensor]) -> Tensor:
        """Logits [B] of the vectors [B, dim] of each field, and [B, L, dim] or jagged [B, ?, dim] of the history's.

        Raises InvalidArgument, which names the wrong field.
        """
        events = sequences_of("DIEN", vectors, self._history)
        return self._logits(vectors, events, self._interests(events))

    def loss(self, vectors: Mapping[str, Tensor], clicks: Tensor) -> Tensor:
        """The log loss and the auxiliary loss (0-dim), whose other events torch's generator draws from the batch."""
        events = sequences_of("DIEN", vectors, self._history)
        interests_NH = self._interests(events)
        loss = self.log_loss(self._logits(vectors, events, interests_NH), clicks)
        if not self.auxiliary or not len(interests_NH):
            return loss
        drawn_N = torch.randint(len(interests_NH), (len(interests_NH),), device=interests_NH.device)
        return loss + self.auxiliary * auxiliary_loss(events, interests_NH, events.values_ND[drawn_N])

    def _interests(self, events: Sequences) -> Tensor:
        """The states h_t [N, H] of the extractor."""
        if not events.values_ND.shape[0]:
            return events.values_ND
        states_BLH, _ = self.extractor(events.padded(events.values_ND))
        return events.packed(states_BLH)

    def _logits(self, vectors: Mapping[str, Tensor], events: Sequences, interests_NH: Tensor) -> Tensor:
        first_order_B, embedded = self._fields.split(vectors)
        query_BH = concatenated(vectors, self._targets)
        attention_N = events.softmax((interests_NH * events.expand(self.relevance(query_BH))).sum(1))
        final_BH = self.evolution(events.padded(interests_NH), events.padded(attention_N))
        deep_B = self.deep(torch.cat([*embedded, final_BH], 1)).squeeze(1)
        logits_B: Tensor = self.bias + first_order_B + deep_B
        return logits_B


def auxiliary_loss(events: Sequences, interests_NH: Tensor, others_NH: Tensor) -> Tensor:
    """Return the loss (0-dim) of telling the event after each interest from the one of ``others`` in its place.

    0 if no event follows another.
    """
    follows_N = events.rows_N[1:] == events.rows_N[:-1]
    states, next_, other = (x[follows_N] for x in (interests_NH[:-1], events.values_ND[1:], others_NH[1:]))
    if not len(states):
        return interests_NH.new_zeros(())
    right, wrong = (states * next_).sum(1), (states * other).sum(1)
    return (nn.functional.softplus(-right) + nn.functional.softplus(wrong)).mean()
