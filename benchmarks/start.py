"""How long a user waits before anything happens: importing, and a cluster of processes with empty tables.

Each case is the median of fresh processes whose files the system has in memory; the rivals are budgets. The import is
timed in a process that has imported torch: of the name alone, and of what a training loop uses, which loads it.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

ROUNDS = 5
IMPORT_SECONDS, READY_SECONDS = 0.5, 3.0
IMPORTS = {
    "import geartrain": "import geartrain",
    "the names of a training loop": "from geartrain import ClassHead, CosFace, PartialFC, RowOptimizer, connect, local",
}
_TIMED = "import time, torch; began = time.perf_counter(); {}; print(time.perf_counter() - began)"


def results(full: bool = False) -> Iterator[dict[str, Any]]:
    """The cases of ``geartrain bench start``; ``full`` starts four times as many processes."""
    rounds = ROUNDS * (4 if full else 1)
    for name, statement in IMPORTS.items():
        yield _case(f"{name}, beyond import torch", _median(_import_seconds, statement, rounds), IMPORT_SECONDS)
    for shards in (1, 4):
        yield _case(f"geartrain up --shards={shards}, until ready", _median(_up_seconds, shards, rounds), READY_SECONDS)


def _median(measure: Any, of: Any, rounds: int) -> float:
    measure(of)  # files that nobody has read yet
    return statistics.median(measure(of) for _ in range(rounds))


def _import_seconds(statement: str) -> float:
    command = [sys.executable, "-c", _TIMED.format(statement)]
    return float(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout)


def _up_seconds(shards: int) -> float:
    command = [
        sys.executable,
        "-m",
        "geartrain",
        "up",
        "--json",
        f"--shards={shards}",
        "--scheduler-listen=127.0.0.1:0",
    ]
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as up:
        try:
            assert up.stdout is not None
            json.loads(up.stdout.readline())
            return time.perf_counter() - began
        finally:
            up.terminate()


def _case(case: str, seconds: float, budget: float) -> dict[str, Any]:
    return {
        "case": case,
        "ours": round(seconds, 3),
        "rival": "budget",
        "theirs": budget,
        "unit": "s",
        "ratio": round(budget / seconds, 2),
        "target": 1.0,
    }
