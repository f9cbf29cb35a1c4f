"""Every optimizer on the rows of a table: the bits of its numpy reference, or no change at all."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.ams.tables.compiled_store import table_hash
from geartrain.ams.tables.row_table import RowTable
from geartrain.ams.values.errors import InvalidArgument, InvalidRows, NonFinite
from geartrain.ams.values.optimizers.registry import Adagrad, RowOptimizerSpec
from geartrain.ams.values.specs import DTYPES, DTypeName, Normal, TableSpec
from tests.specification.optimizers import UpdateStep, updated
from tests.specification.row_table import ReferenceTable
from tests.support.row_tables import contents_of, contents_of_reference, pulled
from tests.support.torch_twins import TORCH_TWINS

SPECS = {name: optimizer for name, (optimizer, _) in TORCH_TWINS.items()}


def make(
    optimizer: RowOptimizerSpec,
    dim: int,
    dtype: DTypeName = "float32",
    slot_dtype: DTypeName | None = None,
    num_rows: int | None = None,
) -> tuple[RowTable, ReferenceTable]:
    slot_dtype = (slot_dtype or dtype) if optimizer.takes_narrow_slots else "float32"
    spec = TableSpec(
        name="t", dim=dim, optimizer=optimizer, dtype=dtype, slot_dtype=slot_dtype, seed=3, num_rows=num_rows
    )
    reference = ReferenceTable(dim, optimizer, Normal(), 3, table_hash("t"), dtype, slot_dtype)
    return RowTable(spec, np.arange(4096)), reference


@pytest.mark.parametrize("num_rows", [None, 20_000])
@pytest.mark.parametrize(
    ("dtype", "slot_dtype"),
    [("float32", "float32"), ("float16", "float32"), ("bfloat16", "bfloat16"), ("float32", "float16")],
)
@pytest.mark.parametrize("name", SPECS)
def test_rows_slots_and_updates_have_the_bits_of_the_reference(
    name: str, dtype: DTypeName, slot_dtype: DTypeName, num_rows: int | None
) -> None:
    ours, theirs = make(SPECS[name], 37, dtype, slot_dtype, num_rows)
    generator = np.random.default_rng(1)
    changes = {
        "weight_decay": lambda step: 0.02 * step,
        "momentum": lambda step: 0.9 - 0.1 * step,
        "beta1": lambda step: 0.9 - 0.1 * step,
        "beta2": lambda step: 1 - 0.1**step,
        "nesterov": lambda step: step % 4 // 2,
        "alpha": lambda step: 0.9 - 0.1 * step,
        "beta": lambda step: 0.1 * step,
        "l1": lambda step: 0.2 / step,
        "l2": lambda step: 0.1 * step,
    }
    changing = [scalar for scalar in SPECS[name].scalars() if scalar in changes and scalar not in SPECS[name].fixed]
    for step in range(6):
        ids = generator.permutation(60)[:40]
        values = generator.standard_normal((40, 37)).astype(list(DTYPES.values())[step % 3])
        lr, scale = 0.3 / (step + 1), 0.7
        scalars = {item: changes[item](step) for item in changing} if step % 2 else {}
        theirs.optimizer = SPECS[name].for_push(scalars)
        created = ours.push(ids, values, lr=lr, scale=scale, optimizer_scalars=scalars)
        assert created == theirs.push(ids, values, lr, scale)
        if step == 3:
            ours.assign(ids[:9], values[:9].astype(DTYPES[dtype]))
            theirs.assign(ids[:9], values[:9].astype(DTYPES[dtype]))
    assert contents_of(ours) == contents_of_reference(theirs, ours.spec)


@pytest.mark.parametrize("dim", [1, 2, 15, 16, 33])
@pytest.mark.parametrize("name", SPECS)
def test_rows_of_any_width_have_the_bits_of_the_reference(name: str, dim: int) -> None:
    ours, theirs = make(SPECS[name], dim)
    ids, generator = np.arange(20), np.random.default_rng(1)
    for _ in range(3):
        gradients = generator.standard_normal((20, dim)).astype(np.float32)
        ours.push(ids, gradients, lr=0.1)
        theirs.push(ids, gradients, 0.1)
    found = contents_of(ours)
    assert found == contents_of_reference(theirs, ours.spec)
    assert {len(slots) for _, slots, _ in found.values()} == {ours.spec.slot_bytes}
    again, _ = make(SPECS[name], dim)
    ours.freeze()
    again.restore(*ours.read_frozen(20))
    assert contents_of(again) == found


@pytest.mark.parametrize("name", SPECS)
@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from(list(DTYPES)),
    steps=st.lists(
        st.tuples(
            st.sampled_from(["push", "push", "assign"]),
            st.lists(st.integers(0, 40), max_size=8, unique=True),
            st.integers(-38, 38),
            st.floats(0, 1e30),
        ),
        max_size=10,
    ),
)
def test_any_sequence_of_calls_equals_the_reference_or_changes_nothing(
    name: str, dtype: DTypeName, steps: list[tuple[str, list[int], int, float]]
) -> None:
    ours, theirs = make(SPECS[name], 5, dtype)
    for number, (verb, chosen, exponent, lr) in enumerate(steps):
        ids = np.array(chosen, np.int64)
        values = np.random.default_rng(number).uniform(-1, 1, (len(ids), 5)).astype(np.float32)
        values *= np.float32(10.0**exponent)
        if verb == "assign":
            rows = np.clip(values, -1e4, 1e4).astype(DTYPES[dtype])
            ours.assign(ids, rows)
            theirs.assign(ids, rows)
            continue
        before = contents_of(ours)
        takes_all = ours.cannot_overflow(float(np.abs(values).max(initial=0)), lr=lr)
        try:
            ours.push(ids, values, lr=lr)
        except NonFinite:
            assert contents_of(ours) == before
            assert not takes_all
        else:
            theirs.push(ids, values, lr)
    found = contents_of(ours)
    assert found == contents_of_reference(theirs, ours.spec)
    assert all(np.isfinite(np.frombuffer(row, DTYPES[dtype]).astype(np.float32)).all() for row, _, _ in found.values())


@pytest.mark.parametrize("name", SPECS)
def test_rows_follow_torch_in_float64_while_the_learning_rate_changes(name: str) -> None:
    optimizer, of_torch = TORCH_TWINS[name]
    ours, _ = make(optimizer, 16)
    ids, generator = np.arange(10), np.random.default_rng(2)
    exact, slots = pulled(ours, ids).astype(np.float64), np.zeros((10, ours.spec.slot_dim))
    weights = torch.from_numpy(exact.copy()).requires_grad_()
    twin = of_torch(weights)
    for step in range(60):
        lr = 0.05 * (1 + step % 7) / 7
        gradients = generator.standard_normal((10, 16)).astype(np.float32)
        ours.push(ids, gradients, lr=lr, scale=0.5)
        exact, slots = updated(optimizer, exact, slots, gradients, UpdateStep(lr, 0.5, step + 1, np.float64))
        weights.grad, twin.param_groups[0]["lr"] = torch.from_numpy(gradients).double() * 0.5, lr
        twin.step()
    np.testing.assert_allclose(exact, weights.detach().numpy(), rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(pulled(ours, ids), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "optimizer",
    [Adagrad(), *(spec for spec in SPECS.values() if any(slot.is_non_negative for slot in spec.slots))],
    ids=str,
)
def test_a_slot_that_cannot_be_negative_is_not_restored_so(optimizer: RowOptimizerSpec) -> None:
    table, _ = make(optimizer, 2)
    slots = np.zeros((1, table.spec.slot_dim), np.float32)
    slots[0, -1] = -1e-30
    steps = np.ones(1, np.int64) if table.spec.step_bytes else None
    with pytest.raises(InvalidRows, match=f"holds a {optimizer.slots[-1].name} below 0"):
        table.restore(np.array([3]), np.zeros((1, 2), np.float32), slots, steps)


@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if not spec.takes_narrow_slots])
def test_slots_that_16_bits_cannot_hold_are_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match=r"slot_dtype is 'bfloat16'; .* must be 'float32'"):
        TableSpec(name="t", dim=2, optimizer=SPECS[name], slot_dtype="bfloat16")
