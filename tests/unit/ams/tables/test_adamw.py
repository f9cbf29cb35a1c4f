"""What only AdamW has; what every optimizer has is in test_optimizer_bits.py."""

from __future__ import annotations

import numpy as np
import torch

from geartrain.ams.tables.row_table import RowTable
from geartrain.ams.values.optimizers.registry import Adam, AdamW
from geartrain.ams.values.specs import Constant, TableSpec


def row_after(optimizer: Adam, gradient: float, *, lr: float = 0.1, pushes: int = 3) -> float:
    table = RowTable(TableSpec(name="t", dim=1, optimizer=optimizer, initializer=Constant(2.0)), np.arange(4096))
    for _ in range(pushes):
        table.push(np.array([1]), np.full((1, 1), gradient, np.float32), lr=lr)
    out = np.empty((1, 1), np.float32)
    table.pull(np.array([1]), out)
    return float(out[0, 0])


def test_defaults_are_those_of_torch() -> None:
    theirs = torch.optim.AdamW([torch.zeros(1, requires_grad=True)]).defaults
    assert (AdamW().lr, AdamW().betas, AdamW().eps) == (theirs["lr"], theirs["betas"], theirs["eps"])
    assert AdamW().weight_decay == theirs["weight_decay"]
    assert AdamW.from_scalars({}) == AdamW() and AdamW() != Adam(weight_decay=0.01)


def test_decay_takes_its_part_of_a_row_whatever_the_gradients_were() -> None:
    np.testing.assert_allclose(row_after(AdamW(weight_decay=0.5), 0.0), 2.0 * 0.95**3, rtol=1e-6)


def test_without_decay_it_has_the_bits_of_adam() -> None:
    assert row_after(AdamW(weight_decay=0.0), 0.3) == row_after(Adam(), 0.3) != row_after(AdamW(), 0.3)


def test_a_decay_beyond_the_whole_row_turns_it_over_as_torch_does() -> None:
    np.testing.assert_allclose(row_after(AdamW(weight_decay=30.0), 0.0, pushes=1), -4.0, rtol=1e-6)
