"""What only one of the optimizers has; what every optimizer has is in test_optimizer_bits.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from geartrain.ams.tables.compiled_store import table_hash
from geartrain.ams.tables.row_table import RowTable
from geartrain.ams.values.errors import InvalidArgument, InvalidRows, NonFinite
from geartrain.ams.values.optimizers.registry import (
    FTRL,
    Adagrad,
    Adam,
    AdamW,
    RMSProp,
    RowOptimizerSpec,
    RowWiseAdagrad,
    RowWiseAdam,
)
from geartrain.ams.values.specs import Constant, Normal, TableSpec
from tests.specification.optimizers import UpdateStep, power, updated
from tests.specification.row_table import ReferenceTable
from tests.support.row_tables import contents_of
from tests.support.row_tables import pulled as all_columns
from tests.support.written_optimizers import FollowTheLeader

IDS = np.arange(4)
FORMS = [(momentum, centered) for momentum in (0.0, 0.7) for centered in (False, True)]


def table_of(optimizer: RowOptimizerSpec, start: float = 0.5, dim: int = 1) -> RowTable:
    spec = TableSpec(name="t", dim=dim, optimizer=optimizer, initializer=Constant(start))
    return RowTable(spec, np.arange(4096))


def pulled(table: RowTable) -> np.ndarray:
    return all_columns(table, IDS)[:, 0]


def gradient(value: float) -> np.ndarray:
    return np.full((len(IDS), 1), value, np.float32)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(Adagrad(), torch.optim.Adagrad), (RMSProp(), torch.optim.RMSprop), (AdamW(), torch.optim.AdamW)],
    ids=repr,
)
def test_defaults_are_those_of_torch(ours: RowOptimizerSpec, theirs: Any) -> None:
    defaults = theirs([torch.zeros(1, requires_grad=True)]).defaults
    defaults["beta1"], defaults["beta2"] = defaults.get("betas", (None, None))
    assert ours.scalars() == {name: defaults[name] for name in ours.scalars()}


@pytest.mark.parametrize(
    ("kind", "name", "wrong"),
    [
        *((Adagrad, name, -1.0) for name in ("lr", "lr_decay", "initial_accumulator_value")),
        (Adagrad, "weight_decay", float("nan")),
        *((kind, "eps", 0.0) for kind in (Adagrad, RMSProp, Adam)),
        (Adam, "betas", (0.9, 1.0)),
        (Adam, "betas", 0.9),
        (Adam, "eps", 1e-40),
        (RMSProp, "alpha", 1.0),
        (RMSProp, "momentum", -0.1),
        (RMSProp, "centered", 2),
        *((FTRL, name, value) for name in ("lr", "beta", "l1", "l2") for value in (-0.1, float("inf"), "much")),
        *((kind, name, -0.1) for kind in (RowWiseAdagrad, RowWiseAdam) for name in ("lr", "weight_decay", "eps")),
    ],
)
def test_settings_out_of_range_are_refused(kind: Any, name: str, wrong: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"{name} (is|must)"):
        kind(**{name: wrong})


def test_only_a_falling_learning_rate_counts_updates() -> None:
    spec = TableSpec(name="t", dim=4, optimizer=Adagrad())
    falling = TableSpec(name="t", dim=4, optimizer=Adagrad(lr_decay=0.1))
    assert (spec.slot_bytes, spec.step_bytes, falling.step_bytes) == (16, 0, 8)


def test_a_row_that_comes_late_begins_with_the_whole_learning_rate() -> None:
    table = table_of(Adagrad(0.1, lr_decay=0.5))
    for _ in range(5):
        table.push(IDS[:1], gradient(1.0)[:1])
    table.push(IDS[1:2], gradient(1.0)[:1])
    np.testing.assert_allclose(pulled(table)[1], 0.4, rtol=1e-6)


def test_a_zero_gradient_moves_no_row_even_with_the_smallest_eps() -> None:
    table = table_of(Adagrad(0.1, eps=2.0**-126))
    table.push(IDS, gradient(0.0))
    assert (pulled(table) == 0.5).all()


def row_after(optimizer: Adam, value: float, pushes: int = 3) -> float:
    table = table_of(optimizer, 2.0)
    for _ in range(pushes):
        table.push(IDS, gradient(value), lr=0.1)
    return float(pulled(table)[0])


def test_decay_of_adamw_takes_its_part_of_a_row_whatever_the_gradients_were() -> None:
    np.testing.assert_allclose(row_after(AdamW(weight_decay=0.5), 0.0), 2.0 * 0.95**3, rtol=1e-6)
    assert row_after(AdamW(weight_decay=0.0), 0.3) == row_after(Adam(), 0.3) != row_after(AdamW(), 0.3)
    np.testing.assert_allclose(row_after(AdamW(weight_decay=30.0), 0.0, pushes=1), -4.0, rtol=1e-6)


@pytest.mark.parametrize("start", [0.0, 1.0])
@pytest.mark.parametrize("rates", [[0.1] * 200, [0.1 / (1 + step % 7) for step in range(200)]], ids=["one", "many"])
def test_ftrl_is_the_paper_in_float64_whatever_the_rates(start: float, rates: list[float]) -> None:
    ours, generator = FTRL(0.1, 0.5, 3.0, 0.2), np.random.default_rng(0)
    rows = start * generator.standard_normal((40, 3))
    weights, slots = torch.from_numpy(rows.copy()).requires_grad_(), np.zeros((40, 6))
    paper = FollowTheLeader([weights], lr=rates[0], beta=0.5, l1=3.0, l2=0.2)
    num_zeroed = num_back = 0
    for rate in rates:
        value, before = generator.standard_normal(rows.shape), rows
        rows, slots = updated(ours, rows, slots, value, UpdateStep(rate, dtype=np.float64))
        weights.grad, paper.param_groups[0]["lr"] = torch.from_numpy(value), rate
        paper.step()
        num_zeroed += int(((rows == 0) & (before != 0)).sum())
        num_back += int(((rows != 0) & (before == 0)).sum())
        np.testing.assert_allclose(rows, weights.detach().numpy(), rtol=1e-8, atol=1e-12)
        np.testing.assert_array_equal(rows == 0, weights.detach().numpy() == 0)
    assert num_zeroed > 10 and num_back > 10


def test_weights_of_ftrl_whose_gradients_say_little_are_exactly_zero() -> None:
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


def test_the_first_update_of_ftrl_is_a_gradient_step_from_the_initial_value() -> None:
    table = table_of(FTRL(0.1, beta=1.0), 0.5)
    table.push(IDS, gradient(3.0))
    np.testing.assert_allclose(pulled(table), 0.5 - 0.1 / (1 + 3) * 3, rtol=1e-6)
    table.assign(IDS, gradient(-0.7))
    table.push(IDS, gradient(3.0))
    np.testing.assert_allclose(pulled(table), -0.7 - 0.1 / (1 + 3) * 3, rtol=1e-6)


@pytest.mark.parametrize("rate", [0.0, 1e-30])
def test_a_rate_of_ftrl_that_falls_to_nothing_moves_no_weight(rate: float) -> None:
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


@pytest.mark.parametrize(("momentum", "centered"), FORMS)
def test_every_form_of_rmsprop_is_that_of_torch_and_compiled_to_the_bits_of_its_reference(
    momentum: float, centered: bool
) -> None:
    settings: dict[str, Any] = {"alpha": 0.9, "eps": 1e-6, "momentum": momentum, "centered": centered}
    ours, generator = RMSProp(0.02, weight_decay=0.1, **settings), np.random.default_rng(0)
    rows = generator.standard_normal((30, 7))
    weights, slots = torch.from_numpy(rows.copy()).requires_grad_(), np.zeros((30, ours.slot_dim(7)))
    theirs = torch.optim.RMSprop([weights], 0.02, weight_decay=0.1, **settings)
    table = RowTable(TableSpec(name="t", dim=7, optimizer=ours), np.arange(4096))
    reference, ids = ReferenceTable(7, ours, Normal(), 0, table_hash("t")), np.arange(30)
    for t in range(1, 11):
        value = generator.standard_normal(rows.shape).astype(np.float32)
        rows, slots = updated(ours, rows, slots, value, UpdateStep(0.02, t=t, dtype=np.float64))
        weights.grad = torch.from_numpy(value).double()
        theirs.step()
        table.push(ids, value)
        reference.push(ids, value, 0.02)
    np.testing.assert_allclose(rows, weights.detach().numpy(), rtol=1e-11, atol=1e-13)
    table.freeze()
    stored = table.read_frozen(30)
    np.testing.assert_array_equal(stored.rows, reference.pull(stored.ids))
    assert stored.slots is not None and stored.slots.shape == (30, 7 * (1 + centered + (momentum != 0)))
    np.testing.assert_array_equal(stored.slots, [reference.slots_of(row) for row in stored.ids.tolist()])


@pytest.mark.parametrize("changed", [{"momentum": 0.5}, {"centered": 1.0}], ids=str)
def test_what_a_row_keeps_does_not_change_with_a_push(changed: dict[str, float]) -> None:
    with pytest.raises(InvalidArgument, match=f"{next(iter(changed))} is .* and it cannot change: whether a row keeps"):
        table_of(RMSProp()).push(IDS, gradient(1.0), optimizer_scalars=changed)


@pytest.mark.parametrize(
    ("row_wise", "element_wise"),
    [
        (RowWiseAdagrad(0.1, 0.2, 0.01, 0.3), Adagrad(0.1, 0.2, 0.01, 0.3)),
        (RowWiseAdam(0.1, weight_decay=0.02), AdamW(0.1, weight_decay=0.02)),
    ],
    ids=str,
)
def test_on_rows_of_width_1_row_wise_optimizers_are_what_their_namesakes_are(
    row_wise: RowOptimizerSpec, element_wise: RowOptimizerSpec
) -> None:
    generator = np.random.default_rng(0)
    rows = generator.standard_normal((50, 1))
    ours, theirs = (rows, np.zeros((50, row_wise.slot_dim(1)))), (rows, np.zeros((50, element_wise.slot_dim(1))))
    for t in range(1, 6):
        value, push = generator.standard_normal((50, 1)), UpdateStep(0.1, t=t, dtype=np.float64)
        ours, theirs = updated(row_wise, *ours, value, push), updated(element_wise, *theirs, value, push)
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-13)
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-13)


def test_a_row_of_a_row_wise_optimizer_keeps_one_number_for_the_size_of_its_gradients() -> None:
    optimizers = (RowWiseAdagrad(), Adagrad(), RowWiseAdam(), AdamW())
    assert [TableSpec(name="t", dim=64, optimizer=optimizer).slot_bytes for optimizer in optimizers] == [
        4,
        256,
        260,
        512,
    ]
    tables = [table_of(optimizer, dim=64) for optimizer in optimizers[:2]]
    for table in tables:
        table.push(np.arange(1000), np.ones((1000, 64), np.float32))
    assert tables[1].memory_bytes - tables[0].memory_bytes == 252 * 1000


def test_squares_whose_sum_is_out_of_range_are_refused_though_their_mean_is_not() -> None:
    table = table_of(RowWiseAdagrad(), dim=64)
    assert table.cannot_overflow(2e18) and not table.cannot_overflow(4e18)


def adam_table(optimizer: Adam) -> RowTable:
    return RowTable(TableSpec(name="t", dim=5, optimizer=optimizer, seed=3), np.arange(4096))


@pytest.mark.parametrize(
    ("gradient", "scale"), [(1e21, 1.0), (1e15, 1e6), (3e38, 1.0), (np.inf, 1.0), (np.nan, 1.0)], ids=str
)
def test_a_second_moment_beyond_float32_is_refused_and_nothing_changes(gradient: float, scale: float) -> None:
    table = adam_table(Adam(1e-3))
    table.push(np.array([1, 2]), np.ones((2, 5), np.float32))
    before = contents_of(table)
    gradients = np.ones((3, 5), np.float32)
    gradients[1, 4] = gradient
    for call in (table.check_push, table.push):
        with pytest.raises(NonFinite, match=r"id 2 \(index 1\)"):
            call(np.array([1, 2, 3]), gradients, scale=scale)
    assert contents_of(table) == before
    table.push(np.array([1, 2, 3]), np.full((3, 5), 1e18, np.float32))
    assert np.isfinite(all_columns(table, np.arange(4))).all()


@pytest.mark.parametrize("place", [0, 9])
def test_restored_moments_count_where_a_push_could_overflow(place: int) -> None:
    table = adam_table(Adam(1e-3, (0.9, 0.9)))
    slots = np.zeros((1, 10), np.float32)
    slots[0, place] = 3.4e38
    table.restore(np.array([1]), np.ones((1, 5), np.float32), slots, np.array([4]))
    gradient = np.full((1, 5), 3.2e19 if place else 0.0, np.float32)  # 0.1 g² is 1.02e38
    assert not table.cannot_overflow(float(gradient.max()))
    with pytest.raises(NonFinite):
        table.push(np.array([1]), gradient, lr=1e30)
    assert contents_of(table)[1] == (np.ones(5, np.float32).tobytes(), slots.tobytes(), 4)


def test_state_that_is_not_adams_is_refused() -> None:
    table = adam_table(Adam(0.1))
    ids, rows, slots = np.array([1]), np.ones((1, 5), np.float32), np.ones((1, 10), np.float32)
    with pytest.raises(InvalidRows, match=r"slots of table 't' is \[1, 5\]; it must be \[1, 10\]"):
        table.restore(ids, rows, slots[:, :5], np.array([1]))
    with pytest.raises(InvalidRows, match="no steps were given"):
        table.restore(ids, rows, slots)
    for second, t in ((-1.0, 1), (1.0, -1), (1.0, 2**60)):
        slots[0, 9] = second
        with pytest.raises(InvalidRows, match=r"second moment below 0|number of updates outside"):
            table.restore(ids, rows, slots, np.array([t]))
    slots[0, 9] = np.inf
    with pytest.raises(NonFinite):
        table.restore(ids, rows, slots, np.array([1]))
    assert table.num_present == 0


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 1000, 12_345, 2**53])
def test_a_power_is_right_to_its_last_places(exponent: int) -> None:
    assert power(0.999, exponent) == pytest.approx(0.999**exponent, rel=1e-11)
