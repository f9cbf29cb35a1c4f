"""Weights, ignored labels and reductions where ranks train together: rows take the mean, or the sum, over all samples.

Of ``reduction="none"`` they take the average of what the ranks make of their losses. Ranks are real processes (gloo),
one of them without samples.
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
from geartrain.ams.values.errors import InvalidArgument, SpecMismatch, SyncError
from tests.integration.conftest import ServedCluster
from tests.support import heads
from tests.support.rank_processes import run_ranks
from tests.support.reference import UNIT_SGD, plain_logits, sampled_weights
from tests.unit.bridge.head.test_reductions import BATCH, CLASSES, DIM, MARGINS, SELECTIONS, Question, close

SHARES = [slice(0, 7), slice(7, 7), slice(7, BATCH)]
JOINT = [
    Question("mean", "some", 3, MARGINS[1], SELECTIONS[1]),
    Question("mean", "none", 3, None, SELECTIONS[0]),
    Question("sum", "none", 2, MARGINS[1], SELECTIONS[0]),
    Question("mean", "none", 1, None, SELECTIONS[0], smoothing=0.2),
    Question("mean", "some", 2, None, SELECTIONS[0], smoothing=0.2),
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
    """By autograd, [C, D]: of the loss of all ranks."""
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
        amounts.append(float(counts.sum()))
        total = total + (losses * counts).sum()
    (total / {"mean": sum(amounts), "sum": 1, "none": len(SHARES)}[question.reduction]).backward()
    assert w.grad is not None
    return w.grad


def train_rank(rank: int, folder: Path, place: str, address: str | None) -> None:
    changes: dict[str, Any] = {}
    with nullcontext() if address is None else gt.connect(address) as cluster:
        for number, question in enumerate(JOINT):
            asked = question if question.weights != "mixed" else Question(margin=None, select=question.select)
            head = make_head(
                cluster,
                place,
                f"head{number}",
                select=question.select,
                margin=question.margin,
                reduction=question.reduction,
                label_smoothing=question.smoothing,
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
        changes |= change_by_micro_batches(cluster, place, rank)
        with pytest.raises(SpecMismatch):
            require_equal_settings(cluster, place, rank)
        if place == "ranks":
            with torch.no_grad(), pytest.raises(SpecMismatch, match=r"train\(\) without gradients', 'eval\(\)'"):
                head.train(rank == 0)(torch.randn(2, DIM), torch.zeros(2, dtype=torch.int64))
            head.train()
        with pytest.raises(InvalidArgument if rank == 0 else SyncError):
            head(features[share], labels[share], torch.full((share.stop - share.start,), -1.0 if rank == 0 else 1.0))
    if rank == 0:
        np.savez(folder / "changes.npz", **changes)


def micro_batch(number: int) -> tuple[Tensor, Tensor]:
    """Of all ranks; the first rank has most of one, and the last of the other."""
    features, labels, _ = Question(seed=number).batch()
    labels[[slice(2, BATCH), slice(0, 6)][number]] = -100
    return features, labels


def change_by_micro_batches(cluster: Any, place: str, rank: int) -> dict[str, Any]:
    """Of the rows, by a step of two."""
    head = make_head(cluster, place, "micro-batches", reduction="mean")
    rows, before = gt.RowOptimizer(head), head.weights()
    for number in range(2):
        features, labels = micro_batch(number)
        head(features[SHARES[rank]].requires_grad_(), labels[SHARES[rank]]).backward()
    rows.step()
    dist.barrier()
    change = (before - head.weights()).numpy()
    dist.barrier()
    return {"before": before.numpy(), "change": change}


def require_equal_settings(cluster: Any, place: str, rank: int) -> None:
    """With others on rank 0."""
    head = make_head(cluster, place, "settings", reduction="sum" if rank == 0 else "mean")
    head(torch.randn(2, DIM), torch.zeros(2, dtype=torch.int64))


def make_head(cluster: Any, place: str, name: str, **more: Any) -> gt.ClassHead:
    return heads.make_head(
        cluster,
        name,
        num_classes=CLASSES,
        dim=DIM,
        optimizer=UNIT_SGD,
        initializer=gt.Normal(std=0.5),
        rows=place,
        sync=place != "ranks",
        **more,
    )


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
    w = torch.from_numpy(found["before"]).double().requires_grad_()
    for number in range(2):
        features, labels = micro_batch(number)
        F.cross_entropy(features.double() @ w.t(), labels).backward()
    assert w.grad is not None
    close(torch.from_numpy(found["change"]), w.grad, 5e-4)
