"""Rows on ranks beside a backbone that PyTorch replicates (DDP) or shards (FSDP2): one joint batch on one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from geartrain.ams.programs.selection import PartialFC
from geartrain.bridge.head.class_head import ClassHead
from geartrain.bridge.head.loss.margins.angular import CosFace
from geartrain.bridge.rows.optimizer import RowOptimizer
from tests.support.rank_processes import run_ranks

CLASSES, DIM, INPUTS, BATCH, STEPS = 53, 8, 10, 12, 6
FROZEN, ASKED, DROPPED = 2, 3, 4
"""Steps with frozen rows, with torch.autograd.grad, and with a backward pass that zero_grad() drops."""


class Classifier(nn.Module):
    """Backbone and head in one module."""

    def __init__(self, head: ClassHead) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.backbone = nn.Sequential(nn.Linear(INPUTS, 16), nn.Tanh(), nn.Linear(16, DIM))
        self.head = head

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.head(self.backbone(inputs), labels)
        return loss


def replicated(model: Classifier) -> nn.Module:
    model.backbone = DistributedDataParallel(model.backbone)  # type: ignore[assignment]
    return model


def replicated_whole(model: Classifier) -> nn.Module:
    return DistributedDataParallel(model)


def sharded(model: Classifier) -> nn.Module:
    for layer in (model.backbone[0], model.backbone[2], model.backbone):
        fully_shard(layer)
    return model


def sharded_whole(model: Classifier) -> nn.Module:
    return fully_shard(model)


WRAPPERS: dict[str, Callable[[Classifier], nn.Module]] = {
    "ddp": replicated,
    "ddp whole": replicated_whole,
    "fsdp2": sharded,
    "fsdp2 whole": sharded_whole,
}


def train(wrap: Callable[[Classifier], nn.Module], rank: int, ranks: int) -> dict[str, np.ndarray]:
    head = ClassHead(
        None,
        "classes",
        num_classes=CLASSES,
        dim=DIM,
        select=PartialFC(0.4),
        margin=CosFace(16, 0.2),
        rows="ranks",
    )
    model = wrap(Classifier(head))
    optimizer, rows = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), RowOptimizer(head)
    share = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(BATCH, INPUTS, generator=generator).requires_grad_()
        labels = torch.randint(CLASSES, (BATCH,), generator=generator)
        head.requires_grad_(step != FROZEN)
        loss = model(inputs[share], labels[share])
        if step == ASKED:  # which leaves no row gradient
            torch.autograd.grad(loss, inputs, retain_graph=True)
        loss.backward()
        if step == DROPPED:
            model.zero_grad()
            loss = model(inputs[share], labels[share])
            loss.backward()
        optimizer.step()
        rows.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()) / ranks)
    model.eval()
    with torch.no_grad():  # the loss of a head at rest, beside a backbone that gathers itself anew
        losses.append(float(model(inputs[share], labels[share])) / ranks)
    whole = [weight.full_tensor() if isinstance(weight, DTensor) else weight for weight in model.parameters()]
    return {
        "losses": np.array(losses),
        "rows": head.weights().numpy(),
        "backbone": torch.cat([weight.detach().reshape(-1) for weight in whole]).numpy(),
    }


def train_rank(rank: int, ranks: int, folder: Path) -> None:
    for name, wrap in WRAPPERS.items():
        np.savez(folder / f"{name}-{rank}.npz", **train(wrap, rank, ranks))  # type: ignore[arg-type]


def test_backbones_under_ddp_and_fsdp2_train_as_one_process_does(tmp_path: Path) -> None:
    run_ranks(train_rank, 2, tmp_path)
    expected = train(lambda model: model, 0, 1)
    for name in WRAPPERS:
        parts = [np.load(tmp_path / f"{name}-{rank}.npz") for rank in range(2)]
        found = {
            "losses": sum(part["losses"] for part in parts),
            **{key: parts[1][key] for key in ("rows", "backbone")},
        }
        for key, values in expected.items():
            atol = 2e-5 * np.abs(values).max()
            np.testing.assert_allclose(found[key], values, rtol=0, atol=atol, err_msg=f"{name}: {key}")
