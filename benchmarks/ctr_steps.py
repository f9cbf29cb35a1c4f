"""Training time of ``geartrain worker ctr`` by default, against ten fixed numbers of steps.

Ratings of films and of lectures (InstEval), with ``--full`` three million flights. The rivals train a quarter of an
epoch to twelve, and look at no validation; all are tested on the same samples. The default is to be within 0.005 of
the AUC of the best of them, in at most 1.3 times its time; its looks are to take at most 5 % of it. Times are seconds
of all processors of whole jobs, snapshots and test included, but for the reading of the samples; those of the default,
of the best rival, and of the default without any look are taken in turns.

``python benchmarks/ctr_steps.py [insteval] [movielens] [flights]`` prints all of them as a table.
"""

from __future__ import annotations

import io
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from _common import result, threads
from _insteval import find_insteval
from rich.console import Console

from geartrain.launch.bench import Result
from geartrain.workers.ctr.recipe import CtrRecipe, recipe_for
from geartrain.workers.ctr.samples.click_samples import ClickSamples
from geartrain.workers.ctr.samples.sources import load_samples
from geartrain.workers.ctr.trainer import ClickTrainer
from geartrain.workers.job.job import run_job
from geartrain.workers.job.options import JobOptions

EPOCHS = (0.25, 0.5, 1, 1.5, 2, 3, 4, 6, 8, 12)
ALLOWED, TIMES, SHARE = 0.005, 1.3, 5.0
TURNS = 3
SEEDS = {"insteval": 3, "movielens": 1, "flights": 1}
_CACHE = Path(".cache")


def results(full: bool = False) -> Iterator[Result]:
    """Yield the cases of ``geartrain bench ctr_steps``."""
    for data in ("insteval", "movielens", *(["flights"] if full else [])):
        yield from _cases(data)


def _cases(data: str) -> Iterator[Result]:
    with threads(1):
        yield from _compared(data, SEEDS[data])


def _compared(data: str, seeds: int) -> Iterator[Result]:
    source = str(find_insteval(_CACHE)) if data == "insteval" else data
    samples, recipe = load_samples(source, _CACHE, print), recipe_for(source)
    recipes = [recipe, *(replace(recipe, epochs=float(epochs)) for epochs in EPOCHS)]
    found = [
        [_trained(samples, replace(each, seed=seed), at == 0) for seed in range(seeds)]
        for at, each in enumerate(recipes)
    ]
    aucs = [statistics.mean(report["held_out"]["auc"] for report, _ in runs) for runs in found]
    ours, *theirs = aucs
    best = max(range(len(EPOCHS)), key=theirs.__getitem__)
    sides = ((recipe, True), (recipes[1 + best], False), (recipe, False))
    turns = [[_trained(samples, *side) for side in sides] for _ in range(TURNS)]
    mine, others, plain = (statistics.median(turn[side][1] for turn in turns) for side in range(3))
    share = statistics.median(100 * turn[0][0]["phases"]["looks"] / turn[0][0]["train_seconds"] for turn in turns)
    print(_table(data, seeds, found, aucs, best, (mine, others)), file=sys.stderr, flush=True)
    case = f"{data}, {seeds} seeds"
    rival = f"{EPOCHS[best]:g} epochs, the best of ten"
    yield result(
        f"AUC, {case}", ours, f"{rival}, less {ALLOWED}", theirs[best] - ALLOWED, "AUC", target=1.0, more_is_better=True
    )
    yield result(f"time, {case}", mine, rival, others, "s", target=1 / TIMES)
    yield result(f"looks at the validation, {case}", share, f"{SHARE:g} % of the training", SHARE, "%", target=1.0)
    rival = "as many steps, no look and no snapshot of the best"
    yield result(f"time with the validation, {case}", mine, rival, plain, "s", target=100 / (100 + SHARE))


class _Loaded(ClickTrainer):
    """Has its samples in memory."""

    samples: ClickSamples

    @classmethod
    def load(cls, *_: Any) -> tuple[str, ClickSamples]:  # type: ignore[override]
        return "", cls.samples


class _NeverLooks(_Loaded):
    """Trains so many steps, and that is all."""

    def between(self) -> None:
        pass

    def trained(self) -> None:
        pass


def _trained(samples: ClickSamples, recipe: CtrRecipe, looks: bool) -> tuple[dict[str, Any], float]:
    """The report of a job, and the seconds it took."""
    trainer = _Loaded if looks else _NeverLooks
    _Loaded.samples = samples
    with tempfile.TemporaryDirectory() as folder:
        options = JobOptions(job="ctr", out=Path(folder) / "run", recipe=recipe, data=".", loggers=())
        started = time.process_time()
        report = run_job(trainer, options, Console(file=io.StringIO())).report
        seconds = time.process_time() - started
    assert report is not None
    return report, seconds


def _table(
    data: str,
    seeds: int,
    found: list[list[tuple[dict[str, Any], float]]],
    aucs: list[float],
    best: int,
    turns: tuple[float, float],
) -> str:
    """AUC and time of every number of steps, beside those of the best one, in Markdown."""
    names = ["default", *(f"{epochs:g}" for epochs in EPOCHS)]
    seconds = [statistics.median(seconds for _, seconds in runs) for runs in found]
    lines = [
        f"| {data}, {seeds} seeds: epochs | steps | AUC | AUC less the best's | s | time / the best's |",
        "|---|---|---|---|---|---|",
    ]
    for name, runs, auc, took in zip(names, found, aucs, seconds, strict=True):
        steps = f"{statistics.mean(report['steps'] for report, _ in runs):,.0f}"
        ratio = turns[0] / turns[1] if name == "default" else took / seconds[1 + best]
        lines.append(f"| {name} | {steps} | {auc:.4f} | {auc - aucs[1 + best]:+.4f} | {took:.1f} | {ratio:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    for name in sys.argv[1:] or SEEDS:
        for each in _cases(name):
            print(each, flush=True)
