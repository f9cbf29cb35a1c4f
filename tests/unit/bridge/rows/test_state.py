"""State of PyTorch objects goes into a snapshot's files and comes back the same."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from geartrain.ams.values.errors import InvalidArgument
from geartrain.bridge.checkpoint.rank_rows import extract_sharded
from geartrain.bridge.rows.serialization import random_state, set_random_state, state_from_bytes, state_to_bytes


def test_an_optimizer_goes_on_as_if_it_had_never_been_saved() -> None:
    torch.manual_seed(0)
    models = [nn.Linear(4, 3)]
    models.append(copy.deepcopy(models[0]))
    optimizers: list[Any] = [torch.optim.AdamW(model.parameters(), lr=0.1, amsgrad=True) for model in models]
    schedules = [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=20) for optimizer in optimizers]
    inputs = torch.randn(12, 4)

    def train(which: int, steps: range) -> None:
        for step in steps:
            optimizers[which].zero_grad()
            models[which](inputs[step]).square().sum().backward()
            optimizers[which].step()
            schedules[which].step()

    train(0, range(12))
    train(1, range(5))
    parts = (models[1].state_dict(), optimizers[1].state_dict(), schedules[1].state_dict())
    saved = state_to_bytes({"model": parts[0], "optimizer": parts[1], "schedule": parts[2]})
    models[1] = nn.Linear(4, 3)
    optimizers[1] = torch.optim.AdamW(models[1].parameters(), lr=7.0, amsgrad=True)
    schedules[1] = torch.optim.lr_scheduler.OneCycleLR(optimizers[1], 0.2, total_steps=20)
    state = state_from_bytes(saved)
    models[1].load_state_dict(state["model"])
    optimizers[1].load_state_dict(state["optimizer"])
    schedules[1].load_state_dict(state["schedule"])
    train(1, range(5, 12))
    for expected, found in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(expected, found)


def test_a_schedule_of_milestones_after_a_warm_up_goes_on() -> None:
    def schedule() -> Any:
        scheduler = torch.optim.lr_scheduler
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), 1.0)
        parts = [scheduler.LinearLR(optimizer, total_iters=3), scheduler.MultiStepLR(optimizer, [2, 2, 3])]
        return scheduler.SequentialLR(optimizer, parts, [5]), optimizer

    def rates(schedule: Any, optimizer: Any, steps: range) -> list[float]:
        found = []
        for _ in steps:
            optimizer.step()
            schedule.step()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    whole, (first, trained), (second, optimizer) = schedule(), schedule(), schedule()
    expected = rates(*whole, range(10))
    rates(first, trained, range(4))
    saved, _ = extract_sharded({"schedule": first.state_dict(), "optimizer": trained.state_dict()})
    state = state_from_bytes(state_to_bytes(saved))
    second.load_state_dict(state["schedule"])
    optimizer.load_state_dict(state["optimizer"])
    assert rates(second, optimizer, range(4, 10)) == expected[4:]


buffer_leases = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
trees = st.recursive(
    buffer_leases,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(trees)
def test_whatever_a_state_holds_comes_back_as_it_was(tree: Any) -> None:
    found = state_from_bytes(state_to_bytes(tree))
    assert found == tree
    assert type(found) is type(tree)


def test_tensors_keep_dtype_and_shape_and_views_are_stored_whole() -> None:
    base = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    state = {"transposed": base.T, "scalar": torch.tensor(3), "empty": torch.empty(0, 2), "same": base, "again": base}
    found = state_from_bytes(state_to_bytes(state))
    for name, tensor in state.items():
        assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype, name


def test_arrays_and_numbers_of_numpy_are_kept_as_evaluations_make_them() -> None:
    drawn = np.random.RandomState(3)
    best = {"loss": np.float32(0.25), "step": np.int64(7), "met": np.bool_(True), "worst": np.float32("inf")}
    found = state_from_bytes(state_to_bytes({"numpy": drawn.get_state(), "best": best, "seen": np.eye(2)[:, ::-1]}))
    assert found["best"] == best and type(found["best"]["loss"]) is float
    np.testing.assert_array_equal(found["seen"], np.eye(2)[:, ::-1])
    expected = drawn.rand(4)
    drawn.set_state(found["numpy"])
    swapped = np.array([1, 2], ">i4")
    np.testing.assert_array_equal(state_from_bytes(state_to_bytes(swapped)), swapped)
    np.testing.assert_array_equal(drawn.rand(4), expected)


def test_what_is_no_state_is_named() -> None:
    with pytest.raises(InvalidArgument, match=r"state\['a'\]\[1\] is object"):
        state_to_bytes({"a": [1, object()]})
    with pytest.raises(InvalidArgument, match=r"state\['c'\] is ndarray"):
        state_to_bytes({"c": np.array(["text"])})
    with pytest.raises(InvalidArgument, match=r"state\['b'\] is a tensor of layout torch.sparse_coo; .* to_dense"):
        state_to_bytes({"b": torch.zeros(3).to_sparse()})
    for odd, message in {
        torch.zeros(2, dtype=torch.complex128): "torch.complex128, .* convert it",
        torch.zeros(2, dtype=torch.float8_e8m0fnu): "torch.float8_e8m0fnu, .* convert it",
        torch.zeros(2, device="meta"): "a meta tensor",
        torch.nested.nested_tensor([torch.zeros(2)]): "a nested tensor",
    }.items():
        with pytest.raises(InvalidArgument, match=rf"state\['d'\] is .*{message}"):
            state_to_bytes({"d": odd})
    with pytest.raises(InvalidArgument, match=r"state\['e'\] is ndarray"):
        state_to_bytes({"e": np.zeros(2, np.longdouble)})
    with pytest.raises(InvalidArgument, match=r"state\['f'\] is longdouble"):
        state_to_bytes({"f": np.longdouble(1)})
    with pytest.raises(InvalidArgument, match="not a state"):
        state_from_bytes(b"torn")
    with pytest.raises(InvalidArgument, match="not a state"):
        state_from_bytes(state_to_bytes({"a": torch.ones(3)})[:-4])


def test_random_numbers_go_on() -> None:
    device = torch.device("cpu")
    state = state_from_bytes(state_to_bytes(random_state(device)))
    expected = torch.rand(3)
    set_random_state(state, device)
    assert torch.equal(torch.rand(3), expected)
