"""CrossMedia: images of items beside their ids, those of a user's history among them.

Legend: B samples, N images of all histories, P numbers of an image, W the width of what is made of one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from geartrain.ams.values.arguments import integer
from geartrain.ams.values.errors import InvalidArgument
from geartrain.bridge.models.activations import ActivationName
from geartrain.bridge.models.attention import attentive_mean
from geartrain.bridge.models.click_model import ClickModel
from geartrain.bridge.models.inputs import FieldVectors, tower
from geartrain.bridge.models.sequences import sequences_of


class CrossMedia(ClickModel):
    """Click logits from embeddings, the item's image, and the images of a history as the item asks for them.

        model = CrossMedia({"user": 16, "item": 16}, image="image", history="history_images", image_dim=4096,
                           query="item")
        logits_B = model({**fields(batch), "image": images_BP, "history_images": jagged_images})

    One network f makes W numbers of every image, the item's own x and those of the history e_j. Two queries look at
    the history, each with attention of its own: the image's f(x), and the embedding q of the item::

        p_k   = Σ_j softmax_j(MLP_k(query_k, f(e_j)))·f(e_j),          query_1 = f(x), query_2 = q
        logit = b + Σ_i w_i + MLP(v_1, …, v_F, f(x), p_1, p_2)

    An empty history gives 0. What goes in may be pixels or what another network made of them; gradients reach it.
    Source: Ge et al., "Image Matters: Visually Modeling User Behaviors Using Advanced Model Server" (2018), section 4:
    the image's embedding and the multi-query attentive pooling.
    """

    def __init__(
        self,
        dims: Mapping[str, int],
        *,
        image: str,
        history: str,
        image_dim: int,
        query: str,
        image_hidden: Sequence[int] = (64,),
        image_width: int = 12,
        attention: Sequence[int] = (16,),
        hidden: Sequence[int] = (64, 32),
        activation: ActivationName = "prelu",
        dropout: float = 0.0,
    ) -> None:
        """Make the dense part; the embeddings are those of the fields.

        Args:
            dims: Width of the embeddings by field, without the images: 1 for first-order weights.
            image: Name of the item's images among the vectors, [B, P].
            history: Name of the history's, jagged [B, ?, P] or [B, L, P].
            image_dim: P.
            query: Field among ``dims`` whose embedding asks beside the item's image.
            image_hidden: Widths of the hidden layers of f.
            image_width: W.
            attention: Widths of the hidden layers of each query's attention.
            hidden: Widths of the deep network's layers.
            activation: Activation of all of them: "prelu", "dice" or "relu".
            dropout: After each layer of the deep network, in [0, 1).

        Raises:
            InvalidArgument: ``query`` is not a field wider than 1, or another argument is out of range.
        """
        super().__init__()
        self._fields = FieldVectors("CrossMedia", dims)
        if query not in self._fields.embedded:
            raise InvalidArgument(f"query of CrossMedia is {query!r}; it must be one of {self._fields.embedded}")
        self._image, self._history, self._query = image, history, query
        self._image_dim = integer("image_dim", image_dim, 1, 2**31 - 1)
        width = integer("image_width", image_width, 1, 2**31 - 1)
        self.descriptor = tower(image_dim, image_hidden, 0.0, out=width, activation=activation)
        self.by_image = tower(2 * width, attention, 0.0, activation=activation)
        self.by_id = tower(dims[query] + width, attention, 0.0, activation=activation)
        self.deep = tower(sum(self._fields.widths) + 3 * width, hidden, dropout, activation=activation)
        self.bias = nn.Parameter(torch.zeros(()))

    def logits(self, vectors: Mapping[str, Tensor]) -> Tensor:
        """Logits [B] of the embeddings [B, dim] and of the images. Raises InvalidArgument that names what is wrong."""
        first_order_B, embedded = self._fields.split(vectors)
        images_BP = vectors.get(self._image)
        if images_BP is None or images_BP.is_nested or images_BP.shape != (first_order_B.shape[0], self._image_dim):
            shape = "not there" if images_BP is None else f"of shape {list(images_BP.shape)}"
            raise InvalidArgument(
                f"the images {self._image!r} are {shape}; CrossMedia takes [{len(first_order_B)}, {self._image_dim}]"
            )
        given = sequences_of("CrossMedia", vectors, {self._history: self._image_dim})
        own_BW = self.descriptor(images_BP)
        seen = replace(given, values_ND=self.descriptor(given.values_ND))
        liked_BW = attentive_mean(seen, own_BW, self.by_image)
        by_id_BW = attentive_mean(seen, vectors[self._query], self.by_id)
        deep_B = self.deep(torch.cat([*embedded, own_BW, liked_BW, by_id_BW], 1)).squeeze(1)
        logits_B: Tensor = self.bias + first_order_B + deep_B
        return logits_B
