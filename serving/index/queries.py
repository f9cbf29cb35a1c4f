"""What every index does with its questions and answers: checks features, and joins the answers of several sets of rows.

Legend: N features, D width, k answers.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from geartrain.ams.kernels import neighbours as ops
from geartrain.ams.values.errors import InvalidArgument

Floats = npt.NDArray[np.float32]
Positions = npt.NDArray[np.int64]
Answers = tuple[Floats, Positions]
"""Scores [N, k], falling, and the positions [N, k] of the rows that have them; of equal scores the lower one first."""


def checked_features(features_ND: npt.NDArray[np.generic], dim: int, *, is_cosine: bool) -> Floats:
    """A copy to search with, of unit length if scores are cosines. Raises InvalidArgument (width, not finite)."""
    if features_ND.ndim != 2 or features_ND.shape[1] != dim:
        raise InvalidArgument(f"features have shape {list(features_ND.shape)}; this model takes [N, {dim}]")
    features: Floats = np.array(features_ND, np.float32, order="C")
    if is_cosine:
        bad = ops.make_unit_rows(features, threads=1)
    else:
        finite = np.isfinite(features).all(axis=1)
        bad = -1 if finite.all() else int(finite.argmin())
    if bad >= 0:
        raise InvalidArgument(f"features[{bad}] has a value that is not finite; give finite numbers")
    return features


def best_of(several: list[Answers], k: int) -> Answers:
    """The k best of answers to the same features about different rows."""
    if len(several) == 1:
        return several[0]
    scores, positions = (np.concatenate(parts, axis=1) for parts in zip(*several, strict=True))
    return ranked(scores, positions, k)


def ranked(scores: Floats, positions: Positions, k: int) -> Answers:
    """The k best by (score falling, position rising)."""
    order = np.lexsort((positions, -scores), axis=1)[:, :k]
    return np.take_along_axis(scores, order, axis=1), np.take_along_axis(positions, order, axis=1)
