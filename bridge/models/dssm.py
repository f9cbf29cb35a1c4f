"""DSSM: two towers, one for the user and one for the item, that meet in a cosine.

Legend: B samples, W the towers' width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from geartrain.ams.values.arguments import integer
from geartrain.ams.values.errors import InvalidArgument
from geartrain.bridge.models.activations import ActivationName
from geartrain.bridge.models.click_model import ClickModel
from geartrain.bridge.models.inputs import FieldVectors, tower


class DSSM(ClickModel):
    """Click logits from the cosine of a user's and an item's vector, each computed without the other.

        model = DSSM(user={"user": 16, "age": 16}, item={"item": 16, "genres": 16})
        loss = model(fields(batch), clicks_B)
        items_NW = model.item_vectors(fields(all_items))    # once; then the best for a user are those nearest to it
        scores_BN = model.user_vectors(fields(batch)) @ items_NW.T

    With the unit vectors x of the user and y of the item, a learned scale γ and a learned b::

        logit = γ·<x, y> + b

    Its loss is the log loss and, of the clicked samples, a softmax over the B items of the batch::

        L_batch = - mean over clicked i of  log( exp(γ<x_i, y_i>) / Σ_j exp(γ<x_i, y_j>) )

    where j is i itself or a sample with another item than i's. Source: Huang et al., "Learning Deep Structured Semantic
    Models for Web Search using Clickthrough Data" (2013), section 3.3, with the batch's items in the place of sampled
    ones. Costs O(B²·W) in training.
    """

    def __init__(
        self,
        user: Mapping[str, int],
        item: Mapping[str, int],
        hidden: Sequence[int] = (64,),
        *,
        width: int = 32,
        negatives: float = 0.1,
        scale: float = 5.0,
        activation: ActivationName = "relu",
        dropout: float = 0.0,
    ) -> None:
        """Make the towers; the embeddings are those of the fields.

        Args:
            user: Width of the vectors by field, each > 1, for the user's tower.
            item: The same for the item's tower.
            hidden: Widths of the layers of each tower.
            width: Width of the two vectors.
            negatives: Factor of the softmax over the batch's items in the loss, >= 0; 0: there is none.
            scale: γ at first, > 0.
            activation: Activation of the hidden layers: "relu", "prelu" or "dice".
            dropout: After each of them, in [0, 1).

        Raises:
            InvalidArgument: A field has dim 1, or another argument is out of range.
        """
        super().__init__()
        if not negatives >= 0:
            raise InvalidArgument(f"negatives is {negatives!r}; it must be >= 0")
        if not 0 < scale < float("inf"):
            raise InvalidArgument(f"scale is {scale!r}; it must be > 0")
        self.negatives = negatives
        self._user, self._item = FieldVectors("DSSM", user), FieldVectors("DSSM", item)
        if thin := self._user.first_order + self._item.first_order:
            raise InvalidArgument(f"field {thin[0]!r} of DSSM has dim 1, and there is no linear part; make it wider")
        width = integer("width", width, 2, 2**31 - 1)
        self.user_tower = tower(sum(self._user.widths), hidden, dropout, out=width, activation=activation)
        self.item_tower = tower(sum(self._item.widths), hidden, dropout, out=width, activation=activation)
        self.log_scale = nn.Parameter(torch.tensor(scale).log())
        self.bias = nn.Parameter(torch.zeros(()))

    def user_vectors(self, vectors: Mapping[str, Tensor]) -> Tensor:
        """Unit vectors [B, W] of users. Raises InvalidArgument, which names the wrong field."""
        return nn.functional.normalize(self.user_tower(_beside(self._user, vectors)), dim=1)

    def item_vectors(self, vectors: Mapping[str, Tensor]) -> Tensor:
        """Unit vectors [B, W] of items. Raises InvalidArgument, which names the wrong field."""
        return nn.functional.normalize(self.item_tower(_beside(self._item, vectors)), dim=1)

    def logits(self, vectors: Mapping[str, Tensor]) -> Tensor:
        """Logits [B] of the vectors [B, dim] of each field. Raises InvalidArgument, which names the wrong field."""
        return self._logits(self.user_vectors(vectors), self.item_vectors(vectors))

    def loss(self, vectors: Mapping[str, Tensor], clicks: Tensor) -> Tensor:
        """The log loss and the softmax over the batch's items (0-dim)."""
        users_BW, items_BW = self.user_vectors(vectors), self.item_vectors(vectors)
        loss = self.log_loss(self._logits(users_BW, items_BW), clicks)
        clicked = clicks > 0
        if not self.negatives or not clicked.any():
            return loss
        _, item_B = torch.unique(_beside(self._item, vectors).detach(), dim=0, return_inverse=True)
        scores = self.log_scale.exp() * users_BW[clicked] @ items_BW.T
        own = clicked.nonzero().squeeze(1)
        return loss + self.negatives * batch_softmax(scores, own, item_B)

    def _logits(self, users_BW: Tensor, items_BW: Tensor) -> Tensor:
        return self.log_scale.exp() * (users_BW * items_BW).sum(1) + self.bias


def batch_softmax(scores_CB: Tensor, own_C: Tensor, item_B: Tensor) -> Tensor:
    """Mean of -log of the softmax at each row's own column (0-dim), over it and the columns of other items.

    ``item_B`` numbers the items: samples of one item are not wrong answers for each other.
    """
    same_CB = item_B[own_C].unsqueeze(1) == item_B.unsqueeze(0)
    same_CB[torch.arange(len(own_C), device=own_C.device), own_C] = False
    return nn.functional.cross_entropy(scores_CB.masked_fill(same_CB, -torch.inf), own_C)


def _beside(fields: FieldVectors, vectors: Mapping[str, Tensor]) -> Tensor:
    return torch.cat(fields.split(vectors)[1], 1)
