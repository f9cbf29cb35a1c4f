"""Weights, ignored labels and reductions where ranks train together: rows take Σ amount · loss / Σ amount of the ranks.

An amount is what a rank's mean is over, its samples or their weights; 1 where the loss is no mean. Ranks are real
processes (gloo), one of them without samples.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

import geartrain as gt
from geartrain.ams.values.errors import InvalidArgument, SyncError
from tests.integration.conftest import ServedCluster
from tests.support.rank_processes import run_ranks
from tests.support.reference import UNIT_SGD, plain_logits, sampled_weights
from tests.unit.bridge.head.test_reductions import BATCH, CLASSES, DIM, MARGINS, SELECTIONS, Question, close

SHARES = [slice(0, 7), slice(7, 7), slice(7, BATCH)]
JOINT = [
    Question("mean", "some", 3, MARGINS[1], SELECTIONS[1]),
    Question("mean", "none", 3, None, SELECTIONS[0]),
    Question("sum", "none", 2, MARGINS[1], SELECTIONS[0]),
    Question("mean", "none", 1, None, SELECTIONS[0], smoothing=0.2),
    Question("none", "some", 0, MARGINS[2], SELECTIONS[1]),
    Question("mean", "mixed", 0, None, SELECTIONS[2]),
]


def weights_of(question: Question, rank: int) -> Tensor | None:
    """Of a rank's samples; "mixed": the last rank gives none."""
    if question.weights == "mixed":
        return None if rank == 2 else torch.arange(1.0, BATCH + 1)[SHARES[rank]]
    weight = question.batch()[2]
    return None if weight is None else weight[SHARES[rank]]


def joint_row_gradient(question: Question, rows: Tensor) -> Tensor:
    """By autograd, [C, D]: of every rank's loss times its share."""
    features, labels, _ = question.batch() if question.weights != "mixed" else Question().batch()
    w = rows.double().requires_grad_()
    kept = labels[labels != -100]
    active = question.select.select(kept.numpy(), CLASSES, 0).ids
    corrections = sampled_weights(question.select, question.margin, active, kept, CLASSES)
    general = None if question.margin is None else question.margin.combined
    total, amounts = torch.zeros((), dtype=torch.float64), []
    for rank, share in enumerate(SHARES):
        counted = labels[share] != -100
        targets = torch.from_numpy(np.searchsorted(active, labels[share][counted].numpy()))
        x = features[share][counted].double()
        logits = plain_logits(x, w[torch.from_numpy(active)], targets, general, corrections)
        losses = F.cross_entropy(logits, targets, reduction="none", label_smoothing=question.smoothing)
        weight = weights_of(question, rank)
        counts = torch.ones(len(x), dtype=torch.float64) if weight is None else weight[counted].double()
        amounts.append(float(counts.sum()) if question.reduction == "mean" else 1.0)
        total = total + (losses * counts).sum()  # amount · mean, or the sum times 1
    (total / sum(amounts)).backward()
    assert w.grad is not None
    return w.grad


def train_rank(rank: int, ranks: int, folder: Path, place: str, address: str | None) -> None:
    del ranks
    changes: dict[str, Any] = {}
    with nullcontext() if address is None else gt.connect(address) as cluster:
        for number, question in enumerate(JOINT):
            asked = question if question.weights != "mixed" else Question(margin=None, select=question.select)
            head = gt.ClassHead(
                cluster,
                f"head{number}",
                num_classes=CLASSES,
                dim=DIM,
                select=question.select,
                margin=question.margin,
                reduction=question.reduction,
                label_smoothing=question.smoothing,
                optimizer=UNIT_SGD,
                initializer=gt.Normal(std=0.5),
                rows=place,
                **({} if place == "ranks" else {"sync": True}),
            )
            rows = gt.RowOptimizer(head)
            features, labels, _ = asked.batch()
            share = SHARES[rank]
            before = head.weights()
            own = features[share].requires_grad_()
            loss = head(own, labels[share], weights_of(question, rank))
            loss.sum().backward()
            norm = rows.squared_norm()
            rows.step()
            dist.barrier()
            changes[f"before{number}"] = before.numpy()
            changes[f"change{number}"] = (before - head.weights()).numpy()
            changes[f"norm{number}"] = np.array(norm)
            dist.barrier()
        with pytest.raises(InvalidArgument if rank == 0 else SyncError):
            head(features[share], labels[share], torch.full((share.stop - share.start,), -1.0 if rank == 0 else 1.0))
    if rank == 0:
        np.savez(folder / "changes.npz", **changes)


@pytest.mark.parametrize("place", [pytest.param("pull", marks=pytest.mark.slow), "hosted", "ranks"])
def test_ranks_share_the_rows_by_what_their_losses_weigh(place: str, tmp_path: Path) -> None:
    served = None if place == "ranks" else ServedCluster(2)
    try:
        run_ranks(train_rank, len(SHARES), tmp_path, place, None if served is None else served.address)
    finally:
        if served is not None:
            served.stop()
    found = np.load(tmp_path / "changes.npz")
    for number, question in enumerate(JOINT):
        expected = joint_row_gradient(question, torch.from_numpy(found[f"before{number}"]))
        close(torch.from_numpy(found[f"change{number}"]), expected, 5e-4)
        assert float(found[f"norm{number}"]) == pytest.approx(float(expected.square().sum()), rel=1e-3)
