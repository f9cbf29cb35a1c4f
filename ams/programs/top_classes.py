"""Best classes of features among the rows of a shard: prediction of a head beside its rows.

Cost on a shard that owns C' classes, for B samples of width D: 2·B·C'·D operations; memory PARTS·B·(k + a chunk's rows)
numbers. Legend: B samples, D width, N rows of a chunk, k answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from geartrain.ams.kernels.neighbours import best_classes, make_unit_rows, pack_panels
from geartrain.ams.programs.class_lifecycle import LiveClasses
from geartrain.ams.programs.hosted import Float32, HostedRows
from geartrain.ams.values.errors import InvalidArgument, NonFinite
from geartrain.ams.values.shard_messages import Arrays
from geartrain.ams.values.specs import Ids

MAX_ANSWERS = 1 << 22
"""Most answers B·k of one call."""

Best = tuple[Float32, Ids]
"""Scores and class ids [B, k'], best first."""


@dataclass(frozen=True, eq=False)
class SearchedRows:
    """Rows of N classes for an exact search by codes of one byte a column."""

    rows_SD: Float32
    """[S, D], S = N · centers."""
    panels: npt.NDArray[np.uint8]
    ids: Ids
    """Ids of the classes [N]."""
    centers: int

    @classmethod
    def of(cls, rows_SD: Float32, ids: Ids, centers: int = 1, *, normalised: bool, threads: int) -> SearchedRows:
        """Return an index that owns ``rows_SD``, if ``normalised`` scaled in place. Raises NonFinite: names a class."""
        if normalised:
            make_unit_rows(rows_SD, threads=threads)
        panels = pack_panels(rows_SD, threads=threads)
        if panels is None:
            bad = int(np.isfinite(rows_SD).all(axis=1).argmin()) // centers
            raise NonFinite(f"the row of class {ids[bad]} holds NaN or infinity; assign it, or restore a snapshot")
        return cls(rows_SD, panels, ids, centers)

    def best(self, features_BD: Float32, k: int, *, threads: int) -> Best:
        """Return the best classes of finite features."""
        scores, numbers = best_classes(self.rows_SD, self.panels, features_BD, k, centers=self.centers, threads=threads)
        return scores, self.ids[numbers]


def top_classes(
    rows: HostedRows,
    features_BD: Float32,
    k: int,
    *,
    live: LiveClasses,
    normalised: bool,
    centers: int = 1,
    chunks: Sequence[tuple[int, int]],
    parts: int,
) -> Arrays:
    """Return ``scores`` float32, ``ids`` int64 [B, k'] of the best live classes here, best first.

    k' = min(k, those here). The score of a class is the largest of its ``centers``, which lie one after the other in
    its row [``centers`` · D]. ``chunks`` of the owned rows are processed in ``parts``, in parallel. Raises
    InvalidArgument for an impossible k.
    """
    size = len(features_BD)
    if k < 1 or k * size > MAX_ANSWERS:
        raise InvalidArgument(f"k is {k} for {size} samples; it must be >= 1, and k · samples at most {MAX_ANSWERS}")
    nothing: Best = (np.empty((size, 0), np.float32), np.empty((size, 0), np.int64))

    def best_of_part(part: int) -> Best:
        best = nothing
        for start, stop in chunks[part::parts]:
            ids = rows.owned_ids(start, stop)
            ids = ids if live.are_all else ids[live.holds(ids)]
            rows_SD = rows.read(ids).reshape(-1, features_BD.shape[1])
            found = SearchedRows.of(rows_SD, ids, centers, normalised=normalised, threads=1)
            best = best_of([best, found.best(features_BD, k, threads=1)], k)
        return best

    scores, ids = best_of(rows.side_by_side(best_of_part, range(parts)), k)
    found: dict[str, npt.NDArray[Any]] = {"scores": scores, "ids": ids}
    return found


def best_of(several: Sequence[Best], k: int) -> Best:
    """Return the ``k`` best of each sample among several, best first; of equals the first one."""
    scores_BN = np.concatenate([scores for scores, _ in several], axis=1)
    ids_BN = np.concatenate([ids for _, ids in several], axis=1)
    if scores_BN.shape[1] > k:
        kept = np.argpartition(scores_BN, scores_BN.shape[1] - k, axis=1)[:, -k:]
        scores_BN, ids_BN = np.take_along_axis(scores_BN, kept, 1), np.take_along_axis(ids_BN, kept, 1)
    order = np.argsort(-scores_BN, axis=1, kind="stable")
    return np.take_along_axis(scores_BN, order, 1), np.take_along_axis(ids_BN, order, 1)
