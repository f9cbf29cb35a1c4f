"""Tensors as rows of a table and back."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.bridge.dense.layout import Layout

SHAPES = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=6)
DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool])


@settings(max_examples=60, deadline=None)
@given(shapes=SHAPES, dim=st.integers(1, 9), data=st.data())
def test_what_was_packed_is_unpacked(shapes: list[tuple[int, ...]], dim: int, data: st.DataObject) -> None:
    layout = Layout({f"t{i}": shape for i, shape in enumerate(shapes)}, dim)
    dtypes = [data.draw(DTYPES) for _ in shapes]
    tensors = [torch.randint(0, 2, shape).to(dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    missing = data.draw(st.sets(st.integers(0, len(shapes) - 1)))
    rows_RD = torch.full((layout.num_rows, dim), 7.0)
    rows_RD.view(-1)[layout.num_values :] = 0
    layout.pack([None if i in missing else tensor for i, tensor in enumerate(tensors)], rows_RD)
    assert (
        layout.num_values
        == sum(tensor.numel() for tensor in tensors)
        <= layout.num_rows * dim
        < layout.num_values + dim
    )
    assert not rows_RD.view(-1)[layout.num_values :].any()
    back = [torch.ones_like(tensor) for tensor in tensors]
    layout.unpack(rows_RD, back)
    for i, (item, other) in enumerate(zip(tensors, back, strict=True)):
        assert other.dtype == item.dtype
        assert torch.equal(other, torch.zeros_like(item) if i in missing else item)


def test_tensors_that_do_not_lie_in_order_are_packed_by_their_values() -> None:
    layout = Layout({"t": (2, 3)}, 4)
    rows_RD = layout.empty()
    layout.pack([torch.arange(6.0).view(3, 2).T], rows_RD)
    assert rows_RD.tolist() == [[0, 2, 4, 1], [3, 5, 0, 0]]
    target = torch.zeros(3, 2)
    layout.unpack(rows_RD, [target.T])
    assert target.tolist() == [[0, 1], [2, 3], [4, 5]]


def test_integers_are_rounded() -> None:
    count, seen = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.bool)
    layout = Layout({"count": (3,), "seen": (3,)}, 3)
    layout.unpack(torch.tensor([[1.9999, -2.0001, 2.0**24], [0.0001, 0.9999, 2.0]]), [count, seen])
    assert count.tolist() == [2, -2, 2**24]
    assert seen.tolist() == [False, True, True]


def test_a_fingerprint_tells_names_shapes_and_their_order_apart() -> None:
    shapes: list[dict[str, tuple[int, ...]]] = [
        {"a": (2, 3), "b": (4,)},
        {"b": (4,), "a": (2, 3)},
        {"a": (3, 2), "b": (4,)},
        {"a": (6,), "b": (4,)},
        {"a": (2, 3), "c": (4,)},
        {"a": (2, 3), "b": (4, 1)},
    ]
    prints = {Layout(shape, 8).fingerprint for shape in shapes}
    assert len(prints) == len(shapes) and max(prints) < 2**64
    assert (
        Layout(shapes[0], 8).fingerprint == Layout(shapes[0], 16).fingerprint == 0x00E740749D417902
    )  # in specs and snapshots


def test_a_layout_names_its_first_and_last_tensors() -> None:
    text = str(Layout({f"layer{i}.weight": (i + 1,) for i in range(9)}, 4))
    assert "9 tensors of 45 values" in text
    assert text.endswith(
        "layer0.weight [1], layer1.weight [2], layer2.weight [3], …, layer6.weight [7], "
        "layer7.weight [8], layer8.weight [9]"
    )
