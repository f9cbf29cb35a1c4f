"""One torch optimizer for parameters and rows: against the same model with its rows in an nn.Linear, in float64."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, StepLR
from torch.utils.checkpoint import checkpoint

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.rows.row_calls import RowCalls
from geartrain.ams.values.errors import InvalidArgument, NonFinite, ShardUnavailable
from geartrain.ams.values.optimizers.registry import RowOptimizerSpec
from tests.support import heads

CLASSES, INPUTS, DIM, STEPS = 30, 6, 5, 14
PLACES = ["held", "streamed", "hosted", "ranks"]
LR = 0.05
SPECS: list[RowOptimizerSpec] = [
    gt.Momentum(LR, 0.9, 1e-2, nesterov=True),
    gt.SparseMomentum(LR, 0.9, 1e-2),
    gt.AdamW(LR, (0.9, 0.99), weight_decay=0.05),
]


def make_head(cluster: Cluster, place: str = "held", name: str = "classes", **settings: Any) -> gt.ClassHead:
    settings = {"optimizer": gt.SGD(LR), "margin": None, **settings}
    return heads.make_head(
        cluster,
        name,
        num_classes=CLASSES,
        dim=DIM,
        select=gt.FullSoftmax(),
        initializer=gt.Normal(std=0.5),
        **heads.PLACES[place],
        **settings,
    )


def make_backbone() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(INPUTS, DIM).double()


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(8, INPUTS, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(CLASSES, (8,), generator=generator)


def torch_optimizer(spec: RowOptimizerSpec, parameters: Any) -> torch.optim.Optimizer:
    if isinstance(spec, gt.AdamW):
        return torch.optim.AdamW(parameters, lr=spec.lr, betas=spec.betas, weight_decay=spec.weight_decay)
    assert isinstance(spec, gt.Momentum | gt.SparseMomentum)
    nesterov = isinstance(spec, gt.Momentum) and spec.nesterov
    return torch.optim.SGD(parameters, spec.lr, spec.momentum, weight_decay=spec.weight_decay, nesterov=nesterov)


def cycle(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return OneCycleLR(optimizer, max_lr=4 * LR, total_steps=STEPS + 1, cycle_momentum=True)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("spec", SPECS, ids=lambda one: one.name)
def test_one_cycle_of_rate_and_momentum_trains_rows_as_torch_trains_a_linear_layer(
    cluster: Cluster, place: str, spec: RowOptimizerSpec
) -> None:
    backbone = make_backbone()
    head = make_head(cluster, place, optimizer=spec)
    twin, classes = copy.deepcopy(backbone), nn.Linear(DIM, CLASSES, bias=False).double()
    classes.weight.data.copy_(head.weights())
    reference = torch_optimizer(spec, [{"params": list(twin.parameters())}, {"params": list(classes.parameters())}])
    optimizer = gt.joint(torch_optimizer(spec, backbone.parameters()), head)
    schedules = [cycle(reference), cycle(optimizer)]
    momenta = set()
    for step in range(STEPS):
        inputs, labels = batch(step)
        F.cross_entropy(classes(twin(inputs)), labels).backward()
        head(backbone(inputs), labels).backward()
        for item in (reference, optimizer):
            item.step()
            item.zero_grad()
        for schedule in schedules:
            schedule.step()
        group = optimizer.param_groups[-1]
        momenta.add(group["betas"][0] if "betas" in group else group["momentum"])
    assert len(momenta) > STEPS / 2
    np.testing.assert_allclose(head.weights(), classes.weight.detach(), rtol=0, atol=2e-5)
    torch.testing.assert_close(backbone.weight, twin.weight, rtol=0, atol=2e-5)


def test_groups_are_those_of_the_torch_optimizer_and_one_for_each_head(cluster: Cluster) -> None:
    backbone = make_backbone()
    dense = torch.optim.AdamW(backbone.parameters(), lr=2e-3)
    first = make_head(cluster, name="first", optimizer=gt.AdamW(0.1, (0.8, 0.9)))
    second = make_head(cluster, name="second", optimizer=gt.SparseMomentum(0.2, 0.7))
    optimizer = gt.joint(dense, first, [second])
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups[0] is dense.param_groups[0]
    shown = [
        {name: group.get(name) for name in ("table", "lr", "betas", "momentum")} for group in optimizer.param_groups
    ]
    assert shown[1:] == [
        {"table": "first", "lr": 0.1, "betas": (0.8, 0.9), "momentum": None},
        {"table": "second", "lr": 0.2, "betas": None, "momentum": 0.7},
    ]
    with pytest.raises(ValueError, match="cycle_momentum"):  # no name for it that all groups have
        cycle(optimizer)
    late = nn.Linear(2, 2)
    schedule = StepLR(optimizer, 1, gamma=0.5)
    optimizer.add_param_group({"params": late.parameters(), "lr": 0.3})
    assert [group.get("table") for group in optimizer.param_groups] == [None, "first", "second", None]
    optimizer.step()
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups[:3]] == [1e-3, 0.05, 0.1]


def test_a_step_goes_on_from_a_saved_state_of_both(cluster: Cluster) -> None:
    def trained(backbone: nn.Module, head: gt.ClassHead, optimizer: Any, steps: range) -> None:
        schedule = StepLR(optimizer, 1, gamma=0.9)
        for step in steps:
            optimizer.zero_grad()
            loss = optimizer.step(lambda seed=step: backward(backbone, head, seed))
            assert float(loss) > 0
            schedule.step()

    def backward(backbone: nn.Module, head: gt.ClassHead, seed: int) -> Tensor:
        inputs, labels = batch(seed)
        loss: Tensor = head(backbone(inputs), labels)
        loss.backward()
        return loss.detach()

    spec = gt.AdamW(LR)
    backbone, head = make_backbone(), make_head(cluster, optimizer=spec)
    optimizer = gt.joint(torch_optimizer(spec, backbone.parameters()), head)
    trained(backbone, head, optimizer, range(3))
    saved = gt.state_from_bytes(gt.state_to_bytes(optimizer.state_dict()))
    resumed = gt.joint(torch_optimizer(spec, backbone.parameters()), head)
    resumed.load_state_dict(saved)
    assert resumed.param_groups[1]["lr"] == pytest.approx(LR * 0.9**3)
    assert {float(item["step"]) for item in resumed.state.values()} == {3.0}
    other = make_head(cluster, name="other", optimizer=spec)
    with pytest.raises(InvalidArgument, match=r"0 param_groups of the rows of table 'other', not 1 .*'classes'"):
        gt.joint(torch_optimizer(spec, backbone.parameters()), other).load_state_dict(saved)
    both = gt.RowOptimizer(other, head)
    both.param_groups[1]["lr"] = 0.5
    swapped = gt.RowOptimizer(head, other)
    swapped.load_state_dict(both.state_dict())
    assert [(group["table"], group["lr"]) for group in swapped.param_groups] == [("classes", 0.5), ("other", LR)]
    with pytest.raises(InvalidArgument, match=r"0 param_groups of the rows of table 'other', not 1 .*'classes'"):
        gt.RowOptimizer(other).load_state_dict(gt.RowOptimizer(head).state_dict())


def test_a_state_of_another_kind_of_optimizer_is_refused_and_changes_nothing(cluster: Cluster) -> None:
    backbone, head = make_backbone(), make_head(cluster)
    saved = gt.joint(torch.optim.AdamW(backbone.parameters()), head).state_dict()
    optimizer = gt.joint(torch.optim.SGD(backbone.parameters(), LR, momentum=0.9), head)
    inputs, labels = batch(0)
    head(backbone(inputs), labels).backward()
    optimizer.step()
    before = optimizer.state[backbone.weight]["momentum_buffer"].clone()
    with pytest.raises(InvalidArgument, match=r"no dampening, momentum.*, which SGD needs, but amsgrad, betas"):
        optimizer.load_state_dict(saved)
    assert torch.equal(optimizer.state[backbone.weight]["momentum_buffer"], before)
    assert optimizer.param_groups[0]["lr"] == LR
    optimizer.zero_grad()
    optimizer.step()


def test_zero_grad_drops_both(cluster: Cluster) -> None:
    backbone, head = make_backbone(), make_head(cluster)
    optimizer = gt.joint(torch.optim.SGD(backbone.parameters(), LR), head)
    before = head.weights().clone(), backbone.weight.detach().clone()
    inputs, labels = batch(0)
    head(backbone(inputs), labels).backward()
    optimizer.zero_grad()
    optimizer.step()
    torch.testing.assert_close((head.weights(), backbone.weight.detach()), before, rtol=0, atol=0)


@pytest.mark.parametrize("place", PLACES)
def test_a_step_that_grad_scaler_skips_changes_neither(cluster: Cluster, place: str) -> None:
    backbone, head = make_backbone(), make_head(cluster, place)
    optimizer, scaler = gt.joint(torch.optim.SGD(backbone.parameters(), LR), head), torch.amp.GradScaler("cpu")
    twin, plain = copy.deepcopy(backbone), make_head(cluster, place, name="plain", seed=0)
    plain.table.assign(np.arange(CLASSES), head.weights().numpy())
    other = gt.joint(torch.optim.SGD(twin.parameters(), LR), plain)
    for step, factor in enumerate([float("inf"), 1.0]):
        before = head.weights().clone(), backbone.weight.detach().clone()
        inputs, labels = batch(step)
        (scaler.scale(head(backbone(inputs), labels)) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if factor != 1.0:
            torch.testing.assert_close((head.weights(), backbone.weight.detach()), before, rtol=0, atol=0)
    plain(twin(inputs), labels).backward()
    other.step()
    torch.testing.assert_close(head.weights(), plain.weights(), rtol=0, atol=1e-6)
    torch.testing.assert_close(backbone.weight, twin.weight, rtol=0, atol=1e-9)


def test_an_optimizer_that_unscales_by_itself_does_so_in_joint(cluster: Cluster) -> None:
    torch.manual_seed(1)
    backbone, head = nn.Linear(INPUTS, DIM), make_head(cluster)
    twin = copy.deepcopy(backbone)
    optimizer, scaler = (
        gt.joint(torch.optim.SGD(backbone.parameters(), LR, fused=True), head),
        torch.amp.GradScaler("cpu"),
    )
    rows = head.weights().clone().requires_grad_()
    for step, factor in enumerate([float("inf"), 1.0]):
        inputs, labels = (item.float() if item.is_floating_point() else item for item in batch(step))
        (scaler.scale(head(backbone(inputs), labels)) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    F.cross_entropy(twin(inputs) @ rows.T, labels).backward()
    torch.optim.SGD([*twin.parameters(), rows], LR).step()
    torch.testing.assert_close(head.weights(), rows.detach(), rtol=0, atol=1e-6)
    torch.testing.assert_close(backbone.weight, twin.weight, rtol=0, atol=1e-6)


def test_an_error_before_any_push_leaves_both_pending(cluster: Cluster) -> None:
    backbone, head = make_backbone(), make_head(cluster, optimizer=gt.SparseMomentum(LR))
    optimizer = gt.joint(torch.optim.SGD(backbone.parameters(), LR), head)
    before = head.weights().clone(), backbone.weight.detach().clone()
    inputs, labels = batch(0)
    head(backbone(inputs), labels).backward()
    group = optimizer.param_groups[1]
    for name, wrong in [("lr", float("nan")), ("momentum", 1.0), ("weight_decay", -1.0), ("betas", (0.9, 0.99))]:
        right = group.get(name)
        group[name] = wrong
        with pytest.raises(InvalidArgument, match=f"table 'classes': {name} is"):
            optimizer.step()
        torch.testing.assert_close((head.weights(), backbone.weight.detach()), before, rtol=0, atol=0)
        del group[name]
        if right is not None:
            group[name] = right
    optimizer.step()
    assert not torch.equal(head.weights(), before[0]) and not torch.equal(backbone.weight, before[1])
    (head(backbone(inputs), labels) * float("nan")).backward()
    before = head.weights().clone(), backbone.weight.detach().clone()
    with pytest.raises(NonFinite):
        optimizer.step()
    torch.testing.assert_close((head.weights(), backbone.weight.detach()), before, rtol=0, atol=0)


def test_a_step_that_failed_on_its_way_goes_on_and_applies_nothing_twice(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone, heads = make_backbone(), [make_head(cluster, name=name) for name in ("first", "second")]
    optimizer = gt.joint(torch.optim.SGD(backbone.parameters(), LR), heads)
    twin, weights = copy.deepcopy(backbone), [head.weights().double().requires_grad_() for head in heads]
    inputs, labels = batch(0)
    sum(head(backbone(inputs), labels) for head in heads).backward()  # type: ignore[union-attr]
    sends: list[int] = []
    whole = RowCalls.write

    def failing(rows: RowCalls, writes: Any) -> list[Any]:
        sends.append(len(writes))
        if len(sends) > 1:
            return whole(rows, writes)
        (_, (_, _, shards)) = writes
        return [*whole(rows, writes[:1]), [ShardUnavailable("planted") for _ in shards]]

    monkeypatch.setattr(RowCalls, "write", failing)
    with pytest.raises(ShardUnavailable, match="planted"):
        optimizer.step()
    stepped = backbone.weight.detach().clone()
    optimizer.step()
    assert torch.equal(backbone.weight, stepped)  # once
    assert sends == [2, 1]
    sum(F.cross_entropy(twin(inputs) @ weight.T, labels) for weight in weights).backward()  # type: ignore[union-attr]
    torch.optim.SGD([*twin.parameters(), *weights], LR).step()
    for head, weight in zip(heads, weights, strict=True):
        torch.testing.assert_close(head.weights().double(), weight.detach(), rtol=0, atol=1e-6)
    torch.testing.assert_close(backbone.weight, twin.weight, rtol=0, atol=1e-6)


@pytest.mark.parametrize("drop", ["optimizer", "model", "nothing"])
def test_what_a_failed_step_left_is_given_up_or_told_of_by_the_next_pass(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, drop: str
) -> None:
    model = nn.ModuleList([make_backbone(), make_head(cluster)])
    backbone, head = model
    optimizer = gt.joint(torch.optim.SGD(model.parameters(), LR), head)
    inputs, labels = batch(0)
    head(backbone(inputs), labels).backward()
    with monkeypatch.context() as patch:
        patch.setattr(
            RowCalls,
            "write",
            lambda _, writes: [[ShardUnavailable("planted") for _ in shards] for (_, _, shards) in writes],
        )
        with pytest.raises(ShardUnavailable, match="planted"):
            optimizer.step()
    if drop == "nothing":
        with pytest.raises(InvalidArgument, match=r"call step\(\) again"):
            head(backbone(inputs), labels).backward()
        return
    (optimizer if drop == "optimizer" else model).zero_grad()
    twin, weight = copy.deepcopy(backbone), head.weights().double().requires_grad_()
    head(backbone(inputs), labels).backward()
    optimizer.step()
    F.cross_entropy(twin(inputs) @ weight.T, labels).backward()
    torch.optim.SGD([*twin.parameters(), weight], LR).step()
    torch.testing.assert_close(head.weights().double(), weight.detach(), rtol=0, atol=1e-6)
    torch.testing.assert_close(backbone.weight, twin.weight, rtol=0, atol=1e-6)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("joined", [True, False])
def test_a_step_that_failed_under_a_grad_scaler_is_called_again_by_it(
    cluster: Cluster, place: str, joined: bool
) -> None:
    backbone, head = make_backbone(), make_head(cluster, place)
    dense = torch.optim.SGD(backbone.parameters(), LR)
    optimizer = gt.joint(dense, head) if joined else gt.RowOptimizer(head)
    twin, weight = copy.deepcopy(backbone), head.weights().double().requires_grad_()
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    inputs, labels = batch(0)
    scaler.scale(head(backbone(inputs), labels)).backward()
    group = optimizer.param_groups[-1]
    group["lr"] = -1.0
    with pytest.raises(InvalidArgument, match="lr"):
        scaler.step(optimizer)
    group["lr"] = LR
    scaler.step(optimizer)
    F.cross_entropy(twin(inputs) @ weight.T, labels).backward()
    torch.optim.SGD([weight], LR).step()
    torch.testing.assert_close(head.weights().double(), weight.detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("part", [0, 1])
def test_of_a_group_with_two_optimizers_each_part_is_reached_by_itself(cluster: Cluster, part: int) -> None:
    columns = [gt.Field("user", dim=3, num_rows=9), gt.Field("item", dim=3, num_rows=9, optimizer=gt.Adagrad(0.1))]
    fields = gt.EmbeddingGroup(cluster, "g", columns, optimizer=gt.SGD(LR))
    optimizer = gt.RowOptimizer(fields)
    before = [torch.as_tensor(fields.table(name).pull(np.arange(9))) for name in ("user", "item")]
    vectors = fields({"user": torch.arange(4), "item": torch.arange(4)})
    sum(vector.square().sum() for vector in vectors.values()).backward(  # type: ignore[union-attr]
        inputs=[fields.parts[part].stand_in]
    )
    optimizer.step()
    after = [torch.as_tensor(fields.table(name).pull(np.arange(9))) for name in ("user", "item")]
    assert [torch.equal(was, now) for was, now in zip(before, after, strict=True)] == [part != 0, part != 1]


def test_a_frozen_sampled_head_is_exact_under_checkpoint_and_draws_anew_at_a_step(cluster: Cluster) -> None:
    head = gt.ClassHead(cluster, "classes", num_classes=400, dim=DIM, select=gt.PartialFC(0.05))
    optimizer = gt.joint(torch.optim.SGD([nn.Parameter(torch.zeros(1))], LR), head)
    head.requires_grad_(False)
    features, labels = torch.randn(6, DIM, requires_grad=True), torch.arange(6)
    (expected,) = torch.autograd.grad(head(features, labels), features)
    checkpoint(head, features, labels, use_reentrant=False).backward()
    torch.testing.assert_close(features.grad, expected)
    optimizer.step()
    assert head.step == 0
    (other,) = torch.autograd.grad(head(features, labels), features)
    assert not torch.equal(other, expected)


@pytest.mark.parametrize(
    ("spec", "name", "value", "reason"),
    [
        (gt.Adagrad(LR, initial_accumulator_value=0.1), "initial_accumulator_value", 0.2, "began at it"),
        (gt.Adagrad(LR), "lr_decay", 0.1, "counted"),
        (gt.SparseMomentum(LR, untouched="elapsed"), "momentum", 0.8, "moves rows later"),
        (gt.SparseMomentum(LR, untouched="elapsed"), "weight_decay", 0.1, "moves rows later"),
        (gt.SparseMomentum(LR), "untouched", "elapsed", "counts its steps"),
    ],
)
def test_what_cannot_change_says_so_and_why(
    cluster: Cluster, spec: RowOptimizerSpec, name: str, value: Any, reason: str
) -> None:
    head = make_head(cluster, optimizer=spec)
    rows = gt.RowOptimizer(head)
    before = head.weights().clone()
    head(torch.randn(8, DIM), batch(0)[1]).backward()
    rows.param_groups[0][name] = value
    with pytest.raises(InvalidArgument, match=f"table 'classes': {name} is .*{value}.* cannot change: .*{reason}"):
        rows.step()
    torch.testing.assert_close(head.weights(), before, rtol=0, atol=0)


def test_mistakes_of_joint_say_what_to_do(cluster: Cluster) -> None:
    backbone, head = make_backbone(), make_head(cluster)
    sgd = torch.optim.SGD(backbone.parameters(), LR)
    with_carrier = torch.optim.SGD([*backbone.parameters(), head.row_update.carrier], LR)
    mistakes: list[tuple[Any, str]] = [
        (lambda: gt.joint(sgd), "no module with rows"),
        (lambda: gt.joint(sgd, head, head), "twice"),
        (lambda: gt.joint(sgd, backbone), "no row_update"),  # type: ignore[arg-type]
        (lambda: gt.joint(with_carrier, head), "param_group 0 of the optimizer holds the carrier"),
        (lambda: gt.joint(gt.RowOptimizer(head), head), "RowOptimizer, which trains rows already"),
        (lambda: gt.joint(gt.joint(sgd, head), head), "JointOptimizer, which trains rows already"),
        (lambda: gt.joint(backbone.parameters(), head), "must be a torch.optim.Optimizer"),  # type: ignore[arg-type]
        (lambda: gt.joint(torch.optim.LBFGS(backbone.parameters()), head), "closure several times"),
        (lambda: gt.joint(sgd, head).add_param_group({"params": [head.row_update.carrier]}), "trained already"),
    ]
    for mistake, message in mistakes:
        with pytest.raises(InvalidArgument, match=message):
            mistake()


def test_tables_of_two_clusters_may_have_one_name(cluster: Cluster) -> None:
    with gt.local() as other:
        heads = make_head(cluster, optimizer=gt.AdamW(LR)), make_head(other, optimizer=gt.SGD(LR))
        optimizer = gt.joint(torch.optim.SGD(make_backbone().parameters(), LR), *heads)
        optimizer.param_groups[1]["lr"], optimizer.param_groups[2]["lr"] = 0.25, 0.5
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
        assert [group["lr"] for group in optimizer.param_groups] == [LR, 0.25, 0.5]
        assert "betas" in optimizer.param_groups[1] and "betas" not in optimizer.param_groups[2]
        alone = gt.joint(torch.optim.SGD(make_backbone().parameters(), LR), heads[0])
        with pytest.raises(InvalidArgument, match=r"2 param_groups of the rows of table 'classes', not 1"):
            alone.load_state_dict(saved)


@pytest.mark.parametrize("place", PLACES)
def test_a_rate_that_no_shard_takes_is_refused_before_any_push_and_may_be_mended(cluster: Cluster, place: str) -> None:
    backbone, head = make_backbone(), make_head(cluster, place)
    optimizer = gt.joint(torch.optim.SGD(backbone.parameters(), LR), head)
    inputs, labels = batch(0)
    head(backbone(inputs), labels).backward()
    before = head.weights()
    optimizer.param_groups[1]["lr"] = 1e39
    with pytest.raises(InvalidArgument, match=r"param_group of table 'classes': lr is 1e\+39; .* finite as float32"):
        optimizer.step()
    assert torch.equal(head.weights(), before)
    optimizer.param_groups[1]["lr"] = LR
    optimizer.step()
    assert not torch.equal(head.weights(), before)


@pytest.mark.parametrize(
    ("spec", "name", "value"),
    [
        (gt.FTRL(LR), "l1", 0.5),
        (gt.RMSProp(LR), "alpha", 0.5),
        (gt.RowWiseAdagrad(LR), "weight_decay", 0.5),
        (gt.RowWiseAdam(LR), "betas", (0.5, 0.9)),
    ],
    ids=lambda one: one.name if isinstance(one, RowOptimizerSpec) else None,
)
def test_the_numbers_of_a_group_are_those_of_its_next_step(
    cluster: Cluster, spec: Any, name: str, value: object
) -> None:
    """Two heads begin alike; one is made with the number, the other's group is given it."""
    inputs, labels = batch(0)
    made = make_head(cluster, name="made", optimizer=replace(spec, **{name: value}))
    given = make_head(cluster, name="given", optimizer=spec)
    cluster.table("given").assign(np.arange(CLASSES), made.weights().numpy())
    for head in (made, given):
        backbone = make_backbone()
        optimizer = gt.joint(torch.optim.SGD(backbone.parameters(), LR), head)
        optimizer.param_groups[-1][name] = value
        optimizer.param_groups[-1]["lr"] = 0.3
        head(backbone(inputs), labels).backward()
        optimizer.step()
    assert torch.equal(made.weights(), given.weights())
