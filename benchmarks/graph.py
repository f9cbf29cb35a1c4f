"""Exact table of the 32 nearest class centers, against faiss: an IndexFlatIP that is built and searches itself.

Both begin with the same float32 rows and end with 32 neighbours of each row but itself, on the same threads; making
unit rows and building count. Ours and the rival alternate and figures are medians. Rows lie in clusters, as class
centers do (see ``_clustered.py``); those of a trained quickstart, if ``runs/quickstart`` is there, are a case of their
own, and tell how uneven the parts of ranks are that keep, of every list, the neighbours whose rows they have.

Memory is what a fresh process holds at its highest, rows included, beyond what it held before it had any; its rival is
the budget: rows + table + 256 MiB. Sizes are those of the arrays that ``ams/graph/service/store.py`` writes.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from _clustered import clustered_rows
from _common import result

from geartrain.ams.graph.building.builder import build_neighbours
from geartrain.ams.graph.building.neighbours import NeighbourTable
from geartrain.ams.graph.building.rows import ArrayRows
from geartrain.ams.graph.service.store import graph_sizes
from geartrain.ams.values.placement import NUM_BUCKETS
from geartrain.ams.values.text import counted
from geartrain.launch.bench import Result

DIM = 128
K = 32
THREADS = 2
SLACK_MIB = 256.0
TIE = 2e-6
"""Two classes whose cosines differ by less are a tie to float32 products of 128 columns."""
TRAINED = Path("runs/quickstart/model/centers.safetensors")
PAPER_CLASSES, PAPER_K, PAPER_SHARDS, PAPER_GIB = 100_000_000, 1000, 256, 1.45

Rows = npt.NDArray[np.float32]


def results(full: bool = False) -> Iterator[Result]:
    """Yield the cases of ``geartrain bench graph``; ``full`` adds 200,000 rows."""
    for num_rows, rounds in ((50_000, 3), (200_000, 1))[: 2 if full else 1]:
        case = f"exact graph of {num_rows:,} clustered rows, D={DIM}, k={K}"
        yield from _against_faiss(case, clustered_rows(num_rows, DIM), rounds)
        yield _memory(case, num_rows)
    if TRAINED.exists():
        from safetensors.numpy import load_file

        rows = load_file(TRAINED)["centers"]
        yield from _against_faiss(f"exact graph of {len(rows):,} trained characters, k={K}", rows, 3)
        yield from _imbalance(f"graph of {len(rows):,} trained characters, k={K}, cut by neighbour", rows)
    yield _largest_part()


def _against_faiss(case: str, rows: Rows, rounds: int) -> Iterator[Result]:
    import faiss

    faiss.omp_set_num_threads(THREADS)
    ours, theirs = [], []
    for _ in range(rounds):
        started = time.perf_counter()
        table = build_neighbours(ArrayRows(rows), K, num_threads=THREADS)
        ours.append(time.perf_counter() - started)
        started = time.perf_counter()
        lists = _faiss_lists(faiss, rows)
        theirs.append(time.perf_counter() - started)
    yield result(case, statistics.median(ours), "faiss IndexFlatIP", statistics.median(theirs), "s", target=1.0)
    differing = _rows_that_differ(rows, table, lists)
    equal = 100 * (1 - len(differing) / len(rows))
    same = f"{case}: rows with the same neighbours, up to ties"
    yield result(same, equal, "all", 100.0, "%", target=1.0, more_is_better=True)


def _imbalance(case: str, rows: Rows) -> Iterator[Result]:
    """What hubs, classes in many lists, make of the parts of ranks."""
    table = build_neighbours(ArrayRows(rows), K, num_threads=THREADS)
    lists = np.bincount(table.neighbours, minlength=len(rows))
    yield result(f"{case}: lists that a class is in, at most", float(lists.max()), "mean", float(lists.mean()), "lists")
    for num_ranks in (8, 64):
        parts = np.array([part.sum() for part in np.array_split(lists, num_ranks)])
        largest = f"{case}: entries of the largest of {num_ranks} parts"
        yield result(largest, float(parts.max()), "mean", float(parts.mean()), "entries")


def _faiss_lists(faiss: Any, rows: Rows) -> npt.NDArray[np.int64]:
    """The neighbours [C, k] of every row, best first, but itself."""
    units = rows.copy()
    faiss.normalize_L2(units)
    index = faiss.IndexFlatIP(units.shape[1])
    index.add(units)
    _, found = index.search(units, K + 1)
    others = found != np.arange(len(rows))[:, None]
    others[others.all(axis=1), -1] = False  # copies of a row came before it: the last one is too many
    lists: npt.NDArray[np.int64] = found[others].reshape(len(rows), K)
    return lists


def _rows_that_differ(rows: Rows, table: NeighbourTable, lists: npt.NDArray[np.int64]) -> list[int]:
    """Rows of which some neighbour, by rank, has a cosine that is not the other's, in double and but for a tie."""
    ours = table.neighbours.reshape(-1, K)
    units = rows.astype(np.float64)
    units /= np.maximum(np.linalg.norm(units, axis=1, keepdims=True), 1e-300)
    differing: list[int] = []
    for start in range(0, len(rows), 1000):
        at = slice(start, start + 1000)
        cosines = [np.einsum("nd,nkd->nk", units[at], units[ids[at]]) for ids in (ours, lists)]
        differing += (start + np.flatnonzero(np.abs(cosines[0] - cosines[1]).max(axis=1) > TIE)).tolist()
    return differing


def _memory(case: str, num_rows: int) -> Result:
    child = subprocess.run([sys.executable, __file__, str(num_rows)], check=True, stdout=subprocess.PIPE, text=True)
    measured = json.loads(child.stdout)
    budget = num_rows * DIM * 4 / 2**20 + measured["table_mib"] + SLACK_MIB
    return result(f"{case}: memory", measured["peak_mib"], "budget", budget, "MiB", target=1.0)


def _measure_memory(num_rows: int) -> dict[str, float]:
    """What this process holds at most while it has the rows and builds their table."""
    build_neighbours(ArrayRows(clustered_rows(1000, DIM)), K, num_threads=THREADS)  # threads and libraries are there
    before = _status_kib("VmRSS")
    rows = clustered_rows(num_rows, DIM)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew: making the rows is not building
    table = build_neighbours(ArrayRows(rows), K, num_threads=THREADS)
    return {"peak_mib": (_status_kib("VmHWM") - before) / 1024, "table_mib": table.num_bytes / 2**20}


def _status_kib(key: str) -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith(f"{key}:"))


def _largest_part() -> Result:
    sizes = graph_sizes(PAPER_CLASSES, PAPER_K, [NUM_BUCKETS // PAPER_SHARDS] * PAPER_SHARDS)
    whole = counted(PAPER_CLASSES, "class", "classes")
    case = f"graph of {whole}, k={PAPER_K}: {sizes.whole_bytes / 2**30:.0f} GiB whole, a part of {PAPER_SHARDS} shards"
    ours = max(sizes.shard_bytes) / 2**30
    return result(case, ours, "100M-class paper, 372 GB whole", PAPER_GIB, "GiB")


if __name__ == "__main__":
    print(json.dumps(_measure_memory(int(sys.argv[1]))))
