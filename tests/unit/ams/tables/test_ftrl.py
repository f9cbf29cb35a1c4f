"""What only FTRL has; what every optimizer has is in test_optimizer_bits.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from geartrain.ams.tables.row_table import RowTable
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.optimizers.ftrl import FTRL
from geartrain.ams.values.optimizers.spec import UpdateStep
from geartrain.ams.values.specs import Constant, TableSpec
from tests.support.written_optimizers import FollowTheLeader

IDS = np.arange(4)


def table_of(optimizer: FTRL, start: float) -> RowTable:
    spec = TableSpec(name="t", dim=1, optimizer=optimizer, initializer=Constant(start))
    return RowTable(spec, np.arange(4096))


def pulled(table: RowTable) -> np.ndarray:
    out = np.empty((len(IDS), 1), np.float32)
    table.pull(IDS, out)
    return out[:, 0]


def gradient(value: float) -> np.ndarray:
    return np.full((len(IDS), 1), value, np.float32)


@pytest.mark.parametrize("start", [0.0, 1.0])
@pytest.mark.parametrize("rates", [[0.1] * 200, [0.1 / (1 + step % 7) for step in range(200)]], ids=["one", "many"])
def test_it_is_the_paper_in_float64_whatever_the_rates(start: float, rates: list[float]) -> None:
    ours, generator = FTRL(0.1, 0.5, 3.0, 0.2), np.random.default_rng(0)
    rows = start * generator.standard_normal((40, 3))
    weights, slots = torch.from_numpy(rows.copy()).requires_grad_(), np.zeros((40, 6))
    paper = FollowTheLeader([weights], lr=rates[0], beta=0.5, l1=3.0, l2=0.2)
    num_zeroed = num_back = 0
    for rate in rates:
        value, before = generator.standard_normal(rows.shape), rows
        rows, slots = ours.updated(rows, slots, value, UpdateStep(rate, dtype=np.float64))
        weights.grad, paper.param_groups[0]["lr"] = torch.from_numpy(value), rate
        paper.step()
        num_zeroed += int(((rows == 0) & (before != 0)).sum())
        num_back += int(((rows != 0) & (before == 0)).sum())
        np.testing.assert_allclose(rows, weights.detach().numpy(), rtol=1e-8, atol=1e-12)
        np.testing.assert_array_equal(rows == 0, weights.detach().numpy() == 0)
    assert num_zeroed > 10 and num_back > 10


def test_weights_whose_gradients_say_little_are_exactly_zero() -> None:
    table = table_of(FTRL(0.1, l1=1.0), 0.01)
    assert (pulled(table) == np.float32(0.01)).all()
    table.push(IDS, np.array([[0.5], [-0.5], [3.0], [-3.0]], np.float32))
    weights = pulled(table)
    assert (weights[:2] == 0).all() and weights[2] < 0 < weights[3]
    table.push(IDS, gradient(0.4))  # 0.9 and -0.1 in all for those that are 0
    assert (pulled(table)[:2] == 0).all()
    table.push(IDS, gradient(0.4))  # 1.3 and 0.3
    weights = pulled(table)
    assert weights[0] < 0 == weights[1]


def test_the_first_update_is_a_gradient_step_from_the_initial_value() -> None:
    table = table_of(FTRL(0.1, beta=1.0), 0.5)
    table.push(IDS, gradient(3.0))
    np.testing.assert_allclose(pulled(table), 0.5 - 0.1 / (1 + 3) * 3, rtol=1e-6)
    table.assign(IDS, gradient(-0.7))
    table.push(IDS, gradient(3.0))
    np.testing.assert_allclose(pulled(table), -0.7 - 0.1 / (1 + 3) * 3, rtol=1e-6)


@pytest.mark.parametrize("rate", [0.0, 1e-30])
def test_a_rate_that_falls_to_nothing_moves_no_weight(rate: float) -> None:
    table = table_of(FTRL(0.1, l1=0.1, l2=0.1), 0.5)
    for lr in (0.1, 0.05):
        table.push(IDS, np.array([[1.0], [-1.0], [0.001], [60.0]], np.float32), lr=lr)
    before = pulled(table)
    assert (before != 0).sum() == 4
    for value in (2.0, -300.0):
        table.push(IDS, gradient(value), lr=rate)
    np.testing.assert_array_equal(pulled(table), before)
    table.push(IDS, gradient(0.0), lr=1e-4)
    np.testing.assert_allclose(pulled(table), before, atol=1e-4)


@pytest.mark.parametrize("name", ["lr", "beta", "l1", "l2"])
@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), "much"])
def test_settings_out_of_range_are_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"{name} (is|must)"):
        FTRL(**{name: value})
