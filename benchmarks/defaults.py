"""A class head with default settings beside ``nn.Linear``, cross entropy and AdamW: held-out accuracy after equal
steps.

Six problems, three seeds. Both sides begin with the same network, see the same batches, and AdamW (1e-3) trains the
network. ``ArcFace()``, whose scale and optimizer are automatic, is compared with the best of the scales 16, 32 and 64,
and with the ArcFace of twenty lines that everybody writes first. The ratio is ours to the rival's less what is allowed
(0.5 points; 2 points), so 1 is the target.

``python benchmarks/defaults.py --help``: other arms (selections, optimizers, margins, scales), steps and seeds, as a
table.
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
from _default_problems import Problem, of_head, problems, top1, with_wrong_labels
from torch import nn
from torch.nn import functional as F

import geartrain as gt
from geartrain.bridge.head.loss.margins.scale import with_scale
from geartrain.launch.bench import Result

NEEDS = ("fonticon_mdi7", "wordfreq")
SEEDS, STEPS = 3, 400
ALLOWED_POINTS, ALLOWED_POINTS_OF_SCALE, ALLOWED_POINTS_OF_GRAPH = 0.5, 2.0, 1.0
THREADS = 2
LINEAR, DEFAULT, ARCFACE, BY_HAND = "nn.Linear", "ClassHead", "ArcFace()", "20 lines"
SCALES = {f"ArcFace({scale})": {"margin": gt.ArcFace(scale)} for scale in (16, 32, 64)}
RANDOM, NEAREST = "ArcFace(), PartialFC(0.1)", "ArcFace(), KNNSoftmax(0.1)"
ARMS: dict[str, dict[str, Any]] = {
    LINEAR: {},
    DEFAULT: {},
    ARCFACE: {"margin": gt.ArcFace()},
    **SCALES,
    BY_HAND: {},
    RANDOM: {"margin": gt.ArcFace(), "select": gt.PartialFC(0.1)},
    NEAREST: {"margin": gt.ArcFace(), "select": gt.KNNSoftmax(0.1)},
}
"""Name -> arguments of the head."""
IMPRINTED: dict[str, dict[str, Any]] = {"imprinted": {}, "ArcFace(), imprinted": {"margin": gt.ArcFace()}}
"""Whose rows begin as means of the untrained network's features -> arguments of the head."""
WRITTEN = "or arguments of the head, such as 'margin=gt.ArcFace(8), sub_centers=3'"
Accuracies = dict[str, dict[str, list[float]]]
"""Problem -> arm -> per cent, seed by seed."""


def results(full: bool = False) -> Iterator[Result]:
    """Yield the cases of ``geartrain bench defaults``; ``full`` takes three times as many steps, and twice the
    seeds."""
    accuracies = run_all(list(ARMS), seeds=SEEDS * (2 if full else 1), steps=STEPS * (3 if full else 1))
    print(table(accuracies), file=sys.stderr)
    yield from cases(accuracies)


def cases(accuracies: Accuracies) -> list[Result]:
    """What is promised: the default head beside nn.Linear, the margin beside the best of three scales and 20 lines."""
    found = []
    for problem, arms in accuracies.items():
        case = f"{problem}: ClassHead with nothing said ({_told(arms[DEFAULT], arms[LINEAR])})"
        found.append(_case(case, arms[DEFAULT], "nn.Linear, cross entropy, AdamW", arms[LINEAR], ALLOWED_POINTS))
    for problem, arms in accuracies.items():
        best = max(SCALES, key=lambda arm: statistics.mean(arms[arm]))
        case = f"{problem}: margin=ArcFace() with nothing said ({_told(arms[ARCFACE], arms[best])})"
        rival = f"{best}, the best of 16, 32, 64"
        found.append(_case(case, arms[ARCFACE], rival, arms[best], ALLOWED_POINTS_OF_SCALE))
    for problem, arms in accuracies.items():
        case = f"{problem}: margin=ArcFace() with nothing said ({_told(arms[ARCFACE], arms[BY_HAND])})"
        rival = "ArcFace(16) in 20 lines, rows from N(0, 0.01), AdamW"
        found.append(_case(case, arms[ARCFACE], rival, arms[BY_HAND], ALLOWED_POINTS_OF_SCALE))
    for problem, arms in accuracies.items():
        case = f"{problem}: KNNSoftmax(0.1) with nothing said ({_told(arms[NEAREST], arms[RANDOM])})"
        found.append(_case(case, arms[NEAREST], RANDOM, arms[RANDOM], ALLOWED_POINTS_OF_GRAPH))
    return found


def run_all(
    arms: list[str], *, seeds: int, steps: int, wrong_labels: float = 0.0, num_problems: int | None = None
) -> Accuracies:
    """Train every arm on the first ``num_problems`` (None: all); a part of the training labels is drawn at random."""
    accuracies: Accuracies = {}
    with threads(THREADS):
        for seed in range(seeds):
            for make in problems(seed, steps)[:num_problems]:
                problem = with_wrong_labels(make(), wrong_labels, seed)
                own = accuracies.setdefault(f"{problem.name}, {problem.num_classes:,} classes", {})
                known: dict[str, float] = {}
                for arm in arms:
                    what = _what_trains(problem, arm)
                    known[what] = known[what] if what in known else 100 * _accuracy(problem, arm, seed)
                    own.setdefault(arm, []).append(known[what])
                    print(f"{problem.name}, seed {seed}, {arm}: {own[arm][-1]:.2f} %", file=sys.stderr, flush=True)
    return accuracies


def table(accuracies: Accuracies) -> str:
    """Mean accuracies, and the difference from the first arm with its standard error, in Markdown."""
    lines: list[str] = []
    for problem, arms in accuracies.items():
        first = next(iter(arms.values()))
        lines += ["", f"| {problem}, {len(first)} seeds | % | points more than {next(iter(arms))} |", "|---|---|---|"]
        lines += [f"| {arm} | {statistics.mean(own):.2f} | {_told(own, first)} |" for arm, own in arms.items()]
    return "\n".join(lines)


def _settings(arm: str) -> dict[str, Any]:
    """Arguments of the head: of a known arm, or as they are written."""
    known = ARMS | IMPRINTED
    return known[arm] if arm in known else eval(f"dict({arm})", {"gt": gt})


def _what_trains(problem: Problem, arm: str) -> str:
    """The same for arms that do the same: ArcFace(), whose scale is automatic, and ArcFace of that scale."""
    if arm in (LINEAR, BY_HAND, *IMPRINTED):
        return arm
    settings = _settings(arm)
    margin = settings.get("margin")
    return repr({**settings, "margin": None if margin is None else with_scale(margin, problem.num_classes)})


def _accuracy(problem: Problem, arm: str, seed: int) -> float:
    torch.manual_seed(seed)
    backbone = problem.backbone()
    if arm == LINEAR:
        return _of_linear(problem, backbone, seed)
    if arm == BY_HAND:
        return _of_twenty_lines(problem, backbone)
    return of_head(problem, backbone, seed, imprint=arm in IMPRINTED, **_settings(arm))


def _of_linear(problem: Problem, backbone: nn.Module, seed: int) -> float:
    layer = nn.Linear(problem.dim, problem.num_classes)
    with gt.local() as cluster, torch.no_grad():  # its first weights are the head's, so that chance parts them less
        head = gt.ClassHead(
            cluster, "classes", num_classes=problem.num_classes, dim=problem.dim, config=gt.HeadConfig(seed=seed)
        )
        layer.weight.copy_(head.weights())
    optimizer = torch.optim.AdamW([*backbone.parameters(), *layer.parameters()], lr=1e-3)
    for inputs, labels in problem.batches:
        F.cross_entropy(layer(backbone(inputs)), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return top1(problem, backbone, lambda features: layer(features).argmax(1))


def _of_twenty_lines(problem: Problem, backbone: nn.Module) -> float:
    rows = nn.Parameter(0.01 * torch.randn(problem.num_classes, problem.dim))
    optimizer = torch.optim.AdamW([*backbone.parameters(), rows], lr=1e-3)

    def cosines(features: torch.Tensor) -> torch.Tensor:
        return F.linear(F.normalize(features), F.normalize(rows))

    for inputs, labels in problem.batches:
        cosine = cosines(backbone(inputs))
        target = cosine.gather(1, labels[:, None]).clamp(-1 + 1e-6, 1 - 1e-6)
        turned = torch.where(target > -math.cos(0.5), torch.cos(torch.acos(target) + 0.5), target - 0.5 * math.sin(0.5))
        F.cross_entropy(16 * cosine.scatter(1, labels[:, None], turned), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return top1(problem, backbone, lambda features: cosines(features).argmax(1))


def _told(ours: list[float], theirs: list[float]) -> str:
    points = [own - other for own, other in zip(ours, theirs, strict=True)]
    error = statistics.stdev(points) / math.sqrt(len(points)) if len(points) > 1 else math.nan
    return f"{statistics.mean(points):+.2f} ± {error:.2f}"


def _case(case: str, ours: list[float], rival: str, theirs: list[float], allowed: float) -> Result:
    mine, other = statistics.mean(ours), statistics.mean(theirs)
    case, rival, other = f"{case} points, {len(ours)} seeds", f"{rival}, less {allowed}", max(other - allowed, 1e-3)
    return result(case, mine, rival, other, "%", target=1.0, more_is_better=True)


def main(
    arms: Annotated[list[str] | None, typer.Argument(help=f"{'; '.join([*ARMS, *IMPRINTED])}; {WRITTEN}.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Of a run.")] = STEPS,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each arm.")] = SEEDS,
    wrong_labels: Annotated[float, typer.Option(min=0, max=1, help="Part of the labels drawn at random.")] = 0.0,
) -> None:
    """Print the table of accuracies."""
    print(table(run_all(arms or list(ARMS), steps=steps, seeds=seeds, wrong_labels=wrong_labels)))


if __name__ == "__main__":
    typer.run(main)
