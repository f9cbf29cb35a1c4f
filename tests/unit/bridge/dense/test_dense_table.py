"""Modules attached to an embedded cluster: what the shards do to their weights is what torch.optim would do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.rows.row_calls import RowCalls
from geartrain.ams.client.shard_calls import ShardCalls
from geartrain.ams.values.errors import (
    ClusterNotReady,
    InvalidArgument,
    NonFinite,
    ShardUnavailable,
    SpecMismatch,
    TableExists,
)
from geartrain.ams.values.optimizers.registry import RowOptimizerSpec
from geartrain.ams.values.shard_messages import Done

DIM = 16


def small_net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 3))


def batch(step: int, size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(size, 6, generator=generator), torch.randn(size, 3, generator=generator)


def backward(module: nn.Module, step: int) -> None:
    parameter = next(module.parameters())
    inputs, targets = (item.to(parameter.dtype) for item in batch(step))
    nn.functional.mse_loss(module(inputs), targets).backward()


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(module, step)
        optimizer.step()


def values(module: nn.Module) -> dict[str, np.ndarray]:
    return {name: item.detach().double().numpy().copy() for name, item in module.state_dict().items()}


def assert_close(one: nn.Module, other: nn.Module, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    for name, value in values(one).items():
        np.testing.assert_allclose(value, values(other)[name], rtol=rtol, atol=atol, err_msg=name)


def assert_same(one: nn.Module, other: nn.Module) -> None:
    assert_close(one, other, 0, 0)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with gt.local(3) as embedded:
        yield embedded


OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "sgd": (gt.SGD(0.1, 0.01), lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.01)),
    "momentum": (gt.Momentum(0.1, 0.9, 0.01), lambda p: torch.optim.SGD(p, 0.1, 0.9, weight_decay=0.01)),
    "nesterov": (gt.Momentum(0.1, nesterov=True), lambda p: torch.optim.SGD(p, 0.1, 0.9, nesterov=True)),
    "adam": (
        gt.Adam(0.01, (0.8, 0.99), 1e-6, 0.02),
        lambda p: torch.optim.Adam(p, 0.01, (0.8, 0.99), 1e-6, 0.02),
    ),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_twenty_steps_equal_torch_in_float64_with_a_learning_rate_schedule(cluster: Cluster, kind: str) -> None:
    module, reference = small_net(), small_net().double()
    spec, make = OPTIMIZERS[kind]
    dense, truth = gt.attach(module, cluster, name="net", optimizer=spec, dim=DIM), make(reference.parameters())
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(item, 20) for item in (dense, truth)]
    for step in range(20):
        for item, optimizer, schedule in zip((module, reference), (dense, truth), schedules, strict=True):
            train(item, optimizer, range(step, step + 1))
            schedule.step()
    assert_close(module, reference, 2e-4, 2e-5)
    assert dense.version == 21  # the first values, and twenty steps
    assert dense.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-12)


def test_the_rows_are_spread_over_the_shards_and_end_with_zeros(cluster: Cluster) -> None:
    module = small_net()
    dense = gt.attach(module, cluster, name="net", dim=DIM, optimizer=gt.Adam(0.1, weight_decay=0.1))
    train(module, dense, range(2))
    num_values = sum(parameter.numel() for parameter in module.parameters())
    table = cluster.table("net")
    assert table.spec.num_rows == -(-num_values // DIM)
    flat = table.pull(np.arange(table.spec.num_rows)).reshape(-1)
    mine = torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()]).numpy()
    np.testing.assert_array_equal(flat[:num_values], mine)
    assert not flat[num_values:].any() and len(flat) > num_values
    rows = [shard.rows for shard in cluster.status().shards]
    assert min(rows) > 0 and max(rows) - min(rows) <= 2


def test_who_names_no_width_takes_that_of_the_table_there_is(cluster: Cluster) -> None:
    first, second, third = small_net(1), small_net(2), small_net(3)
    gt.attach(first, cluster, name="net", optimizer=gt.SGD(0.1), dim=DIM)
    gt.attach(second, cluster, name="net", optimizer=gt.SGD(0.1), reuse=True)
    assert_same(first, second)
    gt.attach(third, cluster, name="other", optimizer=gt.SGD(0.1), reuse=True)  # there is none: it makes it
    assert cluster.table("other").spec.dim == 4096
    with pytest.raises(SpecMismatch, match=r"rows of 16\)"):
        gt.attach(small_net(), cluster, name="net", optimizer=gt.SGD(0.1), dim=DIM + 1, reuse=True)


def test_later_workers_take_the_weights_and_see_the_pushes_of_others(cluster: Cluster) -> None:
    first, second = small_net(1), small_net(2)
    one = gt.attach(first, cluster, name="net", optimizer=gt.SGD(0.1), dim=DIM, reuse=True)
    other = gt.attach(second, cluster, name="net", optimizer=gt.SGD(0.1), dim=DIM, reuse=True)
    assert_same(first, second)
    assert not other.refresh()
    train(first, one, range(1))
    assert other.version == one.version - 1
    assert other.refresh() and other.version == one.version and not other.refresh()
    assert_same(first, second)
    backward(second, 7)
    other.step(pull_after=False)
    assert one.refresh() and not np.array_equal(values(first)["0.weight"], values(second)["0.weight"])
    assert other.refresh()
    assert_same(first, second)
    with pytest.raises(TableExists, match="reuse=True"):
        gt.attach(small_net(), cluster, name="net", optimizer=gt.SGD(0.1), dim=DIM)


class Odd(nn.Module):
    """Tied, frozen and unused parameters, and buffers of every kind."""

    mean: Tensor
    count: Tensor

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Linear(6, 6, bias=False)
        self.again = nn.Linear(6, 6, bias=False)
        self.again.weight = self.embed.weight
        self.fixed = nn.Parameter(torch.randn(7), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(5))
        self.out = nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("scratch", torch.full((4,), float("inf")), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(inputs.detach().mean(0), 0.1)
            self.count = self.count + 1  # another tensor in its place
            self.seen[int(self.count) % 3] = True
        return self.out(torch.tanh(self.again(torch.tanh(self.embed(inputs - self.mean)))) + self.fixed[:6])


def test_tied_frozen_and_unused_parameters_and_buffers(cluster: Cluster) -> None:
    module, reference = Odd(), Odd()
    optimizer = gt.Momentum(0.1, 0.9, weight_decay=0.1)
    dense = gt.attach(module, cluster, name="odd", optimizer=optimizer, dim=DIM)
    truth = torch.optim.SGD(
        [parameter for parameter in reference.parameters() if parameter.requires_grad], 0.1, 0.9, weight_decay=0.1
    )
    num_values = sum(item.numel() for item in (module.embed.weight, module.unused, *module.out.parameters()))
    assert cluster.table("odd").spec.num_rows == -(-num_values // DIM)
    for step in range(5):
        for item, stepper in ((module, dense), (reference, truth)):
            stepper.zero_grad()
            backward(item, step)
            if item is reference:  # torch leaves a parameter without gradient alone; a dense table takes it as zero
                reference.unused.grad = torch.zeros(5)
            stepper.step()
    assert_close(module, reference)
    np.testing.assert_array_equal(module.fixed.numpy(), reference.fixed.numpy())
    assert module.count.dtype == torch.int64 and int(module.count) == 5
    assert module.seen.dtype == torch.bool and module.seen.all()
    late = Odd(seed=3)
    with torch.no_grad():
        late.fixed.fill_(9)
    second = gt.attach(late, cluster, name="odd", optimizer=optimizer, dim=DIM, reuse=True)
    assert_same(late, module)
    backward(late, 9)
    with torch.no_grad():
        late.fixed.fill_(9)  # nobody's business but its own
    second.step()
    assert dense.refresh()
    assert int(module.count) == int(late.count) == 6
    np.testing.assert_array_equal(module.fixed.numpy(), reference.fixed.numpy())
    np.testing.assert_array_equal(late.fixed.numpy(), reference.fixed.numpy())


def test_what_a_module_changed_in_its_buffers_outlives_a_refresh(cluster: Cluster) -> None:
    first, second = Odd(), Odd()
    one = gt.attach(first, cluster, name="odd", optimizer=gt.SGD(0.1), dim=DIM)
    other = gt.attach(second, cluster, name="odd", optimizer=gt.SGD(0.1), dim=DIM, reuse=True)
    backward(second, 1)
    train(first, one, range(2))
    other.refresh()
    assert int(second.count) == 3  # two of the server's and its own
    other.step()
    one.refresh()
    assert int(first.count) == int(second.count) == 3
    assert_same(first, second)


def test_buffers_that_a_drop_left_are_named(cluster: Cluster) -> None:
    gt.attach(Odd(), cluster, name="left", optimizer=gt.SGD(0.1), dim=DIM)
    cluster.drop_table("left")
    with pytest.raises(
        TableExists, match=r"'left\.buffers' is left of an earlier 'left'.* cluster\.drop_table\('left\.buf"
    ):
        gt.attach(Odd(), cluster, name="left", optimizer=gt.SGD(0.1), dim=DIM, reuse=True)
    cluster.drop_table("left.buffers")
    gt.attach(Odd(), cluster, name="left", optimizer=gt.SGD(0.1), dim=DIM, reuse=True)


def test_a_module_follows_a_table_that_went_back_and_on_to_its_version(cluster: Cluster, tmp_path: Path) -> None:
    first, second = Odd(), Odd()
    one = gt.attach(first, cluster, name="back", optimizer=gt.SGD(0.1), dim=DIM)
    path = cluster.snapshot(tmp_path).result(60)
    train(first, one, range(1))
    other = gt.attach(second, cluster, name="back", optimizer=gt.SGD(0.1), dim=DIM, reuse=True)
    cluster.restore(path, replace=True)
    assert one.refresh()
    train(first, one, range(5, 6))
    assert other.version == one.version
    assert other.refresh()
    assert_same(first, second)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_modules_of_sixteen_bits_have_wide_weights_on_the_server(cluster: Cluster, dtype: torch.dtype) -> None:
    module = nn.Linear(4, 1, bias=False)
    nn.init.ones_(module.weight)
    module.to(dtype)
    dense = gt.attach(module, cluster, name="half", optimizer=gt.SGD(1.0), dim=4)
    for _ in range(64):
        module.weight.grad = torch.full((1, 4), 2.0**-13, dtype=dtype)  # less than half a place of 1 in 16 bits
        dense.step()
    assert module.weight.dtype == dtype
    np.testing.assert_array_equal(cluster.table("half").pull(np.array([0])), 1 - 64 * 2.0**-13)
    np.testing.assert_array_equal(module.weight.detach().float().numpy(), 1 - 2.0**-7)


def test_the_dtype_of_a_module_may_change(cluster: Cluster) -> None:
    module = small_net()
    dense = gt.attach(module, cluster, name="net", dim=DIM)
    train(module, dense, range(2))
    module.double()
    train(module, dense, range(2, 4))
    reference = small_net()
    with gt.local() as other:
        train(reference, gt.attach(reference, other, name="net", dim=DIM), range(4))
    assert next(module.parameters()).dtype == torch.float64
    assert_close(module, reference, 1e-4, 1e-5)


def test_a_step_that_grad_scaler_skips_pushes_nothing_and_its_scale_is_taken_out(cluster: Cluster) -> None:
    module, reference = small_net(), small_net()
    dense = gt.attach(module, cluster, name="net", optimizer=gt.Momentum(0.1), dim=DIM)
    truth = torch.optim.SGD(reference.parameters(), 0.1, 0.9)
    scaler, plain = (torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2))
    for step in range(6):
        for item, stepper, scales in ((module, dense, scaler), (reference, truth, plain)):
            stepper.zero_grad()
            inputs, targets = batch(step)
            loss = nn.functional.mse_loss(item(inputs), targets) * (float("inf") if step == 2 else 1.0)
            scales.scale(loss).backward()
            if step % 2:
                scales.unscale_(stepper)
                nn.utils.clip_grad_norm_(item.parameters(), 0.1)
            before = dense.version
            scales.step(stepper)
            if item is module:
                assert dense.version == before + (step != 2)
            scales.update()
    assert scaler.get_scale() == plain.get_scale() == 512.0
    assert_close(module, reference)


def test_gradients_that_are_not_finite_push_nothing_anywhere(cluster: Cluster) -> None:
    module = Odd()
    dense = gt.attach(module, cluster, name="odd", dim=DIM)
    backward(module, 0)
    before = {name: cluster.table(name).pull(np.arange(2)) for name in ("odd", "odd.buffers")}
    assert module.out.bias.grad is not None
    module.out.bias.grad[1] = float("nan")
    for _ in range(2):
        with pytest.raises(NonFinite, match=r"gradient of 'out.bias' \(dense table 'odd'\)"):
            dense.step()
    assert cluster.table("odd").version() == cluster.table("odd.buffers").version() == dense.version == 1
    for name, rows in before.items():
        np.testing.assert_array_equal(cluster.table(name).pull(np.arange(2)), rows)
    train(module, dense, range(1))
    assert dense.version == 2


def test_what_a_step_is_given_is_checked(cluster: Cluster) -> None:
    module = small_net()
    dense = gt.attach(module, cluster, name="net", dim=DIM)
    backward(module, 0)
    for samples in (-1, 0.5):
        with pytest.raises(InvalidArgument, match=rf"samples is {samples}"):
            dense.step(samples=samples)  # type: ignore[arg-type]
    with pytest.raises(NonFinite, match="scale is inf"):
        dense.push(scale=float("inf"))
    with pytest.raises(InvalidArgument, match="lr of dense table 'net' is nan"):
        dense.push(lr=float("nan"))
    dense.param_groups[0]["lr"] = -1.0
    with pytest.raises(InvalidArgument, match=r"lr of dense table 'net' is -1\.0"):
        dense.step()
    assert not dense.refresh()


def test_without_any_gradient_nothing_is_pushed(cluster: Cluster) -> None:
    module = small_net()
    dense = gt.attach(module, cluster, name="net", dim=DIM)
    dense.step()
    assert cluster.table("net").version() == 1
    assert dense.step(lambda: 3.0) == 3.0


def test_a_repeat_of_a_numbered_push_changes_nothing() -> None:
    with gt.local(2, stream="gear/image", incarnation=1) as cluster:
        module = Odd()
        dense = gt.attach(module, cluster, name="odd", dim=DIM)
        backward(module, 0)
        assert not dense.push(7, lr=0.1, scale=0.5).duplicate
        after = {name: cluster.table(name).pull(np.arange(2)) for name in ("odd", "odd.buffers")}
        dense.zero_grad()
        backward(module, 3)
        assert dense.push(7).duplicate
        for name, rows in after.items():
            np.testing.assert_array_equal(cluster.table(name).pull(np.arange(2)), rows)
        assert dense.version == 1 and dense.refresh() and dense.version == 2


def test_a_number_needs_a_named_stream(cluster: Cluster) -> None:
    module = small_net()
    dense = gt.attach(module, cluster, name="net", dim=DIM)
    backward(module, 0)
    with pytest.raises(InvalidArgument, match="stream that has a name"):
        dense.push(1)
    dense.step()


@pytest.mark.parametrize("optimizer", [gt.Adam(0.1), gt.Momentum(0.1), gt.SparseMomentum(0.1)], ids=str)
def test_a_step_asks_each_shard_once(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, optimizer: RowOptimizerSpec
) -> None:
    layer = nn.Linear(5, 7)
    dense = gt.attach(layer, cluster, name="layer", optimizer=optimizer, dim=DIM)
    before = layer.weight.detach().clone()
    layer(torch.ones(2, 5)).sum().backward()

    def asked(*_: Any, **__: Any) -> Any:
        pytest.fail("a step asked again")

    with monkeypatch.context() as patch:
        for room, name in (RowCalls, "pull"), (RowCalls, "write"), (ShardCalls, "read"):
            patch.setattr(room, name, asked)
        dense.step()
        dense.step()
    assert dense.version == cluster.table("layer").version() == 3
    stepped = layer.weight.detach().clone()
    assert not torch.equal(stepped, before) and not dense.refresh()
    dense._pull()
    assert torch.equal(layer.weight, stepped)


def test_a_push_that_failed_half_way_is_completed_once(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    module, reference = Odd(), Odd()
    dense = gt.attach(module, cluster, name="odd", optimizer=gt.Momentum(0.1), dim=DIM)
    train(reference, torch.optim.SGD(reference.parameters(), 0.1, 0.9), range(1))
    deliver, read, pushed = RowCalls.write, ShardCalls.read, 0

    def lossy(rows: RowCalls, writes: Any) -> list[Any]:
        nonlocal pushed
        delivered = deliver(rows, writes)
        pushed += 1
        if pushed == 2:  # the parameters: they follow the buffers
            *others, _ = writes[0][2]
            return [[*(Done() for _ in others), ShardUnavailable("the answer was lost")]]
        return delivered

    def silent(self: ShardCalls, calls: Any, **keywords: Any) -> Any:
        read(self, calls, **keywords)
        raise ShardUnavailable("lost before the pull")

    def lossy_and_pull(rows: RowCalls, write: Any, _: Any) -> tuple[Any, None]:
        return lossy(rows, [write])[0], None

    backward(module, 0)
    monkeypatch.setattr(RowCalls, "write", lossy)
    monkeypatch.setattr(RowCalls, "write_and_pull", lossy_and_pull)
    with pytest.raises(ShardUnavailable, match="the answer was lost"):
        dense.step()
    with monkeypatch.context() as patch, pytest.raises(ShardUnavailable, match="lost before the pull"):
        patch.setattr(ShardCalls, "read", silent)
        dense.step()
    assert pushed == 3  # the parameters again, not the buffers
    assert (cluster.table("odd").version(), dense.version) == (2, 1)
    dense.step()
    assert pushed == 3
    assert_close(module, reference)
    assert (dense.version, int(module.count)) == (2, 1)


def test_a_module_of_another_layout_is_refused_by_name(cluster: Cluster) -> None:
    gt.attach(small_net(), cluster, name="net", dim=DIM)
    wider = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 10), nn.Tanh(), nn.Linear(10, 3))
    renamed = nn.ModuleDict({f"layer{i}": item for i, item in enumerate(small_net())})
    frozen = small_net()
    frozen[0].bias.requires_grad_(False)
    for module in (wider, renamed, frozen):
        with pytest.raises(
            SpecMismatch, match=r"holds a module of layout [0-9a-f]{16} \(12 rows of 16\); this one has"
        ):
            gt.attach(module, cluster, name="net", dim=DIM, reuse=True)
    with pytest.raises(SpecMismatch, match="12 rows of 16"):
        gt.attach(small_net(), cluster, name="net", dim=2 * DIM, reuse=True)
    with pytest.raises(SpecMismatch, match="Momentum"):
        gt.attach(small_net(), cluster, name="net", dim=DIM, optimizer=gt.Momentum(0.1), reuse=True)


def test_modules_that_cannot_be_attached_are_refused_and_leave_no_table(cluster: Cluster) -> None:
    counted = nn.Linear(2, 2)
    counted.register_buffer("keys", torch.tensor([1, 2**24 + 1]))
    endless = nn.Linear(2, 2)
    endless.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
    wrong: list[tuple[Any, type[Exception], str]] = [
        (nn.Tanh(), InvalidArgument, "no parameter that requires a gradient"),
        (nn.LazyLinear(3), InvalidArgument, "'weight' has no shape yet"),
        (nn.Linear(2, 2, dtype=torch.complex64), InvalidArgument, "'weight' is torch.complex64"),
        (nn.Linear(2, 2, device="meta"), InvalidArgument, "'weight' is on the meta device"),
        (counted, InvalidArgument, "'keys' holds integers beyond 16,777,216"),
        (endless, NonFinite, "'mask' holds NaN or infinity"),
    ]
    for module, kind, text in wrong:
        with pytest.raises(kind, match=text):
            gt.attach(module, cluster, name="net")
    for settings, text in (({"mode": "ssp"}, "mode is 'ssp'"), ({"dim": 0}, "dim is 0")):
        with pytest.raises(InvalidArgument, match=text):
            gt.attach(small_net(), cluster, name="net", **settings)  # type: ignore[arg-type]
    cluster.create_table("odd.buffers", dim=1, optimizer=gt.SGD(1.0))
    with pytest.raises(TableExists, match=r"odd\.buffers"):
        gt.attach(Odd(), cluster, name="odd")
    assert [table.name for table in cluster.status().tables] == ["odd.buffers"]


def test_a_table_whose_maker_died_is_waited_for_and_then_named(cluster: Cluster) -> None:
    gt.attach(small_net(), cluster, name="whole", dim=DIM)
    spec = cluster.table("whole").spec
    cluster.create_table(
        "net", dim=DIM, optimizer=spec.optimizer, num_rows=spec.num_rows, initializer=gt.Constant(0.0), seed=spec.seed
    )
    with pytest.raises(ClusterNotReady, match=r"'net' has had no values for 0 s.*drop_table"):
        gt.attach(small_net(), cluster, name="net", dim=DIM, reuse=True, wait_seconds=0)


def test_a_parameter_that_was_replaced_is_named(cluster: Cluster) -> None:
    module = small_net()
    dense = gt.attach(module, cluster, name="net", dim=DIM)
    backward(module, 0)
    module[0].weight = nn.Parameter(module[0].weight.detach().clone())
    with pytest.raises(SpecMismatch, match=r"'0\.weight' was replaced"):
        dense.step()
    with pytest.raises(InvalidArgument, match="trains the parameters of the module"):
        dense.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def test_sparse_gradients_are_taken(cluster: Cluster) -> None:
    module, reference = (nn.Embedding(5, 3, sparse=sparse) for sparse in (True, False))
    reference.load_state_dict(module.state_dict())
    dense = gt.attach(module, cluster, name="rows", optimizer=gt.SGD(0.5), dim=4)
    truth = torch.optim.SGD(reference.parameters(), 0.5)
    for item, stepper in ((module, dense), (reference, truth)):
        item(torch.tensor([1, 3, 1])).square().sum().backward()
        stepper.step()
    assert_close(module, reference)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_goes_on_from_a_snapshot_on_any_number_of_shards(cluster: Cluster, tmp_path: Path, kind: str) -> None:
    settings: dict[str, Any] = {"name": "odd", "optimizer": OPTIMIZERS[kind][0], "dim": DIM}
    module = Odd()
    dense = gt.attach(module, cluster, **settings)
    train(module, dense, range(4))
    path = cluster.snapshot(tmp_path, "a").result(60)
    train(module, dense, range(4, 8))
    for num_shards in (1, 4):
        with gt.local(num_shards) as other:
            other.restore(path)
            again = Odd(seed=5)
            restored = gt.attach(again, other, **settings, reuse=True)
            assert restored.version == 5
            train(again, restored, range(4, 8))
            assert_same(again, module)
            assert restored.version == dense.version


def test_a_parameter_frozen_after_attach_is_refused_beside_others(cluster: Cluster) -> None:
    layer = nn.Linear(3, 2)
    dense = gt.attach(layer, cluster, name="layer", optimizer=gt.Momentum(0.1, 0.9))
    before = layer.bias.detach().clone()
    layer.bias.requires_grad_(False)
    layer(torch.ones(1, 3)).sum().backward()
    with pytest.raises(InvalidArgument, match="'bias' of dense table 'layer' was frozen after attach"):
        dense.step()
    assert torch.equal(torch.from_numpy(cluster.table("layer").pull([0]))[0, 6:8], before)
