"""Values of tensors as rows that lie in the tensors themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from geartrain.ams.kernels import _core, ops
from geartrain.ams.values.errors import InvalidArgument, SpecMismatch
from geartrain.bridge.dense.host_values import HostValues
from geartrain.bridge.dense.layout import Layout

CLIENT = _core.RowsClient(np.zeros(ops.NUM_BUCKETS, np.uint16), 1)
SHAPES = st.lists(st.lists(st.integers(0, 7), max_size=2).map(tuple), min_size=1, max_size=6)
DTYPES = st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float64])


def rows_of(layout: Layout, rows: _core.ScatteredRows, ids: list[int] | None = None, **settings: Any) -> np.ndarray:
    """What a push of these rows would carry."""
    facts = _core.TableFacts("net", layout.dim, 0, True, 0)
    ids_R = np.arange(layout.num_rows) if ids is None else np.array(ids)
    told = {
        "is_assign": False,
        "check": 2,
        "lr": None,
        "scale": 1.0,
        "scalars": {},
        "group": None,
        **settings,
    }
    write = _core.PreparedWrite(CLIENT, facts, ids_R, rows, 0, step_goes_on=False, every_shard=True, **told)
    return write.part(0)[2].copy()


def in_some_order(shape: tuple[int, ...], dtype: torch.dtype, is_turned: bool) -> Tensor:
    tensor = torch.randn(shape[::-1] if is_turned else shape).to(dtype)
    return tensor.permute(tuple(range(tensor.ndim))[::-1]) if is_turned else tensor


@settings(max_examples=60, deadline=None)
@given(shapes=SHAPES, dim=st.integers(1, 9), data=st.data())
def test_rows_are_those_that_packing_makes(shapes: list[tuple[int, ...]], dim: int, data: st.DataObject) -> None:
    layout = Layout({f"t{i}": shape for i, shape in enumerate(shapes)}, dim)
    tensors = [in_some_order(shape, data.draw(DTYPES), data.draw(st.booleans())) for shape in shapes]
    missing = data.draw(st.sets(st.integers(0, len(shapes) - 1)))
    given = [None if i in missing else tensor for i, tensor in enumerate(tensors)]
    expected = layout.empty()
    layout.pack(given, expected)
    rows = HostValues(layout).now(given)
    assert len(rows) == layout.num_rows
    np.testing.assert_array_equal(rows_of(layout, rows), expected.numpy())


@settings(max_examples=60, deadline=None)
@given(shapes=SHAPES, dim=st.integers(1, 9), data=st.data())
def test_rows_that_come_are_what_unpacking_gives(shapes: list[tuple[int, ...]], dim: int, data: st.DataObject) -> None:
    layout = Layout({f"t{i}": shape for i, shape in enumerate(shapes)}, dim)
    tensors = [in_some_order(shape, data.draw(DTYPES), data.draw(st.booleans())) for shape in shapes]
    expected = [tensor.clone() for tensor in tensors]
    values = torch.randn(layout.num_rows, dim)
    layout.unpack(values, expected)
    with HostValues(layout).coming(tensors) as rows:
        rows.place(values.numpy(), None)
    for tensor, other in zip(tensors, expected, strict=True):
        assert torch.equal(tensor, other)


def test_rows_that_do_not_come_stay_what_they_are() -> None:
    layout = Layout({"a": (5,), "b": (6,)}, 4)
    tensors = [torch.zeros(5), torch.zeros(6)]
    with HostValues(layout).coming(tensors) as rows:
        rows.place(np.arange(12, dtype=np.float32).reshape(3, 4), np.array([0, 2]))
    assert tensors[0].tolist() == [0, 1, 2, 3, 0] and tensors[1].tolist() == [0, 0, 0, 8, 9, 10]


def test_nothing_of_a_failed_block_reaches_other_dtypes() -> None:
    layout = Layout({"a": (3,)}, 4)
    tensor = torch.ones(3, dtype=torch.bfloat16)
    values = HostValues(layout)
    with pytest.raises(MemoryError), values.coming([tensor]) as rows:
        rows.place(np.full((1, 4), 7, np.float32), None)
        raise MemoryError
    assert tensor.tolist() == [1, 1, 1]


def test_autograd_hears_of_values_that_came() -> None:
    layout = Layout({"a": (3,)}, 3)
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * weight).sum()
    with HostValues(layout).coming([weight]) as rows:
        rows.place(np.full((1, 3), 7, np.float32), None)
    assert weight.tolist() == [7, 7, 7]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_tensor_of_another_shape_is_named() -> None:
    with pytest.raises(SpecMismatch, match=r"a has shape \[4\] now; it was attached as a \[3\]"):
        HostValues(Layout({"a": (3,)}, 3)).now([torch.ones(4)])


def test_ids_of_rows_of_several_arrays_rise() -> None:
    layout = Layout({"a": (6,)}, 3)
    with pytest.raises(InvalidArgument, match="must rise"):
        rows_of(layout, HostValues(layout).now([torch.ones(6)]), ids=[1, 1])
