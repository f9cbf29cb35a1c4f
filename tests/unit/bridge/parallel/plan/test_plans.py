"""Plans: who holds what, what is chosen, and how the batch grows."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from geartrain.ams.values.errors import InvalidArgument
from geartrain.bridge.parallel.plan.auto import auto_plan
from geartrain.bridge.parallel.plan.build import PlanRequest
from geartrain.bridge.parallel.plan.hardware import Hardware
from geartrain.bridge.parallel.plan.plan import Plan
from geartrain.bridge.parallel.scopes import Replicate, Scope, Split

CLUSTER = Hardware.named("v100-25gbit")
LOSS = nn.CrossEntropyLoss()


class Classifier(nn.Module):
    def __init__(self, classes: int, dim: int = 64) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, dim))
        self.head = nn.Linear(dim, classes)

    def forward(self, images: Tensor) -> Any:
        return self.head(self.backbone(images))


def classifier(classes: int) -> nn.Module:
    with torch.device("meta"):
        return Classifier(classes)


def example(samples: int = 16) -> tuple[Tensor, Tensor]:
    return torch.empty(samples, 32), torch.empty(samples, dtype=torch.int64)


def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def request(model: nn.Module, scopes: dict[str, Scope], ranks: int = 16, **options: Any) -> PlanRequest:
    fields = {"hardware": CLUSTER, "loss": LOSS, "optimizer": momentum, **options}
    return PlanRequest.of(model, scopes, example(), None, ranks=ranks, **fields)


def planned(scopes: dict[str, Scope], **options: Any) -> Plan:
    return request(classifier(100_000), scopes, **options).plan()


def test_a_split_head_is_held_in_parts_and_its_gradients_stay_where_they_are() -> None:
    whole = planned({"backbone": Replicate(), "head": Replicate()})
    split = planned({"backbone": Replicate(), "head": Split()})
    head, same = split.parts[1], whole.parts[1]
    assert head.num_parameters == same.num_parameters == 100_000 * 65
    assert head.parameter_bytes * 16 == same.parameter_bytes == 100_000 * 65 * 4
    assert (head.gradient_bytes, head.optimizer_bytes) == (head.parameter_bytes, head.parameter_bytes)
    assert same.gradient_bytes == 2 * same.parameter_bytes  # with the buckets
    assert whole.sent_bytes - split.sent_bytes > 0.95 * 2 * 15 / 16 * same.parameter_bytes
    assert split.step.seconds < whole.step.seconds
    assert "head" in split.explain()
    assert "gradients of features" in split.explain()
    assert json.loads(json.dumps(split.to_dict()))["parts"][1]["scope"] == "split"


def test_sharded_parts_hold_a_part_of_everything_but_what_is_gathered() -> None:
    plan = planned({"backbone": Replicate(shard=True), "head": Replicate(shard=True)})
    head = plan.parts[1]
    assert head.parameter_bytes == head.gradient_bytes == head.optimizer_bytes == 100_000 // 16 * 65 * 4
    kinds = {collective.collective.kind for collective in plan.collectives if collective.part == "head"}
    assert kinds == {"all-gather", "reduce-scatter"}


def test_what_can_be_hidden_is_hidden_and_no_more() -> None:
    plan = planned({"backbone": Replicate(), "head": Replicate()})
    assert 0 <= plan.step.hidden < plan.step.communication
    assert plan.step_without_overlap.seconds == pytest.approx(plan.step.compute + plan.step.communication)
    slow = plan.changed(hardware=replace(CLUSTER, memory_bandwidth=1e9, overlap=0.0))
    assert slow.step.hidden > plan.step.hidden
    assert slow.step.seconds == pytest.approx(slow.step_without_overlap.seconds)  # nothing is won where all share
    split = planned({"backbone": Replicate(), "head": Split()})
    in_parts = split.changed(micro_batches=4, hardware=replace(CLUSTER, memory_bandwidth=1e9))
    gathers = next(collective for collective in in_parts.collectives if collective.collective.what == "features")
    assert (gathers.times, gathers.bytes) == (4, 16 * 16 * 64 * 4)
    assert in_parts.step.hidden > 0


def test_sparse_gradients_send_less() -> None:
    dense = planned({"backbone": Replicate(), "head": Replicate()})
    sparse = dense.changed(sparsity=0.999)
    assert sparse.sent_bytes < dense.sent_bytes / 25  # of 16 ranks' largest thousandths, each with its place
    biases = [collective for collective in sparse.collectives if collective.collective.what == "gradients"]
    assert sum(biase.times * biase.collective.bytes for biase in biases) == 4 * (512 + 64)  # small ones stay dense


def test_a_parameter_of_two_parts_counts_once() -> None:
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
    model[1].weight = model[0].weight
    scopes: dict[str, Scope] = {"0": Replicate(), "1": Replicate()}
    plan = request(model, scopes, 4).plan()
    assert [part.num_parameters for part in plan.parts if part.name] == [32 * 32, 0]
    assert [collective.bytes for collective in plan.collectives if collective.collective.what == "gradients"] == [
        32 * 32 * 4
    ]


def test_a_layer_without_elements_can_be_planned() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(32, 8), nn.LayerNorm(8), nn.Linear(8, 5))
        model[1].weight = nn.Parameter(torch.empty(0))
        model[1].forward = lambda inputs: inputs + model[1].weight.sum()
    scopes: dict[str, Scope] = {"0": Replicate(), "1": Replicate(), "2": Replicate()}
    assert request(model, scopes, 4).plan().step


def test_the_cheaper_of_replicated_and_split_is_chosen() -> None:
    large = auto_plan(classifier(200_000), 16, example(), loss=LOSS, hardware=CLUSTER, optimizer=momentum)
    assert large.scopes == {"backbone": Replicate(), "head": Split()}
    assert "chosen: head split, the rest replicated" in large.reasons[0]
    small = auto_plan(classifier(10), 2, example(), loss=LOSS, hardware=CLUSTER, optimizer=momentum)
    assert small.scopes == {"backbone": Replicate(), "head": Replicate()}
    alone = auto_plan(classifier(10), 1, example(), loss=LOSS, hardware=CLUSTER)
    assert alone.scopes == {"backbone": Replicate(), "head": Replicate()}
    assert not alone.collectives


def test_what_does_not_fit_is_not_chosen_and_nothing_that_fits_is_an_error() -> None:
    tight = replace(CLUSTER, memory_bytes=60 * 10**6)
    plan = auto_plan(classifier(200_000), 4, example(), loss=LOSS, hardware=tight, optimizer=momentum)
    assert plan.scopes["head"] == Split()
    assert any("everything replicated" in line and "does not fit" in line for line in plan.reasons)
    with pytest.raises(InvalidArgument, match=r"nothing fits into 5\.0 MB a rank on 4 ranks: everything replicated"):
        auto_plan(classifier(200_000), 4, example(), loss=LOSS, hardware=replace(CLUSTER, memory_bytes=5 * 10**6))


def test_arguments_that_cannot_be_are_refused_by_name() -> None:
    model = classifier(10)
    with pytest.raises(InvalidArgument, match="ranks is 0"):
        auto_plan(model, 0, example(), loss=LOSS, hardware=CLUSTER)
    with pytest.raises(InvalidArgument, match=r"hardware is not given, and 8 ranks cannot be measured here"):
        auto_plan(model, 8, example(), loss=LOSS)
    with pytest.raises(InvalidArgument, match=r"example must be \(inputs, labels\)"):
        auto_plan(model, 8, torch.empty(3, 32), loss=LOSS, hardware=CLUSTER)
    with pytest.raises(InvalidArgument, match=r"optimizer cannot step .* 'closure'.*as torch.optim.AdamW does"):
        auto_plan(model, 8, example(), loss=LOSS, hardware=CLUSTER, optimizer=torch.optim.LBFGS)
    with pytest.raises(InvalidArgument, match=r"its loss cannot run .*batch_size \(16\)"):
        auto_plan(model, 8, (example()[0], example(5)[1]), loss=LOSS, hardware=CLUSTER)
    with pytest.raises(InvalidArgument, match="batch is -1"):
        auto_plan(model, 8, example(), loss=LOSS, hardware=CLUSTER, batch=-1)
    with pytest.raises(InvalidArgument, match="hardware is 'h200'; it must be a Hardware"):
        auto_plan(model, 8, example(), loss=LOSS, hardware="h200")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="model is 'net'; it must be a torch"):
        auto_plan("net", 8, example(), loss=LOSS, hardware=CLUSTER)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=r"sparsity is 1\.0"):
        planned({"": Replicate()}, sparsity=1.0)
    with pytest.raises(InvalidArgument, match="'backbone' is a Sequential, which cannot be split"):
        planned({"backbone": Split(), "head": Split()})
