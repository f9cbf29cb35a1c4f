"""Writes and opens the index of a model: which classes fit a feature best.

Legend: C classes, K centers of a class, D width, N features, k answers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from geartrain.ams.graph.building.recall import available_cores
from geartrain.ams.values.errors import ModelDamaged
from geartrain.ams.values.specs import Ids
from geartrain.serving.index import shortcut
from geartrain.serving.index.choice import choose_index
from geartrain.serving.index.exact import PANELS, EncodedRows, map_panels, write_panels
from geartrain.serving.index.nearest import NearestIndex
from geartrain.serving.index.queries import Floats
from geartrain.workers.models.saved_model import map_arrays, write_arrays

HELD, FACTS = "index_ids.safetensors", "index.json"
"""Ids of the classes that an index holds which is older than its model; what is said of one that is not in a model."""
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
    ids: Ids | None = None,
    older: Path | None = None,
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
        ids: [C] of the classes, rising; None: 0 … C - 1.
        older: A folder with an index of faiss, of other moments of classes; that alone is tried, nothing is built.
        threads: That work; None: one for each core.

    Raises:
        InvalidRows: A center is not finite.
        InvalidArgument: asked_recall or kind.
        ConfigError: A kind of faiss was asked for, which is not installed.
        ModelDamaged: ``older`` is not whole.
    """
    threads = threads or available_cores()
    write_panels(staging / PANELS, centers, threads)
    rows = EncodedRows.of(centers, biases, panels=map_panels(staging / PANELS, centers))
    given = None if older is None else _read_older(older, rows, ids)
    if older is not None and given is None:
        kind = "exact"
    chosen = choose_index(
        rows, is_cosine=is_cosine, asked_recall=asked_recall, kind=kind, queries=queries, older=given, threads=threads
    )
    files = [PANELS]
    if older is not None and chosen.shortcut is not None:
        files += [shortcut.FILE, HELD]
        for name in (shortcut.FILE, HELD):
            (staging / name).hardlink_to(older / name)
    elif chosen.shortcut is not None:
        files.append(shortcut.FILE)
        shortcut.write(chosen.shortcut, staging / shortcut.FILE)
    size = (staging / shortcut.FILE).stat().st_size if chosen.shortcut is not None else None
    return {**chosen.facts, "centers": _fingerprint(centers), "files": files, **({"bytes": size} if size else {})}


def write_older(folder: Path, centers: Floats, biases: Floats | None, ids: Ids, **asked: Any) -> None:
    """Build an index for ``write_index(older=folder)``, of classes that are only going to change; ``asked`` as there.

    Raises as that does.
    """
    facts = write_index(folder, centers, biases, **asked)
    (folder / PANELS).unlink()
    write_arrays(folder / HELD, {"ids": np.ascontiguousarray(ids, np.int64)})
    (folder / FACTS).write_text(json.dumps({**facts, "classes": len(ids)}), encoding="utf-8")


def _read_older(folder: Path, rows: EncodedRows, ids: Ids | None) -> shortcut.FaissShortcut | None:
    """None: no index was fast enough, with so much recall."""
    facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    return None if facts["kind"] == "exact" else _opened(folder, facts, rows, ids)


def _opened(folder: Path, facts: Mapping[str, Any], rows: EncodedRows, ids: Ids | None) -> shortcut.FaissShortcut:
    if not (folder / HELD).exists():
        return shortcut.read(folder / shortcut.FILE, facts, rows, len(rows.centers))
    held: Ids = map_arrays(folder / HELD)["ids"]
    way = shortcut.read(folder / shortcut.FILE, facts, rows, len(held))
    return way.of_later(held, rows, np.arange(len(rows.centers)) if ids is None else ids)


def open_index(
    folder: Path,
    config: Mapping[str, Any],
    centers: Floats,
    biases: Floats | None = None,
    *,
    ids: Ids | None = None,
    threads: int | None = None,
) -> NearestIndex:
    """Open the index in the folder of a model, or make an exact one if it has none.

    ``config`` is the model's, of which ``is_cosine`` and ``index`` are read; ``centers`` [C, D] or [C, K, D] and
    ``biases`` [C] may be mapped; ``ids`` [C] of the classes rise (None: 0 … C - 1). An index that is older than the
    centers names the classes it holds. Raises ModelDamaged (names the file), InvalidRows, ConfigError (no faiss).
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
    rows = EncodedRows.of(centers, biases, panels=panels, threads=threads)
    way = None if facts["kind"] == "exact" else _opened(folder, facts, rows, ids)
    return NearestIndex(rows, is_cosine=config["is_cosine"], threads=threads, facts=facts, shortcut=way)


def _fingerprint(centers: Floats) -> str:
    """Tells arrays of other shapes or moments of a training apart, by a few of their rows."""
    digest = xxhash.xxh3_128(repr(centers.shape).encode())
    for place in range(_SAMPLED_CENTERS):
        digest.update(centers[place * (len(centers) - 1) // (_SAMPLED_CENTERS - 1)].tobytes())
    return digest.hexdigest()
