"""Exact search of 1,000,000 class centers, for a batch of 32 features and for one, against faiss and torch.

Rivals are faiss's IndexFlatIP and, for people who write it themselves, torch's product and topk; all use the same
threads and the same float32 rows, and find the 10 best. Calls alternate (A B A B) and figures are medians. Rows lie in
clusters, as class centers do (see ``_clustered.py``), and features are rows with noise, of a cosine of 0.6 with them.

Recall@1 is that of an index of faiss made for 50,000 rows with 0.99 asked for, on features that its effort was not
chosen by (see ``serving/index/choice.py``); beside it, how fast it is. ``--full`` lets the index of 1,000,000 rows be
chosen, which takes minutes.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from _clustered import clustered_rows
from _common import result, threads
from torch import nn

import geartrain as gt
from geartrain.launch.bench import Result
from geartrain.serving.index.choice import sample_queries
from geartrain.serving.index.nearest import NearestIndex
from geartrain.serving.index.registry import open_index, write_index

NUM_ROWS, FEW_ROWS, DIM, K = 1_000_000, 50_000, 128, 10
THREADS = 2
ASKED_RECALL = 0.99
ROUNDS = 9

Floats = npt.NDArray[np.float32]


def results(full: bool = False) -> Iterator[Result]:
    """Yield the cases of ``geartrain bench search``; ``full`` chooses an index of 1,000,000 rows, too."""
    rows = clustered_rows(NUM_ROWS, DIM)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    queries = sample_queries(rows, 320)
    queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    with tempfile.TemporaryDirectory() as folder, threads(THREADS):
        facts = write_index(Path(folder), rows, is_cosine=True, threads=THREADS)
        config = {"is_cosine": True, "index": facts}
        index = open_index(Path(folder), config, rows, threads=THREADS)
        yield from _exact(index, rows, queries)
        started = time.perf_counter()
        open_index(Path(folder), config, rows, threads=THREADS)
        yield result(f"open an index of {NUM_ROWS:,} rows", time.perf_counter() - started, "aim", 3.0, "s", target=1.0)
    for num_classes, batch in ((9_262, 256), (100_000, 1024)):
        yield from _predicted(rows[:num_classes], batch)
    for kind in ("ivf", "hnsw"):
        yield from _chosen(rows[:FEW_ROWS], kind)
    if full:
        yield from _chosen(rows, None)


def _exact(index: NearestIndex, rows: Floats, queries: Floats) -> Iterator[Result]:
    import faiss

    faiss.omp_set_num_threads(THREADS)
    flat = faiss.IndexFlatIP(DIM)
    flat.add(rows)
    all_rows = torch.from_numpy(rows)
    for batch, target in ((32, 2.0), (1, 1.0)):
        case = f"exact search of {NUM_ROWS:,} rows, D={DIM}, k={K}, batch of {batch}"
        ours, theirs, by_hand = _medians(
            [
                lambda some: index.search(some, K),
                lambda some: flat.search(some, K),
                lambda some: torch.topk(torch.from_numpy(some) @ all_rows.T, K),
            ],
            [queries[at : at + batch] for at in range(0, batch * ROUNDS, batch)],
        )
        yield result(case, 1e3 * ours, "faiss IndexFlatIP", 1e3 * theirs, "ms", target=target)
        yield result(case, 1e3 * ours, "torch product and topk", 1e3 * by_hand, "ms")
    _, found = index.search(queries[:32], K)
    true = queries[:32].astype(np.float64) @ rows.T.astype(np.float64)
    best = -np.sort(-true, axis=1)[:, :K]
    same = np.abs(np.take_along_axis(true, found, axis=1) - best).max(axis=1) < 1e-7
    case = f"exact search of {NUM_ROWS:,} rows: features with the {K} best of float64"
    yield result(case, 100 * float(same.mean()), "all", 100.0, "%", target=1.0, more_is_better=True)


def _predicted(rows: Floats, batch: int) -> Iterator[Result]:
    """What a head says in an evaluation: no row changes between two batches."""
    features = torch.from_numpy(sample_queries(rows, batch * ROUNDS).astype(np.float32))
    with threads(THREADS), gt.local(num_shards=2) as cluster:
        heads = {}
        for where in ("pull", "hosted"):
            heads[where] = gt.ClassHead(cluster, where, num_classes=len(rows), dim=DIM, margin=gt.ArcFace(), rows=where)
            cluster.table(where).assign(np.arange(len(rows)), rows)
        all_rows = torch.from_numpy(rows)
        pulled, hosted, by_hand = _medians(
            [
                lambda some: heads["pull"].predict(some, K),
                lambda some: heads["hosted"].predict(some, K),
                lambda some: torch.topk(nn.functional.normalize(some) @ all_rows.T, K),
            ],
            list(features.split(batch)),
        )
    case = f"head.predict of {len(rows):,} classes, D={DIM}, k={K}, batch of {batch:,}"
    yield result(f"{case}, rows pulled", 1e3 * pulled, "torch product and topk", 1e3 * by_hand, "ms", target=1.2)
    yield result(f"{case}, rows hosted", 1e3 * hosted, "torch product and topk", 1e3 * by_hand, "ms", target=1.2)


def _medians(sides: list[Callable[[Any], object]], batches: Sequence[Any]) -> list[float]:
    """Median seconds of a call of each side; the first round does not count."""
    seconds: list[list[float]] = [[] for _ in sides]
    for some in batches:
        for side, taken in zip(sides, seconds, strict=True):
            started = time.perf_counter()
            side(some)
            taken.append(time.perf_counter() - started)
    return [statistics.median(taken[1:]) for taken in seconds]


def _chosen(rows: Floats, kind: str | None) -> Iterator[Result]:
    with tempfile.TemporaryDirectory() as folder:
        asked = {"asked_recall": ASKED_RECALL, "kind": kind, "threads": THREADS}
        facts = write_index(Path(folder), rows, is_cosine=True, **asked)
        config = {"is_cosine": True, "index": facts}
        chosen = open_index(Path(folder), config, rows, threads=THREADS)
        exact = open_index(Path(folder), {**config, "index": {**facts, "kind": "exact"}}, rows, threads=THREADS)
        fresh = sample_queries(rows, 2000)[1::2]
        recall = float((chosen.search(fresh, 1)[0] >= exact.search(fresh, 1)[0]).mean())
        what = f"{'the index chosen' if kind is None else kind} ({facts['kind']}) of {len(rows):,} rows"
        yield result(f"recall@1 of {what}", recall, "asked", ASKED_RECALL, "", target=1.0, more_is_better=True)
        ours, theirs = _medians(
            [lambda some: chosen.search(some, K), lambda some: exact.search(some, K)],
            [fresh[at : at + 1] for at in range(100)],
        )
        yield result(f"search by {what}, batch of 1", 1e3 * ours, "exact search", 1e3 * theirs, "ms")
