"""Dense tables when calls fail half way or others come in between: nothing is pushed twice, nothing stays unseen."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.rows.row_calls import RowCalls
from geartrain.ams.client.shard_calls import ShardCalls
from geartrain.ams.values.errors import NonFinite, ShardUnavailable
from geartrain.ams.values.shard_messages import Done
from geartrain.bridge.dense.dense_table import DenseTable
from geartrain.bridge.dense.layout import Layout

DIM = 8


class Counting(nn.Module):
    """A layer that counts its forwards in buffers; the count is several rows wide."""

    count: Tensor
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("count", torch.zeros(3 * DIM, dtype=torch.int64))
        self.register_buffer("total", torch.zeros(2))

    def forward(self, inputs: Tensor) -> Tensor:
        self.count = self.count + 1
        self.total += 0.5
        result: Tensor = self.layer(inputs)
        return result

    def forwards(self) -> set[float]:
        return {*self.count.tolist(), *(2 * self.total).tolist()}


def attached(cluster: Cluster, *, reuse: bool = True) -> tuple[Counting, DenseTable]:
    module = Counting()
    return module, gt.attach(module, cluster, name="net", dim=DIM, optimizer=gt.SGD(0.1), reuse=reuse)


def backward(module: Counting, times: int = 1) -> None:
    for _ in range(times):
        module(torch.ones(4, 6)).square().sum().backward()


@pytest.fixture
def fail_step(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    whole = RowCalls.write

    def fail(dense: DenseTable, push: int, *, applied: bool) -> None:
        """One shard's answer to the first (buffers) or second (parameters) push of a step is lost, or its request."""
        pushes = 0

        def lossy(rows: RowCalls, writes: Any) -> list[Any]:
            nonlocal pushes
            pushes += 1
            if pushes != push:
                return whole(rows, writes)
            [(prepared, context, shards)] = writes
            *others, _ = shards
            assert others
            [reply] = whole(rows, [(prepared, context, shards if applied else others)])
            assert isinstance(reply, tuple)  # all have done it
            return [[*(Done() for _ in others), ShardUnavailable("lost")]]

        def lossy_and_pull(rows: RowCalls, write: Any, _: Any) -> tuple[Any, None]:
            return lossy(rows, [write])[0], None

        with monkeypatch.context() as patch:
            patch.setattr(RowCalls, "write", lossy)
            patch.setattr(RowCalls, "write_and_pull", lossy_and_pull)
            with pytest.raises(ShardUnavailable, match="lost"):
                dense.step()

    return fail


@pytest.mark.parametrize("push", [1, 2])
@pytest.mark.parametrize("applied", [True, False])
def test_buffers_of_a_step_that_is_dropped_are_not_pushed_again(
    cluster: Cluster, fail_step: Callable[..., None], push: int, applied: bool
) -> None:
    module, dense = attached(cluster)
    backward(module)
    fail_step(dense, push, applied=applied)
    dense.zero_grad()
    backward(module)
    dense.step()
    seen = {2.0} if applied or push == 2 else {1.0, 2.0}  # a shard that did not get the first change never does
    assert module.forwards() == seen
    late, _ = attached(cluster)
    assert late.forwards() == seen


@pytest.mark.parametrize("push", [1, 2])
@pytest.mark.parametrize("applied", [True, False])
def test_a_refresh_between_a_failed_step_and_its_repeat_doubles_no_change_of_buffers(
    cluster: Cluster, fail_step: Callable[..., None], push: int, applied: bool
) -> None:
    (module, dense), (other, others) = attached(cluster), attached(cluster)
    backward(other, 5)
    others.step()
    backward(module)
    fail_step(dense, push, applied=applied)
    assert dense.refresh()
    dense.step()
    assert module.forwards() == {6.0}
    backward(module)
    dense.step()
    others.refresh()
    assert module.forwards() == other.forwards() == {7.0}


@pytest.mark.parametrize("push", [1, 2])
@pytest.mark.parametrize("applied", [True, False])
def test_ranks_complete_a_step_that_some_shards_have_before_the_next(
    cluster: Cluster, fail_step: Callable[..., None], push: int, applied: bool
) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        module = Counting()
        dense = gt.attach(module, cluster, name="net", dim=DIM, optimizer=gt.SGD(1.0), mode="sync")
        before = module.layer.weight.detach().clone()
        gradients = [1.0, 10.0, 100.0]
        for step, gradient in enumerate(gradients):
            dense.zero_grad()
            backward(module)
            for parameter in module.parameters():
                parameter.grad = torch.full_like(parameter, gradient)
            if step == 0:
                fail_step(dense, push, applied=applied)
            else:
                dense.step()
        torch.testing.assert_close(module.layer.weight.detach(), before - sum(gradients))
        assert module.forwards() == {3.0} and dense.version == 4
        dense.zero_grad()
        backward(module)
        fail_step(dense, push, applied=applied)
        dense.zero_grad()
        dense.found_inf = torch.ones(())  # as GradScaler says it: what is new is skipped
        dense.step()
        assert dense.version == 5 and not dense.refresh()
    finally:
        dist.destroy_process_group()


def test_ranks_may_drop_a_step_that_a_shard_refuses(cluster: Cluster) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        module = Counting()
        dense = gt.attach(module, cluster, name="net", dim=DIM, optimizer=gt.SGD(1.0), mode="sync")
        backward(module)
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, 1e30)
        with pytest.raises(NonFinite):
            dense.push(lr=1e30)
        dense.zero_grad()
        backward(module)
        dense.step()
        assert dense.version == 2
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("push", [1, 2])
@pytest.mark.parametrize("raises", [True, False])
def test_a_push_that_is_repeated_has_the_gradients_it_began_with(
    cluster: Cluster, fail_step: Callable[..., None], monkeypatch: pytest.MonkeyPatch, push: int, raises: bool
) -> None:
    module, dense = attached(cluster)
    backward(module)
    before = module.layer.weight.detach().clone()
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    if raises:

        def unsent(*_: Any) -> list[Any]:
            raise ShardUnavailable("lost")

        with monkeypatch.context() as patch, pytest.raises(ShardUnavailable, match="lost"):
            patch.setattr(RowCalls, "write" if push == 1 else "write_and_pull", unsent)
            dense.step()
    else:
        fail_step(dense, push, applied=False)
    for parameter in module.parameters():
        assert parameter.grad is not None
        parameter.grad.fill_(1000)
    dense.step()
    torch.testing.assert_close(module.layer.weight.detach(), before - 0.1)


@pytest.mark.parametrize("shards", [1, 2])
def test_gradients_that_are_not_finite_are_named_wherever_they_are_found(shards: int) -> None:
    with gt.local(shards) as cluster:
        layer = nn.Linear(6, 6)
        dense = gt.attach(layer, cluster, name="net", dim=DIM, optimizer=gt.SGD(0.1))
        before = layer.weight.detach().clone()
        layer.weight.grad, layer.bias.grad = torch.ones(6, 6), torch.full((6,), torch.nan)
        with pytest.raises(NonFinite, match="the gradient of 'bias'"):
            dense.step()
        assert dense.version == cluster.table("net").version() == 1
        layer.bias.grad.fill_(1)
        dense.step()  # with what the gradients are now: nothing is pending
        torch.testing.assert_close(layer.weight.detach(), before - 0.1)


def test_a_pull_that_fails_half_way_leaves_buffers_and_what_they_changed_by(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    (module, dense), (other, others) = attached(cluster), attached(cluster)
    backward(other, 5)
    others.step()
    module(torch.ones(1, 6))
    unpack = Layout.unpack

    def full(self: Layout, rows_RD: Tensor, tensors: Any) -> None:
        if any(tensor is module.count for tensor in tensors):
            raise MemoryError
        unpack(self, rows_RD, tensors)

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(Layout, "unpack", full)
        dense.refresh()
    assert module.forwards() == {1.0}
    assert dense.refresh() and module.forwards() == {6.0}
    backward(module)
    dense.step()
    assert module.forwards() == {7.0}


def test_a_write_that_reached_one_shard_only_is_seen(cluster: Cluster) -> None:
    module, dense = attached(cluster)
    table = cluster.table("net")
    table.push(np.array([0]), np.ones((1, DIM), np.float32))
    assert (dense.version, table.version()) == (1, 1) and sorted(table.versions()) == [1, 2]
    assert dense.refresh() and not dense.refresh()
    np.testing.assert_array_equal(table.pull(np.array([0]))[0], module.layer.weight.detach().reshape(-1)[:DIM])
    # From now on one shard is ahead, so that a write which reaches the other first moves the version at once.
    table.push(np.array([1]), np.ones((1, DIM), np.float32))
    assert dense.refresh() and dense.version == 2
    table.push(np.array([0]), np.ones((1, DIM), np.float32))
    assert dense.refresh() and dense.version == 2
    np.testing.assert_array_equal(table.pull(np.array([0]))[0], module.layer.weight.detach().reshape(-1)[:DIM])


def test_who_comes_while_the_first_makes_the_tables_waits_for_both(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_table = Cluster.create_table
    begun, may_go_on = threading.Event(), threading.Event()
    version = ShardCalls.read

    def slowly(self: Cluster, name: str, **settings: Any) -> Any:
        if name == "net.buffers" and not settings["reuse"]:
            begun.set()
            assert may_go_on.wait(30)
        return create_table(self, name, **settings)

    def looked(self: ShardCalls, calls: Any, **keywords: Any) -> Any:
        replies = version(self, calls, **keywords)
        may_go_on.set()  # the second has looked for values, and found none
        return replies

    monkeypatch.setattr(Cluster, "create_table", slowly)
    made: list[Counting] = []
    first = threading.Thread(target=lambda: made.append(attached(cluster, reuse=False)[0]))
    first.start()
    assert begun.wait(30)
    monkeypatch.setattr(ShardCalls, "read", looked)
    try:
        second, _ = attached(cluster)
    finally:
        may_go_on.set()
        first.join()
    assert torch.equal(second.layer.weight, made[0].layer.weight)
