"""LARS: each layer has the rate that its weight's norm over its gradient's allows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from geartrain.ams.values.arguments import boolean
from geartrain.ams.values.errors import InvalidArgument
from geartrain.bridge.optim.layerwise import LayerwiseOptimizer, gradient_of, require_number
from geartrain.bridge.optim.norms import local_part


class LARS(LayerwiseOptimizer):
    """SGD with momentum and a rate for each layer, for large batches (You, Gitman and Ginsburg 2017, algorithm 1).

        ratio = trust_coefficient · ‖w‖ / (‖g‖ + weight_decay · ‖w‖ + eps)
        v ← momentum · v + ratio · (g + weight_decay · w)
        w ← w − lr · v

    The rate stands outside of v, as in ``torch.optim.SGD``; the paper has it inside, which is the same while it is
    constant. A layer whose weight or gradient is 0 has the ratio 1. Parameters may be DTensors (FSDP2, tensor
    parallelism): norms are those of whole weights, at one all-reduce of two numbers a parameter for each param_group.
    Nothing waits for a device. Not thread-safe.

    Args:
        params: Parameters, or groups of them with numbers of their own.
        lr: >= 0. With a ``trust_coefficient`` of 0.001 usual ones are 1 to 30, with 1 those of 0.001 to 0.03.
        momentum: In [0, 1).
        weight_decay: λ, >= 0; also part of the ratio.
        trust_coefficient: η, >= 0: what part of its norm a weight may move by in a step at lr 1. The paper's is 0.001;
            1 gives ‖w‖ / (‖g‖ + λ‖w‖) itself.
        eps: Added to the divisor.
        nesterov: Look ahead by the momentum, as ``torch.optim.SGD`` does.
        maximize: Go up instead of down.
        adapt: Which parameters have a ratio, and weight decay: None those of two and more dimensions, so that biases
            and the weights of norms are trained by plain SGD, as is usual; True all; False none. Of a group, too.

    Raises:
        InvalidArgument: a number is out of range, or ``nesterov`` is without momentum.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        eps: float = 1e-8,
        nesterov: bool = False,
        maximize: bool = False,
        adapt: bool | None = None,
    ) -> None:
        numbers = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "eps": eps}
        switches = {"nesterov": nesterov, "maximize": maximize, "adapt": adapt}
        super().__init__(params, {**numbers, "trust_coefficient": trust_coefficient, **switches})

    def _check(self, group: dict[str, Any]) -> None:
        super()._check(group)
        require_number("momentum", group["momentum"], below=1.0)
        require_number("trust_coefficient", group["trust_coefficient"])
        if boolean("nesterov", group["nesterov"]) and not group["momentum"]:
            raise InvalidArgument("nesterov is True and momentum is 0; give a momentum (0.9), or nesterov=False")

    def _measured(self, group: dict[str, Any], param: Tensor) -> Tensor:
        return gradient_of(group, param)

    def _ratio(self, group: dict[str, Any], weight: Tensor, step: Tensor) -> Tensor:
        ratio: Tensor = group["trust_coefficient"] * weight / (step + group["weight_decay"] * weight + group["eps"])
        return ratio

    def _move(self, group: dict[str, Any], param: Tensor, ratio: Tensor | None) -> None:
        weight, step = local_part(param), gradient_of(group, param)
        if ratio is not None:
            step = step.add(weight, alpha=group["weight_decay"]).mul_(ratio)
        if group["momentum"]:
            state = self.state[param]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(param)
            velocity = local_part(state["momentum_buffer"])
            velocity.mul_(group["momentum"]).add_(step)
            step = step.add(velocity, alpha=group["momentum"]) if group["nesterov"] else velocity
        weight.add_(step, alpha=-group["lr"])
