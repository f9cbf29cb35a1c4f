"""Base of LARS and LAMB: a step for each layer, scaled by a ratio of norms."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from geartrain.ams.values.arguments import boolean, real_number
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.text import quoted
from geartrain.bridge.optim.norms import local_part, whole_norms


class LayerwiseOptimizer(torch.optim.Optimizer, ABC):
    """An optimizer that scales the step of a layer by a ratio of norms.

    A group's ``adapt`` says which parameters have a ratio, and weight decay: None those of two and more dimensions
    (biases and the weights of norms are left out, as is usual), True all, False none.
    """

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        self._check(defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group. Raises InvalidArgument for a number that is out of range."""
        self._check({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def _check(self, group: dict[str, Any]) -> None:
        """Raise InvalidArgument for a number that is out of range."""
        require_number("lr", float(group["lr"]) if isinstance(group["lr"], Tensor) else group["lr"])
        require_number("weight_decay", group["weight_decay"])
        require_number("eps", group["eps"])
        boolean("maximize", group["maximize"])
        if group["adapt"] is not None:
            boolean("adapt", group["adapt"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step; return what ``closure`` returned, which is called before it, with gradients.

        Raises InvalidArgument, before any parameter moves, for a gradient that is sparse or complex, and RankLost if a
        rank that holds part of a weight is gone.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        trained = [
            (group, [param for param in group["params"] if param.grad is not None]) for group in self.param_groups
        ]
        for _, params in trained:
            for param in params:
                self._require_dense(param.grad)
        for group, params in trained:
            self._step_group(group, params)
        return loss

    def _step_group(self, group: dict[str, Any], params: list[Tensor]) -> None:
        for param in params:
            self._collect(group, param)
        adapted = [param for param in params if _is_adapted(group, param)]
        weights = ((param, local_part(param)) for param in adapted)
        steps = ((param, self._measured(group, param)) for param in adapted)
        norms = whole_norms([*weights], steps)
        ratios = {}
        for param, weight, step in zip(adapted, norms[: len(adapted)], norms[len(adapted) :], strict=True):
            ratio = self._ratio(group, weight, step)
            ratios[param] = torch.where((weight > 0) & (step > 0), ratio, torch.ones_like(ratio))
        for param in params:
            self._move(group, param, ratios.get(param))

    def _require_dense(self, grad: Tensor) -> None:
        if grad.is_sparse or grad.is_complex():
            raise InvalidArgument(
                f"a gradient {list(grad.shape)} is {'sparse' if grad.is_sparse else 'complex'}; {type(self).__name__} "
                "takes dense real ones. Give its parameter to an optimizer of its own"
            )

    def _collect(self, group: dict[str, Any], param: Tensor) -> None:
        """Add the gradient to the state, before norms are known."""

    @abstractmethod
    def _measured(self, group: dict[str, Any], param: Tensor) -> Tensor:
        """Return this rank's part of the tensor whose norm divides the weight's."""

    @abstractmethod
    def _ratio(self, group: dict[str, Any], weight: Tensor, step: Tensor) -> Tensor:
        """The ratio of a layer (0-dim) by the norms of its weight and of :meth:`_measured`, where both are > 0."""

    @abstractmethod
    def _move(self, group: dict[str, Any], param: Tensor, ratio: Tensor | None) -> None:
        """Move this rank's part of a parameter in place; without a ratio it is not adapted."""


def gradient_of(group: dict[str, Any], param: Tensor) -> Tensor:
    """Return this rank's part of the gradient of the minimised loss."""
    assert param.grad is not None
    grad = local_part(param.grad, param)
    return -grad if group["maximize"] else grad


def require_number(name: str, value: object, below: float = float("inf")) -> None:
    """Raise InvalidArgument unless 0 <= value < below."""
    if not 0 <= real_number(name, value) < below:
        bounds = ">= 0 and finite" if below == float("inf") else f"in [0, {below:g})"
        raise InvalidArgument(f"{name} is {quoted(value)}; it must be {bounds}")


def _is_adapted(group: dict[str, Any], param: Tensor) -> bool:
    return param.ndim > 1 if group["adapt"] is None else bool(group["adapt"])
