"""Held-out accuracy of KNN softmax beside full softmax and random classes, paired by seed: glyphs, and similar classes.

KNN softmax fills the places that labels leave by neighbours alone (``near=1``, as the paper does), by one for each
random class (the default) or by one for seven (``near=0.125``). Glyphs are trained by ``geartrain worker glyphs``. Two
problems, whose 4,000 classes lie in families of 20 that are alike, are trained here, with a plain softmax and a margin.

Every run of glyphs is a process of its own with the recipe of the quickstart; only the selection and the seed differ. A
finished run stays in ``.cache/accuracy`` under a name made from its arguments and that recipe, so a bench that was
stopped goes on where it was, and another number of seeds needs only the runs that are missing. What is compared is the
mean, over the seeds, of (top-1 of the selection − top-1 of full softmax with the same seed), with its standard error.

``python benchmarks/accuracy.py --help``: the same with fewer steps, classes or seeds.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from _common import result
from _default_problems import families, of_head
from _up import GEARTRAIN

import geartrain as gt
from geartrain.ams.programs.selection import Selection
from geartrain.launch.bench import Result
from geartrain.workers.job.keys import as_json
from geartrain.workers.recipes.recipe import GlyphRecipe

FOLDER = Path(".cache") / "accuracy"
SEEDS = 5
STEPS, CLASSES = 100, 4000
"""Of glyphs, unless all is asked for: the quickstart's recipe, with all characters."""
FAMILY_STEPS = 2500
ALLOWED_POINTS = 0.3
ARMS = {
    "full softmax": ("select=full",),
    "KNN 10 %, near=1": ("select=knn", "sample_rate=0.1", "neighbours=32", "near=1"),
    "KNN 10 %": ("select=knn", "sample_rate=0.1", "neighbours=32"),
    "KNN 10 %, near=0.125": ("select=knn", "sample_rate=0.1", "neighbours=32", "near=0.125"),
    "random 10 %": ("select=partial", "sample_rate=0.1"),
}
"""Name -> arguments of the worker; the first one is what the others are compared with."""
FAMILY_ARMS: dict[str, Selection] = {
    "full softmax": gt.FullSoftmax(),
    "KNN 10 %, near=1": gt.KNNSoftmax(0.1, near=1.0),
    "KNN 10 %": gt.KNNSoftmax(0.1),
    "KNN 10 %, near=0.125": gt.KNNSoftmax(0.1, near=0.125),
    "random 10 %": gt.PartialFC(0.1),
}
"""The same, for a head."""
LOSSES: dict[str, dict[str, Any]] = {"softmax": {}, "ArcFace": {"margin": gt.ArcFace()}}
BASE = next(iter(ARMS))

Reports = dict[str, list[dict[str, Any]]]
"""Name of an arm -> the ``report.json`` of each of its seeds."""


@dataclass(frozen=True)
class Difference:
    """Of held-out top-1, in points (per cent of the images)."""

    mean: float
    standard_error: float
    """Of the mean, over the pairs; NaN of a single pair."""


def results(full: bool = False) -> Iterator[Result]:
    """Yield the cases of ``geartrain bench accuracy``; ``full`` trains all characters, as long as the quickstart
    does."""
    steps, classes = (GlyphRecipe().steps, None) if full else (STEPS, CLASSES)
    reports = run_all(SEEDS, steps=steps, classes=classes)
    print(table(reports))
    yield from _results(reports)
    for loss, margin in LOSSES.items():
        reports = run_families(SEEDS, margin, FAMILY_STEPS)
        print(f"{loss}:\n{table(reports)}")
        yield from _results(reports)


def run_families(seeds: int, margin: dict[str, Any], steps: int) -> Reports:
    """Train on the problems of families, seed by seed; the reports of an arm are as those of the worker."""
    reports: Reports = {name: [] for name in ARMS}
    for seed in range(seeds):
        found: Reports = {name: [] for name in ARMS}
        for problem in families(seed, steps):
            for name, select in FAMILY_ARMS.items():
                torch.manual_seed(seed)
                began = time.process_time()
                top1 = of_head(problem, problem.backbone(), seed, select=select, **margin)
                found[name].append({"test": problem.name, "top1": top1, "seconds": time.process_time() - began})
                print(f"{problem.name}, {margin}, seed {seed}, {name}: {100 * top1:.2f} %", file=sys.stderr, flush=True)
        for name, problems in found.items():
            seconds = sum(one["seconds"] for one in problems)
            held_out = {one["test"]: {"top1": one["top1"]} for one in problems}
            reports[name].append({"held_out": held_out, "train_seconds": seconds, "phases": {}})
    return reports


def run_all(seeds: int, *, steps: int, classes: int | None) -> Reports:
    """Do the runs that are not there yet, seed by seed, and return what all of them reported."""
    reports: Reports = {name: [] for name in ARMS}
    for seed in range(seeds):
        for name, selection in ARMS.items():
            settings = [*selection, f"steps={steps}", f"snapshots.steps={steps}", f"seed={seed}"]
            if classes is not None:
                settings.append(f"classes={classes}")
            reports[name].append(_report(settings))
            print(f"{name}, seed {seed}: {_line(reports[name][-1])}", file=sys.stderr, flush=True)
    return reports


def difference(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]], test: str) -> Difference:
    """Ours − theirs on a held-out test, run by run."""
    points = [
        100 * (own["held_out"][test]["top1"] - other["held_out"][test]["top1"])
        for own, other in zip(ours, theirs, strict=True)
    ]
    error = statistics.stdev(points) / math.sqrt(len(points)) if len(points) > 1 else math.nan
    return Difference(statistics.mean(points), error)


def table(reports: Reports) -> str:
    """Accuracy and time of every arm, in Markdown."""
    tests = list(reports[BASE][0]["held_out"])
    heads = [f"{test}, top-1 % | against {BASE}, points" for test in tests]
    lines = [
        f"| {len(reports[BASE])} seeds | {' | '.join(heads)} | training, s | of that the graph, s |",
        "|---" * (3 + 2 * len(tests)) + "|",
    ]
    for name, own in reports.items():
        cells = [name]
        for test in tests:
            cells.append(f"{statistics.mean(100 * report['held_out'][test]['top1'] for report in own):.2f}")
            delta = difference(own, reports[BASE], test)
            cells.append("" if name == BASE else f"{delta.mean:+.2f} ± {delta.standard_error:.2f}")
        cells.append(f"{statistics.median(report['train_seconds'] for report in own):.0f}")
        cells.append(f"{statistics.median(_graph_seconds(report) for report in own):.1f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _results(reports: Reports) -> Iterator[Result]:
    others = [name for name in reports if name != BASE]
    for name in others:
        for test in reports[BASE][0]["held_out"]:
            delta = difference(reports[name], reports[BASE], test)
            case = f"{name}, {test}, {len(reports[name])} seeds: distance of top-1 from {BASE}"
            case += f" ({delta.mean:+.2f} ± {delta.standard_error:.2f})"
            target = 1.0 if name.startswith("KNN") else None
            yield result(case, max(abs(delta.mean), 1e-3), "allowed", ALLOWED_POINTS, "points", target=target)
    theirs = statistics.median(report["train_seconds"] for report in reports[BASE])
    for name in others:
        ours = statistics.median(report["train_seconds"] for report in reports[name])
        graph = statistics.median(_graph_seconds(report) for report in reports[name])
        case = f"{name}: training, {graph:.1f} s for the graph included"
        yield result(case, ours, BASE, theirs, "s")


def _report(settings: list[str]) -> dict[str, Any]:
    """What the run with these keys of the recipe reported, at any time before or now."""
    identity = json.dumps([settings, as_json(GlyphRecipe())], sort_keys=True)
    folder = FOLDER / hashlib.sha256(identity.encode()).hexdigest()[:16]
    path = folder / "report.json"
    if not path.exists():
        work = FOLDER / f"{folder.name}.running"
        shutil.rmtree(work, ignore_errors=True)  # of a run that was stopped
        command = [*GEARTRAIN, "worker", "glyphs", f"--out={work}"]
        command += [f"--set={setting}" for setting in settings]
        subprocess.run(command, check=True, stdout=sys.stderr)
        (work / "arguments.json").write_text(identity, encoding="utf-8")
        for part in ("snapshots", "model", "events"):
            shutil.rmtree(work / part)
        work.rename(folder)
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return report


def _line(report: dict[str, Any]) -> str:
    tests = ", ".join(f"{test} {100 * answers['top1']:.2f} %" for test, answers in report["held_out"].items())
    return f"{tests}; {report['train_seconds']:.0f} s, graph {_graph_seconds(report):.1f} s"


def _graph_seconds(report: dict[str, Any]) -> float:
    return float(report["phases"].get("graph", 0.0))


def main(
    steps: Annotated[int, typer.Option(min=1, help="Updates of a run.")] = GlyphRecipe().steps,
    classes: Annotated[int | None, typer.Option(help="Only so many characters.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each selection.")] = SEEDS,
    family_steps: Annotated[
        int | None, typer.Option(min=1, help="The problems of families, by so many updates.")
    ] = None,
) -> None:
    """Print the table of accuracies and times of glyphs, or those of the problems of families."""
    if family_steps is None:
        print(table(run_all(seeds, steps=steps, classes=classes)))
        return
    for loss, margin in LOSSES.items():
        print(f"{loss}:\n{table(run_families(seeds, margin, family_steps))}")


if __name__ == "__main__":
    typer.run(main)
