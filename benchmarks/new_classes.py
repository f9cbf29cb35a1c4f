"""Effect of classes added from examples on the existing classes.

    python benchmarks/new_classes.py

2,000 classes of five samples (``_default_problems.py``). A head begins with nine tenths of the classes, then the rest
is added from its training samples, or so many that they are a hundredth of all. On held-out samples: accuracy over the
old classes before and after, and over the new ones; the same with ``add_classes(rows=...)`` of unit means as they are.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from _common import result, threads
from _default_problems import Problem, problems
from torch import Tensor, nn
from torch.nn import functional as F

import geartrain as gt
from geartrain.launch.bench import Result

STEPS, FULL_STEPS = 600, 2400
FEW_SAMPLES = 3
"""Number of the problem."""
PARTS = (0.01, 0.1)
"""Of the classes are new."""
ALLOWED_POINTS = 1.0
HEADS: dict[str, dict[str, Any]] = {"no margin": {}, "ArcFace()": {"margin": gt.ArcFace()}}
STARTS = {"untrained, imprinted": (True, False), "trained": (False, True), "imprinted, trained": (True, True)}
"""Name -> whether the head is imprinted, whether it trains."""


class Accuracy(NamedTuple):
    """Per cent."""

    before: float
    after: float
    new: float
    plain_after: float
    plain_new: float


def results(full: bool = False) -> Iterator[Result]:
    """Yield the cases of ``geartrain bench new_classes``; ``full`` trains four times as long."""
    for case, seen in measured(FULL_STEPS if full else STEPS):
        allowed = max(seen.before - ALLOWED_POINTS, 1e-3)
        rival = f"before they came, less {ALLOWED_POINTS}"
        yield result(f"old classes, {case}", seen.after, rival, allowed, "%", target=1.0, more_is_better=True)


def measured(steps: int) -> Iterator[tuple[str, Accuracy]]:
    """Each case as it is done."""
    with threads(2):
        problem = problems(0, steps)[FEW_SAMPLES]()
        for (margin, settings), (start, (imprints, trains)) in itertools.product(HEADS.items(), STARTS.items()):
            for part, seen in _accuracies(problem, settings, imprints, steps if trains else 0):
                yield f"{margin}, {start}, {part:.0%} new", seen


def _accuracies(
    problem: Problem, settings: dict[str, Any], imprints: bool, steps: int
) -> Iterator[tuple[float, Accuracy]]:
    torch.manual_seed(0)
    backbone, num_old = problem.backbone(), int(0.9 * problem.num_classes)
    inputs, labels = (torch.cat(parts) for parts in zip(*problem.batches, strict=True))
    old = list(zip(*(values[labels < num_old].split(128) for values in (inputs, labels)), strict=True))
    with gt.local(num_shards=1) as cluster:
        head = gt.ClassHead(
            cluster, "classes", num_classes=problem.num_classes, num_live_classes=num_old, dim=problem.dim, **settings
        )
        if imprints:
            head.imprint(old, backbone, progress=lambda _: None)
        optimizer = gt.joint(torch.optim.AdamW(backbone.parameters(), lr=1e-3), head)
        for some, of in old[:steps]:
            head(backbone(some), of).backward()
            optimizer.step()
            optimizer.zero_grad()
        tests = problem.test[0], problem.test[1]
        before = _top1(head, backbone, *tests, torch.arange(num_old))
        for part in PARTS:
            wanted = labels[labels >= num_old].unique()[: max(1, int(part * problem.num_classes))]
            chosen = torch.isin(labels, wanted)
            numbers = torch.searchsorted(wanted, labels[chosen])
            with torch.no_grad():
                features = backbone.eval()(inputs[chosen])
            plain = F.normalize(torch.zeros(len(wanted), head.dim).index_add_(0, numbers, features))
            seen = []
            for given in ({"examples": [(inputs[chosen], numbers)], "backbone": backbone}, {"rows": plain}):
                ids = head.add_classes(len(wanted), **given)
                seen.append(_top1(head, backbone, *tests, torch.arange(num_old)))
                seen.append(_top1(head, backbone, *tests, wanted, ids))
                head.retire_classes(ids)
            yield part, Accuracy(before, *seen)


@torch.no_grad()
def _top1(
    head: gt.ClassHead, backbone: nn.Module, inputs: Tensor, labels: Tensor, wanted: Tensor, ids: Tensor | None = None
) -> float:
    """Over the samples of the classes ``wanted``, rising, which the head knows as ``ids``."""
    chosen = torch.isin(labels, wanted)
    answers = head.predict(backbone.eval()(inputs[chosen]), k=1)[1][:, 0]
    theirs = (wanted if ids is None else ids)[torch.searchsorted(wanted, labels[chosen])]
    return 100 * float((answers == theirs).double().mean())


def main() -> None:
    """Print the table."""
    print(
        "| classes | old, before | old, after | new | old, plain means | new, plain means |\n|---|---|---|---|---|---|"
    )
    for case, seen in measured(int(sys.argv[1]) if len(sys.argv) > 1 else STEPS):
        print(f"| {case} | {' | '.join(f'{value:.1f}' for value in seen)} |", flush=True)


if __name__ == "__main__":
    main()
