"""Features that reach a head part by part, so that they and their gradients are sent during computation.

Autograd runs the newest nodes first. Each part has a node right behind its backbone, so the backward pass takes the
parts one after the other, the last first, and each node waits for the gradients of its own part alone.

Legend: B samples of this rank, S of one part that count, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from geartrain.ams.values.errors import InvalidRows
from geartrain.ams.values.specs import Ids
from geartrain.bridge.collectives.part_exchange import with_travelled_gradient
from geartrain.bridge.head.loss.autograd_node import HeadCall, refuse_second_derivative
from geartrain.bridge.head.loss.config import Reduction
from geartrain.bridge.rows.transfers import upload


class PartGradients(Protocol):
    """Source of the gradients of each part's features."""

    def start(self) -> None:
        """Start to compute or send the gradients."""

    def collect(self, part: int) -> Tensor:
        """Return the gradients of one part."""


class FeatureParts:
    """One batch whose features are computed part by part, in the gradient mode of its creation."""

    def __init__(self, compute: Callable[[int], Tensor], sizes: Sequence[int], *, overlap: bool = True) -> None:
        """``compute(part)`` returns features [``sizes[part]``, D]; ``overlap``: whether sending overlaps with
        computation."""
        self._compute = compute
        self.sizes = list(sizes)
        self.overlap = overlap
        self._modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        self.joined: list[Tensor] = []
        """Counted features of each part, in the graph."""
        self.gradients: PartGradients | None = None
        """Source of the feature gradients, set by the head; None: there is none yet."""
        self.factors: Sequence[Tensor] = ()
        """Factor of each part's gradients in the backward pass."""

    @property
    def size(self) -> int:
        """Number of samples, B."""
        return sum(self.sizes)

    def compute(self, part: int) -> Tensor:
        """Return the features of one part, in the graph. Raises as the backbone, and InvalidRows."""
        inference, gradients = self._modes
        with torch.inference_mode(inference), torch.set_grad_enabled(gradients):
            features = self._compute(part)
        found = len(features) if isinstance(features, Tensor) and features.ndim else type(features).__name__
        if found != self.sizes[part]:
            raise InvalidRows(
                f"of {self.sizes[part]} samples of micro-batch {part} the backbone made features of {found}; it must "
                "give one row [D] for each sample"
            )
        return features

    def join(self, part: int, features: Tensor, kept: Ids | None) -> Tensor:
        """Join the part's features at ``kept`` (None: all), the counted ones, to the graph; return them [S, D]."""
        inference, gradients = self._modes
        with torch.inference_mode(inference), torch.set_grad_enabled(gradients):
            if kept is not None:
                features = features[upload(kept, features.device)]
            width = features.shape[1]  # rows with biases have one more column

            def collect() -> Tensor:
                assert self.gradients is not None
                return self.gradients.collect(part)[:, :width] * self.factors[part]

            joined = with_travelled_gradient(features, collect)
        self.joined.append(joined)
        return joined

    def kept(self, part: int, places: Ids | None) -> Ids | None:
        """Return which samples of a part are among ``places``, indices of the batch; None: all."""
        if places is None:
            return None
        first = sum(self.sizes[:part])
        low, high = np.searchsorted(places, (first, first + self.sizes[part]))
        return places[low:high] - first


class _PartsLoss(torch.autograd.Function):
    """Autograd function loss(features of each part); backward queues row gradients and starts to send the features'."""

    @staticmethod
    def forward(ctx: Any, stand_in: Tensor | None, call: HeadCall, parts: FeatureParts, *joined: Tensor) -> Tensor:
        del stand_in
        with torch.autocast(joined[0].device.type, enabled=False):
            loss, _ = call.run(want_gradient=any(ctx.needs_input_grad[3:]))
        ctx.call, ctx.parts = call, parts
        ctx.like = [(features.shape, features.dtype) for features in joined]
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        call: HeadCall = ctx.call
        parts: FeatureParts = ctx.parts
        of_stand_in = call.defer(upstream)
        with torch.autocast(upstream.device.type, enabled=False):
            if parts.gradients is None or not any(ctx.needs_input_grad[3:]):
                return (of_stand_in, *(None,) * (len(ctx.needs_input_grad) - 1))
            parts.gradients.start()
            each_B = call.upstream_of_samples(upstream)
            parts.factors = [
                of_part.unsqueeze(1) for of_part in torch.split(each_B, [shape[0] for shape, _ in ctx.like])
            ]
        nothing = upstream.new_zeros(())
        return of_stand_in, None, None, *(nothing.to(dtype).expand(shape) for shape, dtype in ctx.like)


def parts_loss(parts: FeatureParts, stand_in: Tensor | None, call: HeadCall, reduction: Reduction) -> Tensor:
    """Return the loss (0-dim), or losses [B], of one call, joined to the graphs of the parts, and to ``stand_in`` of
    trained rows."""
    joined, parts.joined = parts.joined, []  # the graph knows the parts: no cycle must keep both
    losses: Tensor = _PartsLoss.apply(stand_in, call, parts, *joined)  # type: ignore[no-untyped-call]
    return call.reduced(losses, parts.size, reduction)
