"""What only RMSProp has; what every optimizer has is in test_optimizer_bits.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from geartrain.ams.kernels.reference.row_table import ReferenceTable
from geartrain.ams.tables.compiled_store import table_hash
from geartrain.ams.tables.row_table import RowTable
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.optimizers.rmsprop import RMSProp
from geartrain.ams.values.optimizers.spec import UpdateStep
from geartrain.ams.values.specs import Normal, TableSpec

FORMS = [(momentum, centered) for momentum in (0.0, 0.7) for centered in (False, True)]


def test_defaults_are_those_of_torch() -> None:
    ours, theirs = RMSProp(), torch.optim.RMSprop([torch.zeros(1, requires_grad=True)]).defaults
    assert ours.scalars() == {name: theirs[name] for name in ours.scalars()}


@pytest.mark.parametrize(("momentum", "centered"), FORMS)
def test_every_form_is_that_of_torch_in_float64(momentum: float, centered: bool) -> None:
    settings: dict[str, Any] = {"alpha": 0.9, "eps": 1e-6, "momentum": momentum, "centered": centered}
    ours, generator = RMSProp(0.02, weight_decay=0.1, **settings), np.random.default_rng(0)
    rows = generator.standard_normal((30, 7))
    weights, slots = torch.from_numpy(rows.copy()).requires_grad_(), np.zeros((30, ours.slot_dim(7)))
    theirs = torch.optim.RMSprop([weights], 0.02, weight_decay=0.1, **settings)
    for t in range(1, 11):
        gradient = generator.standard_normal(rows.shape)
        rows, slots = ours.updated(rows, slots, gradient, UpdateStep(0.02, t=t, dtype=np.float64))
        weights.grad = torch.from_numpy(gradient)
        theirs.step()
    np.testing.assert_allclose(rows, weights.detach().numpy(), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(("momentum", "centered"), FORMS)
def test_every_form_is_compiled_to_the_bits_of_its_reference(momentum: float, centered: bool) -> None:
    optimizer = RMSProp(0.02, momentum=momentum, centered=centered)
    table = RowTable(TableSpec(name="t", dim=7, optimizer=optimizer), np.arange(4096))
    reference = ReferenceTable(7, optimizer, Normal(), 0, table_hash("t"))
    ids, generator = np.arange(30), np.random.default_rng(1)
    for _ in range(4):
        gradients = generator.standard_normal((30, 7)).astype(np.float32)
        table.push(ids, gradients, lr=0.02)
        reference.push(ids, gradients, 0.02)
    out = np.empty((30, 7), np.float32)
    table.pull(ids, out)
    np.testing.assert_array_equal(out, reference.pull(ids))
    table.freeze()
    stored = table.read_frozen(30)
    assert stored.slots is not None and stored.slots.shape == (30, 7 * (1 + centered + (momentum != 0)))
    np.testing.assert_array_equal(stored.slots, [reference.slots_of(row) for row in stored.ids.tolist()])


@pytest.mark.parametrize("changed", [{"momentum": 0.5}, {"centered": 1.0}], ids=str)
def test_what_a_row_keeps_does_not_change_with_a_push(changed: dict[str, float]) -> None:
    table = RowTable(TableSpec(name="t", dim=2, optimizer=RMSProp()), np.arange(4096))
    with pytest.raises(InvalidArgument, match=f"{next(iter(changed))} is .* and it cannot change: whether a row keeps"):
        table.push(np.arange(2), np.ones((2, 2), np.float32), optimizer_scalars=changed)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"lr": -1.0}, "lr is -1.0"),
        ({"alpha": 1.0}, "alpha is 1.0"),
        ({"alpha": float("nan")}, "alpha is nan"),
        ({"eps": 0.0}, "eps is 0.0"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1"),
        ({"momentum": -0.1}, "momentum is -0.1"),
        ({"centered": 2}, "centered is 2"),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        RMSProp(**wrong)
