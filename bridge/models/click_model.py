"""Base class of networks that predict clicks: logits of a batch, or the loss.

Legend: B samples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn


class ClickModel(nn.Module, ABC):
    """The base of :mod:`geartrain.models`: subclasses have :meth:`logits`, and :meth:`loss` if theirs is another.

    The loss is a result of the call itself, so that what wraps a module, such as DistributedDataParallel, sees it.
    """

    log_odds_shift = 0.0
    """Added to the logits of what is not learned from. Where only a part w of the samples without a click is learned
    from, log w undoes that: p = q / (q + (1 - q) / w) of the probability q learned (He et al. 2014, section 6.3)."""
    learned_logits: Tensor | None = None
    """Those [B] of the newest batch learned from, without the shift and as they were before it."""

    per_node: ClassVar[bool] = False
    """Whether it takes vectors of nodes that samples share, as of a group with ``per_node=True``, and their batch."""

    def forward(self, vectors: Mapping[str, Tensor], clicks: Tensor | None = None, batch: Any = None) -> Tensor:
        """Return the logits, or the loss, of a batch.

        Args:
            vectors: Vectors by field, float [B, dim]; of sequences as the model says.
            clicks: [B], 0 or 1, of the samples to learn from.
            batch: Has the levels of vectors by node; for models that are :attr:`per_node`.

        Returns:
            Without ``clicks`` the logits [B]; with them the loss (0-dim) to go backward from.

        Raises:
            InvalidArgument: A field is missing or has another shape; it is named.
        """
        if batch is None:
            return self.logits(vectors) + self.log_odds_shift if clicks is None else self.loss(vectors, clicks)
        logits = self.logits(vectors, batch)  # type: ignore[call-arg]
        return logits + self.log_odds_shift if clicks is None else self.log_loss(logits, clicks)

    @abstractmethod
    def logits(self, vectors: Mapping[str, Tensor]) -> Tensor:
        """The log-odds [B] of a click."""

    def loss(self, vectors: Mapping[str, Tensor], clicks: Tensor) -> Tensor:
        """The mean of -log of the probability of what happened (0-dim), in nats."""
        return self.log_loss(self.logits(vectors), clicks)

    def log_loss(self, logits: Tensor, clicks: Tensor) -> Tensor:
        """The mean of -log of the probability of what happened (0-dim), in nats; ``logits`` and ``clicks`` are [B]."""
        self.learned_logits = logits.detach()
        return nn.functional.binary_cross_entropy_with_logits(logits, clicks.to(logits.dtype))
