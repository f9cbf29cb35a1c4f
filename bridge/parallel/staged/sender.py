"""What a sender does: features to the owners of the split layer, and back the loss and the features' gradients.

The owners' gradients are scaled as if their own modules were averaged; here the senders' are (DDP, FSDP2).

Legend: S samples of this rank, C classes, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from geartrain.ams.values.errors import InvalidArgument
from geartrain.bridge.parallel.split.layer import autocast_dtype, check_floating
from geartrain.bridge.parallel.staged.stage_link import StagedBatch, StageLink


class DistantLogits:
    """Stands for logits of this rank's samples, which other ranks compute; the model returns it as it is."""

    def __init__(self, features_SD: Tensor) -> None:
        self._features_SD = features_SD

    @property
    def features_SD(self) -> Tensor:
        """What the split layer was given."""
        return self._features_SD

    def _refuse_operator(self, *_: object) -> NoReturn:
        _refuse("an operator")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __neg__ = _refuse_operator
    __matmul__ = __rmatmul__ = __pow__ = __getitem__ = __len__ = _refuse_operator

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse what only tensors have."""
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse(f".{name}")

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], *_: Any) -> NoReturn:
        """What PyTorch calls instead of its own functions."""
        _refuse(getattr(func, "__name__", str(func)))


def _refuse(what: str) -> NoReturn:
    raise InvalidArgument(
        f"{what} is not for logits of another stage, which this rank never sees: let the model return what its split "
        "layer gave, and do the rest in loss="
    )


class DistantLinear(nn.Module):
    """Takes the place of an ``nn.Linear`` that other ranks hold."""

    def __init__(self, name: str, in_features: int, out_features: int) -> None:
        super().__init__()
        self.layer_name = name
        self.in_features, self.out_features = in_features, out_features

    def forward(self, features_SD: Tensor) -> DistantLogits:
        """Keep features [S, D] for the owners; raises InvalidRows unless they fit."""
        check_floating(features_SD, self.in_features, self.layer_name)
        dtype = autocast_dtype(features_SD.device)
        narrow = dtype is not None and features_SD.dtype.itemsize <= 4
        return DistantLogits(features_SD.to(dtype) if narrow else features_SD)

    def extra_repr(self) -> str:
        """For print()."""
        return f"in_features={self.in_features}, out_features={self.out_features}, held by other ranks"


def ask_for_loss(stages: StageLink, features_SD: Tensor, labels_S: Tensor) -> Tensor:
    """The loss over the samples of all senders (0-dim); its backward waits for the gradients [S, D]."""
    batch = stages.begin(None, features_SD, asks_for_loss=True)
    stages.give(batch.spans, features_SD.detach(), labels_S.to(features_SD.device))
    loss = torch.empty((), dtype=stages.answer(None, None), device=features_SD.device)
    owner = stages.owners[stages.senders.index(stages.link.rank) % len(stages.owners)]
    stages.link.start_transfers([], [(loss, owner)]).result()
    if not torch.is_grad_enabled():
        return loss
    # The loss of a backbone that is not trained has a backward pass, too: every rank calls it.
    anchor = torch.empty(0, requires_grad=True)
    joined: Tensor = _DistantLoss.apply(features_SD, anchor, loss, stages, batch)  # type: ignore[no-untyped-call]
    return joined


def ask_for_logits(stages: StageLink, features_SD: Tensor, num_classes: int) -> Tensor:
    """All logits [S, C] of this rank's samples; no graph of autograd leads to them."""
    features_SD = features_SD.detach()
    batch = stages.begin(None, features_SD, asks_for_loss=False)
    stages.give(batch.spans, features_SD)
    logits_SC = features_SD.new_empty(len(features_SD), num_classes, dtype=stages.answer(None, None))
    stages.take(batch.spans, logits_SC)
    return logits_SC


class _DistantLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, features_SD: Tensor, anchor: Tensor, loss: Tensor, stages: StageLink, batch: StagedBatch
    ) -> Tensor:
        del anchor
        ctx.stages, ctx.batch = stages, batch
        ctx.shape, ctx.dtype, ctx.device = features_SD.shape, features_SD.dtype, features_SD.device
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        del upstream  # what the owners send has theirs in it; the same script gives the same
        if not ctx.batch.wants_gradient:
            return None, None, None, None, None
        stages: StageLink = ctx.stages
        gradient_SD = torch.empty(ctx.shape, dtype=ctx.dtype, device=ctx.device)
        stages.take(ctx.batch.spans, gradient_SD)
        return gradient_SD.mul_(len(stages.senders) / len(stages.owners)), None, None, None, None
