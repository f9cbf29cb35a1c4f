"""One float64 reference for every place where class rows can be: same losses, feature gradients and rows.

A place is a function that trains the recipe below and says what came out; each selection meets each margin. Ranks are
real processes (gloo); rows in a cluster are embedded. Ten steps with momentum, weight decay, uneven batches, one empty.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from geartrain.ams.client.factory import local
from geartrain.ams.programs.selection import ActiveClasses, FullSoftmax, PartialFC
from geartrain.ams.values.optimizers.registry import Momentum, SparseMomentum
from geartrain.ams.values.specs import DTypeName, Normal
from geartrain.bridge.head.class_head import ClassHead
from geartrain.bridge.head.loss.margins.angular import ArcFace, CombinedMargin, CosFace, SphereFace
from geartrain.bridge.head.loss.margins.margin import Margin
from geartrain.bridge.head.selection.knn_selection import KNNSoftmax
from geartrain.bridge.rows.optimizer import RowOptimizer
from geartrain.launch.hosting import local as hosting_cluster
from tests.specification.ops import nearest_neighbours
from tests.support import heads
from tests.support.plain_graph import table_of
from tests.support.rank_processes import run_ranks
from tests.support.reference import plain_gradients, sampled_weights

CLASSES, DIM, BATCH, STEPS, RANKS = 101, 8, 11, 10, 3
SHARES = {1: [11], 3: [6, 0, 5]}
"""Samples of each rank; they change places from step to step."""
REBUILD = 4
SELECTIONS: dict[str, FullSoftmax | PartialFC | KNNSoftmax] = {
    "full": FullSoftmax(),
    "partial": PartialFC(0.3, seed=5),
    "corrected": PartialFC(0.3, seed=5, corrected=True),
    "knn": KNNSoftmax(0.2, k=3, rebuild=REBUILD, seed=5, near=1.0),
}
MARGINS: dict[str, Margin | None] = {
    "arcface": ArcFace(16, 0.3),
    "cosface": CosFace(16, 0.2),
    "sphereface": SphereFace(8, 1.35),
    "combined": CombinedMargin(90.0, 1.1, 0.2, 0.1),
    "none": None,
}
OPTIMIZERS: dict[str, SparseMomentum | Momentum] = {
    "sparse": SparseMomentum(lr=0.3, momentum=0.9, weight_decay=1e-2),
    "nesterov": Momentum(lr=0.2, momentum=0.8, weight_decay=1e-3, nesterov=True),
}
INITIAL = Normal(std=0.3)
Array = npt.NDArray[Any]


@dataclass
class Outcome:
    """Mean losses [STEPS], gradients of the mean loss by the joint features [STEPS, B, D], last rows [C, D]."""

    losses: Array
    gradients: Array
    rows: Array


Case = tuple[str, str, str]
"""Names of a selection, a margin and an optimizer."""
CASES: list[Case] = [
    *itertools.product(["full", "partial", "knn"], MARGINS, ["sparse"]),
    ("partial", "arcface", "nesterov"),
    ("corrected", "cosface", "sparse"),
    ("corrected", "combined", "sparse"),
]


def joint_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    features = torch.randn(BATCH, DIM, generator=generator)
    labels = torch.randint(CLASSES, (BATCH,), generator=generator)
    labels[3] = labels[2]  # a class with two samples
    return features, labels


def share_of(rank: int, ranks: int, step: int) -> slice:
    sizes = SHARES[ranks][step % ranks :] + SHARES[ranks][: step % ranks]
    first = sum(sizes[:rank])
    return slice(first, first + sizes[rank])


def make_head(cluster: Any, case: Case, rows: str, **settings: Any) -> ClassHead:
    select, margin, optimizer = case
    return heads.make_head(
        cluster,
        "-".join(case),
        num_classes=CLASSES,
        dim=DIM,
        select=SELECTIONS[select],
        margin=MARGINS[margin],
        optimizer=OPTIMIZERS[optimizer],
        initializer=INITIAL,
        seed=7,
        rows=rows,
        **settings,
    )


def learning_rate(base: float, step: int) -> float:
    return base * (1 - step / (2 * STEPS))


def train_share(head: ClassHead, rank: int, ranks: int, steps: range = range(STEPS)) -> list[tuple[float, Array]]:
    """This rank's part of the joint mean and the gradients of that by its samples, per step."""
    rows = RowOptimizer(head)
    base = rows.param_groups[0]["lr"]
    said = []
    for step in steps:
        features, labels = joint_batch(step)
        share = share_of(rank, ranks, step)
        own = features[share].requires_grad_()
        rows.param_groups[0]["lr"] = learning_rate(base, step)
        loss = head(own, labels[share])
        loss.backward()
        rows.step()
        rows.zero_grad()
        assert own.grad is not None
        said.append((float(loss.detach()) / ranks, own.grad.numpy() / ranks))  # as averages over the ranks take it
    return said


def reference(case: Case) -> Outcome:
    """The same in float64, every logit and every row written out."""
    select, margin, name = case
    with local() as cluster:
        rows = make_head(cluster, case, "pull").weights().double()
    velocity = torch.zeros_like(rows)
    optimizer, margins = OPTIMIZERS[name], MARGINS[margin]
    losses, gradients = [], []
    choose = SELECTIONS[select]
    for step in range(STEPS):
        features, labels = joint_batch(step)
        if isinstance(choose, KNNSoftmax):
            if step % REBUILD == 0:
                lists = nearest_neighbours(rows.float().numpy(), choose.k)
                graph = table_of(lists.tolist(), choose.k)
            ids = graph.select(labels.numpy(), choose.budget(CLASSES), seed=choose.seed, step=step)
            active = ActiveClasses(len(ids), ids)
        else:
            active = choose.select(labels.numpy(), CLASSES, step)
        ids = torch.from_numpy(active.ids)
        targets = torch.from_numpy(active.positions(labels.numpy()))
        general = None if margins is None else margins.combined
        loss, x_gradient, w_gradient = plain_gradients(
            features, rows[ids], targets, general, sampled_weights(choose, margins, active.ids, labels, CLASSES)
        )
        direction = w_gradient + optimizer.weight_decay * rows[ids]
        velocity[ids] = optimizer.momentum * velocity[ids] + direction
        if isinstance(optimizer, Momentum) and optimizer.nesterov:
            change = direction + optimizer.momentum * velocity[ids]
        else:
            change = velocity[ids]
        rows[ids] -= learning_rate(optimizer.lr, step) * change
        losses.append(float(loss))
        gradients.append(x_gradient.numpy())
    return Outcome(np.array(losses), np.array(gradients), rows.numpy())


def in_cluster(cases: list[Case], folder: Path, *, rows: str) -> dict[Case, Outcome]:
    """One worker, two shards."""
    del folder
    outcomes = {}
    with hosting_cluster(2) as cluster:
        for case in cases:
            head = make_head(cluster, case, rows)
            said = train_share(head, 0, 1)
            outcomes[case] = joined([said], 1, head.weights().numpy())
    return outcomes


def on_ranks(cases: list[Case], folder: Path, ranks: int = RANKS) -> dict[Case, Outcome]:
    """rows="ranks" on processes of their own; 101 classes divide by no number of them."""
    run_ranks(_train_rank, ranks, folder, cases)
    parts = [np.load(folder / f"rank{rank}.npz") for rank in range(ranks)]
    outcomes = {}
    for case in cases:
        key = "-".join(case)
        said = []
        for part in parts:
            ends = np.cumsum(part[f"{key}/sizes"])[:-1]
            said.append(list(zip(part[f"{key}/losses"], np.split(part[f"{key}/gradients"], ends), strict=True)))
        outcomes[case] = joined(said, ranks, parts[-1][f"{key}/rows"])
    return outcomes


def alone(cases: list[Case], folder: Path) -> dict[Case, Outcome]:
    """rows="ranks" in this process, without torch.distributed and without a cluster."""
    del folder
    outcomes = {}
    for case in cases:
        head = make_head(None, case, "ranks")
        said = train_share(head, 0, 1)
        outcomes[case] = joined([said], 1, head.weights().numpy())
    return outcomes


def _train_rank(rank: int, ranks: int, folder: Path, cases: list[Case]) -> None:
    arrays: dict[str, Array] = {}
    for case in cases:
        key = "-".join(case)
        head = make_head(None, case, "ranks")
        said = train_share(head, rank, ranks)
        arrays[f"{key}/losses"] = np.array([loss for loss, _ in said])
        arrays[f"{key}/gradients"] = np.concatenate([gradient for _, gradient in said])
        arrays[f"{key}/sizes"] = np.array([len(gradient) for _, gradient in said])
        arrays[f"{key}/rows"] = head.weights().numpy()
    np.savez(folder / f"rank{rank}.npz", **arrays)  # type: ignore[arg-type]


def joined(said: list[list[tuple[float, Array]]], ranks: int, rows: Array) -> Outcome:
    assert len(said) == ranks
    losses = [sum(part[step][0] for part in said) for step in range(STEPS)]
    gradients = [np.concatenate([part[step][1] for part in said]) for step in range(STEPS)]
    return Outcome(np.array(losses), np.array(gradients), rows)


def require_close(outcome: Outcome, truth: Outcome, case: Case) -> None:
    for field in ("losses", "gradients", "rows"):
        mine, theirs = getattr(outcome, field), getattr(truth, field)
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=3e-4 * np.abs(theirs).max(), err_msg=f"{case} {field}")
    assert np.abs(truth.rows).max() > 0


PLACES: dict[str, Callable[[list[Case], Path], dict[Case, Outcome]]] = {
    "pull": partial(in_cluster, rows="pull"),
    "hosted": partial(in_cluster, rows="hosted"),
    "ranks": on_ranks,
    "one-rank": alone,
}


@pytest.fixture(scope="module")
def expected() -> dict[Case, Outcome]:
    return {case: reference(case) for case in CASES}


@pytest.mark.parametrize("place", PLACES)
def test_every_place_of_the_rows_equals_the_float64_reference(
    place: str, expected: dict[Case, Outcome], tmp_path: Path
) -> None:
    outcomes = PLACES[place](CASES, tmp_path)
    for case in CASES:
        require_close(outcomes[case], expected[case], case)


DTYPES: list[DTypeName] = ["float32", "float16", "bfloat16"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_on_a_rank_begin_as_those_of_a_cluster(dtype: DTypeName) -> None:
    case = CASES[0]
    with local(num_shards=3) as cluster:
        theirs = make_head(cluster, case, "pull", dtype=dtype).weights()
    assert torch.equal(make_head(None, case, "ranks", dtype=dtype).weights(), theirs)


@pytest.mark.parametrize("place", ["pull", "hosted", "ranks"])
def test_a_class_that_is_alone_has_no_loss_however_far_below_its_logit_is(place: str) -> None:
    with hosting_cluster(2) as cluster:
        head = ClassHead(
            None if place == "ranks" else cluster,
            "alone",
            num_classes=1,
            dim=4,
            select=FullSoftmax(),
            margin=CombinedMargin(64.0, 4.0, 0.2, 0.1),
            optimizer=SparseMomentum(0.1),
            initializer=INITIAL,
            rows=place,
        )
        features = (-head.weights().repeat(3, 1)).requires_grad_()  # the margin puts their logit near -500
        before = head.weights()
        loss = head(features, torch.zeros(3, dtype=torch.int64))
        loss.backward()
        RowOptimizer(head).step()
        assert features.grad is not None
        assert float(loss.detach()) == 0 and not features.grad.any()
        assert torch.equal(head.weights(), before)
