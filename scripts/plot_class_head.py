"""Draw docs/explanation/class-head-traffic.svg: bytes that a step of a class head moves, for each place of the rows.

From the formulas of docs/explanation/class-heads.md; nothing is measured. Needs matplotlib: pip install '.[bench]'.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import numpy.typing as npt
import plots
from matplotlib.ticker import EngFormatter

DIM, BATCH, SHARDS, RANKS, NUMBER_BYTES = 128, 128, 2, 2, 4
ROWS_CACHE_BYTES = 64 << 20
PATH = Path(__file__).resolve().parent.parent / "docs" / "explanation" / "class-head-traffic.svg"

Counts = npt.NDArray[np.float64]


def pulled(active: Counts) -> Counts:
    """Rows down and gradients up, with their ids; rows that do not fit come down twice."""
    travels = np.where(active * DIM * NUMBER_BYTES > ROWS_CACHE_BYTES, 3, 2)
    return travels * active * (DIM * NUMBER_BYTES + 8)


def hosted() -> int:
    """Features to every shard twice and sums back, the target rows once."""
    return 4 * BATCH * DIM * (3 * SHARDS + 1) + 40 * BATCH * SHARDS


def on_ranks() -> int:
    """What a rank gives and takes: features, labels, three numbers a sample, feature gradients."""
    return BATCH * RANKS * (4 * DIM + 8 + 24 + 4 * DIM)


def main() -> None:
    """Write the plot."""
    classes = np.logspace(4, 8, 200)
    figure, axes = plt.subplots(figsize=(4.8, 3.6))
    axes.loglog(classes, pulled(classes), label="pull, full softmax")
    axes.loglog(classes, pulled(0.1 * classes), label="pull, 10 % active")
    axes.loglog(classes, np.full_like(classes, on_ranks()), "--", label=f"ranks ({RANKS})")
    axes.loglog(classes, np.full_like(classes, hosted()), ":", label="hosted, full or partial")
    axes.set(xlabel="classes", ylabel="bytes of a step and rank")
    axes.xaxis.set_major_formatter(EngFormatter())
    axes.yaxis.set_major_formatter(EngFormatter("B"))
    axes.grid(alpha=0.3)
    axes.legend()
    plots.save(figure, PATH)


if __name__ == "__main__":
    main()
