"""Training jobs for test_sync_training: fixed data, a GroupNorm backbone, fp32. For one process or several ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import geartrain as gt

CLASSES, DIM, JOINT_BATCH, STEPS = 500, 16, 24, 6
SELECTIONS = {"full": gt.FullSoftmax(), "partial": gt.PartialFC(sample_rate=0.2)}


def backbone() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 8 * 8, DIM)
    )


def main(scheduler: str, out: str) -> None:
    """Train with either selection, alone or as one of the ranks there are; rank 0 writes losses, rows and the backbone
    to ``out``.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    trained = {f"{select}/{name}": array for select in SELECTIONS for name, array in train(scheduler, select, ranks)}
    if ranks == 1 or dist.get_rank() == 0:
        np.savez(out, **trained)
    if ranks > 1:
        dist.barrier()


def as_rank(scheduler: str, out: str) -> None:
    """For :func:`tests.support.rank_processes.run_ranks`."""
    main(scheduler, out)


def train(scheduler: str, select: str, ranks: int) -> list[tuple[str, np.ndarray[Any, Any]]]:
    rank = dist.get_rank() if ranks > 1 else 0
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(STEPS, JOINT_BATCH, 1, 8, 8, generator=generator)
    labels = torch.randint(0, CLASSES, (STEPS, JOINT_BATCH), generator=generator)
    model: nn.Module = backbone()
    if ranks > 1:
        model = DistributedDataParallel(model)
    with gt.connect(scheduler) as cluster:
        head = gt.ClassHead(
            cluster,
            select,
            num_classes=CLASSES,
            dim=DIM,
            select=SELECTIONS[select],
            margin=gt.ArcFace(scale=16, margin=0.2),
            optimizer=gt.SparseMomentum(lr=0.5, momentum=0.9, weight_decay=1e-3),
            initializer=gt.Normal(std=0.1),
            sync=True,
        )
        rows = gt.RowOptimizer(head)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        losses = []
        share = JOINT_BATCH // ranks
        mine = slice(rank * share, (rank + 1) * share)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = head(model(images[step, mine]), labels[step, mine])
            loss.backward()
            optimizer.step()
            rows.step()
            losses.append(loss.detach())
        joint = torch.stack(losses)
        if ranks > 1:
            dist.all_reduce(joint)
            joint /= ranks
        dense = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        if ranks > 1:
            dist.barrier()
        return [("losses", joint.numpy()), ("rows", head.weights().numpy()), ("dense", dense.numpy())]
