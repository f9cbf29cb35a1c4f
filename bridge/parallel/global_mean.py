"""Mean loss over the samples of all ranks, from each rank's part.

Legend: R ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.text import quoted
from geartrain.bridge.collectives.communicator import Communicator
from geartrain.bridge.collectives.mean import mean_of_ranks
from geartrain.bridge.rows.eager import runs_eagerly

LossFunction = Callable[[Any, Tensor], Tensor]


@runs_eagerly
def mean_over_ranks(
    losses: Tensor, weights: Tensor | None = None, process_group: dist.ProcessGroup | None = None
) -> Tensor:
    """Return the mean (0-dim) of the losses of all ranks, Σ w·loss / Σ w: that of one worker with the joint batch.

        losses = F.binary_cross_entropy_with_logits(logits, clicks, reduction="none")
        loss = gt.mean_over_ranks(losses)

    DDP, FSDP2 and rows that ranks train together average gradients over the R ranks with equal weights, however many
    samples each has. So the derivative by each rank's losses is R times that of the mean. The returned number is the
    same on every rank. Every rank calls it, and goes backward from it: one all-reduce of two numbers. Without
    torch.distributed it is the plain weighted mean. NaN where the weights of all ranks are 0, as in torch.

    Args:
        losses: Losses of this rank's samples, floating point of any shape, possibly empty.
        weights: Weight of each loss, in their shape; None: 1.
        process_group: The ranks whose gradients are averaged; None: all of torch.distributed.

    Raises InvalidArgument for other tensors, RankLost.
    """
    if not isinstance(losses, Tensor) or not losses.is_floating_point():
        raise InvalidArgument(f"losses is {quoted(losses)}; it must be a floating point tensor, a loss for each sample")
    if weights is not None and (getattr(weights, "shape", None) != losses.shape or weights.requires_grad):
        raise InvalidArgument(
            f"weights is {quoted(weights)}; it must be a tensor {list(losses.shape)} as the losses, without a gradient"
        )
    link = Communicator(process_group)
    wide = _wide(losses)
    own_sum, amount = wide.sum(), losses.new_tensor(losses.numel(), dtype=torch.float64)
    if weights is not None:
        own_sum, amount = (wide * weights).sum(), weights.sum(dtype=torch.float64)
    if losses.device.type == "cpu":  # NCCL does not support it
        own_sum = own_sum.to(link.device)
    return mean_of_ranks(own_sum, amount, link).to(losses)


def own_sum_of(loss: LossFunction, reduction: str, output: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed loss of the own samples, and the divisor of its mean, from outputs that are not split."""
    if type(loss) in (nn.CrossEntropyLoss, nn.NLLLoss):
        known: Any = loss
        output, weight = _wide(output), None if known.weight is None else _wide(known.weight)
        if type(loss) is nn.NLLLoss:
            own_sum = F.nll_loss(output, labels, weight, None, known.ignore_index, None, "sum")
        else:
            smoothing = known.label_smoothing
            own_sum = F.cross_entropy(output, labels, weight, None, known.ignore_index, None, "sum", smoothing)
        if labels.dtype.is_floating_point:
            return own_sum, own_sum.new_tensor(output.numel() // max(1, output.shape[1]))
        counts = labels != known.ignore_index
        weights = counts if weight is None else weight[torch.where(counts, labels, 0)] * counts
        return own_sum, weights.sum()
    amount = torch.tensor(float(len(labels)), dtype=torch.float32, device=labels.device)
    if not len(labels):
        return _nothing_of(output), amount
    value = loss(output, labels)
    return (value * amount if reduction == "mean" else value), amount


def _wide(values: Tensor) -> Tensor:
    """Return 16-bit values as float32: their sum may exceed float16 where their mean does not."""
    return values.float() if values.dtype.itemsize < 4 else values


def _nothing_of(output: Any) -> Tensor:
    """Return 0 as a function of all that a model returned for no samples: backward reaches its parameters."""
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.dtype.is_floating_point]
    if not tensors or (torch.is_grad_enabled() and not any(tensor.requires_grad for tensor in tensors)):
        raise InvalidArgument(
            f"this rank has no samples, and the model returned {quoted(output)} for none, in which nothing has a "
            "gradient. Return tensors, in tuples, lists or dicts, or give every rank a sample"
        )
    return torch.stack([tensor.sum() * 0.0 for tensor in tensors]).sum()
