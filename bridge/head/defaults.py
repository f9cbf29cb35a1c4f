"""Defaults of a head, which match ``nn.Linear`` under cross entropy and AdamW.

With a margin the rows learn by momentum. ``geartrain bench defaults`` compares both.
"""

from __future__ import annotations

import math

from geartrain.ams.programs.selection import PartialFC, Selection
from geartrain.ams.values.optimizers.registry import AdamW, SparseMomentum
from geartrain.ams.values.specs import Uniform

DEFAULT_SELECT = PartialFC(sample_rate=0.1, min_active=65_536)
"""Full softmax for up to 65,536 classes; beyond, an unbiased estimate of its loss, or with a margin a sample."""
DEFAULT_OPTIMIZER = AdamW(lr=1e-3)
"""Optimizer where every class is active in every step."""
_SMALL_BATCH = 64
_MARGIN_RATE, _CLASSES_OF_MARGIN_RATE = 0.2, 4000


def default_optimizer(select: Selection, num_classes: int) -> AdamW:
    """Return AdamW at a learning rate that compensates for the steps in which a sampled class is not active.

    Adam moves a row about as far in each update, whatever its gradient's size: a row that is active in one of n steps
    learns n times as slowly. The rate is that of ``DEFAULT_OPTIMIZER`` times n. Of few classes the labels of a batch
    have most, however few are drawn: n counts those of a small batch as active.
    """
    labels = num_classes * (1 - (1 - 1 / num_classes) ** _SMALL_BATCH)  # distinct labels among so many even draws
    return AdamW(lr=DEFAULT_OPTIMIZER.lr * min(select.steps_between_draws(num_classes), num_classes / labels))


def margin_optimizer(num_classes: int) -> SparseMomentum:
    """Return momentum at 0.2 for rows under a margin; below 4,000 classes the rate is proportional to their number.

    Only a row's direction counts there, and a step turns it by rate · gradient / length². Averaged over the steps that
    is rate / C, whatever the batch: so rows of ten classes turn no faster than those of thousands, and do not outrun
    the features, whose common direction they would follow. Adam's step does not shrink with the gradient. Before a row
    has met a sample of its class, it turns as far along the gradient that all classes share as it will for its own
    later: at the rate of ``DEFAULT_OPTIMIZER`` rows of their first length learn slowly, at ten times that, not at all.
    For scales up to the automatic one: at 24 and 32 some problems learnt nothing at this rate.
    """
    return SparseMomentum(lr=_MARGIN_RATE * min(1.0, num_classes / _CLASSES_OF_MARGIN_RATE))


def linear_initializer(dim: int) -> Uniform:
    """Return uniform in ±1/√D, the distribution of weights and biases of ``torch.nn.Linear``."""
    bound = 1 / math.sqrt(dim)
    return Uniform(-bound, bound)
