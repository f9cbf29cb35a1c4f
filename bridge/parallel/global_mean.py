"""One loss over the samples of all ranks, made of what each rank has of it.

Legend: R ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.text import quoted
from geartrain.bridge.collectives.communicator import Communicator

LossFunction = Callable[[Any, Tensor], Tensor]


class _MeanOfRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own_sum: Tensor, amount: Tensor | None, link: Communicator) -> Tensor:
        # Of one type, for a rank without samples does not know what the others' losses are of.
        own = own_sum.detach().double()
        amounts = torch.zeros_like(own) if amount is None else amount.to(own)
        total, divisor = link.sum(torch.stack([own, amounts])).unbind()
        ctx.factor = link.world_size if amount is None else (link.world_size / divisor).to(own_sum.dtype)
        return (total if amount is None else total / divisor).to(own_sum.dtype)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        return upstream * ctx.factor, None, None


def mean_of_ranks(own_sum: Tensor, amount: Tensor | None, link: Communicator) -> Tensor:
    """Σ ``own_sum`` / Σ ``amount`` over the ranks (None: 1), the same number on each: one all-reduce of two numbers.

    Backward gives R times the derivative, for the gradients of replicated parts are averaged over the R ranks.
    """
    mean: Tensor = _MeanOfRanks.apply(own_sum, amount, link)  # type: ignore[no-untyped-call]
    return mean


def own_sum_of(loss: LossFunction, reduction: str, output: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of the own samples as a sum, and what a mean divides such sums by, of outputs that are whole."""
    if type(loss) in (nn.CrossEntropyLoss, nn.NLLLoss):
        known: Any = loss
        if type(loss) is nn.NLLLoss:
            own_sum = F.nll_loss(output, labels, known.weight, None, known.ignore_index, None, "sum")
        else:
            smoothing = known.label_smoothing
            own_sum = F.cross_entropy(output, labels, known.weight, None, known.ignore_index, None, "sum", smoothing)
        if labels.dtype.is_floating_point:
            return own_sum, own_sum.new_tensor(output.numel() // max(1, output.shape[1]))
        counts = labels != known.ignore_index
        weights = counts if known.weight is None else known.weight[torch.where(counts, labels, 0)] * counts
        return own_sum, weights.sum()
    amount = torch.tensor(float(len(labels)), device=labels.device)
    if not len(labels):
        return _nothing_of(output), amount
    value = loss(output, labels)
    return (value * amount if reduction == "mean" else value), amount


def _nothing_of(output: Any) -> Tensor:
    """0, as a function of all that a model returned for no samples: a backward pass reaches its parameters."""
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.dtype.is_floating_point]
    if not tensors or (torch.is_grad_enabled() and not any(tensor.requires_grad for tensor in tensors)):
        raise InvalidArgument(
            f"this rank has no samples, and the model returned {quoted(output)} for none, in which nothing has a "
            "gradient. Return tensors, in tuples, lists or dicts, or give every rank a sample"
        )
    return torch.stack([tensor.sum() * 0.0 for tensor in tensors]).sum()
