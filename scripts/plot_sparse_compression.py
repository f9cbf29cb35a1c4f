"""Draw the plots of sample trees in docs/explanation/benchmarks.md: samples per second with trees, plain, of torch.

Measures them: the curves of benchmarks/sparse_compression.py, in seconds of processors (sample-trees.svg), and those of
benchmarks/sparse_workers.py (sample-trees-workers.svg). ``curves`` or ``workers`` as an argument: only these. Needs
matplotlib and pyarrow: pip install '.[bench,data]'.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import plots

import geartrain as gt

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "explanation"
sys.path.insert(0, str(ROOT / "benchmarks"))
import sparse_compression  # noqa: E402
import sparse_workers  # noqa: E402

SIDES = ("sample trees", "plain samples", "torch, plain samples")


def draw_curves() -> None:
    """Measure, print and plot samples over repetition and batch."""
    points: dict[str, list[tuple[int, list[float]]]] = {}
    with tempfile.TemporaryDirectory() as folder, gt.local() as cluster:
        for what, number, seconds in sparse_compression.curves(sparse_compression.Sides(cluster), Path(folder)):
            batch = number if what == "batch" else sparse_compression.BATCH
            points.setdefault(what, []).append((number, [batch / duration for duration in seconds]))
            print(what, number, *[f"{batch / duration:,.0f}" for duration in seconds], flush=True)
    figure, both = plt.subplots(2, figsize=(4.8, 6.6), sharey=True)
    for axes, (what, own) in zip(both, points.items(), strict=True):
        for side, label in enumerate(SIDES):
            axes.semilogx([number for number, _ in own], [rates[side] for _, rates in own], "o-", label=label)
        axes.set(xlabel="samples of a user" if what != "batch" else "samples of a batch")
        axes.set(ylabel="samples/s of a processor")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.grid(alpha=0.3)
    both[0].set(ylim=(0, None))
    both[1].legend(loc="lower right")
    plots.save(figure, FOLDER / "sample-trees.svg")


def draw_workers() -> None:
    """Measure and print samples over the number of workers, and plot those per second of a processor."""
    cores, points = len(os.sched_getaffinity(0)), list(sparse_workers.curve())
    for number, sides in points:
        for label, rates in zip(SIDES, sides, strict=False):
            by_clock = f"{rates.a_second:,.0f}" if number <= cores else "-"
            print(number, label, by_clock, f"{rates.a_processor_second:,.0f} {rates.shards_part:.2f}", flush=True)
    figure, axes = plt.subplots(figsize=(4.8, 3.4))
    numbers = [number for number, _ in points]
    for side, label in enumerate(SIDES[:2]):
        axes.semilogx(numbers, [sides[side].a_processor_second for _, sides in points], "o-", base=2, label=label)
    axes.set(xlabel="workers", ylabel="samples/s of a processor", ylim=(0, None))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_xticks(numbers, labels=[str(number) for number in numbers])
    axes.grid(alpha=0.3)
    axes.legend()
    plots.save(figure, FOLDER / "sample-trees-workers.svg")


if __name__ == "__main__":
    drawings = {"curves": draw_curves, "workers": draw_workers}
    for chosen in sys.argv[1:] or drawings:
        drawings[chosen]()
