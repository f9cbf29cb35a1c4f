"""A class head with nothing said beside ``nn.Linear``, cross entropy and AdamW: held-out accuracy after equal steps.

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
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import torch
import typer
from _default_problems import Problem, problems, with_wrong_labels
from _row_wise_adamw import RowWiseAdamW
from torch import nn
from torch.nn import functional as F

import geartrain as gt
from geartrain.bridge.head.loss.margins.scale import with_scale

SEEDS, STEPS = 3, 400
ALLOWED_POINTS, ALLOWED_POINTS_OF_SCALE, ALLOWED_POINTS_OF_GRAPH = 0.5, 2.0, 1.0
THREADS = 2
LINEAR, DEFAULT, ARCFACE, BY_HAND = "nn.Linear", "ClassHead", "ArcFace()", "20 lines"
LAYERS = {LINEAR: torch.optim.AdamW, "nn.Linear, row-wise AdamW": RowWiseAdamW}
"""What trains the weights of a plain layer."""
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
OTHERS: dict[str, dict[str, Any]] = {
    "bias=True": {"bias": True},
    "PartialFC(0.5)": {"select": gt.PartialFC(0.5)},
    "PartialFC(0.1)": {"select": gt.PartialFC(0.1)},
    "PartialFC(0.1, corrected=False), AdamW(1e-3)": {
        "select": gt.PartialFC(0.1, corrected=False),
        "optimizer": gt.AdamW(1e-3),
    },
    "AdamW(3e-4)": {"optimizer": gt.AdamW(3e-4)},
    "AdamW(3e-3)": {"optimizer": gt.AdamW(3e-3)},
    "SparseMomentum(0.1)": {"optimizer": gt.SparseMomentum(0.1)},
    "SparseMomentum(1)": {"optimizer": gt.SparseMomentum(1.0)},
    **{
        f"PartialFC({rate}), {name}": {"select": gt.PartialFC(rate), "optimizer": optimizer}
        for rate in (0.5, 0.1)
        for name, optimizer in {
            "AdamW(1e-3)": gt.AdamW(1e-3),
            "Adagrad(0.05)": gt.Adagrad(0.05),
            "SparseMomentum(0.1)": gt.SparseMomentum(0.1),
        }.items()
    },
    "Normal(std=0.01)": {"initializer": gt.Normal(std=0.01)},
    "CosFace()": {"margin": gt.CosFace()},
    "CosFace(margin=0)": {"margin": gt.CosFace(margin=0.0)},
    "ArcFace(margin=0.2)": {"margin": gt.ArcFace(margin=0.2)},
    **{
        f"ArcFace(), KNNSoftmax(0.1, near={near})": {"margin": gt.ArcFace(), "select": gt.KNNSoftmax(0.1, near=near)}
        for near in (0.25, 0.5, 1.0)
    },
    "ArcFace(), AdamW(1e-3)": {"margin": gt.ArcFace(), "optimizer": gt.AdamW(1e-3)},
    "ArcFace(), AdamW(1e-2)": {"margin": gt.ArcFace(), "optimizer": gt.AdamW(1e-2)},
    "ArcFace(), SparseMomentum(0.1)": {"margin": gt.ArcFace(), "optimizer": gt.SparseMomentum(0.1)},
    "ArcFace(), Normal(std=0.01)": {"margin": gt.ArcFace(), "initializer": gt.Normal(std=0.01)},
    **{f"ArcFace({scale})": {"margin": gt.ArcFace(scale)} for scale in (4, 8, 12, 24)},
    **{f"ArcFace(), sub_centers={k}": {"margin": gt.ArcFace(), "sub_centers": k} for k in (2, 3)},
    **IMPRINTED,
    **{layer: {} for layer in LAYERS},
}
WIRES: dict[str, dict[str, Any]] = {
    "float32": {},
    **{dtype: {"wire_dtype": dtype} for dtype in ("bfloat16", "float16")},
}
"""In which type rows travel -> arguments of the head."""
HEADS: dict[str, dict[str, Any]] = {
    "AdamW(1e-3)": {"optimizer": gt.AdamW(1e-3)},
    "ArcFace(), SparseMomentum(0.1)": OTHERS["ArcFace(), SparseMomentum(0.1)"],
}
"""Those whose rows travel so -> their arguments."""
OTHERS |= {
    f"{head}, {wire}": {**settings, **travels} for head, settings in HEADS.items() for wire, travels in WIRES.items()
}
Accuracies = dict[str, dict[str, list[float]]]
"""Problem -> arm -> per cent, seed by seed."""


def results(full: bool = False) -> Iterator[dict[str, Any]]:
    """The cases of ``geartrain bench defaults``; ``full`` takes three times as many steps, and twice the seeds."""
    accuracies = run_all(list(ARMS), seeds=SEEDS * (2 if full else 1), steps=STEPS * (3 if full else 1))
    print(table(accuracies), file=sys.stderr)
    yield from cases(accuracies)


def cases(accuracies: Accuracies) -> list[dict[str, Any]]:
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
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    accuracies: Accuracies = {}
    try:
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
    finally:
        torch.set_num_threads(threads)
    return accuracies


def table(accuracies: Accuracies) -> str:
    """Mean accuracies, and the difference from the first arm with its standard error, in Markdown."""
    lines: list[str] = []
    for problem, arms in accuracies.items():
        first = next(iter(arms.values()))
        lines += ["", f"| {problem}, {len(first)} seeds | % | points more than {next(iter(arms))} |", "|---|---|---|"]
        lines += [f"| {arm} | {statistics.mean(own):.2f} | {_told(own, first)} |" for arm, own in arms.items()]
    return "\n".join(lines)


def _what_trains(problem: Problem, arm: str) -> str:
    """The same for arms that do the same: ArcFace(), whose scale is automatic, and ArcFace of that scale."""
    if arm in LAYERS or arm in IMPRINTED or arm == BY_HAND:
        return arm
    settings = {**ARMS, **OTHERS}[arm]
    margin = settings.get("margin")
    return repr({**settings, "margin": None if margin is None else with_scale(margin, problem.num_classes)})


def _accuracy(problem: Problem, arm: str, seed: int) -> float:
    torch.manual_seed(seed)
    backbone = problem.backbone()
    if arm in LAYERS:
        return _of_linear(problem, backbone, seed, arm)
    if arm == BY_HAND:
        return _of_twenty_lines(problem, backbone)
    settings = {**ARMS, **OTHERS}[arm]
    with gt.local() as cluster:
        head = gt.ClassHead(cluster, "classes", num_classes=problem.num_classes, dim=problem.dim, seed=seed, **settings)
        if arm in IMPRINTED:
            head.imprint(problem.batches, backbone)
        network, rows = torch.optim.AdamW(backbone.parameters(), lr=1e-3), gt.RowOptimizer(head)
        for inputs, labels in problem.batches:
            head(backbone(inputs), labels).backward()
            network.step()
            rows.step()
            network.zero_grad()
            rows.zero_grad()
        return _top1(problem, backbone, lambda features: head.predict(features, k=1)[1][:, 0])


def _of_linear(problem: Problem, backbone: nn.Module, seed: int, arm: str) -> float:
    layer = nn.Linear(problem.dim, problem.num_classes)
    with gt.local() as cluster, torch.no_grad():  # its first weights are the head's, so that chance parts them less
        head = gt.ClassHead(cluster, "classes", num_classes=problem.num_classes, dim=problem.dim, seed=seed)
        layer.weight.copy_(head.weights())
    others = torch.optim.AdamW([*backbone.parameters(), layer.bias], lr=1e-3)
    optimizers = [others, LAYERS[arm]([layer.weight], lr=1e-3)]
    for inputs, labels in problem.batches:
        F.cross_entropy(layer(backbone(inputs)), labels).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return _top1(problem, backbone, lambda features: layer(features).argmax(1))


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
    return _top1(problem, backbone, lambda features: cosines(features).argmax(1))


@torch.no_grad()
def _top1(problem: Problem, backbone: nn.Module, answers: Callable[[torch.Tensor], torch.Tensor]) -> float:
    backbone.eval()
    inputs, labels = problem.test
    pairs = zip(inputs.split(1000), labels.split(1000), strict=True)
    right = sum(int((answers(backbone(some)) == their).sum()) for some, their in pairs)
    return right / len(labels)


def _told(ours: list[float], theirs: list[float]) -> str:
    points = [own - other for own, other in zip(ours, theirs, strict=True)]
    error = statistics.stdev(points) / math.sqrt(len(points)) if len(points) > 1 else math.nan
    return f"{statistics.mean(points):+.2f} ± {error:.2f}"


def _case(case: str, ours: list[float], rival: str, theirs: list[float], allowed: float) -> dict[str, Any]:
    mine, other = statistics.mean(ours), statistics.mean(theirs)
    return {
        "case": f"{case} points, {len(ours)} seeds",
        "ours": round(mine, 2),
        "rival": f"{rival}, less {allowed}",
        "theirs": round(other - allowed, 2),
        "unit": "%",
        "ratio": round(mine / max(other - allowed, 1e-3), 3),
        "target": 1.0,
    }


def main(
    arms: Annotated[list[str] | None, typer.Argument(help=f"Some of: {'; '.join([*ARMS, *OTHERS])}.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Of a run.")] = STEPS,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each arm.")] = SEEDS,
    wrong_labels: Annotated[float, typer.Option(min=0, max=1, help="Part of the labels drawn at random.")] = 0.0,
) -> None:
    """Print the table of accuracies."""
    print(table(run_all(arms or [*ARMS, *OTHERS], steps=steps, seeds=seeds, wrong_labels=wrong_labels)))


if __name__ == "__main__":
    typer.run(main)
