"""Writes and opens the index of a model: which classes fit a feature best.

Legend: C classes, K centers of a class, D width, N features, k answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from geartrain.ams.graph.building.recall import available_cores
from geartrain.ams.values.errors import ModelDamaged
from geartrain.serving.index import shortcut
from geartrain.serving.index.choice import choose_index
from geartrain.serving.index.exact import PANELS, EncodedRows, map_panels, write_panels
from geartrain.serving.index.nearest import NearestIndex
from geartrain.serving.index.queries import Floats

_SAMPLED_CENTERS = 64


def write_index(
    staging: Path,
    centers: Floats,
    biases: Floats | None = None,
    *,
    is_cosine: bool,
    asked_recall: float = 1.0,
    kind: str | None = None,
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
        kind: exact, ivf, hnsw or flat (the last three of faiss); None: the fastest that finds enough.
        queries: Features [N, D] to measure recall with, best those of held-out images; None: centers with noise.
        threads: That work; None: one for each core.

    Raises:
        InvalidRows: A center is not finite.
        InvalidArgument: asked_recall or kind.
        ConfigError: A kind of faiss was asked for, which is not installed.
    """
    threads = threads or available_cores()
    write_panels(staging / PANELS, centers, threads)
    rows = EncodedRows.of(centers, biases, panels=map_panels(staging / PANELS, centers))
    chosen = choose_index(
        rows, is_cosine=is_cosine, asked_recall=asked_recall, kind=kind, queries=queries, threads=threads
    )
    facts = {**chosen.facts, "centers": _fingerprint(centers), "files": [PANELS]}
    if chosen.shortcut is not None:
        shortcut.write(chosen.shortcut, staging / shortcut.FILE)
        facts |= {"bytes": (staging / shortcut.FILE).stat().st_size, "files": [PANELS, shortcut.FILE]}
    return facts


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
    ``biases`` [C] may be mapped. Raises ModelDamaged (names the file), InvalidRows, ConfigError (faiss is missing).
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
    way = None if facts["kind"] == "exact" else shortcut.read(folder / shortcut.FILE, facts, base)
    return NearestIndex(base, is_cosine=config["is_cosine"], threads=threads, facts=facts, shortcut=way)


def _fingerprint(centers: Floats) -> str:
    """Tells arrays of other shapes or moments of a training apart, by a few of their rows."""
    digest = xxhash.xxh3_128(repr(centers.shape).encode())
    for place in range(_SAMPLED_CENTERS):
        digest.update(centers[place * (len(centers) - 1) // (_SAMPLED_CENTERS - 1)].tobytes())
    return digest.hexdigest()
