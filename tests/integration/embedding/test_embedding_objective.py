"""Ranks with unequal batches train embeddings and the network behind them by one objective, whatever the loss.

Networks are under DDP or FSDP2, rows pulled, hosted or on the ranks, ranks processes (gloo); the truth is plain PyTorch
in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import geartrain as gt
from tests.support.rank_processes import run_ranks

ROWS, DIM, JOINT = 20, 4, 12
SHARES = [slice(0, 9), slice(9, JOINT)]
MICRO = [[slice(0, 9), slice(9, 9)], [slice(9, 10), slice(10, JOINT)]]
"""Of each micro-batch the samples of each rank, one of which has none."""
PLACES: dict[str, dict[str, Any]] = {"pull": {}, "hosted": {"where": "hosted"}, "ranks": {"rows": "ranks"}}
WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {"ddp": DistributedDataParallel, "fsdp2": fully_shard}


def batch(mine: Any) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Ids, targets and weights, which are 0 for some."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(ROWS, (JOINT, 5), generator=generator)
    targets, weights = torch.rand(JOINT, generator=generator), torch.rand(JOINT, generator=generator)
    weights[[2, 3, 10]] = 0.0
    return {"user": ids[mine, :2], "item": ids[mine, 2:]}, targets[mine], weights[mine]


def network() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(2 * DIM, 6), nn.Tanh(), nn.Linear(6, 1))


def losses_of(net: nn.Module, vectors: dict[str, Tensor], targets: Tensor) -> Tensor:
    logits = net(torch.cat([vectors["user"], vectors["item"]], dim=1))[:, 0]
    return F.binary_cross_entropy_with_logits(logits, targets.to(logits), reduction="none")


def joint(losses: Tensor, weights: Tensor) -> Tensor:
    return gt.mean_over_ranks(losses, weights)


def unweighted(losses: Tensor, weights: Tensor) -> Tensor:
    del weights
    return gt.mean_over_ranks(losses)


def own_mean(losses: Tensor, weights: Tensor) -> Tensor:
    """What a rank without any does not change: 0."""
    del weights
    return losses.sum() / max(1, len(losses))


LOSSES = [joint, unweighted, own_mean]


def train_rank(rank: int, folder: Path, place: str, address: str | None) -> None:
    found: dict[str, Any] = {}
    settings = dict(PLACES[place])
    where = settings.pop("where", "pull")
    with nullcontext() if address is None else gt.connect(address) as cluster:
        for number, loss_of in enumerate(LOSSES):
            for wrap, made in WRAPS.items():
                fields = gt.EmbeddingGroup(
                    cluster,
                    f"{wrap}{number}",
                    [gt.Field(name, dim=DIM, num_rows=ROWS, where=where) for name in ("user", "item")],
                    optimizer=gt.SGD(1.0),
                    mode="sync",
                    **settings,
                )
                net, rows = made(network()), gt.RowOptimizer(fields)
                before = pulled(fields)
                losses = []
                for micro in MICRO:
                    if isinstance(net, DistributedDataParallel):
                        net.require_backward_grad_sync = micro is MICRO[-1]
                    else:
                        net.set_requires_gradient_sync(micro is MICRO[-1])  # type: ignore[operator]
                    ids, targets, weights = batch(micro[rank])
                    loss = loss_of(losses_of(net, fields(ids), targets), weights)
                    loss.backward()
                    losses.append(loss.detach())
                norm = None if place == "hosted" else rows.squared_norm()
                rows.step()
                dist.barrier()
                change = before - pulled(fields)
                dist.barrier()
                gradients: list[Any] = [parameter.grad for parameter in net.parameters()]
                whole = [item.full_tensor() if isinstance(item, DTensor) else item for item in gradients]
                dense = torch.cat([item.reshape(-1) for item in whole])
                found[f"{loss_of.__name__}, {wrap}"] = losses, dense, before, change, norm
    torch.save(found, folder / f"{rank}.pt")


def pulled(fields: gt.EmbeddingGroup) -> Tensor:
    return torch.stack([torch.as_tensor(fields.table(name).pull(torch.arange(ROWS))) for name in ("user", "item")])


def expected(loss_of: Callable[[Tensor, Tensor], Tensor], before: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
    """The joint mean by one worker, or the average over the ranks of what each would do alone."""
    net, rows = network().double(), before.double().requires_grad_()
    values = []
    for micro in MICRO:
        own = []
        for share in micro if loss_of is own_mean else [slice(micro[0].start, micro[1].stop)]:
            ids, targets, weights = batch(share)
            vectors = {"user": rows[0][ids["user"]].sum(1), "item": rows[1][ids["item"]].sum(1)}
            own.append(loss_of(losses_of(net, vectors, targets.double()), weights))
        loss = torch.stack(own).mean()
        loss.backward()
        values.append(loss.detach())
    assert rows.grad is not None
    return values, torch.cat([parameter.grad.reshape(-1) for parameter in net.parameters()]), rows.grad  # type: ignore[union-attr]


@pytest.mark.parametrize("place", PLACES)
def test_network_and_rows_follow_one_loss(place: str, served: Callable[..., Any], tmp_path: Path) -> None:
    run_ranks(train_rank, 2, tmp_path, place, None if place == "ranks" else served(2).address)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for loss_of in LOSSES:
        for key in (f"{loss_of.__name__}, {wrap}" for wrap in WRAPS):
            losses, dense, before, change, norm = first[key]
            wanted_losses, wanted_dense, wanted_change = expected(loss_of, before)
            if loss_of is not own_mean:
                assert losses == second[key][0], key  # the same number on every rank
                torch.testing.assert_close(losses, [item.float() for item in wanted_losses])
            torch.testing.assert_close(dense.double(), wanted_dense, rtol=1e-4, atol=1e-6, msg=key)
            torch.testing.assert_close(change.double(), wanted_change, rtol=1e-4, atol=1e-6, msg=key)
            if norm is not None:
                assert norm == pytest.approx(float(wanted_change.square().sum()), rel=1e-4), key


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_mean_of_16_bit_losses_needs_no_sum_of_16_bits(dtype: torch.dtype) -> None:
    losses = torch.full((20_000,), 7.0, dtype=dtype).requires_grad_()
    for weights in (None, torch.full_like(losses, 3.0, requires_grad=False)):
        mean = gt.mean_over_ranks(losses, weights)
        assert mean.dtype == dtype
        assert mean == 7.0
        torch.testing.assert_close(torch.autograd.grad(mean, losses)[0], torch.full_like(losses, 1 / 20_000))


def test_losses_and_weights_that_are_none_are_refused() -> None:
    losses = torch.ones(3, requires_grad=True)
    assert gt.mean_over_ranks(losses, torch.tensor([1.0, 0.0, 3.0])) == 1
    for wrong in ([1.0], torch.ones(3, dtype=torch.int64)):
        with pytest.raises(gt.errors.InvalidArgument, match=r"losses is .*a floating point tensor"):
            gt.mean_over_ranks(wrong)  # type: ignore[arg-type]
    for weights in ([1.0] * 3, torch.ones(2), torch.ones(3, requires_grad=True)):
        with pytest.raises(gt.errors.InvalidArgument, match=r"weights is .*it must be a tensor \[3\]"):
            gt.mean_over_ranks(losses, weights)  # type: ignore[arg-type]
