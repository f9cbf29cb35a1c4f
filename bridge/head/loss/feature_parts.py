"""Features that come to a head part by part, so that they and their gradients travel beside what is computed.

Autograd runs what was made last first. Each part gets a node right behind its backbone, so in the backward pass the
parts come one after the other, the last one first, and the node waits for the gradients of its own part alone.

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
from geartrain.bridge.collectives.parts import with_travelled_gradient
from geartrain.bridge.head.loss.autograd_node import HeadCall, refuse_second_derivative
from geartrain.bridge.head.loss.config import Reduction
from geartrain.bridge.rows.transfers import upload


class PartGradients(Protocol):
    """Where the gradients of the features of each part come from."""

    def start(self) -> None:
        """They are wanted."""

    def collect(self, part: int) -> Tensor:
        """Those of one part."""


class FeatureParts:
    """One batch whose features are computed part by part, in the gradient mode in which this was made."""

    def __init__(self, compute: Callable[[int], Tensor], sizes: Sequence[int], *, overlap: bool = True) -> None:
        """``compute(part)`` gives features [``sizes[part]``, D]; ``overlap``: whether anything travels meanwhile."""
        self._compute = compute
        self.sizes = list(sizes)
        self.overlap = overlap
        self._modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        self.joined: list[Tensor] = []
        """Those that count of each part, in the graph."""
        self.gradients: PartGradients | None = None
        """Where those of the features will be, once the head has seen them; None: nowhere."""
        self.factors: Sequence[Tensor] = ()
        """What each part's are multiplied by, in the backward pass."""

    @property
    def size(self) -> int:
        """B."""
        return sum(self.sizes)

    def compute(self, part: int) -> Tensor:
        """The features of one part, in the graph. Raises what the backbone does, and InvalidRows."""
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
        """Join the part's features, of which those at ``kept`` count (None: all), to the graph; return them [S, D]."""
        inference, gradients = self._modes
        with torch.inference_mode(inference), torch.set_grad_enabled(gradients):
            if kept is not None:
                features = features[upload(kept, features.device)]
            width = features.shape[1]  # rows with biases have a column more

            def collect() -> Tensor:
                assert self.gradients is not None
                return self.gradients.collect(part)[:, :width] * self.factors[part]

            joined = with_travelled_gradient(features, collect)
        self.joined.append(joined)
        return joined

    def kept(self, part: int, places: Ids | None) -> Ids | None:
        """Which samples of a part are among ``places``, indices of the batch; None: all."""
        if places is None:
            return None
        first = sum(self.sizes[:part])
        low, high = np.searchsorted(places, (first, first + self.sizes[part]))
        return places[low:high] - first


class _PartsLoss(torch.autograd.Function):
    """loss(features of each part); backward queues the row gradients and lets the features' travel."""

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
    """Loss (0-dim), or losses [B], of one call, joined to the graphs of the parts, and to ``stand_in`` of trained
    rows."""
    joined, parts.joined = parts.joined, []  # the graph knows the parts: no cycle is to keep both
    losses: Tensor = _PartsLoss.apply(stand_in, call, parts, *joined)  # type: ignore[no-untyped-call]
    return call.reduced(losses, parts.size, reduction)
