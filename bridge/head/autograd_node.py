"""The autograd node between a head's rows and the network in front of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from geartrain.ams.values.errors import InvalidArgument
from geartrain.bridge.rows.pending import PendingUpdate


class RowsPass(Protocol):
    """The rows of one forward pass, wherever they are."""

    def forward(self, *, want_gradient: bool, keep_bytes: int) -> tuple[Tensor, Tensor | None]:
        """Loss (0-dim) and feature gradient [B, D]; logits of up to ``keep_bytes`` may be kept."""
        ...

    def gradient(self, upstream: Tensor) -> tuple[Any, Tensor]:
        """``upstream`` · the row gradients; also a number that is finite only if all of them are."""
        ...

    def discard(self) -> None:
        """Let go of everything when no row gradient is wanted."""
        ...


@dataclass
class HeadCall:
    """One forward pass of a head."""

    rows: RowsPass
    update: PendingUpdate[Any]
    samples: int
    keep_bytes: int
    want_rows: bool
    """Whether a backward pass queues row gradients."""
    used: bool = False
    moment: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        """Remember of which classes and rows the pass is."""
        self.moment = self.update.moment

    def run(self, *, want_gradient: bool) -> tuple[Tensor, Tensor | None]:
        """Loss and, if wanted, feature gradient; autocast is off inside, the passes choose their own types."""
        with torch.inference_mode(False), torch.no_grad():
            keep_bytes = self.keep_bytes if self.want_rows else 0
            loss, gradient_BD = self.rows.forward(want_gradient=want_gradient, keep_bytes=keep_bytes)
        if not self.want_rows:
            self.rows.discard()
        return loss, gradient_BD

    def queue_row_gradients(self, upstream: Tensor) -> None:
        """Make the row gradients and add them to the head's update."""
        if not self.want_rows:
            return
        if self.used:
            raise InvalidArgument(
                "backward ran a second time over the loss of a ClassHead, whose pulled rows now hold their gradient; "
                "call the head again for another loss (retain_graph does not help)"
            )
        if self.moment != self.update.moment:
            raise InvalidArgument(
                "classes were added, retired or loaded, or the table was restored, between this forward pass and its "
                "backward; call the head again"
            )
        self.used = True
        gradient, checksum = self.rows.gradient(upstream)
        self.update.add(gradient, checksum, self.samples)


class HeadLoss(torch.autograd.Function):
    """loss(features [B, D]); backward gives the exact feature gradient and queues the row gradients."""

    @staticmethod
    def forward(ctx: Any, features_BD: Tensor, carrier: Tensor, call: HeadCall) -> Tensor:
        """Run the pass; ``carrier`` is there so that the loss needs a gradient even if the features do not."""
        del carrier
        want_gradient = bool(ctx.needs_input_grad[0])
        with torch.autocast(features_BD.device.type, enabled=False):
            loss, gradient_BD = call.run(want_gradient=want_gradient)
        ctx.call = call
        ctx.feature_dtype = features_BD.dtype
        width = features_BD.shape[1]  # rows with biases have a column more
        ctx.save_for_backward(*([gradient_BD[:, :width]] if gradient_BD is not None else []))
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, None, None]:
        """Scale the feature gradient of the forward pass; make the row gradients."""
        if torch.is_grad_enabled():  # by create_graph=True: the gradient would silently count as a constant
            raise InvalidArgument(
                "a ClassHead has no second derivatives: create_graph=True cannot go through its loss; take the "
                "gradient of the loss without it, or compute a gradient penalty on another loss"
            )
        with torch.autocast(upstream.device.type, enabled=False):
            ctx.call.queue_row_gradients(upstream)
            saved = ctx.saved_tensors
            return (saved[0] * upstream).to(ctx.feature_dtype) if saved else None, None, None


def head_loss(features_BD: Tensor, carrier: Tensor, call: HeadCall) -> Tensor:
    """Loss (0-dim) of one call, joined to the graphs of the features and of the carrier."""
    loss: Tensor = HeadLoss.apply(features_BD, carrier, call)  # type: ignore[no-untyped-call]
    return loss
