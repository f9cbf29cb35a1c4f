"""The exact index: recall of the best rows by fast products of known error, then their exact scores.

Legend: C classes, K centers of a class, D width, N features, k answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from geartrain.ams.kernels import neighbours as ops
from geartrain.ams.values.arguments import integer
from geartrain.serving.index.queries import Answers, Floats, Positions, checked_features


class ExactIndex:
    """Finds the rows of best score, always the true ones. Immutable and thread-safe."""

    def __init__(
        self, centers: Floats, biases: Floats | None, *, is_cosine: bool, threads: int, facts: Mapping[str, Any]
    ) -> None:
        """``centers`` [C, D] or [C, K, D], of unit length if ``is_cosine``; they may be mapped. ``biases`` [C]."""
        self._rows = centers.reshape(-1, centers.shape[-1])
        self._centers_each = 1 if centers.ndim == 2 else centers.shape[1]
        self._biases, self._is_cosine, self._threads, self.facts = biases, is_cosine, threads, facts

    @property
    def num_rows(self) -> int:
        """C, of those that can be an answer."""
        return len(self._rows) // self._centers_each

    @property
    def dim(self) -> int:
        """D."""
        return int(self._rows.shape[1])

    def search(self, features_ND: Floats, k: int) -> Answers:
        """Scores [N, k] and positions [N, k] of the best classes; all, where there are fewer than k.

        Raises InvalidArgument (k, width, a feature that is not finite).
        """
        k = min(integer("k", k, 1), self.num_rows)
        features = checked_features(features_ND, self.dim, is_cosine=self._is_cosine)
        return self._best(features, k)

    def _best(self, features: Floats, k: int) -> Answers:
        rows = self._rows
        if self._biases is not None:
            rows = np.column_stack([rows, self._biases]).astype(np.float32)
            features = np.column_stack([features, np.ones(len(features), np.float32)])
        width = min(k * self._centers_each, len(rows))
        scores, ids = np.zeros((len(features), width)), np.zeros((len(features), width), np.int32)
        counts, nobody = np.zeros(len(features), np.int32), np.full(len(features), -1, np.int32)
        ops.exact_best(features, nobody, rows, 0, scores, ids, counts, threads=self._threads)
        ordered = np.lexsort((ids, -scores), axis=1)
        return first_of_each(
            np.take_along_axis(scores, ordered, axis=1).astype(np.float32),
            np.take_along_axis(ids, ordered, axis=1).astype(np.int64) // self._centers_each,
            k,
            is_one_each=self._centers_each == 1,
        )


def first_of_each(scores: Floats, positions: Positions, k: int, *, is_one_each: bool) -> Answers:
    """Of sorted scores of centers, those that are the first of their class: k of each row."""
    if is_one_each:
        return scores[:, :k], positions[:, :k]
    places = np.stack([np.sort(np.unique(row, return_index=True)[1])[:k] for row in positions])
    return np.take_along_axis(scores, places, axis=1), np.take_along_axis(positions, places, axis=1)
