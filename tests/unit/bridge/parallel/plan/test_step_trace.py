"""What a step does, operation by operation, without computing it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from geartrain.ams.values.errors import InvalidArgument
from geartrain.bridge.parallel.plan.auto import _AdamW
from geartrain.bridge.parallel.plan.build import buckets
from geartrain.bridge.parallel.plan.dry import skeleton_of, without_values
from geartrain.bridge.parallel.plan.hardware import Hardware
from geartrain.bridge.parallel.plan.trace import REST, StepTrace, traced_step, traced_update

PRODUCTS = Hardware(name="products count", flops={"float32": 1.0}, memory_bandwidth=1e30, memory_bytes=1)
BYTES = Hardware(name="bytes count", flops={"float32": 1e30}, memory_bandwidth=1.0, memory_bytes=1)


def traced(model: nn.Module, parts: list[str], inputs: Tensor, hardware: Hardware = PRODUCTS) -> StepTrace:
    trace = StepTrace(hardware)
    traced_step(model, parts, lambda: model(inputs).sum(), inputs, trace)
    return trace


def test_products_are_counted_forward_and_backward_and_what_is_kept_between() -> None:
    model = skeleton_of(nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 4, bias=False)))
    trace = traced(model, ["0", "2"], torch.empty(5, 8, device="meta"))
    seconds = {key: pytest.approx(value, abs=1) for key, value in trace.seconds.items()}
    assert seconds["0", "forward"] == 2 * 5 * 8 * 16
    assert seconds["2", "forward"] == 2 * 5 * 16 * 4
    assert seconds["2", "backward"] == 2 * 2 * 5 * 16 * 4
    backward = sum(value for (_, phase), value in trace.seconds.items() if phase == "backward")
    assert backward == pytest.approx(2 * 2 * 5 * 16 * 4 + 2 * 5 * 8 * 16, abs=1)  # the inputs want no gradient
    # the second layer keeps what the first one gave, ReLU the same memory
    assert sum(map(trace.kept_bytes, ("0", "2", REST))) == 5 * 16 * 4
    in_bytes = traced(model, ["0"], torch.empty(5, 8, device="meta"), BYTES)
    assert in_bytes.seconds["0", "forward"] == pytest.approx(4 * (5 * 8 + 8 * 16 + 5 * 16))
    assert in_bytes.seconds[REST, "forward"] > 0  # of what no named part does


def test_no_value_of_a_model_is_copied() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    skeleton = skeleton_of(model)
    assert {tensor.device.type for tensor in (*skeleton.parameters(), *skeleton.buffers())} == {"meta"}
    assert [name for name, _ in skeleton.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


def test_a_model_that_looks_at_values_is_refused_by_name() -> None:
    class Looks(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return torch.from_numpy(inputs.numpy())

    with pytest.raises(InvalidArgument, match=r"Looks or its loss cannot run without values.*to numpy"):
        traced(Looks(), [], torch.empty(2, 3, device="meta"))
    with pytest.raises(InvalidArgument, match="does not call '1'"):
        model = skeleton_of(nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]))
        empty = torch.empty(2, 3, device="meta")
        traced_step(model, ["1"], lambda: model[0](empty).sum(), (), StepTrace(BYTES))  # type: ignore[operator,index]


@pytest.mark.parametrize(("make", "states"), [(torch.optim.SGD, 0), (torch.optim.AdamW, 2)])
def test_the_state_of_an_optimizer_is_counted(make: Any, states: int) -> None:
    parameters = list(skeleton_of(nn.Linear(100, 10)).parameters())
    seconds, state_bytes = traced_update(parameters, make, BYTES)
    assert state_bytes == pytest.approx(states * 1010 * 4, abs=8)
    assert seconds >= (3 + 2 * states) * 1010 * 4  # parameters and gradients read, parameters and states written


def test_the_stand_in_of_adamw_steps_as_adamw_from_its_first_step_on() -> None:
    made = traced_update(list(skeleton_of(nn.Linear(100, 10)).parameters()), _AdamW, BYTES)
    seconds, state_bytes = traced_update(list(skeleton_of(nn.Linear(100, 10)).parameters()), torch.optim.AdamW, BYTES)
    assert made == (pytest.approx(seconds, abs=100), pytest.approx(state_bytes, abs=8))  # numbers of steps are ours


def test_tensors_as_long_as_the_batch_follow_it() -> None:
    example = {"images": torch.empty(4, 3), "names": "no tensor", "grid": torch.empty(7)}
    made, samples = without_values(example, 9)
    assert (samples, made["images"].shape, made["grid"].shape) == (9, (9, 3), (7,))
    with pytest.raises(InvalidArgument, match="example is"):
        without_values(["nothing"], 3)


def test_buckets_close_when_they_are_full() -> None:
    sizes = [100_000, 200_000, 1, 5_000_000, 2_000_000, 3]  # of float32: the limits are 1 and 25 MiB
    made = buckets([torch.empty(size, device="meta") for size in sizes])
    assert [[item.numel() for item in bucket] for bucket in made] == [
        [100_000, 200_000],
        [1, 5_000_000, 2_000_000],
        [3],
    ]
