"""AdamW whose second moment is one number a row: what rows of width D would save D − 1 floats by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class RowWiseAdamW(torch.optim.Optimizer):
    """``torch.optim.AdamW`` of matrices [C, D] but for v [C, 1] ← β₂ v + (1 − β₂) · mean over columns of g²."""

    def __init__(self, matrices: list[Tensor], lr: float = 1e-3, weight_decay: float = 1e-2) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One update."""
        del closure
        beta1, beta2 = 0.9, 0.999
        for group in self.param_groups:
            for matrix_cd in group["params"]:
                state = self.state[matrix_cd]
                state.setdefault("t", 0)
                state["t"] += 1
                means_cd = state.setdefault("first", torch.zeros_like(matrix_cd))
                squares_c = state.setdefault("second", torch.zeros(len(matrix_cd), 1))
                means_cd.lerp_(matrix_cd.grad, 1 - beta1)
                squares_c.lerp_(matrix_cd.grad.square().mean(1, keepdim=True), 1 - beta2)
                matrix_cd.mul_(1 - group["lr"] * group["weight_decay"])
                divisor_c = (squares_c / (1 - beta2 ** state["t"])).sqrt() + 1e-8
                matrix_cd.sub_(group["lr"] / (1 - beta1 ** state["t"]) * means_cd / divisor_c)
