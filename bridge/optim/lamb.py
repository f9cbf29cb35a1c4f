"""LAMB: Adam with a rate for each layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.text import quoted
from geartrain.bridge.optim.layerwise import LayerwiseOptimizer, gradient_of, require_number
from geartrain.bridge.optim.norms import local_part


class LAMB(LayerwiseOptimizer):
    """Adam with a rate for each layer, for large batches (You et al. 2020, algorithm 2).

        m ← β1 · m + (1 − β1) · g;  v ← β2 · v + (1 − β2) · g²
        r = (m / (1 − β1ᵗ)) / (√(v / (1 − β2ᵗ)) + eps) + weight_decay · w
        w ← w − lr · ‖w‖ / ‖r‖ · r

    A layer whose weight or r is 0 has the ratio 1. DTensors are taken as by :class:`LARS`, at the same cost; nothing
    waits for a device. Not thread-safe.

    Args:
        params: Parameters, or groups of them with numbers of their own.
        lr: >= 0; the part of its norm that a weight moves by in a step.
        betas: β1 and β2, in [0, 1).
        eps: Added to the divisor.
        weight_decay: λ, >= 0.
        maximize: Go up instead of down.
        adapt: Which parameters have a ratio, and weight decay: None those of two and more dimensions, so that biases
            and the weights of norms are trained by plain Adam, as is usual; True all; False none. Of a group, too.

    Raises:
        InvalidArgument: a number is out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        maximize: bool = False,
        adapt: bool | None = None,
    ) -> None:
        numbers = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**numbers, "maximize": maximize, "adapt": adapt})

    def _check(self, group: dict[str, Any]) -> None:
        super()._check(group)
        if not isinstance(group["betas"], tuple | list) or len(group["betas"]) != 2:
            raise InvalidArgument(f"betas is {quoted(group['betas'])}; it must be two numbers in [0, 1)")
        for beta in group["betas"]:
            require_number("betas", beta, below=1.0)

    def _collect(self, group: dict[str, Any], param: Tensor) -> None:
        state, (beta1, beta2), grad = self.state[param], group["betas"], gradient_of(group, param)
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")  # so that reading it waits for no device
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        state["step"] += 1
        local_part(state["exp_avg"]).lerp_(grad, 1 - beta1)
        local_part(state["exp_avg_sq"]).mul_(beta2).addcmul_(grad, grad, value=1 - beta2)

    def _measured(self, group: dict[str, Any], param: Tensor) -> Tensor:
        return self._direction(group, param, group["weight_decay"])

    def _ratio(self, group: dict[str, Any], weight: Tensor, step: Tensor) -> Tensor:  # noqa: ARG002
        return weight / step

    def _move(self, group: dict[str, Any], param: Tensor, ratio: Tensor | None) -> None:
        # Made anew: directions of all layers at once would take the memory of another copy of the model.
        step = self._direction(group, param, 0.0 if ratio is None else group["weight_decay"])
        local_part(param).add_(step if ratio is None else step.mul_(ratio), alpha=-group["lr"])

    def _direction(self, group: dict[str, Any], param: Tensor, weight_decay: float) -> Tensor:
        """Return this rank's part of r."""
        state, (beta1, beta2) = self.state[param], group["betas"]
        count = float(state["step"])
        divisor = local_part(state["exp_avg_sq"]).sqrt().div_((1 - beta2**count) ** 0.5).add_(group["eps"])
        step = (local_part(state["exp_avg"]) / divisor).div_(1 - beta1**count)
        return step.add_(local_part(param), alpha=weight_decay) if weight_decay else step
