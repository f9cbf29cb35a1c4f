"""``gt.SlowGear`` with its slow gear in this process: conventional training as a setting, and what else it promises."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.ams.values.errors import (
    InvalidArgument,
    InvalidIds,
    NonFinite,
    SampleDamaged,
    SampleNotFound,
    SpecMismatch,
)
from geartrain.bridge.gear.gear_update import GearGradient
from tests.support.gear_fakes import configured

DIM, IDS = 4, 12
SAMPLES = torch.randn(IDS, 6, generator=torch.Generator().manual_seed(5))
CONVENTIONAL: dict[str, Any] = {"expire_seconds": 0.0, "gradients_per_id": 1, "mode": "sync"}


def build(norm: bool = False) -> nn.Module:
    torch.manual_seed(7)
    layers: list[nn.Module] = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, DIM)]
    if norm:
        layers.insert(1, nn.BatchNorm1d(8))
    return nn.Sequential(*layers)


def batches(steps: int, size: int = 9) -> Iterator[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(11)
    for _ in range(steps):
        yield torch.randint(IDS, (size,), generator=random), torch.randn(size, generator=random)


def fast_part() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(DIM, 1)


def loss_of(fast: nn.Module, features: Tensor, targets: Tensor) -> Tensor:
    return ((fast(features).squeeze(-1) - targets) ** 2).mean()


def trained_conventionally(optimizer: str, steps: int, dtype: torch.dtype) -> tuple[list[float], nn.Module]:
    """The same model in one process, in float64: each id's sample runs through it where the id stands in the batch."""
    dense, fast = build().to(dtype), fast_part().to(dtype)
    both = [*dense.parameters(), *fast.parameters()]
    rule = torch.optim.SGD(both, 0.1) if optimizer == "sgd" else torch.optim.Adam(both, 0.01)
    losses = []
    for ids, targets in batches(steps):
        rule.zero_grad()
        loss = loss_of(fast, dense(SAMPLES.to(dtype)[ids]), targets.to(dtype))
        loss.backward()
        rule.step()
        losses.append(loss.item())
    return losses, dense


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("max_batch", [256, 3])
def test_conventional_training_is_a_setting(cluster: Cluster, optimizer: str, max_batch: int) -> None:
    rule = gt.SGD(0.1) if optimizer == "sgd" else gt.Adam(0.01)
    made: list[nn.Module] = []

    def building() -> nn.Module:
        made.append(build())
        return made[0]

    image = gt.SlowGear(
        cluster,
        "image",
        dim=DIM,
        build=building,
        samples=SAMPLES,
        optimizer=rule,
        config=gt.SlowGearConfig(max_batch=max_batch),
        **CONVENTIONAL,
    )
    fast = fast_part()
    fast_rule = (
        torch.optim.SGD(fast.parameters(), 0.1) if optimizer == "sgd" else torch.optim.Adam(fast.parameters(), 0.01)
    )
    rows = gt.RowOptimizer(image)
    losses = []
    for ids, targets in batches(20):
        fast_rule.zero_grad()
        rows.zero_grad()
        loss = loss_of(fast, image(ids), targets)
        loss.backward()
        fast_rule.step()
        rows.step()
        losses.append(loss.item())
    expected, dense = trained_conventionally(optimizer, 20, torch.float64)
    np.testing.assert_allclose(losses, expected, rtol=2e-5 if optimizer == "sgd" else 2e-4)
    for mine, theirs in zip(made[0].parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-5 if optimizer == "sgd" else 1e-4)
    account = image.account()
    assert account.adds_up and account.applied == account.received > 0
    image.close()


@pytest.mark.parametrize(("train_mode", "forwards"), [("never", 2), ("always", 2), ("backward", 3)])
def test_what_a_backward_pass_computed_again_is_not_computed_once_more(
    cluster: Cluster, train_mode: str, forwards: int
) -> None:
    now = [1000.0]
    made: list[nn.Module] = []
    counted: list[int] = []

    def building() -> nn.Module:
        made.append(build())
        made[0].register_forward_hook(lambda _, inputs, __: counted.append(len(inputs[0])))
        return made[0]

    image = slow_gear(
        cluster,
        build=building,
        train_mode=train_mode,
        expire_seconds=5.0,
        gradients_per_id=1,
        mode="sync",
        clock=lambda: now[0],
    )
    rows = gt.RowOptimizer(image)
    ids = torch.tensor([1, 2])
    image(ids).sum().backward()
    before = made[0](SAMPLES[ids]).detach()
    counted.pop()
    now[0] += 4
    rows.step()
    now[0] += 4
    again = image(ids)
    assert len(counted) == forwards
    if train_mode != "backward":
        torch.testing.assert_close(again, before)
    now[0] += 4
    torch.testing.assert_close(image(ids), made[0](SAMPLES[ids]))
    image.close()


def slow_gear(cluster: Cluster, **settings: Any) -> gt.SlowGear:
    given: dict[str, Any] = {"dim": DIM, "build": build, "samples": SAMPLES, "optimizer": gt.SGD(0.1)}
    return gt.SlowGear(cluster, "image", **configured(given | settings))


def delivered(image: gt.SlowGear, rows: gt.RowOptimizer, ids: list[int], factor: float = 1.0) -> None:
    (image(torch.tensor(ids)) * factor).sum().backward()
    rows.step()


def test_features_have_the_shape_of_the_ids_and_a_repeated_id_costs_once(cluster: Cluster) -> None:
    asked: list[int] = []

    def sample(number: int) -> Tensor:
        asked.append(number)
        return SAMPLES[number]

    image = slow_gear(cluster, samples=sample)
    ids = torch.tensor([[3, 1, 3], [1, 1, 0]])
    features = image(ids)
    assert features.shape == (2, 3, DIM) and features.requires_grad
    torch.testing.assert_close(features.detach(), build()(SAMPLES[ids]).detach())
    assert sorted(asked) == [0, 1, 3]
    again = image(ids[0])
    assert sorted(asked) == [0, 1, 3] and torch.equal(again, features[0])
    assert image(torch.empty(0, dtype=torch.int64)).shape == (0, DIM)


def test_m_gradients_make_one_update_of_their_mean(cluster: Cluster) -> None:
    image = slow_gear(cluster, gradients_per_id=3, mode="sync")
    rows = gt.RowOptimizer(image)
    dense = build()
    for factor in (1.0, 2.0):
        delivered(image, rows, [5, 5, 2], factor)
    account = image.account()
    assert (account.received, account.waiting, account.applied) == (4, 4, 0)
    delivered(image, rows, [5], 6.0)
    assert (image.account().waiting, image.account().applied) == (2, 3)
    grad = torch.full((1, DIM), (2 * 1.0 + 2 * 2.0 + 6.0) / 3)
    dense(SAMPLES[[5]]).backward(grad)
    with torch.no_grad():
        for parameter in dense.parameters():
            parameter -= 0.1 * parameter.grad
    now = slow_gear(cluster, reuse=True, expire_seconds=0.0)
    torch.testing.assert_close(now(torch.arange(IDS)).detach(), dense(SAMPLES).detach())
    image.flush()  # id 2 waits with two gradients: their mean, not a third of their sum
    dense.zero_grad()
    dense(SAMPLES[[2]]).backward(torch.full((1, DIM), 1.5))
    with torch.no_grad():
        for parameter in dense.parameters():
            parameter -= 0.1 * parameter.grad
    now = slow_gear(cluster, reuse=True, expire_seconds=0.0)
    torch.testing.assert_close(now(torch.arange(IDS)).detach(), dense(SAMPLES).detach())
    assert image.account().applied == 5


def test_the_learning_rate_of_the_step_travels_with_the_gradients(cluster: Cluster) -> None:
    image = slow_gear(cluster, gradients_per_id=1, mode="sync", expire_seconds=0.0)
    rows = gt.RowOptimizer(image)
    assert rows.param_groups[0]["lr"] == 0.1 and rows.param_groups[0]["table"] == "image"
    rows.param_groups[0]["lr"] = 0.0
    before = image(torch.arange(IDS)).detach()
    delivered(image, rows, [1, 2])
    assert torch.equal(image(torch.arange(IDS)).detach(), before)


def test_async_updates_are_made_behind_and_close_flushes(cluster: Cluster) -> None:
    image = slow_gear(cluster, gradients_per_id=2, mode="async")
    rows = gt.RowOptimizer(image)
    for _ in range(5):
        delivered(image, rows, [1, 2, 3])
    image.close()
    image.close()
    account = image.account()
    assert account.adds_up and account.applied == 15 and account.waiting == account.due == 0


def test_features_expire_by_the_clock_and_by_dense_updates(cluster: Cluster) -> None:
    now = [1000.0]
    image = slow_gear(
        cluster, expire_seconds=10.0, max_version_lag=1, gradients_per_id=1, mode="sync", clock=lambda: now[0]
    )
    rows = gt.RowOptimizer(image)
    first = image(torch.tensor([1])).detach()
    delivered(image, rows, [2])
    assert torch.equal(image(torch.tensor([1])).detach(), first)  # one update behind, and young
    now[0] += 11.0
    second = image(torch.tensor([1])).detach()
    assert not torch.equal(second, first)
    delivered(image, rows, [2])
    delivered(image, rows, [2])
    assert not torch.equal(image(torch.tensor([1])).detach(), second)  # two updates behind


def kept_by(cluster: Cluster, config: gt.SlowGearConfig) -> gt.SlowGear:
    given: dict[str, Any] = {"dim": DIM, "build": build, "samples": SAMPLES, "optimizer": gt.SGD(0.1), "mode": "sync"}
    return gt.SlowGear(cluster, "image", config=config, gradients_per_id=2, **given)


@pytest.mark.parametrize("room", [IDS, 3])
def test_features_kept_on_a_device_are_those_kept_on_the_host(room: int) -> None:
    found, rates = [], []
    for config in (gt.SlowGearConfig(cache_ids=room), gt.SlowGearConfig(device_cache_bytes=room * 4 * DIM + 1)):
        with gt.local() as cluster:
            image, fast = kept_by(cluster, config), fast_part()
            rows, losses = gt.RowOptimizer(image), []
            for ids, targets in batches(12):
                losses.append(loss_of(fast, image(ids), targets))
                losses[-1].backward()
                rows.step()
                rows.zero_grad()
            report = image.cache.report()
            assert report["capacity"] == room and report["bytes"] > 0
            rates.append(report["hit_rate"])
            found.append([loss.item() for loss in losses])
            image.close()
    assert found[0] == found[1] and rates[0] == rates[1] > 0


def test_ids_without_a_feature_raise_and_the_others_are_kept(cluster: Cluster) -> None:
    asked: list[int] = []

    def sample(number: int) -> Tensor | None:
        asked.append(number)
        if number == 99:
            raise OSError("no such file")
        return SAMPLES[number] if number < IDS else None

    image = slow_gear(cluster, samples=sample)
    with pytest.raises(SampleNotFound, match=r"id 50 has no sample .*99") as caught:
        image(torch.tensor([1, 99, 2, 50]))
    assert caught.value.ids == (50, 99)
    with pytest.raises(SampleDamaged, match="id 99 cannot be read: OSError: no such file"):
        image(torch.tensor([99]))
    del asked[:]
    image(torch.tensor([1, 2]))
    assert asked == []


def test_missing_features_may_be_zeros_without_a_gradient(cluster: Cluster) -> None:
    image = slow_gear(cluster, on_missing="zeros", gradients_per_id=1, mode="sync")
    rows = gt.RowOptimizer(image)
    features = image(torch.tensor([1, 50, 2]))
    assert not features[1].any() and features[0].any()
    features.sum().backward()
    rows.step()
    assert image.account().received == image.account().applied == 2


def test_a_gradient_that_is_not_finite_is_named_and_the_rest_can_go_on(cluster: Cluster) -> None:
    image = slow_gear(cluster, gradients_per_id=1, mode="sync")
    rows = gt.RowOptimizer(image)
    features = image(torch.tensor([1, 2, 3]))
    (features * torch.tensor([[1.0], [float("nan")], [1.0]])).sum().backward()
    with pytest.raises(NonFinite, match="first that of id 2"):
        rows.step()
    assert image.account().received == 0
    assert image.row_update.drop_non_finite().tolist() == [2]
    rows.step()
    assert image.account().applied == 2


def test_grad_scaler_clipping_and_micro_batches_work_as_for_heads(cluster: Cluster) -> None:
    image = slow_gear(cluster, gradients_per_id=1, mode="sync", expire_seconds=0.0)
    rows = gt.RowOptimizer(image)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    dense = build()
    for ids in ([1, 2], [2, 3]):
        scaler.scale(image(torch.tensor(ids)).sum()).backward()
    scaler.unscale_(rows)
    norm = rows.clip_grad_norm_(0.5)
    assert norm == pytest.approx((DIM * (1 + 4 + 1)) ** 0.5, rel=1e-5)
    scaler.step(rows)
    scaler.update()
    assert image.account().received == image.account().applied == 3 and image.step == 1
    grad = torch.tensor([1.0, 2.0, 1.0]).reshape(3, 1).expand(3, DIM) * (0.5 / float(norm))
    dense(SAMPLES[[1, 2, 3]]).backward(grad)
    with torch.no_grad():
        for parameter in dense.parameters():
            parameter -= 0.1 * parameter.grad
    torch.testing.assert_close(image(torch.arange(IDS)).detach(), dense(SAMPLES).detach())


def test_micro_batches_sum_the_gradients_of_an_id_and_keep_its_oldest_version() -> None:
    first = GearGradient(np.array([4, 2]), torch.tensor([[1.0], [2.0]]), np.array([7, 3]))
    first.merge(GearGradient(np.array([2, 9]), torch.tensor([[5.0], [6.0]]), np.array([5, 1])))
    order = np.argsort(first.ids)
    assert first.ids[order].tolist() == [2, 4, 9] and first.versions[order].tolist() == [3, 7, 1]
    assert first.gradients_KD[torch.from_numpy(order), 0].tolist() == [7.0, 1.0, 6.0]
    assert first.squared_norm() == 1.0 + 49.0 + 36.0


def test_without_training_there_is_no_gradient(cluster: Cluster) -> None:
    image = slow_gear(cluster).eval()
    assert not image(torch.tensor([1])).requires_grad
    image.train()
    with torch.no_grad():
        assert not image(torch.tensor([1])).requires_grad


def test_batch_statistics_reach_the_dense_table(cluster: Cluster) -> None:
    image = slow_gear(cluster, build=lambda: build(norm=True), **CONVENTIONAL)
    rows = gt.RowOptimizer(image)
    delivered(image, rows, list(range(8)))
    reference = build(norm=True)
    reference(SAMPLES[:8]).sum().backward()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter -= 0.1 * parameter.grad
    made: list[nn.Module] = []
    slow_gear(cluster, build=lambda: made.append(build(norm=True)) or made[0], reuse=True)
    torch.testing.assert_close(made[0].state_dict(), reference.state_dict())


def test_its_state_is_its_name_and_step(cluster: Cluster) -> None:
    image = slow_gear(cluster, gradients_per_id=1, mode="sync")
    rows = gt.RowOptimizer(image)
    delivered(image, rows, [1])
    state = copy.deepcopy(image.state_dict())
    assert sum(parameter.numel() for parameter in image.parameters()) == 0
    other = slow_gear(cluster, reuse=True)
    other.load_state_dict(state)
    assert other.step == 1
    state["_extra_state"]["gear"] = "sound"
    with pytest.raises(SpecMismatch, match="'sound'"):
        other.load_state_dict(state)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"on_missing": "skip"}, "on_missing is 'skip'"),
        ({"mode": "later"}, "mode 'later'"),
        ({"samples": None}, "both build= and samples="),
        ({"samples": None, "build": None, "optimizer": None}, "no slow gears"),
        ({"samples": None, "build": None, "stale": "scale"}, "optimizer, stale: .*slowgear --optimizer --stale'"),
        ({"gradients_per_id": 0}, "gradients_per_id is 0"),
        ({"expire_seconds": -1.0}, "expire_seconds is -1.0"),
        ({"train_mode": "often"}, "train_mode is 'often'"),
        ({"build": lambda: 3}, "build.. returned int"),
        ({"max_batch": 0}, "max_batch is 0"),
        ({"ids_per_update": 0}, "ids_per_update is 0"),
        ({"reduction": "max"}, "reduction is 'max'"),
        ({"flush_seconds": -1}, "flush_seconds is -1"),
        ({"stale": "drop"}, "stale='drop' needs it"),
        ({"max_gradient_lag": 3}, "stale='drop' needs it"),
    ],
)
def test_wrong_settings_are_named(cluster: Cluster, settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidArgument, match=complaint):
        slow_gear(cluster, **settings)
    assert cluster.status().tables == ()


@pytest.mark.parametrize("ids", [torch.tensor([1.0]), torch.tensor([True]), torch.tensor([-1]), [1]])
def test_wrong_ids_are_named(cluster: Cluster, ids: Any) -> None:
    with pytest.raises(InvalidIds):
        slow_gear(cluster)(ids)


@pytest.mark.cuda
def test_on_a_gpu_features_are_where_the_ids_are_and_training_is_the_same(cluster: Cluster) -> None:
    losses = []
    for name, device in (("cpu", "cpu"), ("cuda", "cuda")):
        image = gt.SlowGear(
            cluster, name, dim=DIM, build=build, samples=SAMPLES, optimizer=gt.SGD(0.1), device=device, **CONVENTIONAL
        )
        rows, found = gt.RowOptimizer(image), []
        for ids, targets in batches(5):
            features = image(ids.to(device))
            assert features.device.type == device
            loss = loss_of(fast_part().to(device), features, targets.to(device))
            loss.backward()
            rows.step()
            found.append(loss.item())
        losses.append(found)
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
