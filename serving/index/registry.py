"""Reading and writing of a model's index, which finds the classes that fit a feature best.

Legend: C classes, K centers of a class, D width, N features, k answers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from geartrain.ams.graph.building.recall import available_cores
from geartrain.ams.values.errors import ModelDamaged
from geartrain.ams.values.specs import Ids
from geartrain.serving.index import shortcut
from geartrain.serving.index.choice import choose_index
from geartrain.serving.index.exact import PANELS, EncodedRows, Floats, map_panels, write_panels
from geartrain.serving.index.nearest import NearestIndex
from geartrain.workers.models.saved_model import CENTERS, map_arrays, write_arrays

PLACES, FACTS = "index_places.safetensors", "index.json"
"""Files: positions of an older index's classes in the model; facts of an index outside a model."""
_SAMPLED_CENTERS = 64
_AT_ONCE = 65_536
_NEAR = 0.5
"""Distance, in parts of its length, that a center may have moved for an older index to still find it."""


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
    """Write the files of an index of ``centers`` to ``staging``; return the value of ``config["index"]``.

    Args:
        staging: The folder of the model, not sealed yet; seal every file in the result's ``files``.
        centers: [C, D] or [C, K, D] float32, of unit length if ``is_cosine``; may be mapped.
        biases: [C], added to the scores.
        is_cosine: Whether a score is the cosine of feature and center; otherwise their dot product.
        asked_recall: Share of features whose best class must be found; 1: exact search.
        kind: exact, ivf, hnsw or flat (the last three of faiss); None: ivf or hnsw, with enough recall, if worthwhile.
        queries: Features [N, D] to measure recall with, best those of held-out images; None: centers with noise.
        ids: [C] of the classes, ascending; None: 0 … C - 1.
        older: Folder of a faiss index of an earlier moment; only that is tried, nothing is built.
        threads: Number of threads; None: one for each core.

    Raises:
        InvalidRows: A center is not finite.
        InvalidArgument: ``asked_recall`` or ``kind`` is out of range.
        ConfigError: A faiss kind was asked for, and faiss is not installed.
        ModelDamaged: ``older`` is damaged.
    """
    threads = threads or available_cores()
    write_panels(staging / PANELS, centers, threads)
    rows = EncodedRows.of(centers, biases, panels=map_panels(staging / PANELS, centers))
    given = None
    if older is not None and (built := json.loads((older / FACTS).read_text(encoding="utf-8")))["kind"] == "exact":
        kind = "exact"  # no index had both the speed and the recall
    elif older is not None:
        write_arrays(staging / PLACES, {"places": _places(map_arrays(older / CENTERS), rows, ids)})
        _link(older / shortcut.FILE, staging / shortcut.FILE)
        given = _opened(staging, built, rows)
    measured, chosen = choose_index(
        rows, is_cosine=is_cosine, asked_recall=asked_recall, kind=kind, queries=queries, older=given, threads=threads
    )
    facts = {**measured, "centers": _fingerprint(centers), "files": [PANELS]}
    if given is not None and chosen is None:
        for name in (shortcut.FILE, PLACES):
            (staging / name).unlink()
    elif given is not None:
        younger = 0 if given.younger is None else len(given.younger.centers)
        facts |= {"files": [PANELS, shortcut.FILE, PLACES], "younger": younger}
    elif chosen is not None:
        facts["files"] = [PANELS, shortcut.FILE]
        shortcut.write(chosen, staging / shortcut.FILE)
    if chosen is not None:
        facts["bytes"] = (staging / shortcut.FILE).stat().st_size
    return facts


def write_older(folder: Path, centers: Path, **asked: Any) -> None:
    """Build an index for ``write_index(older=folder)`` from a model's file of centers; ``asked`` as there.

    Raises as that does.
    """
    _link(centers, folder / CENTERS)
    arrays = map_arrays(folder / CENTERS)
    facts = write_index(folder, arrays["centers"], arrays.get("biases"), **asked)
    (folder / PANELS).unlink()
    (folder / FACTS).write_text(json.dumps({**facts, "classes": len(arrays["centers"])}), encoding="utf-8")


def _places(then: Mapping[str, npt.NDArray[Any]], rows: EncodedRows, ids: Ids | None) -> Ids:
    """Return the positions of an index's classes among ``rows``; -1: the class is gone or has moved, such as where
    another class has its id.
    """
    if then["centers"].shape[1:] != rows.centers.shape[1:] or ("biases" in then) != (rows.biases is not None):
        raise ModelDamaged(f"the index is of centers {list(then['centers'].shape[1:])}, another size; export again")
    held = then.get("ids", np.arange(len(then["centers"])))
    ids = np.arange(len(rows.centers)) if ids is None else ids
    at: Ids = np.searchsorted(ids, held).clip(max=len(ids) - 1)
    for start in range(0, len(held), _AT_ONCE):
        some = slice(start, start + _AT_ONCE)
        now = rows.centers[at[some]]
        moved, length = np.square(now - then["centers"][some]).sum(-1), np.square(now).sum(-1)
        if rows.biases is not None:
            moved += np.square(rows.biases[at[some]] - then["biases"][some])
        is_near = (moved <= _NEAR**2 * length).reshape(len(now), -1).all(axis=1)
        at[some][(ids[at[some]] != held[some]) | ~is_near] = -1
    return at


def _link(file: Path, link: Path) -> None:
    link.unlink(missing_ok=True)
    try:
        link.hardlink_to(file)
    except FileNotFoundError as exc:
        raise ModelDamaged(f"{file} is missing; export the model again") from exc
    except OSError:  # some disks have no links
        shutil.copyfile(file, link)


def _opened(folder: Path, facts: Mapping[str, Any], rows: EncodedRows) -> shortcut.FaissShortcut:
    if not (folder / PLACES).exists():
        return shortcut.read(folder / shortcut.FILE, facts, rows, len(rows.centers))
    places = map_arrays(folder / PLACES)["places"]
    if places.max(initial=-1) >= len(rows.centers):
        raise ModelDamaged(f"{folder / PLACES} is of another model than the centers beside it; export the model again")
    return shortcut.read(folder / shortcut.FILE, facts, rows, len(places)).of_later(places, rows)


def open_index(
    folder: Path,
    config: Mapping[str, Any],
    centers: Floats,
    biases: Floats | None = None,
    *,
    threads: int | None = None,
) -> NearestIndex:
    """Open the index in a model's folder, or make an exact one if it has none.

    ``is_cosine`` and ``index`` are read from the model's ``config``; ``centers`` [C, D] or [C, K, D] and ``biases``
    [C] may be mapped. Raises ModelDamaged (names the file), InvalidRows, ConfigError (faiss is missing).
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
    way = None if facts["kind"] == "exact" else _opened(folder, facts, rows)
    return NearestIndex(rows, is_cosine=config["is_cosine"], threads=threads, facts=facts, shortcut=way)


def _fingerprint(centers: Floats) -> str:
    """Return a hash of the shape and a few rows, to tell arrays of other shapes or moments apart."""
    digest = xxhash.xxh3_128(repr(centers.shape).encode())
    for place in range(_SAMPLED_CENTERS):
        digest.update(centers[place * (len(centers) - 1) // (_SAMPLED_CENTERS - 1)].tobytes())
    return digest.hexdigest()
