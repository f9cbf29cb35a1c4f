"""What only the row-wise optimizers have; what every optimizer has is in test_optimizer_bits.py."""

from __future__ import annotations

import numpy as np
import pytest

from geartrain.ams.tables.row_table import RowTable
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.optimizers.adagrad import Adagrad
from geartrain.ams.values.optimizers.adamw import AdamW
from geartrain.ams.values.optimizers.rowwise import RowWiseAdagrad, RowWiseAdam
from geartrain.ams.values.optimizers.spec import RowOptimizerSpec, UpdateStep
from geartrain.ams.values.specs import TableSpec


@pytest.mark.parametrize(
    ("row_wise", "element_wise"),
    [
        (RowWiseAdagrad(0.1, 0.2, 0.01, 0.3), Adagrad(0.1, 0.2, 0.01, 0.3)),
        (RowWiseAdam(0.1, weight_decay=0.02), AdamW(0.1, weight_decay=0.02)),
    ],
    ids=str,
)
def test_on_rows_of_width_1_they_are_what_their_namesakes_are(
    row_wise: RowOptimizerSpec, element_wise: RowOptimizerSpec
) -> None:
    generator = np.random.default_rng(0)
    rows = generator.standard_normal((50, 1))
    ours, theirs = (rows, np.zeros((50, row_wise.slot_dim(1)))), (rows, np.zeros((50, element_wise.slot_dim(1))))
    for t in range(1, 6):
        gradient, push = generator.standard_normal((50, 1)), UpdateStep(0.1, t=t, dtype=np.float64)
        ours, theirs = row_wise.updated(*ours, gradient, push), element_wise.updated(*theirs, gradient, push)
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-13)
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-13)


def test_a_row_keeps_one_number_for_the_size_of_its_gradients() -> None:
    def slot_bytes(optimizer: RowOptimizerSpec) -> int:
        return TableSpec(name="t", dim=64, optimizer=optimizer).slot_bytes

    assert [slot_bytes(one) for one in (RowWiseAdagrad(), Adagrad())] == [4, 256]
    assert [slot_bytes(one) for one in (RowWiseAdam(), AdamW())] == [260, 512]
    tables = [
        RowTable(TableSpec(name="t", dim=64, optimizer=one), np.arange(4096)) for one in (RowWiseAdagrad(), Adagrad())
    ]
    for table in tables:
        table.push(np.arange(1000), np.ones((1000, 64), np.float32))
    assert tables[1].memory_bytes - tables[0].memory_bytes == 252 * 1000


def test_squares_whose_sum_is_out_of_range_are_refused_though_their_mean_is_not() -> None:
    table = RowTable(TableSpec(name="t", dim=64, optimizer=RowWiseAdagrad()), np.arange(4096))
    assert table.cannot_overflow(2e18) and not table.cannot_overflow(4e18)


@pytest.mark.parametrize("kind", [RowWiseAdagrad, RowWiseAdam])
@pytest.mark.parametrize("name", ["lr", "weight_decay", "eps"])
@pytest.mark.parametrize("value", [-0.1, float("nan")])
def test_settings_out_of_range_are_refused(kind: type[RowOptimizerSpec], name: str, value: float) -> None:
    with pytest.raises(InvalidArgument, match=f"{name} is {value}"):
        kind(**{name: value})  # type: ignore[arg-type]
