"""Activations with parameters: PReLU and Dice.

Legend: N vectors, W their width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.text import quoted

ActivationName = Literal["relu", "prelu", "dice"]


class Dice(nn.Module):
    """A PReLU whose step lies at the mean of its input, and is as wide as the input's standard deviation.

    With the mean and variance of each column over the batch, or in evaluation their running values::

        p = sigmoid((s - E[s]) / √(Var[s] + 1e-8)),  f(s) = p·s + (1 - p)·α·s

    α [W] is learned, 0 at first. Source: Zhou et al., "Deep Interest Network for Click-Through Rate Prediction"
    (2018), section 5.3.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(width))
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))

    def forward(self, values_NW: Tensor) -> Tensor:
        """Return f(s) [N, W]. A batch of fewer than two vectors has no variance: the running one is used."""
        mean, variance = self.get_buffer("running_mean"), self.get_buffer("running_var")
        learns = self.training and len(values_NW) > 1
        share = nn.functional.batch_norm(values_NW, mean, variance, training=learns, momentum=0.1, eps=1e-8).sigmoid()
        return values_NW * (share + (1 - share) * self.alpha)


ACTIVATIONS: dict[str, Callable[[int], nn.Module]] = {
    "relu": lambda _: nn.ReLU(),
    "prelu": lambda width: nn.PReLU(width, init=0.25),
    "dice": Dice,
}


def activation_of(name: ActivationName) -> Callable[[int], nn.Module]:
    """Return the function that creates the layer for a number of columns. Raises InvalidArgument."""
    if name not in ACTIVATIONS:
        raise InvalidArgument(f"activation is {quoted(name)}; it must be one of {', '.join(map(repr, ACTIVATIONS))}")
    return ACTIVATIONS[name]
