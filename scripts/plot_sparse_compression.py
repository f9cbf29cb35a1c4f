"""Draw docs/explanation/sample-trees.svg: what a sample costs with trees, with plain samples, and of torch.

Measures them: the curves of benchmarks/sparse_compression.py, in seconds of processors. Needs matplotlib and pyarrow:
pip install '.[bench,data]'.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt

import geartrain as gt

ROOT = Path(__file__).resolve().parent.parent
PATH = ROOT / "docs" / "explanation" / "sample-trees.svg"
sys.path.insert(0, str(ROOT / "benchmarks"))
import sparse_compression as bench  # noqa: E402

SIDES = ("sample trees", "plain samples", "torch, plain samples")


def main() -> None:
    """Measure, print and write the plot."""
    points: dict[str, list[tuple[int, list[float]]]] = {}
    with tempfile.TemporaryDirectory() as folder, gt.local() as cluster:
        for what, number, seconds in bench.curves(bench.Sides(cluster), Path(folder)):
            batch = number if what == "batch" else bench.BATCH
            points.setdefault(what, []).append((number, [batch / one for one in seconds]))
            print(what, number, *[f"{batch / one:,.0f}" for one in seconds], flush=True)
    mpl.rcParams.update({"svg.hashsalt": "geartrain", "svg.fonttype": "none", "font.size": 9})
    figure, both = plt.subplots(1, 2, figsize=(8, 3.4), sharey=True)
    for axes, (what, own) in zip(both, points.items(), strict=True):
        for side, label in enumerate(SIDES):
            axes.semilogx([number for number, _ in own], [rates[side] for _, rates in own], "o-", label=label)
        axes.set(xlabel="samples of a user" if what != "batch" else "samples of a batch")
        axes.grid(alpha=0.3)
    both[0].set(ylabel="samples per second of a processor", ylim=(0, None))
    both[0].legend()
    figure.tight_layout()
    figure.savefig(PATH, metadata={"Date": None})
    text = PATH.read_text(encoding="utf-8")
    PATH.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
