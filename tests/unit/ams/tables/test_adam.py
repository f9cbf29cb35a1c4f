"""Adam on the rows of a table, against the numpy reference bit by bit and against torch.optim.Adam in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from geartrain.ams.kernels.reference.row_table import ReferenceTable
from geartrain.ams.tables.compiled_store import table_hash
from geartrain.ams.tables.row_table import RowTable
from geartrain.ams.values.errors import InvalidRows, NonFinite
from geartrain.ams.values.optimizers.adam import Adam, power
from geartrain.ams.values.optimizers.spec import UpdateStep
from geartrain.ams.values.specs import DTypeName, Normal, TableSpec

ALL_BUCKETS = np.arange(4096)
SETTINGS = [
    Adam(0.01),
    Adam(0.1, (0.8, 0.95), 1e-4, 0.02),
    Adam(0.1, (0.0, 0.0)),
    Adam(0.1, (0.999999, 0.999999), eps=1e-30),
]


def make(
    optimizer: Adam, *, dim: int = 5, num_rows: int | None = None, dtype: DTypeName = "float32"
) -> tuple[RowTable, ReferenceTable]:
    spec = TableSpec(name="t", dim=dim, optimizer=optimizer, num_rows=num_rows, dtype=dtype, seed=3)
    return RowTable(spec, ALL_BUCKETS), ReferenceTable(dim, optimizer, Normal(), 3, table_hash("t"), dtype)


def pulled(table: RowTable, ids: np.ndarray) -> np.ndarray:
    out = np.empty((len(ids), table.spec.dim), table.spec.numpy_dtype)
    table.pull(ids, out)
    return out


def frozen(table: RowTable) -> dict[int, tuple[bytes, bytes, int]]:
    table.freeze()
    ids, rows, slots, steps, _ = table.read_frozen(10_000)
    table.thaw(kept=True)
    assert slots is not None and steps is not None
    values = zip(ids.tolist(), rows, slots, steps.tolist(), strict=True)
    return {row_id: (row.tobytes(), slot.tobytes(), t) for row_id, row, slot, t in values}


@pytest.mark.parametrize("optimizer", SETTINGS[:3], ids=repr)
def test_rows_follow_torch_in_float64_while_the_learning_rate_changes(optimizer: Adam) -> None:
    ours, _ = make(optimizer, dim=16)
    ids, generator = np.arange(10), np.random.default_rng(2)
    weights = torch.from_numpy(pulled(ours, ids)).double().requires_grad_()
    torch_adam = torch.optim.Adam([weights], optimizer.lr, optimizer.betas, optimizer.eps, optimizer.weight_decay)
    exact, slots = weights.detach().numpy().copy(), np.zeros((10, 32))
    for step in range(60):
        lr = optimizer.lr * (1 + step % 7) / 7
        gradients = generator.standard_normal((10, 16)).astype(np.float32)
        ours.push(ids, gradients, lr=lr, scale=0.5)
        weights.grad = torch.from_numpy(gradients).double() * 0.5
        torch_adam.param_groups[0]["lr"] = lr
        torch_adam.step()
        exact, slots = optimizer.updated(exact, slots, gradients, UpdateStep(lr, 0.5, step + 1, np.float64))
    np.testing.assert_allclose(exact, weights.detach().numpy(), rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(pulled(ours, ids), weights.detach().numpy(), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("gradient", "scale"), [(1e21, 1.0), (1e15, 1e6), (3e38, 1.0), (np.inf, 1.0), (np.nan, 1.0)], ids=str
)
def test_a_second_moment_beyond_float32_is_refused_and_nothing_changes(gradient: float, scale: float) -> None:
    table, _ = make(Adam(1e-3))
    table.push(np.array([1, 2]), np.ones((2, 5), np.float32))
    before = frozen(table)
    gradients = np.ones((3, 5), np.float32)
    gradients[1, 4] = gradient
    for call in (table.check_push, table.push):
        with pytest.raises(NonFinite, match=r"id 2 \(index 1\)"):
            call(np.array([1, 2, 3]), gradients, scale=scale)
    assert frozen(table) == before
    table.push(np.array([1, 2, 3]), np.full((3, 5), 1e18, np.float32))
    assert np.isfinite(pulled(table, np.arange(4))).all()


@pytest.mark.parametrize("place", [0, 9])
def test_restored_moments_count_where_a_push_could_overflow(place: int) -> None:
    table, _ = make(Adam(1e-3, (0.9, 0.9)))
    slots = np.zeros((1, 10), np.float32)
    slots[0, place] = 3.4e38
    table.restore(np.array([1]), np.ones((1, 5), np.float32), slots, np.array([4]))
    gradient = np.full((1, 5), 3.2e19 if place else 0.0, np.float32)  # 0.1 g² is 1.02e38
    assert not table.cannot_overflow(float(gradient.max()))
    with pytest.raises(NonFinite):
        table.push(np.array([1]), gradient, lr=1e30)
    assert frozen(table)[1] == (np.ones(5, np.float32).tobytes(), slots.tobytes(), 4)


def test_state_that_is_not_adams_is_refused() -> None:
    table, _ = make(Adam(0.1))
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
