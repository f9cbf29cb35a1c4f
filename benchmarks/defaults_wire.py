"""Rows of a head that travel in 16 bits, beside float32: held-out accuracy.

Pairs of letters, 1,352 classes, two optimizers, as many seeds as ``geartrain bench defaults`` takes. Rows of a shard
in this process are rounded as those on the way from another. The ratio is that to float32 less 0.5 points.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from typing import Any

from defaults import ALLOWED_POINTS, HEADS, SEEDS, STEPS, WIRES, run_all, table


def results(full: bool = False) -> Iterator[dict[str, Any]]:
    """The cases of ``geartrain bench defaults`` about rows on the way; ``full`` takes twice the seeds."""
    arms = [f"{head}, {wire}" for head in HEADS for wire in WIRES]
    accuracies = run_all(arms, seeds=SEEDS * (2 if full else 1), steps=STEPS, num_problems=1)
    for problem, found in accuracies.items():
        for head in HEADS:
            own = {wire: found[f"{head}, {wire}"] for wire in WIRES}
            print(table({f"{problem}, {head}": own}), file=sys.stderr)
            wide = statistics.mean(own["float32"]) - ALLOWED_POINTS
            for wire in list(WIRES)[1:]:
                ours = statistics.mean(own[wire])
                yield {
                    "case": f"{problem}, {len(own[wire])} seeds, {head}: {wire}",
                    "ours": round(ours, 2),
                    "rival": f"float32, less {ALLOWED_POINTS}",
                    "theirs": round(wide, 2),
                    "unit": "%",
                    "ratio": round(ours / wide, 3),
                    "target": 1.0,
                }
