"""Clipping dense parameters and rows together: what torch.nn.utils.clip_grad_norm_ does where rows are parameters."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.ams.values.errors import InvalidArgument, NonFinite
from geartrain.bridge.rows import optimizer
from tests.support import heads
from tests.support.reference import plain_loss
from tests.unit.bridge.gear.test_slow_gear import DIM as GEAR_DIM
from tests.unit.bridge.gear.test_slow_gear import SAMPLES, build

CLASSES, DIM, LR = 40, 5, 0.5
PLACES = ["held", "streamed", "hosted", "ranks"]
MARGIN = gt.CosFace(8, 0.1)


def make_head(cluster: Cluster, place: str, name: str = "classes", **settings: Any) -> gt.ClassHead:
    return heads.make_head(
        cluster,
        name,
        num_classes=CLASSES,
        dim=DIM,
        select=gt.FullSoftmax(),
        margin=MARGIN,
        optimizer=gt.SGD(LR),
        initializer=gt.Normal(std=1.0),
        **heads.PLACES[place],
        **settings,
    )


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(6, 7, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(CLASSES, (6,), generator=generator)


class Truth:
    """The same model with its rows in a parameter, in float64."""

    def __init__(self, backbone: nn.Module, rows: Tensor) -> None:
        self.backbone = copy.deepcopy(backbone)
        self.rows = nn.Parameter(rows.double())

    def clipped(self, max_norm: float, seeds: tuple[int, ...]) -> Tensor:
        for seed in seeds:
            inputs, labels = batch(seed)
            (plain_loss(self.backbone(inputs), self.rows, labels, MARGIN.combined) / len(seeds)).backward()
        return torch.nn.utils.clip_grad_norm_([*self.backbone.parameters(), self.rows], max_norm)

    @property
    def updated_rows(self) -> np.ndarray:
        assert self.rows.grad is not None
        return (self.rows - LR * self.rows.grad).detach().numpy()


def model(cluster: Cluster, place: str) -> tuple[nn.Linear, gt.ClassHead, gt.RowOptimizer, Truth]:
    torch.manual_seed(3)
    backbone = nn.Linear(7, DIM).double()
    head = make_head(cluster, place)
    return backbone, head, gt.RowOptimizer(head), Truth(backbone, head.weights())


def require_equal(backbone: nn.Module, head: gt.ClassHead, truth: Truth) -> None:
    for mine, its in zip(backbone.parameters(), truth.backbone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(head.weights().numpy(), truth.updated_rows, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("max_norm", [0.05, 1e3])
@pytest.mark.parametrize("place", PLACES)
def test_it_is_what_pytorch_does_where_rows_are_parameters(cluster: Cluster, place: str, max_norm: float) -> None:
    backbone, head, rows, truth = model(cluster, place)
    for seed in (1, 2):
        inputs, labels = batch(seed)
        (head(backbone(inputs), labels) / 2).backward()
    norm = gt.clip_grad_norm_(backbone.parameters(), rows, max_norm)
    expected = truth.clipped(max_norm, (1, 2))
    assert norm.dtype == torch.float64
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
    rows.step()
    require_equal(backbone, head, truth)


@pytest.mark.parametrize("place", PLACES)
def test_after_unscale_the_norm_is_that_without_a_loss_scale(cluster: Cluster, place: str) -> None:
    backbone, head, rows, truth = model(cluster, place)
    optimizer = torch.optim.SGD(backbone.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1000.0)
    inputs, labels = batch(1)
    scaler.scale(head(backbone(inputs), labels)).backward()
    scaler.unscale_(optimizer)
    scaler.unscale_(rows)
    norm = gt.clip_grad_norm_(backbone.parameters(), rows, 0.05)
    torch.testing.assert_close(norm, truth.clipped(0.05, (1,)), rtol=1e-5, atol=0)
    scaler.step(optimizer)
    scaler.step(rows)
    scaler.update()
    assert scaler.get_scale() == 1000.0
    require_equal(backbone, head, truth)


@pytest.mark.parametrize("place", PLACES)
def test_the_clipper_of_pytorch_is_right_or_refuses(cluster: Cluster, place: str) -> None:
    backbone, head, rows, truth = model(cluster, place)
    inputs, labels = batch(1)
    head(backbone(inputs), labels).backward()
    everything = [*backbone.parameters(), *rows.param_groups[0]["params"]]
    if place != "held":
        with pytest.raises(InvalidArgument, match=r"geartrain\.clip_grad_norm_"):
            torch.nn.utils.clip_grad_norm_(everything, 0.05)
        return
    norm = torch.nn.utils.clip_grad_norm_(everything, 0.05)
    torch.testing.assert_close(norm.double(), truth.clipped(0.05, (1,)), rtol=1e-5, atol=0)
    rows.step()
    require_equal(backbone, head, truth)


@pytest.mark.parametrize("place", ["streamed", "hosted", "ranks"])
def test_whatever_else_changes_the_stand_in_is_refused(cluster: Cluster, place: str) -> None:
    head = make_head(cluster, place)
    rows = gt.RowOptimizer(head)
    carrier = rows.param_groups[0]["params"][0]
    head(torch.randn(4, DIM), torch.arange(4)).backward()
    assert float(carrier.grad) == 1.0  # to look is no harm
    for change in (
        lambda grad: grad.mul_(0.5),
        lambda grad: grad.detach().mul_(0.5),
        lambda grad: grad.data.clamp_(-0.1, 0.1),
        lambda grad: grad.norm(),
        lambda grad: torch._foreach_norm([grad]),
    ):
        with pytest.raises(InvalidArgument, match=r"geartrain\.clip_grad_norm_"):
            change(carrier.grad)
    carrier.grad = carrier.grad.clone() / 2
    with pytest.raises(InvalidArgument, match=r"geartrain\.clip_grad_norm_"):
        rows.step()
    assert head.step == 0
    rows.zero_grad()
    head(torch.randn(4, DIM), torch.arange(4)).backward()
    rows.step()
    assert head.step == 1


def test_several_heads_and_a_dense_table_are_clipped_together(cluster: Cluster) -> None:
    torch.manual_seed(4)
    trunk = nn.Linear(7, DIM)
    dense = gt.attach(trunk, cluster, name="trunk", optimizer=gt.SGD(LR))
    heads = [make_head(cluster, "held", "a"), make_head(cluster, "hosted", "b")]
    rows = [gt.RowOptimizer(head) for head in heads]
    weights = [nn.Parameter(head.weights().double()) for head in heads]
    twin = copy.deepcopy(trunk).double()
    inputs, labels = batch(5)
    sum(head(trunk(inputs.float()), labels) for head in heads).backward()
    sum(plain_loss(twin(inputs), weight, labels, MARGIN.combined) for weight in weights).backward()
    norm = gt.clip_grad_norm_((), [*rows, dense], 0.1)
    expected = torch.nn.utils.clip_grad_norm_([*twin.parameters(), *weights], 0.1)
    assert float(norm) == pytest.approx(float(expected), rel=1e-4)
    for item in [*rows, dense]:
        item.step()
    for head, weight in zip(heads, weights, strict=True):
        assert weight.grad is not None
        np.testing.assert_allclose(head.weights(), (weight - LR * weight.grad).detach(), rtol=1e-4, atol=1e-6)
    assert twin.weight.grad is not None
    torch.testing.assert_close(
        trunk.weight.detach(), (twin.weight - LR * twin.weight.grad).float().detach(), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("place", PLACES)
def test_gradients_that_are_not_finite_have_no_norm_and_are_refused_by_the_step(cluster: Cluster, place: str) -> None:
    head = make_head(cluster, place)
    rows, before = gt.RowOptimizer(head), head.weights()
    (head(torch.randn(4, DIM), torch.arange(4)) * torch.inf).backward()
    with pytest.raises(NonFinite, match="joint norm"):
        gt.clip_grad_norm_((), rows, 1.0, error_if_nonfinite=True)
    assert not torch.isfinite(gt.clip_grad_norm_((), rows, 1.0))
    with pytest.raises(NonFinite, match="nothing was pushed"):
        rows.step()
    assert torch.equal(head.weights(), before)


def test_without_gradients_the_norm_is_zero(cluster: Cluster) -> None:
    head = make_head(cluster, "held")
    assert float(gt.clip_grad_norm_(nn.Linear(2, 2).parameters(), gt.RowOptimizer(head), 1.0)) == 0.0


@pytest.mark.parametrize("scale", [1e-25, 1e-30])
def test_a_norm_whose_squares_float32_cannot_hold_is_unscaled_all_the_same(cluster: Cluster, scale: float) -> None:
    head = make_head(cluster, "held")
    rows, scaler = gt.RowOptimizer(head), torch.amp.GradScaler("cpu", init_scale=0.25)
    (scaler.scale(head(torch.ones(4, DIM), torch.arange(4))) * scale).backward()
    before = head.row_update.squared_norm()
    assert before > 0
    scaler.unscale_(rows)
    assert head.row_update.squared_norm() == pytest.approx(16 * before)


def test_on_a_device_nobody_waits_for_the_norm_and_the_result_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def clipped(*, on_device: bool) -> tuple[Tensor, Tensor, Tensor]:
        head, backbone = heads.make_head(num_classes=CLASSES, dim=DIM, margin=MARGIN), nn.Linear(7, DIM)
        nn.init.constant_(backbone.weight, 0.1), nn.init.zeros_(backbone.bias)
        rows, (inputs, labels) = gt.RowOptimizer(head), batch(0)
        head(backbone(inputs.float()), labels).backward()
        if on_device:

            def squares(grads: list[Tensor], optimizers: list[gt.RowOptimizer]) -> list[Tensor]:
                del optimizers
                return [head.row_update._pending.squares_on_device(), *(grad.double().square().sum() for grad in grads)]

            monkeypatch.setattr(optimizer, "_on_one_device", squares)
        norm = gt.clip_grad_norm_(backbone.parameters(), rows, 0.01)
        assert backbone.weight.grad is not None
        rows.step()
        return norm, backbone.weight.grad, head.weights()

    expected = clipped(on_device=False)
    for found, wanted in zip(clipped(on_device=True), expected, strict=True):
        torch.testing.assert_close(found, wanted)


def test_a_bad_label_on_a_device_does_not_spoil_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    head, backbone = heads.make_head(late=True, num_classes=CLASSES, dim=DIM, margin=MARGIN), nn.Linear(7, DIM)
    rows, (inputs, labels) = gt.RowOptimizer(head), batch(0)
    labels[1] = CLASSES
    head(backbone(inputs.float()), labels).backward()
    before = [parameter.grad.clone() for parameter in backbone.parameters()]

    def squares(grads: list[Tensor], optimizers: list[gt.RowOptimizer]) -> list[Tensor]:
        del optimizers
        return [head.row_update._factor()[0].double(), *(grad.double().square().sum() for grad in grads)]

    monkeypatch.setattr(optimizer, "_on_one_device", squares)
    assert torch.isnan(gt.clip_grad_norm_(backbone.parameters(), rows, 0.01))
    norm = float(torch.cat([grad.flatten() for grad in before]).norm())
    for parameter, grad in zip(backbone.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.grad, grad * min(1.0, 0.01 / norm))
    assert torch.isnan(head.row_update._factor())


def test_features_of_a_slow_gear_are_clipped_by_either(cluster: Cluster) -> None:
    gear = gt.SlowGear(cluster, "image", dim=GEAR_DIM, build=build, samples=SAMPLES, gradients_per_id=1)
    rows = gt.RowOptimizer(gear)
    ids = torch.tensor([1, 2, 1])
    gear(ids).sum().backward()
    expected = np.sqrt(gear.dim * (2.0**2 + 1.0))  # id 1 twice
    carrier = rows.param_groups[0]["params"]
    assert float(torch.nn.utils.clip_grad_norm_(carrier, 2 * expected)) == pytest.approx(expected)
    assert float(gt.clip_grad_norm_((), rows, expected / 2)) == pytest.approx(expected)
    assert float(gt.clip_grad_norm_((), rows, 1e9)) == pytest.approx(expected / 2)
    gear.close()


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan")])
def test_a_bound_that_is_none_is_refused(cluster: Cluster, bad: float) -> None:
    rows = gt.RowOptimizer(make_head(cluster, "held"))
    with pytest.raises(InvalidArgument, match="max_norm"):
        gt.clip_grad_norm_((), rows, bad)
    with pytest.raises(InvalidArgument, match="rows is"):
        gt.clip_grad_norm_((), nn.Linear(2, 2), 1.0)  # type: ignore[arg-type]


class _HostReads(TorchDispatchMode):
    """Counts the numbers that the host takes out of tensors: on a GPU it waits for each."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_the_host_does_not_wait_for_each_parameter(cluster: Cluster) -> None:
    rows = gt.RowOptimizer(make_head(cluster, "held"))
    counts = []
    for layers in (1, 20):
        backbone = nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers)))
        backbone(torch.ones(2, 3)).sum().backward()
        with _HostReads() as reads:
            gt.clip_grad_norm_(backbone.parameters(), rows, 1.0)
        counts.append(reads.count)
    assert counts[0] == counts[1]
