"""Clipping where ranks train together: the norm of what all of them push, on every rank, wherever the rows are.

Ranks are real processes (gloo) with uneven batches, one of them empty in one step; the cluster has two shards behind
sockets. The truth is one worker with the joint batch, in float64.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import geartrain as gt
from geartrain.ams.client.factory import connect
from geartrain.ams.values.errors import InvalidArgument, ShardUnavailable, SyncError
from tests.integration.conftest import ServedCluster
from tests.support import heads
from tests.support.rank_processes import on_ranks, run_ranks
from tests.support.reference import FakeCluster, plain_loss

CLASSES, DIM, LR, MAX_NORM = 30, 5, 0.5, 0.05
MARGIN = gt.CosFace(8, 0.1)
SHARES = [[slice(0, 5), slice(5, 8)], [slice(0, 8), slice(0, 0)], [slice(0, 4), slice(4, 8)]]
"""Of each rank in each step: the first two have rows alone, the last a backbone under DDP, which wants even batches."""
MICRO_BATCHES = 2


def make_head(cluster: Any, place: str) -> gt.ClassHead:
    return heads.make_head(
        cluster,
        place,
        num_classes=CLASSES,
        dim=DIM,
        select=gt.PartialFC(0.6),
        margin=MARGIN,
        optimizer=gt.SGD(LR),
        initializer=gt.Normal(std=1.0),
        sync=place != "ranks",
        **heads.PLACES[place],
    )


def batch(step: int, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + number)
    return torch.randn(8, DIM, generator=generator), torch.randint(CLASSES, (8,), generator=generator)


def backbone() -> nn.Linear:
    torch.manual_seed(2)
    return nn.Linear(DIM, DIM)


def train_rank(rank: int, folder: Path, place: str, address: str) -> None:
    with connect(address) as cluster:
        head, module = make_head(cluster, place), DistributedDataParallel(backbone())
        rows, scaler = gt.RowOptimizer(head), torch.amp.GradScaler("cpu", init_scale=1000.0)
        norms, weights = [], [head.weights().numpy()]
        for step, shares in enumerate(SHARES):
            has_backbone = step == len(SHARES) - 1
            for number in range(MICRO_BATCHES):
                features, labels = (item[shares[rank]] for item in batch(step, number))
                features = module(features) if has_backbone else features
                scaler.scale(head(features, labels) / MICRO_BATCHES).backward()
            scaler.unscale_(rows)
            dense = list(module.parameters()) if has_backbone else []
            for parameter in dense:
                parameter.grad.mul_(1 / scaler.get_scale())
            with pytest.raises(InvalidArgument, match=r"geartrain\.clip_grad_norm_"):
                torch.nn.utils.clip_grad_norm_(rows.param_groups[0]["params"], MAX_NORM)
            norms.append(float(gt.clip_grad_norm_(dense, rows, MAX_NORM)))
            scaler.step(rows)
            scaler.update()
            rows.zero_grad()
            dist.barrier()  # no rank reads rows before the last update of all
            weights.append(head.weights().numpy())
            dist.barrier()
        grads = {f"grad{number}": parameter.grad.numpy() for number, parameter in enumerate(module.parameters())}
        np.savez(folder / f"rank{rank}.npz", norms=norms, weights=np.stack(weights), **grads)


@pytest.mark.parametrize("place", ["held", pytest.param("streamed", marks=pytest.mark.slow), "hosted", "ranks"])
def test_two_ranks_clip_what_one_worker_would(place: str, tmp_path: Path) -> None:
    served = ServedCluster(2)
    try:
        run_ranks(train_rank, 2, tmp_path, place, served.address)
    finally:
        served.stop()
    said = [np.load(tmp_path / f"rank{rank}.npz") for rank in range(2)]
    np.testing.assert_array_equal(said[0]["norms"], said[1]["norms"])
    rows = torch.from_numpy(said[0]["weights"][0]).double().requires_grad_()
    module = backbone().double()
    for step in range(len(SHARES)):
        parameters: list[Tensor] = [rows]
        for number in range(MICRO_BATCHES):
            features, labels = batch(step, number)
            inputs = features.double()
            if step == len(SHARES) - 1:
                inputs, parameters = module(inputs), [rows, *module.parameters()]
            active = torch.from_numpy(gt.PartialFC(0.6).select(labels.numpy(), CLASSES, step).ids)
            targets = torch.searchsorted(active, labels)
            (plain_loss(inputs, rows[active], targets, MARGIN.combined) / MICRO_BATCHES).backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        assert said[0]["norms"][step] == pytest.approx(float(norm), rel=1e-4), f"step {step}"
        with torch.no_grad():
            rows -= LR * rows.grad
        rows.grad = None
        np.testing.assert_allclose(said[0]["weights"][step + 1], rows.detach(), rtol=1e-4, atol=1e-5)
    for number, parameter in enumerate(module.parameters()):
        assert parameter.grad is not None
        for item in said:
            np.testing.assert_allclose(item[f"grad{number}"], parameter.grad, rtol=1e-3, atol=1e-6)


@on_ranks(2)
def test_a_rank_that_cannot_read_its_rows_lets_no_other_wait(rank: int) -> None:
    cluster = FakeCluster()
    head = make_head(cluster, "streamed")
    rows = gt.RowOptimizer(head)
    features, labels = batch(0, 0)
    head(features, labels).backward()

    def fails(*_: Any, **__: Any) -> None:
        raise ShardUnavailable("shard 0 is away")

    torch.set_default_dtype(torch.float64)  # of no matter to what a rank sends
    if rank == 1:
        cluster.tables["streamed"].pull_into_async = fails  # type: ignore[method-assign, assignment]
    with pytest.raises(ShardUnavailable if rank == 1 else SyncError):
        gt.clip_grad_norm_((), rows, MAX_NORM)
