"""Writes and opens the index of a model: which classes fit a feature best.

Legend: C classes, K centers of a class, D width, N features, k answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import xxhash

from geartrain.ams.graph.building.recall import available_cores
from geartrain.ams.values.errors import ModelDamaged
from geartrain.serving.index.exact import PANELS, EncodedRows, ExactIndex, map_panels, write_panels
from geartrain.serving.index.queries import Answers, Floats, Positions

_SAMPLED_CENTERS = 64


class NearestIndex(Protocol):
    """Classes to be searched for those of best score. Immutable and thread-safe.

    A class's score is that of the best of its centers; scores are exact, rounded to float32.
    """

    facts: Mapping[str, Any]
    """Its kind, and what was measured of it."""

    @property
    def num_classes(self) -> int:
        """How many may be an answer."""

    @property
    def dim(self) -> int:
        """D."""

    def search(self, features_ND: Floats, k: int) -> Answers:
        """Scores [N, k], falling, and positions [N, k] of classes; of equal scores the lower position first.

        All classes, where there are fewer than k. Raises InvalidArgument (k, width, a feature that is not finite).
        """

    def with_rows(
        self, positions: Positions, centers: Floats, biases: Floats | None = None, retired: Sequence[int] = ()
    ) -> NearestIndex:
        """The index of a later version, which shares what did not change; this one goes on as it is.

        ``centers`` [Y, D] or [Y, K, D] (and ``biases`` [Y], if it has some) are those of distinct ``positions`` [Y],
        changed or new ones, at any place; ``retired`` positions are no answers any more. Raises InvalidRows.
        """


def write_index(
    staging: Path,
    centers: Floats,
    biases: Floats | None = None,
    *,
    is_cosine: bool,
    threads: int | None = None,
) -> dict[str, Any]:
    """Write the files of an index of ``centers`` to ``staging``; return what ``config["index"]`` is to say.

    Args:
        staging: The folder of the model, not sealed yet; seal every file named in the answer's ``files``.
        centers: [C, D] or [C, K, D] float32, of unit length if ``is_cosine``; may be mapped.
        biases: [C], added to the scores.
        is_cosine: Whether a score is the cosine of feature and center, or their product.
        threads: That work; None: one for each core.

    Raises:
        InvalidRows: A center is not finite.
    """
    del biases, is_cosine
    write_panels(staging / PANELS, centers, threads or available_cores())
    return {
        "kind": "exact",
        "asked_recall": 1.0,
        "recall_at_1": 1.0,
        "centers": _fingerprint(centers),
        "files": [PANELS],
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
    ``biases`` [C] may be mapped. Raises ModelDamaged (names the file), InvalidRows.
    """
    threads = threads or available_cores()
    facts = config.get("index")
    if facts is None:
        facts, panels = {"kind": "exact", "asked_recall": 1.0, "recall_at_1": 1.0, "files": []}, None
    else:
        if facts["centers"] != _fingerprint(centers):
            raise ModelDamaged(
                f"the index in {folder} was made of other centers than those beside it; export the model again"
            )
        panels = map_panels(folder / PANELS, centers)
    base = EncodedRows.of(centers, biases, panels=panels, threads=threads)
    return ExactIndex(base, is_cosine=config["is_cosine"], threads=threads, facts=facts)


def _fingerprint(centers: Floats) -> str:
    """Tells arrays of other shapes or moments of a training apart, by a few of their rows."""
    digest = xxhash.xxh3_128(repr(centers.shape).encode())
    for place in range(_SAMPLED_CENTERS):
        digest.update(centers[place * (len(centers) - 1) // (_SAMPLED_CENTERS - 1)].tobytes())
    return digest.hexdigest()
