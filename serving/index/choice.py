"""Chooses the index for centers by their size and the recall that is asked for, measured against exact search.

Legend: C classes, K centers of a class, D width, N features.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from geartrain.ams.values.arguments import integer
from geartrain.ams.values.errors import ConfigError, InvalidArgument
from geartrain.ams.values.text import quoted
from geartrain.serving.index.exact import EncodedRows
from geartrain.serving.index.nearest import NearestIndex
from geartrain.serving.index.queries import Floats
from geartrain.serving.index.shortcut import KINDS, FaissShortcut, build

EXACT_IS_ENOUGH = 32 << 20
"""Numbers of all centers, up to which an exact search of one feature takes some milliseconds on two cores."""
NUM_QUERIES = 1000
_COSINE_OF_NOISE = 0.6
"""Of a center and a feature made of it: held-out images of hard classes are as far away."""
_EFFORTS = tuple(2**power for power in range(2, 10))
_BATCH = 32
_WORTHWHILE = 2.0
"""How much faster than exact search another index must be."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """An index, and what was measured of it."""

    index: NearestIndex
    facts: dict[str, Any]
    shortcut: FaissShortcut | None


def choose_index(
    rows: EncodedRows,
    *,
    is_cosine: bool,
    asked_recall: float = 1.0,
    kind: str | None = None,
    queries: Floats | None = None,
    threads: int = 1,
) -> Choice:
    """The fastest index whose recall@1, measured, is at least ``asked_recall``; the exact one if no other is.

    ``kind``: of :data:`KINDS`, or "exact"; that alone is tried, and taken if its recall is enough.
    Raises InvalidArgument, ConfigError (a kind of faiss without faiss).
    """
    if not 0 < asked_recall <= 1:
        raise InvalidArgument(f"asked_recall is {asked_recall!r}; it must be above 0 and at most 1")
    if kind not in (None, "exact", *KINDS):
        raise InvalidArgument(f"kind is {quoted(kind)}; it must be one of exact, {', '.join(KINDS)}")
    exact = NearestIndex(rows, is_cosine=is_cosine, threads=threads, facts={})
    tried: list[dict[str, Any]] = []
    if kind in KINDS or (kind is None and asked_recall < 1 and rows.centers.size > EXACT_IS_ENOUGH):
        queries = sample_queries(rows.centers) if queries is None else queries[: NUM_QUERIES * 10]
        truth, exact_seconds = _answers(exact, queries)
        for candidate in (kind,) if kind in KINDS else ("ivf", "hnsw"):
            try:
                shortcut = build(str(candidate), rows, threads)
            except ConfigError:
                if kind is not None:
                    raise
                break
            index, facts = _tuned(shortcut, rows, is_cosine, threads, queries, truth, exact_seconds, asked_recall)
            if facts["recall_at_1"] >= asked_recall and (kind is not None or facts["speed_of_exact"] >= _WORTHWHILE):
                facts |= {"asked_recall": asked_recall, "passed_over": tried}
                return Choice(index=index, facts=facts, shortcut=shortcut)
            tried.append(facts)
    facts = {"kind": "exact", "asked_recall": asked_recall, "recall_at_1": 1.0, "passed_over": tried}
    return Choice(index=exact, facts=facts, shortcut=None)


def sample_queries(centers: Floats, count: int = NUM_QUERIES) -> Floats:
    """Features [N, D] as of images of some classes: their centers with noise, of a cosine of 0.6 with them."""
    generator = np.random.default_rng(0)
    count = min(integer("count", count, 1), len(centers))
    chosen = np.sort(generator.choice(len(centers), count, replace=False))
    features = np.asarray(centers[chosen] if centers.ndim == 2 else centers[chosen, 0], np.float64)
    lengths = np.linalg.norm(features, axis=1, keepdims=True)
    noise = generator.standard_normal(features.shape) / np.sqrt(features.shape[1])
    mixed: Floats = (_COSINE_OF_NOISE * features + np.sqrt(1 - _COSINE_OF_NOISE**2) * lengths * noise).astype(
        np.float32
    )
    return mixed


def _tuned(
    shortcut: FaissShortcut,
    rows: EncodedRows,
    is_cosine: bool,
    threads: int,
    queries: Floats,
    truth: Floats,
    exact_seconds: float,
    asked_recall: float,
) -> tuple[NearestIndex, dict[str, Any]]:
    """The index with the least effort that finds enough, or with the most."""
    for effort in _EFFORTS if shortcut.kind != "flat" else (1,):
        shortcut.effort = effort
        index = NearestIndex(rows, is_cosine=is_cosine, threads=threads, facts={}, shortcut=shortcut)
        found, seconds = _answers(index, queries)
        recall = float((found >= truth).mean())
        if recall >= asked_recall:
            break
    return index, {
        "kind": shortcut.kind,
        "effort": effort,
        "recall_at_1": recall,
        "recall_queries": len(queries),
        "speed_of_exact": round(exact_seconds / seconds, 2),
    }


def _answers(index: NearestIndex, queries: Floats) -> tuple[Floats, float]:
    """The best score of each feature, and the seconds that it took."""
    started = time.perf_counter()
    scores = [index.search(queries[at : at + _BATCH], 1)[0][:, 0] for at in range(0, len(queries), _BATCH)]
    return np.concatenate(scores), time.perf_counter() - started
