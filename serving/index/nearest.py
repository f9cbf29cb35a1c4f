"""The index of a model: rows as they were written, searched exactly or by a shortcut, and those that came later.

Legend: C classes, K centers of a class, D width, N features, Y classes that changed, k answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from geartrain.ams.values.arguments import integer
from geartrain.ams.values.errors import InvalidRows
from geartrain.serving.index.exact import EncodedRows
from geartrain.serving.index.queries import Answers, Floats, Positions, best_of, checked_features


class Shortcut(Protocol):
    """Finds most of the best rows without looking at all."""

    def search(self, rows: EncodedRows, features_ND: Floats, k: int, threads: int) -> Answers:
        """As :meth:`EncodedRows.search`, but that a class may be missed."""


class NearestIndex:
    """Classes to be searched for those of best score. Immutable and thread-safe.

    A class's score is that of the best of its centers; scores are exact, rounded to float32.
    """

    def __init__(
        self,
        base: EncodedRows,
        *,
        is_cosine: bool,
        threads: int,
        facts: Mapping[str, Any],
        young: EncodedRows | None = None,
        shortcut: Shortcut | None = None,
    ) -> None:
        """``base`` as it was written; ``young`` rows that came later, searched exactly.

        ``shortcut``: finds rows of ``base``; None: they are searched exactly, too.
        """
        self._base, self._young, self._is_cosine, self._threads = base, young, is_cosine, threads
        self._shortcut = shortcut
        self._parts = [part for part in (base, young) if part is not None and part.num_living]
        self.facts = facts

    @property
    def num_classes(self) -> int:
        """How many may be an answer."""
        return sum(part.num_living for part in self._parts)

    @property
    def dim(self) -> int:
        """D."""
        return int(self._base.centers.shape[-1])

    def search(self, features_ND: Floats, k: int) -> Answers:
        """Scores [N, k], falling, and positions [N, k] of classes; of equal scores the lower position first.

        All classes, where there are fewer than k. Raises InvalidArgument (k, width, a feature that is not finite).
        """
        k = min(integer("k", k, 1), self.num_classes)
        features = checked_features(features_ND, self.dim, is_cosine=self._is_cosine)
        return best_of([self._search(part, features, k) for part in self._parts], len(features), k)

    def with_rows(
        self, positions: Positions, centers: Floats, biases: Floats | None = None, retired: Sequence[int] = ()
    ) -> NearestIndex:
        """The index of a later version, which shares what did not change; this one goes on as it is.

        ``centers`` [Y, D] or [Y, K, D] (and ``biases`` [Y], if it has some) are those of distinct ``positions`` [Y],
        changed or new ones, at any place; ``retired`` positions are no answers any more. It costs what all rows that
        came later cost. Raises InvalidRows.
        """
        gone = np.concatenate([positions, np.asarray(retired, np.int64)])
        young = _with_young(self._base, self._young, positions, centers, biases, gone, self._threads)
        return NearestIndex(
            self._base.without(gone),
            is_cosine=self._is_cosine,
            threads=self._threads,
            facts=self.facts,
            young=young,
            shortcut=self._shortcut,
        )

    def by(self, shortcut: Shortcut, facts: Mapping[str, Any] | None = None) -> NearestIndex:
        """The same rows, searched by ``shortcut``."""
        return NearestIndex(
            self._base,
            is_cosine=self._is_cosine,
            threads=self._threads,
            facts=facts or self.facts,
            young=self._young,
            shortcut=shortcut,
        )

    def _search(self, part: EncodedRows, features_ND: Floats, k: int) -> Answers:
        if part is self._base and self._shortcut is not None:
            return self._shortcut.search(part, features_ND, k, self._threads)
        return part.search(features_ND, k, self._threads)


def _with_young(
    base: EncodedRows,
    young: EncodedRows | None,
    positions: Positions,
    centers: Floats,
    biases: Floats | None,
    gone: Positions,
    threads: int,
) -> EncodedRows | None:
    """Later rows, and what is left of those that came before them. Raises InvalidRows."""
    if len(np.unique(positions)) != len(positions) or (positions < 0).any():
        raise InvalidRows("positions must be distinct and at least 0")
    expected = (len(positions), *base.centers.shape[1:])
    if centers.shape != expected or (biases is None) != (base.biases is None):
        raise InvalidRows(
            f"centers of {len(positions)} positions have shape {list(centers.shape)}; this index takes "
            f"{list(expected)}, and biases {'no' if base.biases is None else 'as well'}"
        )
    parts = [(positions, centers, biases)]
    if young is not None and young.positions is not None:
        kept = ~np.isin(young.positions, gone)
        parts.append((young.positions[kept], young.centers[kept], None if young.biases is None else young.biases[kept]))
    together = np.concatenate([part[0] for part in parts])
    if not len(together):
        return None
    order = np.argsort(together)
    return EncodedRows.of(
        np.concatenate([part[1] for part in parts])[order].astype(np.float32, copy=False),
        None if biases is None else np.concatenate([part[2] for part in parts])[order].astype(np.float32, copy=False),
        positions=together[order],
        threads=threads,
    )
