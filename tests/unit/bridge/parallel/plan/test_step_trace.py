"""What a step does, operation by operation, without computing it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from geartrain.ams.values.errors import InvalidArgument
from geartrain.bridge.parallel.plan.costs import replicas
from geartrain.bridge.parallel.plan.costs.skeleton import skeleton_of, without_values
from geartrain.bridge.parallel.plan.costs.trace import REST, Operation, Recorded, StepTrace, traced_step, traced_update
from geartrain.bridge.parallel.plan.hardware.hardware import Hardware

SLOW = Hardware(name="slow", flops={"float32": 100.0}, memory_bandwidth=10.0, memory_bytes=1)


def traced(model: nn.Module, parts: list[str], inputs: Tensor) -> Recorded:
    return traced_step(model, parts, lambda: model(inputs).sum(), inputs, StepTrace())


def test_products_are_counted_forward_and_backward() -> None:
    model = skeleton_of(nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 4, bias=False)))
    recorded = traced(model, ["0", "2"], torch.empty(5, 8, device="meta"))
    assert recorded.work("0", "forward").flops == 2 * 5 * 8 * 16
    assert recorded.work("2", "forward").flops == 2 * 5 * 16 * 4
    assert recorded.work("2", "backward").flops == 2 * 2 * 5 * 16 * 4
    backward = sum(work.flops for (_, phase), work in recorded.operations.items() if phase == "backward")
    assert backward == 2 * 2 * 5 * 16 * 4 + 2 * 5 * 8 * 16  # the inputs want no gradient
    # the second layer keeps what the first one gave, ReLU the same memory
    assert sum(recorded.kept_bytes.values()) == 5 * 16 * 4


def test_an_operation_takes_the_longer_of_arithmetic_and_bytes() -> None:
    assert Operation(name="mm", dtype="float32", flops=500, bytes=10).seconds(SLOW) == 5.0
    assert Operation(name="add", dtype="float32", bytes=30).seconds(SLOW) == 3.0
    assert Operation(name="mm", dtype="bfloat16", flops=500).seconds(SLOW) == 5.0  # not known: as float32


def test_no_value_of_a_model_is_copied() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    skeleton = skeleton_of(model)
    assert {one.device.type for one in (*skeleton.parameters(), *skeleton.buffers())} == {"meta"}
    assert [name for name, _ in skeleton.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert {one.device.type for one in model.parameters()} == {"cpu"}


def test_a_model_that_looks_at_values_is_refused_by_name() -> None:
    class Looks(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return inputs if bool(inputs.sum() > 0) else -inputs

    class Converts(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return torch.from_numpy(inputs.numpy())

    with pytest.raises(InvalidArgument, match=r"Converts or its loss cannot run without values.*to numpy"):
        traced(Converts(), [], torch.empty(2, 3, device="meta"))
    with pytest.raises(InvalidArgument, match="Looks or its loss cannot run without values"):
        traced(Looks(), [], torch.empty(2, 3, device="meta"))
    with pytest.raises(InvalidArgument, match="does not call '1'"):
        model = skeleton_of(nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]))
        traced_step(model, ["1"], lambda: model[0](torch.empty(2, 3, device="meta")).sum(), (), StepTrace())  # type: ignore[operator,index]


@pytest.mark.parametrize(("make", "states"), [(torch.optim.SGD, 0), (torch.optim.AdamW, 2)])
def test_the_state_of_an_optimizer_is_counted(make: Any, states: int) -> None:
    parameters = list(skeleton_of(nn.Linear(100, 10)).parameters())
    work, state_bytes = traced_update(parameters, make)
    assert state_bytes == pytest.approx(states * 1010 * 4, abs=8)
    assert work.bytes >= (3 + 2 * states) * 1010 * 4  # parameters and gradients read, parameters and states written


def test_tensors_as_long_as_the_batch_follow_it() -> None:
    example = {"images": torch.empty(4, 3), "names": "no tensor", "grid": torch.empty(7)}
    made, samples = without_values(example, 9)
    assert (samples, made["images"].shape, made["grid"].shape) == (9, (9, 3), (7,))
    with pytest.raises(InvalidArgument, match="example is"):
        without_values(["nothing"], 3)


def test_buckets_close_when_they_are_full() -> None:
    sizes = [100_000, 200_000, 1, 5_000_000, 2_000_000, 3]  # of float32: the limits are 1 and 25 MiB
    made = replicas.buckets([torch.empty(size, device="meta") for size in sizes])
    assert [[one.numel() for one in bucket] for bucket in made] == [[100_000, 200_000], [1, 5_000_000, 2_000_000], [3]]


def test_work_outside_named_parts_is_the_rest() -> None:
    recorded = traced(skeleton_of(nn.Sequential(nn.Linear(3, 2))), ["0"], torch.empty(2, 3, device="meta"))
    assert [one.name for one, _ in recorded.work(REST, "forward").operations] == ["sum"]
