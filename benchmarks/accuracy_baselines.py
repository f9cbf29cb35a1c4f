"""Held-out accuracy of KNN softmax beside full softmax, random classes, selective softmax and MACH, paired by seed.

4,000 classes in 400 families of ten that look alike: the approximations differ in whether they find the family. Each
way has the same network, batches and optimizer (AdamW, 1e-3; rows of which a tenth is active learn at ten times that,
as a class head has it by default). KNN softmax, random classes and HF-A have 400 logits a sample, a tenth of the
classes; full softmax has all. Both baselines are plain torch, as their papers have them:

- selective softmax by a hashing forest, HF-A: Zhang et al., "Accelerated Training for Massive Classification via
  Dynamic Class Selection", AAAI 2018. Trees split the rows by the sides of random pairs until a leaf has few; a
  sample's active classes are those of its leaves. The forest is built anew every so many steps. HF-A takes as many
  classes as reach a part of the probability of all; that part is measured when the forest is built.
- MACH: Medini et al., "Extreme Classification in Log Memory using Count-Min Sketch", NeurIPS 2019. Classes are hashed
  into buckets R times, each with a network of its own and a softmax over B buckets; the score of a class is the mean
  of its buckets'. Buckets, R and their rate of learning (1e-2) are the best of some that were tried.

Legend: C classes, D width, N samples, B buckets, R repetitions.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import torch
import typer
from _common import result, threads
from _default_problems import Problem, families_of_ten, of_head, top1
from torch import Tensor, nn
from torch.nn import functional as F

import geartrain as gt
from geartrain.launch.bench import Result

SEEDS, STEPS, THREADS = 2, 600, 1
BUDGET = 400
RATE = 1e-2
"""Of the forest's rows and of buckets; networks learn at a tenth of it."""
TREES, LEAF, REBUILD_STEPS, PROBABILITY = 10, 40, 100, 0.9
"""Of the forest: its trees, the most rows of a leaf, how often it is built, and what active classes shall hold."""
BUCKETS, REPETITIONS = 32, 25
ALLOWED_POINTS = 0.5
FULL, NEAREST, RANDOM = "full softmax", "KNN softmax 10 %, near=1", "random classes 10 %"
HEADS: dict[str, dict[str, Any]] = {
    FULL: {},
    NEAREST: {"select": gt.KNNSoftmax(0.1, near=1.0)},
    "KNN softmax 10 %": {"select": gt.KNNSoftmax(0.1)},
    RANDOM: {"select": gt.PartialFC(0.1)},
}
"""Name -> arguments of the class head."""
FOREST, SKETCH = "selective softmax, HF-A", "MACH"


def results(full: bool = False) -> Iterator[Result]:
    """Yield the cases of ``geartrain bench accuracy_baselines``; ``full`` takes five seeds."""
    found = run_all(5 if full else SEEDS, STEPS)
    print(table(found), file=sys.stderr)
    for name in (FOREST, SKETCH, RANDOM):
        case = f"{NEAREST} ({points_between(found[NEAREST], found[name])} points)"
        ours, theirs = (statistics.mean(found[arm]) for arm in (NEAREST, name))
        yield result(case, ours, name, theirs, "%", more_is_better=True)
    ours, theirs = statistics.mean(found[NEAREST]), statistics.mean(found[FULL]) - ALLOWED_POINTS
    case = f"{NEAREST} ({points_between(found[NEAREST], found[FULL])} points)"
    yield result(case, ours, f"full softmax, less {ALLOWED_POINTS}", theirs, "%", target=1.0, more_is_better=True)


def run_all(seeds: int, steps: int) -> dict[str, list[float]]:
    """Per cent named rightly, seed by seed, of each way."""
    found: dict[str, list[float]] = {name: [] for name in (*HEADS, FOREST, SKETCH)}
    with threads(THREADS):
        for seed in range(seeds):
            problem = families_of_ten(seed, steps)
            for name, own in found.items():
                torch.manual_seed(seed)
                if name in HEADS:
                    own.append(100 * of_head(problem, problem.backbone(), seed, **HEADS[name]))
                else:
                    own.append(100 * (_of_forest(problem) if name == FOREST else _of_sketch(problem)))
                print(f"seed {seed}, {name}: {own[-1]:.2f} %", file=sys.stderr, flush=True)
    return found


def table(found: dict[str, list[float]]) -> str:
    """Mean accuracies, and the difference from full softmax with its standard error, in Markdown."""
    lines = [f"| {len(found[FULL])} seeds | top-1 % | points more than full softmax |", "|---|---|---|"]
    for name, own in found.items():
        lines.append(f"| {name} | {statistics.mean(own):.2f} | {points_between(own, found[FULL])} |")
    return "\n".join(lines)


def points_between(ours: list[float], theirs: list[float]) -> str:
    """The mean difference, run by run, with its standard error."""
    points = [own - other for own, other in zip(ours, theirs, strict=True)]
    error = statistics.stdev(points) / math.sqrt(len(points)) if len(points) > 1 else math.nan
    return f"{statistics.mean(points):+.2f} ± {error:.2f}"


class _Tree:
    """Rows split by random pairs of them: a row whose angle is smaller to the first of a pair goes left."""

    def __init__(self, rows_CD: Tensor) -> None:
        self.normals = list[Tensor]()
        self.children = list[list[int]]()
        self.leaves = list[Tensor]()
        self.root = self._split(F.normalize(rows_CD), torch.arange(len(rows_CD)), depth=0)

    def _split(self, rows_CD: Tensor, classes: Tensor, depth: int) -> int:
        """The number of the node of ``classes``: >= 0, or ~number of a leaf."""
        left = torch.zeros(len(classes), dtype=torch.bool)
        if len(classes) > LEAF and depth < 40:
            first, second = rows_CD[classes[torch.randperm(len(classes))[:2]]]
            normal = first - second
            left = rows_CD[classes] @ normal > 0
        if not left.any() or left.all():
            self.leaves.append(classes)
            return ~(len(self.leaves) - 1)
        node = len(self.children)
        self.normals.append(normal)
        self.children.append([0, 0])
        self.children[node] = [self._split(rows_CD, classes[side], depth + 1) for side in (~left, left)]
        return node

    def leaf_of(self, features_ND: Tensor) -> list[Tensor]:
        """The classes of the leaf of each feature, whatever its length."""
        sides = (features_ND @ torch.stack(self.normals).T > 0).tolist()
        found = []
        for side in sides:
            node = self.root
            while node >= 0:
                node = self.children[node][side[node]]
            found.append(self.leaves[~node])
        return found


def _of_forest(problem: Problem) -> float:
    backbone = problem.backbone()
    rows = nn.Embedding(problem.num_classes, problem.dim, sparse=True)
    nn.init.normal_(rows.weight, std=problem.dim**-0.5)
    network = torch.optim.AdamW(backbone.parameters(), lr=1e-3)
    of_rows = torch.optim.SparseAdam(rows.parameters(), lr=RATE)
    for step, (inputs, labels) in enumerate(problem.batches):
        features = backbone(inputs)
        if step % REBUILD_STEPS == 0:
            forest = [_Tree(rows.weight.detach()) for _ in range(TREES)]
            budget = _budget(rows.weight.detach(), features.detach(), len(labels.unique()))
        counts = torch.zeros(problem.num_classes)
        for tree in forest:
            for classes in tree.leaf_of(features.detach()):
                counts[classes] += 1
        counts[labels] = torch.inf  # labels first, then what most leaves hold
        active = counts.topk(min(budget, int((counts > 0).sum()))).indices
        places = torch.zeros(problem.num_classes, dtype=torch.int64)
        places[active] = torch.arange(len(active))
        F.cross_entropy(features @ rows(active).T, places[labels]).backward()
        for optimizer in (network, of_rows):
            optimizer.step()
            optimizer.zero_grad()
    return top1(problem, backbone, lambda features: (features @ rows.weight.T).argmax(1))


def _budget(rows_CD: Tensor, features_ND: Tensor, labels: int) -> int:
    """Of HF-A: the classes that hold enough of the probability, over the batch; at least twice the labels."""
    mean = (features_ND @ rows_CD.T).softmax(1).mean(0).sort(descending=True).values.cumsum(0)
    return min(BUDGET, max(2 * labels, int((mean < PROBABILITY).sum()) + 1))


class _Sketch(nn.Module):
    """R networks apart from each other, each with B buckets."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.networks = nn.ModuleList(problem.backbone() for _ in range(REPETITIONS))
        self.buckets = nn.ModuleList(nn.Linear(problem.dim, BUCKETS) for _ in range(REPETITIONS))

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits [N, R, B]."""
        pairs = zip(self.networks, self.buckets, strict=True)
        return torch.stack([buckets(network(inputs)) for network, buckets in pairs], 1)


def _of_sketch(problem: Problem) -> float:
    sketch, hashes_RC = _Sketch(problem), torch.randint(BUCKETS, (REPETITIONS, problem.num_classes))
    networks, buckets = list(sketch.networks.parameters()), list(sketch.buckets.parameters())
    optimizer = torch.optim.AdamW([{"params": networks, "lr": 1e-3}, {"params": buckets, "lr": RATE}])
    for inputs, labels in problem.batches:
        losses = F.cross_entropy(sketch(inputs).flatten(0, 1), hashes_RC[:, labels].T.flatten(), reduction="sum")
        (losses / len(labels)).backward()
        optimizer.step()
        optimizer.zero_grad()

    def answers(logits_NRB: Tensor) -> Tensor:
        chances = logits_NRB.softmax(2)
        return torch.stack([chances[:, turn, hashes] for turn, hashes in enumerate(hashes_RC)]).sum(0).argmax(1)

    return top1(problem, sketch, answers)


def main(
    steps: Annotated[int, typer.Option(min=1, help="Of a run.")] = STEPS,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each way.")] = SEEDS,
) -> None:
    """Print the table of accuracies."""
    print(table(run_all(seeds, steps)))


if __name__ == "__main__":
    typer.run(main)
