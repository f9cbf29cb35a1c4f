"""Index of a model: its rows, searched exactly or through an approximate shortcut.

Legend: C classes, K centers of a class, D width, N features, k answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from geartrain.ams.kernels import neighbours as ops
from geartrain.ams.values.errors import InvalidArgument
from geartrain.serving.index.exact import Answers, EncodedRows, Floats, best_of
from geartrain.serving.index.shortcut import FaissShortcut


class NearestIndex:
    """Search for the classes of best score. Immutable and thread-safe.

    The score of a class is that of its best center; scores are exact, rounded to float32.
    """

    def __init__(
        self,
        rows: EncodedRows,
        *,
        is_cosine: bool,
        threads: int,
        facts: Mapping[str, Any],
        shortcut: FaissShortcut | None = None,
    ) -> None:
        """``shortcut`` selects candidate rows; None: exact search."""
        self._rows, self._is_cosine, self._threads, self._shortcut = rows, is_cosine, threads, shortcut
        self.facts = facts
        self.num_classes, self.dim = len(rows.centers), int(rows.centers.shape[-1])

    def search(self, features_ND: Floats, k: int) -> Answers:
        """Return scores [N, k], descending, and positions [N, k] of classes; of equal scores the lower position first.

        Returns all classes if there are fewer than k >= 1. Raises InvalidArgument (width, a feature that is not
        finite, or one so large that a score is not).
        """
        k = min(k, self.num_classes)
        if features_ND.ndim != 2 or features_ND.shape[1] != self.dim:
            raise InvalidArgument(f"features have shape {list(features_ND.shape)}; this model takes [N, {self.dim}]")
        features: Floats = np.array(features_ND, np.float32, order="C")  # a copy, of unit length if scores are cosines
        if self._is_cosine:
            bad = ops.make_unit_rows(features, threads=1)
        else:
            finite = np.isfinite(features).all(axis=1)
            bad = -1 if finite.all() else int(finite.argmin())
        if bad >= 0:
            raise InvalidArgument(f"features[{bad}] has a value that is not finite; give finite numbers")
        scores, positions = self._found(features, k)
        finite = np.isfinite(scores).all(axis=1)
        if not finite.all():
            largest = np.abs(features[finite.argmin()]).max()
            raise InvalidArgument(
                f"features[{finite.argmin()}] has numbers as large as {largest:g}, whose scores are beyond float32; "
                "give smaller ones, as the network makes them"
            )
        return scores, positions

    def _found(self, features: Floats, k: int) -> Answers:
        """Return the answers to finite features, of unit length if scores are cosines."""
        if self._shortcut is None:
            return self._rows.search(features, k, self._threads)
        scores, positions = np.empty((len(features), k), np.float32), np.empty((len(features), k), np.int64)
        found_NW = self._shortcut.search(self._rows, features, k, self._threads)
        whole = (found_NW >= 0).all(axis=1)
        if whole.any():
            several = [self._rows.best_among(features[whole], found_NW[whole], k, self._threads)]
            if self._shortcut.younger is not None:
                several.append(self._shortcut.younger.search(features[whole], k, self._threads))
            scores[whole], positions[whole] = best_of(several, k)
        if not whole.all():
            scores[~whole], positions[~whole] = self._rows.search(features[~whole], k, self._threads)
        return scores, positions

    def by(self, shortcut: FaissShortcut) -> NearestIndex:
        """Return an index of the same rows, searched through ``shortcut``."""
        return NearestIndex(
            self._rows,
            is_cosine=self._is_cosine,
            threads=self._threads,
            facts=self.facts,
            shortcut=shortcut,
        )
