"""Writes and opens the index of a model: which rows are nearest to a feature.

Legend: C classes, K centers of a class, D width, N features, k answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import xxhash

from geartrain.ams.graph.building.recall import available_cores
from geartrain.ams.values.errors import ModelDamaged
from geartrain.serving.index.exact import ExactIndex
from geartrain.serving.index.queries import Answers, Floats

_SAMPLED_ROWS = 64


class NearestIndex(Protocol):
    """Rows to be searched for those of best score. Immutable and thread-safe."""

    facts: Mapping[str, Any]
    """Its kind, and what was measured of it."""

    @property
    def num_rows(self) -> int:
        """How many classes can be an answer."""

    def search(self, features_ND: Floats, k: int) -> Answers:
        """Scores [N, k], falling, and positions [N, k] of classes; of equal scores the lower position first.

        All classes, where there are fewer than k. Raises InvalidArgument (k, width, a feature that is not finite).
        """


def write_index(
    staging: Path,
    centers: Floats,
    biases: Floats | None = None,
    *,
    is_cosine: bool,
    asked_recall: float = 1.0,
    queries: Floats | None = None,
    threads: int | None = None,
) -> dict[str, Any]:
    """Write the files of an index of ``centers`` to ``staging``; return what ``config["index"]`` is to say.

    Args:
        staging: The folder of the model, not sealed yet; seal every file named in the answer's ``files``.
        centers: [C, D] or [C, K, D] float32, of unit length if ``is_cosine``; may be mapped.
        biases: [C], added to the scores.
        is_cosine: Whether a score is the cosine of feature and center, or their product.
        asked_recall: The share of features whose best class must be found; 1: always, by exact search.
        queries: Features [N, D] to measure recall with, best those of held-out images; None: centers with noise.
        threads: That work; None: one for each core.
    """
    del staging, biases, is_cosine, queries, threads
    return {
        "kind": "exact",
        "asked_recall": asked_recall,
        "recall_at_1": 1.0,
        "centers": _fingerprint(centers),
        "files": [],
    }


def open_index(
    folder: Path,
    config: Mapping[str, Any],
    centers: Floats,
    biases: Floats | None = None,
    *,
    threads: int | None = None,
) -> NearestIndex:
    """Open the index in the folder of a model, or make an exact one if it has none.

    ``config`` is the model's, of which ``is_cosine`` and ``index`` are read; ``centers`` [C, D] or [C, K, D] and
    ``biases`` [C] may be mapped. Raises ModelDamaged (names the file).
    """
    facts = config.get("index") or {"kind": "exact", "asked_recall": 1.0, "recall_at_1": 1.0}
    if facts.get("centers", _fingerprint(centers)) != _fingerprint(centers):
        raise ModelDamaged(
            f"the index in {folder} was made of other centers than those beside it; export the model again"
        )
    return ExactIndex(centers, biases, is_cosine=config["is_cosine"], threads=threads or available_cores(), facts=facts)


def _fingerprint(centers: Floats) -> str:
    """Tells arrays of other shapes or moments of a training apart, by a few of their rows."""
    digest = xxhash.xxh3_128(repr(centers.shape).encode())
    for place in range(_SAMPLED_ROWS):
        digest.update(centers[place * (len(centers) - 1) // (_SAMPLED_ROWS - 1)].tobytes())
    return digest.hexdigest()
