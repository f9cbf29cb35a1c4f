"""SparseMomentum(untouched="elapsed"): rows nobody pushed move as dense momentum moves them, whenever one looks."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.ams.tables.compiled_store import table_hash
from geartrain.ams.tables.row_table import RowTable, TableSteps
from geartrain.ams.values.errors import InvalidArgument, InvalidRows, NonFinite
from geartrain.ams.values.optimizers.registry import SparseMomentum
from geartrain.ams.values.specs import DTYPES, DTypeName, Ids, Normal, TableSpec
from tests.specification.elapsed_momentum import ElapsedTable
from tests.specification.row_table import ReferenceTable

DIM, COUNT = 3, 24
EVERY_ID = np.arange(COUNT)
ALL_BUCKETS = np.arange(4096)
Doubles = npt.NDArray[np.float64]


def make(
    weight_decay: float = 0.0,
    *,
    num_rows: int | None = COUNT,
    window: int = 1000,
    dtype: DTypeName = "float32",
    slot_dtype: DTypeName = "float32",
    lr: float = 0.1,
) -> RowTable:
    optimizer = SparseMomentum(lr, momentum=0.9, weight_decay=weight_decay, untouched="elapsed")
    spec = TableSpec(
        name="t",
        dim=DIM,
        optimizer=optimizer,
        num_rows=num_rows,
        dtype=dtype,
        slot_dtype=slot_dtype,
        initializer=Normal(0, 1),
    )
    return RowTable(spec, ALL_BUCKETS, window=window)


def pulled(table: RowTable, ids: Ids = EVERY_ID) -> npt.NDArray[Any]:
    out = np.empty((len(ids), DIM), table.spec.numpy_dtype)
    table.pull(ids, out)
    return out


class Dense:
    """Momentum on every row at every step, in float64, as torch.optim.SGD has it."""

    def __init__(self, table: RowTable) -> None:
        self.optimizer = table.spec.optimizer
        assert isinstance(self.optimizer, SparseMomentum)
        self.rows: Doubles = pulled(table).astype(np.float64)
        self.slots: Doubles = np.zeros_like(self.rows)

    def step(self, gradients: Doubles, lr: float) -> None:
        assert isinstance(self.optimizer, SparseMomentum)
        self.slots = self.optimizer.momentum * self.slots + gradients + self.optimizer.weight_decay * self.rows
        self.rows = self.rows - lr * self.slots


PUSH = st.tuples(
    st.lists(st.integers(0, COUNT - 1), max_size=6, unique=True), st.floats(0, 0.5, width=32), st.booleans()
)
STEPS = st.lists(
    st.tuples(st.sampled_from(["push", "push", "push", "assign", "pull"]), PUSH, st.integers(1, 12)), max_size=25
)


@settings(deadline=None, max_examples=150)
@given(
    steps=STEPS,
    weight_decay=st.sampled_from([0.0, 0.05]),
    window=st.sampled_from([4, 10, 1000]),
    num_rows=st.sampled_from([None, COUNT]),
)
def test_every_row_equals_dense_momentum_under_a_changing_learning_rate(
    steps: list[Any], weight_decay: float, window: int, num_rows: int | None
) -> None:
    table = make(weight_decay, window=window, num_rows=num_rows)
    dense = Dense(table)
    gradients = np.zeros_like(dense.rows)
    for number, (verb, (chosen, lr, ends_step), repeats) in enumerate(steps):
        ids = np.array(sorted(chosen), np.int64)
        values = np.random.default_rng(number).standard_normal((len(ids), DIM)).astype(np.float32)
        if verb == "assign":
            table.assign(ids, values)
            dense.rows[ids], dense.slots[ids], gradients[ids] = values, 0, 0
        elif verb == "push":
            for _ in range(repeats):  # a few rows pushed again and again, while the others wait
                table.push(ids, values, lr=lr, ends_step=True)
                gradients[ids] += values
                dense.step(gradients, lr)
                gradients[:] = 0
            if not ends_step and len(ids):  # two pushes of one step, with rows in both
                table.push(ids, values, lr=lr, ends_step=False)
                table.push(ids[:1], values[:1], lr=lr)
                gradients[ids] += values
                gradients[ids[:1]] += values[:1]
                dense.step(gradients, lr)
                gradients[:] = 0
        else:
            np.testing.assert_allclose(pulled(table, ids), dense.rows[ids], rtol=1e-4, atol=2e-5)
    np.testing.assert_allclose(pulled(table), dense.rows, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("weight_decay", [0.0, 0.02])
@pytest.mark.parametrize(("dtype", "slot_dtype"), [("float32", "float32"), ("float16", "bfloat16")])
def test_every_step_equals_the_reference_bit_by_bit(
    weight_decay: float, dtype: DTypeName, slot_dtype: DTypeName
) -> None:
    ours = make(weight_decay, dtype=dtype, slot_dtype=slot_dtype)
    optimizer = ours.spec.optimizer
    theirs = ElapsedTable(DIM, optimizer, Normal(0, 1), 0, table_hash("t"), dtype, slot_dtype)
    generator = np.random.default_rng(1)
    for step in range(60):
        ids = generator.permutation(COUNT)[: step % 4]
        gradients = generator.standard_normal((len(ids), DIM)).astype(np.float32)
        if step % 9 == 5:
            values = gradients.astype(DTYPES[dtype])
            assert ours.assign(ids, values) == theirs.assign(ids, values)
        lr, ends = 0.2 / (1 + step), step % 5 != 2
        created = ours.push(ids, gradients, lr=lr, scale=0.5, ends_step=ends)
        assert created == theirs.push(ids, gradients, lr, 0.5, ends_step=ends)
        assert pulled(ours).tobytes() == theirs.pull(EVERY_ID).tobytes()


def test_reading_moves_nothing() -> None:
    read, unread = make(0.02), make(0.02)
    for step in range(30):
        ids = np.array([step % 5])
        for table in (read, unread):
            table.push(ids, np.ones((1, DIM), np.float32))
        pulled(read)
    assert pulled(read).tobytes() == pulled(unread).tobytes()


def test_a_refused_push_is_no_step_and_one_without_rows_is() -> None:
    table = make(0.1)
    table.push(np.array([1]), np.ones((1, DIM), np.float32))
    before = pulled(table)
    with pytest.raises(NonFinite):
        table.push(np.array([2]), np.full((1, DIM), np.nan, np.float32))
    assert pulled(table).tobytes() == before.tobytes()
    table.push(np.empty(0, np.int64), np.empty((0, DIM), np.float32))
    assert table.steps is not None and table.steps.now == 2
    assert (pulled(table) != before).all()


@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_what_is_remembered_of_the_steps_is_bounded(weight_decay: float) -> None:
    table = make(weight_decay, window=20)
    generator = np.random.default_rng(0)
    for _ in range(200):
        ids = generator.permutation(COUNT)[:2]
        table.push(ids, generator.standard_normal((2, DIM)).astype(np.float32))
        assert table.steps is not None and len(table.steps.lrs) <= 40


def test_a_row_that_moves_beyond_its_type_stays_at_its_end() -> None:
    table = make(dtype="float16", slot_dtype="float16", lr=1.0)
    table.push(np.array([0]), np.full((1, DIM), -40_000, np.float32))
    for _ in range(30):
        table.push(np.array([1]), np.zeros((1, DIM), np.float32))
    assert (pulled(table)[0] == 65504).all()
    wild = make(weight_decay=50.0, lr=1.0)
    for _ in range(600):
        wild.push(np.empty(0, np.int64), np.empty((0, DIM), np.float32))
    assert np.isfinite(pulled(wild)).all()


def test_a_push_that_would_overflow_a_caught_up_row_is_refused() -> None:
    table = make(dtype="float16", lr=1.0)
    table.push(np.array([0]), np.full((1, DIM), -10_000, np.float32))
    for _ in range(20):
        table.push(np.empty(0, np.int64), np.empty((0, DIM), np.float32))
    before = pulled(table)
    with pytest.raises(NonFinite, match="beyond the range of float16"):
        table.push(np.array([0]), np.full((1, DIM), -20_000, np.float32))
    assert pulled(table).tobytes() == before.tobytes()


def test_what_does_not_fit_a_table_that_counts_steps_is_refused() -> None:
    table = make()
    rows = np.zeros((1, DIM), np.float32)
    with pytest.raises(InvalidRows, match="counts the steps of its rows; no steps"):
        table.restore(np.array([1]), rows, rows)
    for steps in (TableSteps(-1, [], (1.0, 0.0)), TableSteps(1, [0.1, 0.1], (1, 0)), TableSteps(1, [-0.1], (1, 0))):
        with pytest.raises(InvalidArgument, match="no steps of table 't'"):
            table.adopt_steps(steps)
    with pytest.raises(InvalidArgument, match="untouched is 'later'; it must be 'freeze' or 'elapsed'"):
        SparseMomentum(0.1, untouched="later")  # type: ignore[arg-type]


def test_the_lazy_form_counts_nothing() -> None:
    assert isinstance(ElapsedTable(1, SparseMomentum(0.1), Normal(), 0, 0), ReferenceTable)
    spec = TableSpec(name="t", dim=DIM, optimizer=SparseMomentum(0.1))
    assert RowTable(spec, ALL_BUCKETS).steps is None
