"""Choice of the index of class centers by their size and the asked recall, measured against exact search.

Legend: C classes, K centers of a class, D width, N features.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np

from geartrain.ams.values.arguments import integer
from geartrain.ams.values.errors import ConfigError, InvalidArgument
from geartrain.ams.values.text import quoted
from geartrain.serving.index.exact import EncodedRows, Floats
from geartrain.serving.index.nearest import NearestIndex
from geartrain.serving.index.shortcut import KINDS, FaissShortcut, build, load_faiss

EXACT_IS_ENOUGH = 32 << 20
"""Elements of all centers up to which an exact search of one feature takes some milliseconds on two cores."""
NUM_QUERIES = 1000
_COSINE_OF_NOISE = 0.6
"""Cosine of a center and a feature sampled from it: held-out images of hard classes are as far away."""
_EFFORTS = tuple(2**power for power in range(2, 10))
_BATCH = 32
_WORTHWHILE = 2.0
"""Required speedup of an index over exact search; half of that for an older index to be kept."""


def choose_index(
    rows: EncodedRows,
    *,
    is_cosine: bool,
    asked_recall: float = 1.0,
    kind: str | None = None,
    queries: Floats | None = None,
    older: FaissShortcut | None = None,
    threads: int = 1,
) -> tuple[dict[str, Any], FaissShortcut | None]:
    """Return the first index whose measured recall@1 is at least ``asked_recall`` and which is twice as fast as exact
    search: the measurements, and its shortcut.

    Tries ``ivf``, then ``hnsw``; falls back to exact search, which has no shortcut. With an ``asked_recall`` of 1, or
    up to :data:`EXACT_IS_ENOUGH` numbers, none is tried.

    ``kind``, from :data:`KINDS` or "exact", restricts the choice to one, used at any speed if its recall is enough;
    ``older`` restricts it to that index, used if it is no slower than exact search. Raises InvalidArgument, ConfigError
    (a faiss kind without faiss).
    """
    require_choice(asked_recall, kind)
    exact = NearestIndex(rows, is_cosine=is_cosine, threads=threads, facts={})
    tried: list[dict[str, Any]] = []
    if older or kind in KINDS or (kind is None and asked_recall < 1 and rows.centers.size > EXACT_IS_ENOUGH):
        queries = sample_queries(rows.centers) if queries is None else queries[: NUM_QUERIES * 10]
        worthwhile = 0.0 if kind else _WORTHWHILE / 2 if older else _WORTHWHILE
        exam = _ShortcutTrial(exact, queries, *_answers(exact, queries), asked_recall, worthwhile)
        candidates: tuple[str | FaissShortcut, ...] = ("ivf", "hnsw") if kind is None else (kind,)
        for candidate in (older,) if older else candidates:
            try:
                shortcut = build(candidate, rows, threads) if isinstance(candidate, str) else candidate
            except ConfigError:
                if kind is not None:
                    raise
                break
            facts = exam.tune(shortcut)
            if exam.is_passed(facts):
                facts |= {"asked_recall": asked_recall, "passed_over": tried}
                return facts, shortcut
            tried.append(facts)
    return {"kind": "exact", "asked_recall": asked_recall, "recall_at_1": 1.0, "passed_over": tried}, None


def require_choice(asked_recall: float, kind: str | None) -> None:
    """Raise InvalidArgument for values that :func:`choose_index` does not accept, ConfigError where faiss is
    missing."""
    if not 0 < asked_recall <= 1:
        raise InvalidArgument(f"asked_recall is {asked_recall!r}; it must be above 0 and at most 1")
    if kind not in (None, "exact", *KINDS):
        raise InvalidArgument(f"kind is {quoted(kind)}; it must be one of exact, {', '.join(KINDS)}")
    if kind in KINDS:
        load_faiss()


def sample_queries(centers: Floats, count: int = NUM_QUERIES) -> Floats:
    """Sample features [N, D] like those of images of some classes: their centers with noise, at a cosine of 0.6."""
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


class _ShortcutTrial(NamedTuple):
    """Measurement of a shortcut against exact search."""

    exact: NearestIndex
    queries: Floats
    truth: Floats
    """[N] the best scores."""
    exact_seconds: float
    asked_recall: float
    worthwhile: float
    """Required speedup over exact search."""

    def tune(self, shortcut: FaissShortcut) -> dict[str, Any]:
        """Set the least effort with enough recall, or the one at which it is too slow; return the measurements."""
        index = self.exact.by(shortcut)
        for effort in _EFFORTS if shortcut.kind != "flat" else (1,):
            shortcut.effort = effort
            found, seconds = _answers(index, self.queries)
            recall = float((found >= self.truth).mean())
            if recall >= self.asked_recall or seconds * self.worthwhile > self.exact_seconds:
                break
        return {
            "kind": shortcut.kind,
            "effort": effort,
            "recall_at_1": recall,
            "recall_queries": len(self.queries),
            "speed_of_exact": round(self.exact_seconds / seconds, 2),
        }

    def is_passed(self, facts: dict[str, Any]) -> bool:
        """Return whether an index with these measurements may be used."""
        enough = facts["recall_at_1"] >= self.asked_recall and facts["speed_of_exact"] >= self.worthwhile
        return bool(enough)


def _answers(index: NearestIndex, queries: Floats) -> tuple[Floats, float]:
    """Return the best score of each feature, and the CPU seconds it took: the CPUs of a service are shared."""
    started = time.process_time()
    scores = [index.search(queries[at : at + _BATCH], 1)[0][:, 0] for at in range(0, len(queries), _BATCH)]
    return np.concatenate(scores), time.process_time() - started
