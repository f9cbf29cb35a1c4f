"""What only Adagrad has; what every optimizer has is in test_optimizer_bits.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from geartrain.ams.tables.row_table import RowTable
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.optimizers.adagrad import Adagrad
from geartrain.ams.values.specs import Constant, TableSpec


def table_of(optimizer: Adagrad, start: float = 0.5) -> RowTable:
    return RowTable(TableSpec(name="t", dim=3, optimizer=optimizer, initializer=Constant(start)), np.arange(4096))


def pulled(table: RowTable, ids: np.ndarray) -> np.ndarray:
    out = np.empty((len(ids), 3), np.float32)
    table.pull(ids, out)
    return out


def test_defaults_are_those_of_torch() -> None:
    ours, theirs = Adagrad(), torch.optim.Adagrad([torch.zeros(1, requires_grad=True)]).defaults
    assert ours.scalars() == {name: theirs[name] for name in ours.scalars()}


def test_only_a_falling_learning_rate_counts_updates() -> None:
    spec = TableSpec(name="t", dim=4, optimizer=Adagrad())
    falling = TableSpec(name="t", dim=4, optimizer=Adagrad(lr_decay=0.1))
    assert (spec.slot_bytes, spec.step_bytes, falling.step_bytes) == (16, 0, 8)


def test_a_row_that_comes_late_begins_with_the_whole_learning_rate() -> None:
    table = table_of(Adagrad(0.1, lr_decay=0.5))
    gradients = np.ones((1, 3), np.float32)
    for _ in range(5):
        table.push(np.array([1]), gradients)
    table.push(np.array([2]), gradients)
    np.testing.assert_allclose(pulled(table, np.array([2])), 0.4, rtol=1e-6)


def test_a_zero_gradient_moves_no_row_even_with_the_smallest_eps() -> None:
    table = table_of(Adagrad(0.1, eps=2.0**-126))
    table.push(np.array([1]), np.zeros((1, 3), np.float32))
    assert (pulled(table, np.array([1])) == 0.5).all()


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"lr": -1.0}, "lr is -1.0"),
        ({"lr_decay": -0.1}, "lr_decay is -0.1"),
        ({"weight_decay": float("nan")}, "weight_decay is nan"),
        ({"initial_accumulator_value": -1.0}, "initial_accumulator_value is -1.0"),
        ({"eps": 0.0}, "eps is 0.0"),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        Adagrad(**wrong)
