"""What a head does where its caller says nothing: what ``nn.Linear`` under cross entropy and AdamW does.

``geartrain bench defaults`` compares the two.
"""

from __future__ import annotations

import math

from geartrain.ams.programs.selection import PartialFC
from geartrain.ams.values.optimizers.registry import AdamW
from geartrain.ams.values.specs import Uniform

DEFAULT_SELECT = PartialFC(sample_rate=0.1, min_active=65_536)
"""The full softmax while that is affordable; beyond, its loss is estimated without bias, or with the margin sampled."""
DEFAULT_OPTIMIZER = AdamW(lr=1e-3)


def linear_initializer(dim: int) -> Uniform:
    """Uniform in ±1/√D, as ``torch.nn.Linear`` draws its weights and biases."""
    bound = 1 / math.sqrt(dim)
    return Uniform(-bound, bound)
