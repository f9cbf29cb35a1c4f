"""Rows and slots of 16 bits are rounded by chance: unbiased, reproducible, never out of range."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.ams.tables.compiled_store import table_hash
from geartrain.ams.tables.row_table import RowTable
from geartrain.ams.values.errors import InvalidRows, NonFinite
from geartrain.ams.values.optimizers.registry import SGD, Momentum, RowOptimizerSpec, SparseMomentum
from geartrain.ams.values.specs import DTYPES, Constant, DTypeName, TableSpec
from tests.specification.rounding import LATE_ROW, ROW, SLOT, draws, rounded, rounding_key, stored
from tests.support.row_tables import pulled

HALVES: list[DTypeName] = ["float16", "bfloat16"]
LARGEST = {"float16": 65504.0, "bfloat16": (2 - 2**-7) * 2.0**127}


def table_of(
    optimizer: RowOptimizerSpec,
    dtype: DTypeName,
    *,
    dim: int = 8,
    start: float = 0.0,
    seed: int = 3,
    name: str = "t",
    owned: np.ndarray | None = None,
) -> RowTable:
    slot_dtype: DTypeName = dtype if optimizer.takes_narrow_slots else "float32"
    spec = TableSpec(
        name=name,
        dim=dim,
        optimizer=optimizer,
        initializer=Constant(start),
        dtype=dtype,
        slot_dtype=slot_dtype,
        seed=seed,
    )
    return RowTable(spec, np.arange(4096) if owned is None else owned)


def written(values: np.ndarray, dtype: DTypeName, ids: np.ndarray) -> np.ndarray:
    """What rows of 0 become by a push that carries them to ``values`` [N, D]."""
    table = table_of(SGD(1.0), dtype, dim=values.shape[1])
    table.push(ids, -values)
    return pulled(table, ids)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "optimizer",
    [
        SGD(1e-3, weight_decay=1e-3),
        Momentum(1e-3, 0.9, weight_decay=1e-4),
        SparseMomentum(1e-3, 0.9, weight_decay=1e-4),
        SparseMomentum(1e-3, 0.9, weight_decay=1e-4, untouched="elapsed"),
    ],
    ids=repr,
)
def test_weight_decay_alone_shrinks_rows_as_it_does_in_float32(dtype: DTypeName, optimizer: RowOptimizerSpec) -> None:
    """Each step is less than a thousandth of the distance between two neighbours: to the nearest, nothing moved."""
    table, exact = table_of(optimizer, dtype, dim=256, start=1.0), table_of(optimizer, "float32", dim=256, start=1.0)
    ids, none = np.arange(20), np.zeros((20, 256), np.float32)
    for _ in range(3_000):
        table.push(ids, none)
        exact.push(ids, none)
    ours, theirs = pulled(table, ids).astype(np.float64), pulled(exact, ids).astype(np.float64)
    assert 1 - theirs.mean() > 2e-3  # the decay to be seen
    spread = ours.std() / np.sqrt(ours.size)
    assert abs(ours.mean() - theirs.mean()) < 5 * spread + 1e-6
    assert spread > 0


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("value", [1.0003, -0.3, 3e-5, 2.0**-24 * 0.3, -1e-7, 0.7777 * 2.0**-14, 1234.567])
def test_the_mean_of_a_rounded_value_is_the_value(dtype: DTypeName, value: float) -> None:
    values = np.full((500, 256), value, np.float32)
    ours = written(values, dtype, np.arange(500)).astype(np.float64)
    low, high = ours.min(), ours.max()
    exact = float(np.float32(value))
    assert low <= exact <= high and len(np.unique(ours)) == 2
    chance = (exact - low) / (high - low)
    deviation = np.sqrt(chance * (1 - chance) / ours.size)
    assert abs((ours == high).mean() - chance) < 5 * deviation
    # Also of each column and of each row.
    assert np.abs((ours == high).mean(0) - chance).max() < 6 * deviation * np.sqrt(256)
    assert np.abs((ours == high).mean(1) - chance).max() < 6 * deviation * np.sqrt(500)


def test_draws_of_columns_updates_parts_rows_and_tables_are_not_alike() -> None:
    key = rounding_key(3, table_hash("t"))
    base = draws(key, 7, 1, ROW, 4096)
    others = [
        draws(key, 8, 1, ROW, 4096),
        draws(key, 7 + 2**32, 1, ROW, 4096),
        draws(key, 7, 2, ROW, 4096),
        draws(key, 7, 1, SLOT, 4096),
        draws(key, 7, 1, LATE_ROW, 4096),
        draws(rounding_key(4, table_hash("t")), 7, 1, ROW, 4096),
        draws(rounding_key(3, table_hash("u")), 7, 1, ROW, 4096),
        np.roll(base, 1),
    ]
    for other in others:
        assert (base == other).mean() < 0.002
        assert abs(np.corrcoef(base, other)[0, 1]) < 5 / np.sqrt(4096)
    assert draws(key, 7, 1 + 2**32, ROW, 64).tolist() == base[:64].tolist()


def test_a_value_meets_other_draws_at_each_update() -> None:
    """A stuck value would otherwise stay for ever, or leave at once."""
    ups = [int(d) for number in range(1, 5_001) for d in draws(rounding_key(0, 1), 5, number, ROW, 1)]
    counts, _ = np.histogram(ups, bins=16, range=(0, 2**16))
    assert np.abs(counts - 5_000 / 16).max() < 5 * np.sqrt(5_000 / 16)


@pytest.mark.parametrize("dtype", HALVES)
def test_every_value_that_the_type_has_stays(dtype: DTypeName) -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    values = bits.view(DTYPES[dtype]).astype(np.float32)
    values = values[np.isfinite(values) & (values != 0)].reshape(-1, 2)
    ours = written(values, dtype, np.arange(len(values)))
    np.testing.assert_array_equal(ours.astype(np.float32), values)


@settings(max_examples=150, deadline=None)
@given(
    dtype=st.sampled_from(HALVES),
    bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=70),
    row_id=st.integers(0, 2**63 - 1),
    seed=st.integers(0, 2**64 - 1),
)
def test_any_value_is_rounded_as_the_reference_does(dtype: DTypeName, bits: list[int], row_id: int, seed: int) -> None:
    values = np.array(bits, np.uint32).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        values = np.where(np.isfinite(values.astype(DTYPES[dtype])), values, np.float32(LARGEST[dtype]))
    table = table_of(SGD(1.0), dtype, dim=len(values), seed=seed)
    key, ids = rounding_key(seed, table_hash("t")), np.array([row_id])
    table.push(ids, -values[None])
    first = pulled(table, ids)
    expected = stored(0 + values, dtype, key=key, row_id=row_id, number=1, part=ROW)
    assert first[0].tobytes() == expected.tobytes()
    table.push(ids, values[None], lr=0.5)
    moved = first[0].astype(np.float32) - np.float32(0.5) * values
    assert pulled(table, ids)[0].tobytes() == stored(moved, dtype, key=key, row_id=row_id, number=2, part=ROW).tobytes()


@pytest.mark.parametrize(
    ("dtype", "halfway"), [("float16", 65520.0), ("bfloat16", float(np.uint32(0x7F7F8000).view("f")))]
)
def test_chance_makes_no_infinity_where_the_nearest_value_is_finite(dtype: DTypeName, halfway: float) -> None:
    below = np.nextafter(np.float32(halfway), np.float32(0))
    for value in (below, -below):
        ours = written(np.full((300, 8), value, np.float32), dtype, np.arange(300)).astype(np.float64)
        assert (ours == np.copysign(LARGEST[dtype], value)).all()
    table = table_of(SGD(1.0), dtype)
    with pytest.raises(NonFinite, match=f"beyond the range of {dtype} rows"):
        table.push(np.arange(2), np.full((2, 8), -halfway, np.float32))
    assert table.num_present == 0
    assert not np.isfinite(
        rounded(np.array([halfway, np.nan, -np.inf], np.float32), np.zeros(3, np.uint16), dtype)
    ).any()


@pytest.mark.parametrize("dtype", HALVES)
def test_rows_near_the_end_of_the_range_are_rounded_up_in_its_bound_too(dtype: DTypeName) -> None:
    """The shortcut that a push cannot overflow must know the largest row there can be, not the nearest one."""
    table = table_of(SGD(1.0), dtype)
    step = np.full((50, 8), -LARGEST[dtype] * 0.2491, np.float32)
    with pytest.raises(NonFinite):
        for _ in range(6):
            table.push(np.arange(50), step)
    assert np.isfinite(pulled(table, np.arange(50)).astype(np.float32)).all()


@pytest.mark.parametrize("dtype", HALVES)
def test_what_is_assigned_and_what_a_row_begins_with_are_rounded_to_the_nearest(dtype: DTypeName) -> None:
    table = table_of(SGD(1.0), dtype, dim=500, start=1.0005)
    nearest = np.float32(1.0005).astype(DTYPES[dtype])
    assert (pulled(table, np.arange(3)) == nearest).all()
    table.push(np.arange(3), np.zeros((3, 500), np.float32))
    assert (pulled(table, np.arange(3)) == nearest).all()


def test_rows_without_numbers_of_updates_are_restored_and_damaged_numbers_are_refused() -> None:
    table = table_of(SparseMomentum(0.1), "bfloat16")
    ids, rows = np.arange(2), np.ones((2, 8), DTYPES["bfloat16"])
    table.restore(ids, rows, rows)
    table.freeze()
    assert table.read_frozen(5).steps == pytest.approx([0, 0])
    table.thaw(kept=True)
    with pytest.raises(InvalidRows, match="number of updates outside"):
        table.restore(ids, rows, rows, np.array([1, -1]))


def test_an_assigned_row_goes_on_to_other_draws() -> None:
    """Else a row that is assigned and pushed in turn would meet the same draws for ever."""
    table, ids = table_of(SGD(1.0), "bfloat16", dim=64), np.array([4])
    seen = set()
    for _ in range(5):
        table.assign(ids, np.ones((1, 64), DTYPES["bfloat16"]))
        table.push(ids, np.full((1, 64), -0.003, np.float32))
        seen.add(pulled(table, ids).tobytes())
    assert len(seen) == 5
