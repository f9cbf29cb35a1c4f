"""A module attached from processes of its own, over gRPC: ranks that step together, and workers that do not wait."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.bridge.dense.dense_table import DenseTable
from tests.support.rank_processes import run_ranks

STEPS, JOINT = 8, 10
SHARES = [slice(0, 7), slice(7, JOINT)]


class Net(nn.Module):
    """No batch statistics in its forward pass, but a buffer that keeps some."""

    mean: Tensor
    batches: Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(6, 40), nn.LayerNorm(40), nn.Tanh(), nn.Linear(40, 3))
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        self.mean.lerp_(inputs.detach().mean(0), 0.25)
        self.batches += 1
        return self.body(inputs)


def loss_of(net: nn.Module, step: int, mine: slice) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    inputs, targets = torch.randn(JOINT, 6, generator=generator), torch.randn(JOINT, 3, generator=generator)
    return nn.functional.mse_loss(net(inputs[mine]), targets[mine])


def train(net: nn.Module, dense: DenseTable, mine: slice) -> None:
    schedule = torch.optim.lr_scheduler.StepLR(dense, 2, 0.7)
    for step in range(STEPS):
        dense.zero_grad()
        loss_of(net, step, mine).backward()
        dense.step(samples=mine.stop - mine.start)
        schedule.step()


def attached(cluster: Cluster, seed: int, mode: Any) -> tuple[Net, DenseTable]:
    net = Net(seed)
    return net, gt.attach(net, cluster, name="net", optimizer=gt.Adam(0.01, weight_decay=0.01), mode=mode, dim=64)


def saved(net: Net, path: Path) -> None:
    np.savez(path, **{name: item.detach().numpy() for name, item in net.state_dict().items()})


def train_a_rank(rank: int, folder: Path, address: str) -> None:
    with gt.connect(address) as cluster:
        net, dense = attached(cluster, rank, "sync")
        train(net, dense, SHARES[rank])
    saved(net, folder / f"rank{rank}.npz")


def test_two_ranks_equal_one_process_with_the_joint_batch(served: Callable[..., Any], tmp_path: Path) -> None:
    run_ranks(train_a_rank, 2, tmp_path, served(3).address)
    with gt.local() as cluster:
        net, dense = attached(cluster, 0, "async")
        train(net, dense, slice(0, JOINT))
    first, second = (np.load(tmp_path / f"rank{rank}.npz") for rank in range(2))
    for name, value in net.state_dict().items():
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)
        np.testing.assert_allclose(first[name], value.numpy(), rtol=2e-4, atol=2e-5, err_msg=name)


def train_with_a_bad_rank(rank: int, folder: Path, address: str) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    bad = float("inf") if rank == 1 else 1.0
    with gt.connect(address) as cluster:
        net, dense = attached(cluster, rank, "sync")
        scaler.scale(loss_of(net, 0, SHARES[rank]) * bad).backward()
        scaler.step(dense)
        scaler.update()
        assert (scaler.get_scale(), dense.version) == ((128.0, 1) if rank == 1 else (256.0, 1))
        dense.zero_grad()
        (loss_of(net, 1, SHARES[rank]) * bad).backward()
        kind, text = [(gt.errors.SyncError, "rank 1 failed"), (gt.errors.NonFinite, r"gradient of 'body\.0\.weight'")][
            rank
        ]
        with pytest.raises(kind, match=text):
            dense.step()
        assert not dense.refresh()
        dense.zero_grad()
        scaler.scale(loss_of(net, 2, SHARES[rank])).backward()  # the ranks' scales differ by now
        scaler.step(dense)
        assert dense.version == 2
    saved(net, folder / f"bad{rank}.npz")


def test_what_one_rank_cannot_push_no_rank_pushes(served: Callable[..., Any], tmp_path: Path) -> None:
    run_ranks(train_with_a_bad_rank, 2, tmp_path, served(2).address)
    first, second = (np.load(tmp_path / f"bad{rank}.npz") for rank in range(2))
    reference = Net(0)
    (0.5 * loss_of(reference, 2, SHARES[0]) + 0.5 * loss_of(reference, 2, SHARES[1])).backward()
    torch.optim.Adam(reference.parameters(), 0.01, weight_decay=0.01).step()
    for name, value in reference.named_parameters():
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)
        np.testing.assert_allclose(first[name], value.detach().numpy(), rtol=1e-4, atol=1e-6, err_msg=name)
    assert int(first["batches"]) == 3  # of the steps that were not made, too


def test_a_worker_that_was_started_again_repeats_its_push_without_effect(served: Callable[..., Any]) -> None:
    address = served(2).address
    settings: dict[str, Any] = {"name": "net", "optimizer": gt.Momentum(0.1), "dim": 16}

    def gradients(net: Net, step: int) -> None:
        net(torch.randn(4, 6, generator=torch.Generator().manual_seed(step))).square().sum().backward()

    with gt.connect(address, stream="gear/image", incarnation=1) as cluster:
        net = Net(1)
        dense = gt.attach(net, cluster, **settings)
        for number in (1, 2):
            dense.zero_grad()
            gradients(net, number)
            assert not dense.push(number).duplicate
            dense.refresh()
        after = {name: item.detach().clone() for name, item in net.named_parameters()}
    with gt.connect(address, stream="gear/image", incarnation=2) as cluster:
        net = Net(2)
        dense = gt.attach(net, cluster, **settings, reuse=True)
        gradients(net, 2)
        assert dense.push(2).duplicate
        assert not dense.refresh() and dense.version == 3
        for name, value in net.named_parameters():
            assert torch.equal(value, after[name]), name
        assert int(net.batches) == 3  # what it changed itself, before its push turned out to be a repeat
        dense.zero_grad()
        gradients(net, 3)
        assert not dense.push(3).duplicate
        assert dense.refresh() and dense.version == 4


def test_no_worker_waits_for_another(served: Callable[..., Any], tmp_path: Path) -> None:
    address = served(2).address
    run_ranks(train_alone, 2, tmp_path, address)
    with gt.connect(address) as cluster:
        assert cluster.table("net").version() == 1 + 2 * 5
        rows = cluster.table("net").pull(np.arange(2)).reshape(-1)
    np.testing.assert_allclose(rows[:6], [-2.0 * 5 * (1 + 2)] * 6, rtol=1e-6)


def train_alone(rank: int, address: str) -> None:
    net = nn.Linear(6, 1, bias=False)
    nn.init.zeros_(net.weight)
    with gt.connect(address) as cluster:
        dense = gt.attach(net, cluster, name="net", optimizer=gt.SGD(2.0), dim=4, reuse=True)
        for _ in range(5):
            net.weight.grad = torch.full((1, 6), float(rank + 1))
            dense.step()
