"""A version of an export with what was written since the one before, against one with all rows: seconds and bytes.

10 M rows of 16 values with Adagrad in a hashed table on two shards; 1 % of them, drawn evenly, are pushed between two
versions. Both are written to the disk of the checkout and synced, shards and exporter in this process. Then what a
follower takes to apply that increment, against reading all rows.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from _calls import result

import geartrain as gt
from geartrain.launch.bench import Result

NUM_ROWS, DIM, SHARE, SHARDS = 10_000_000, 16, 0.01, 2
FILLED = 250_000
ROUNDS = 3
FOLDER = Path(".cache")
"""On the disk of the checkout; the system's temporary folder may be memory."""


def results(full: bool = False) -> Iterator[Result]:
    """The export's cases of ``geartrain bench sparse``; ``full`` takes three times as many versions."""
    FOLDER.mkdir(exist_ok=True)
    seconds: dict[str, list[float]] = {"whole": [], "increment": []}
    sizes: dict[str, list[int]] = {"whole": [], "increment": []}
    case = f"{SHARE:.0%} of {NUM_ROWS:,} rows, D={DIM}, {SHARDS} shards"
    with tempfile.TemporaryDirectory(dir=FOLDER) as name:
        folder = Path(name)
        with gt.local(num_shards=SHARDS) as cluster:
            table = cluster.create_table("bench", dim=DIM, optimizer=gt.Adagrad(0.05))
            random = np.random.default_rng(0)
            for start in range(0, NUM_ROWS, FILLED):
                table.push(np.arange(start, start + FILLED), random.standard_normal((FILLED, DIM), np.float32))
            for _ in range(ROUNDS * (3 if full else 1)):
                shutil.rmtree(folder, ignore_errors=True)  # a new base each time, so that the disk does not fill
                for kind, share in (("whole", 0.0), ("increment", SHARE)):
                    ids = random.choice(NUM_ROWS, int(share * NUM_ROWS), replace=False)
                    table.push(ids, random.standard_normal((len(ids), DIM), np.float32))
                    began = time.perf_counter()
                    pending = cluster.export("bench", folder)
                    pending.result()
                    seconds[kind].append(time.perf_counter() - began)
                    sizes[kind].append(sum(file.stat().st_size for file in Path(pending.path).iterdir()))
        yield _against("s", case, {kind: statistics.median(own) for kind, own in seconds.items()}, 10.0)
        yield _against("MB", case, {kind: statistics.median(own) / 1e6 for kind, own in sizes.items()}, 30.0)
        yield _follower(folder, case)


def _follower(folder: Path, case: str) -> Result:
    """From here on the cluster's memory is free again."""
    newest = folder / "version-000000002"
    hidden = newest.rename(folder / ".later")
    follower: list[gt.TableFollower] = []
    whole = _seconds(lambda: follower.append(gt.TableFollower(folder)))
    hidden.rename(newest)
    increment = _seconds(follower[0].refresh)
    return result(f"a follower takes {case}", increment, "reading all rows", whole, "s", target=None)


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _against(unit: str, case: str, figures: dict[str, float], target: float) -> Result:
    return result(f"export ({unit}) of {case}", figures["increment"], "all rows", figures["whole"], unit, target=target)
