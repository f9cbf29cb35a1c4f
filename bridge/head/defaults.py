"""What a head does where its caller says nothing: what ``nn.Linear`` under cross entropy and AdamW does.

``geartrain bench defaults`` compares the two.
"""

from __future__ import annotations

import math

from geartrain.ams.programs.selection import PartialFC, Selection
from geartrain.ams.values.optimizers.registry import AdamW
from geartrain.ams.values.specs import Uniform

DEFAULT_SELECT = PartialFC(sample_rate=0.1, min_active=65_536)
"""The full softmax while that is affordable; beyond, its loss is estimated without bias, or with the margin sampled."""
DEFAULT_OPTIMIZER = AdamW(lr=1e-3)
"""Where every class is active in every step."""
_SMALL_BATCH = 64


def default_optimizer(select: Selection, num_classes: int) -> AdamW:
    """AdamW, at a rate that makes up for the steps in which a drawn class is not active.

    Adam moves a row about as far in each update, whatever its gradient's size: a row that is active in one of n steps
    learns n times as slowly. The rate is that of ``DEFAULT_OPTIMIZER`` times n. Of few classes the labels of a batch
    have most, however few are drawn: n counts those of a small batch as active.
    """
    labels = num_classes * (1 - (1 - 1 / num_classes) ** _SMALL_BATCH)  # distinct ones of so many even draws
    return AdamW(lr=DEFAULT_OPTIMIZER.lr * min(select.steps_between_draws(num_classes), num_classes / labels))


def linear_initializer(dim: int) -> Uniform:
    """Uniform in ±1/√D, as ``torch.nn.Linear`` draws its weights and biases."""
    bound = 1 / math.sqrt(dim)
    return Uniform(-bound, bound)
