"""Optimizers that torch lacks, as their sources write them, for weights [N, D] all of which have a gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class WrittenOptimizer(torch.optim.Optimizer):
    """Steps each parameter by :meth:`update`, with its state and the settings of its group."""

    def __init__(self, parameters: list[Tensor], **settings: Any) -> None:
        super().__init__(parameters, settings)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for weights in group["params"]:
                state = self.state[weights]
                state["t"] = state.get("t", 0) + 1
                self.update(weights, weights.grad, state, group)

    def update(self, weights: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


class OneSumARow(WrittenOptimizer):
    """FBGEMM's rowwise_adagrad with TorchRec's lr_decay and initial value of the sum."""

    def update(self, weights: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        gradient = gradient + group["weight_decay"] * weights
        total = state.setdefault("sum", torch.full_like(weights[:, :1], group["start"]))
        total += (gradient * gradient).mean(1, keepdim=True)
        multiplier = group["lr"] / (1 + (state["t"] - 1) * group["lr_decay"]) / (total.sqrt() + group["eps"])
        weights -= multiplier * gradient


class OneSecondMomentARow(WrittenOptimizer):
    """FBGEMM's partial_rowwise_adam."""

    def update(self, weights: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        first = state.setdefault("m", torch.zeros_like(weights))
        second = state.setdefault("v", torch.zeros_like(weights[:, :1]))
        first.copy_(beta1 * first + (1 - beta1) * gradient)
        second.copy_(beta2 * second + (1 - beta2) * (gradient * gradient).mean(1, keepdim=True))
        first_hat, second_hat = first / (1 - beta1 ** state["t"]), second / (1 - beta2 ** state["t"])
        weights -= group["lr"] * (first_hat / (second_hat.sqrt() + group["eps"]) + group["weight_decay"] * weights)


class FollowTheLeader(WrittenOptimizer):
    """Algorithm 1 of McMahan et al., KDD 2013, with z and n, from z = -w / eta where it begins at w.

    Every weight is made anew from its z and n. sigma is 1 / eta - 1 / eta of the step before, also where the rate alpha
    changes.
    """

    def update(self, weights: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        n = state.setdefault("n", torch.zeros_like(weights))
        before = state.setdefault("1/eta", (group["beta"] + n.sqrt()) / group["lr"])
        z = state.setdefault("z", -weights * before)
        n += gradient * gradient
        after = (group["beta"] + n.sqrt()) / group["lr"]
        z += gradient - (after - before) * weights
        moved = -(z - z.sign() * group["l1"]) / (after + group["l2"])
        weights.copy_(torch.where(z.abs() <= group["l1"], torch.zeros_like(z), moved))
        before.copy_(after)
