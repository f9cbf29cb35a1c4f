"""Recipes whose ranks exchange only the largest elements of the backbone's gradients."""

from __future__ import annotations

import pytest
from torch import nn

from geartrain.ams.values.errors import ConfigError
from geartrain.workers.recipes.recipe import Recipe, optimizer_of


def test_momentum_and_decay_are_left_to_what_sparsifies() -> None:
    parameters = [nn.Parameter()]
    (plain,) = optimizer_of(Recipe(momentum=0.9, weight_decay=0.1, sparsity=0.99), parameters).param_groups
    assert (plain["momentum"], plain["weight_decay"], plain["nesterov"]) == (0, 0, False)
    (whole,) = optimizer_of(Recipe(momentum=0.9, weight_decay=0.1), parameters).param_groups
    assert (whole["momentum"], whole["weight_decay"], whole["nesterov"]) == (0.9, 0.1, True)


def test_what_cannot_be_sparsified_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sparsity is 1\.5; it must lie in \[0, 1\)"):
        Recipe(sparsity=1.5)
    with pytest.raises(ConfigError, match=r"not for the optimizer 'adamw'; give --optimizer 'sgd'"):
        Recipe(sparsity=0.99, optimizer="adamw", lr=1e-3)
