"""Approximate faiss indexes that select candidate rows, which then get exact scores.

An index may be older than the rows: it finds classes where they were, their scores are of the current rows, and classes
it lacks are searched beside it. Legend: R rows, C classes, D width, N features, W candidate rows, k answers.
"""

from __future__ import annotations

import errno
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from geartrain.ams.values.errors import ConfigError, ModelDamaged
from geartrain.serving.index.exact import EncodedRows, Floats, Positions

FILE = "index.faiss"
KINDS = ("ivf", "hnsw", "flat")
_MORE = 16
"""Rows beyond k that get exact scores, as the scores of faiss are of 8-bit codes."""
_TRAINED_OF_A_LIST = 64
_MIN_OF_A_LIST = 39
"""Least rows of an ivf list that faiss recommends."""


class FaissShortcut:
    """A faiss index. Thread-safe."""

    def __init__(self, index: Any, kind: str, effort: int) -> None:
        """``effort``: number of lists to visit (ivf), or rows in the queue (hnsw)."""
        self.index, self.kind, self.effort = index, kind, effort
        self.younger: EncodedRows | None = None
        """Classes that the index lacks."""
        self._places: Positions | None = None
        """Position of each indexed class among the rows, -1: gone; None: the index holds exactly the rows."""
        self._bits: npt.NDArray[np.uint8] | None = None
        self._num_held = int(index.ntotal)

    def of_later(self, places: Positions, rows: EncodedRows) -> FaissShortcut:
        """Return the same index for ``rows`` of a later moment; ``places`` are the classes' current positions, -1:
        gone."""
        later = FaissShortcut(self.index, self.kind, self.effort)
        stayed = places >= 0
        later._places = places
        later._bits = np.packbits(np.repeat(stayed, rows.centers_each), bitorder="little")
        later._num_held = int(stayed.sum()) * rows.centers_each
        later.younger = rows.part(np.setdiff1d(np.arange(len(rows.centers)), places))
        return later

    def search(self, rows: EncodedRows, features_ND: Floats, k: int, threads: int) -> npt.NDArray[np.int32]:
        """Return candidate rows [N, W] for at least k classes, of those indexed; -1: too few found."""
        faiss, each = load_faiss(), rows.centers_each
        width = min(k * each + _MORE, self._num_held)
        if not width:
            return np.full((len(features_ND), 1), -1, np.int32)
        faiss.omp_set_num_threads(threads)
        _, found_NW = self.index.search(_widened(features_ND, rows), width, params=self._parameters(faiss, width))
        if self._places is not None:
            now = self._places[found_NW // each]
            found_NW = np.where((found_NW >= 0) & (now >= 0), now * each + found_NW % each, -1)
        rows_NW: npt.NDArray[np.int32] = found_NW.astype(np.int32)
        return rows_NW

    def _parameters(self, faiss: Any, width: int) -> Any:
        chosen: dict[str, Any] = {}
        if self._bits is not None:
            chosen["sel"] = faiss.IDSelectorBitmap(len(self._bits), faiss.swig_ptr(self._bits))
        if self.kind == "flat":
            return faiss.SearchParameters(**chosen)
        if self.kind == "ivf":
            return faiss.SearchParametersIVF(**chosen, nprobe=self.effort)
        return faiss.SearchParametersHNSW(**chosen, efSearch=max(self.effort, width))


def build(kind: str, rows: EncodedRows, threads: int) -> FaissShortcut:
    """Build an index of one of KINDS. Raises ConfigError without faiss."""
    faiss = load_faiss()
    faiss.omp_set_num_threads(threads)
    centers = rows.centers.reshape(-1, rows.centers.shape[-1])
    values_RD = centers if rows.biases is None else np.column_stack([centers, rows.biases])
    lists = max(1, min(int(2 * math.sqrt(len(values_RD))), len(values_RD) // _MIN_OF_A_LIST))
    spec = {"flat": "Flat", "ivf": f"IVF{lists},SQ8", "hnsw": "HNSW32,SQ8"}[kind]
    index = faiss.index_factory(values_RD.shape[1], spec, faiss.METRIC_INNER_PRODUCT)
    few = np.random.default_rng(0).permutation(len(values_RD))[: _TRAINED_OF_A_LIST * lists]
    index.train(np.ascontiguousarray(values_RD[np.sort(few)]))
    index.add(np.ascontiguousarray(values_RD))
    return FaissShortcut(index, kind, 1)


def write(shortcut: FaissShortcut, path: Path) -> None:
    """Write the index for :func:`read`. Raises OSError."""
    try:
        load_faiss().write_index(shortcut.index, str(path))
    except RuntimeError as exc:  # also for a full disk
        raise OSError(errno.EIO, f"it cannot be written; is there room on the disk? ({exc})", str(path)) from exc


def read(path: Path, facts: Mapping[str, Any], rows: EncodedRows, num_held: int) -> FaissShortcut:
    """Map an index of ``num_held`` classes that :func:`write` wrote. Raises ConfigError without faiss, ModelDamaged."""
    faiss = load_faiss()
    how = faiss.IO_FLAG_MMAP if facts["kind"] == "ivf" else faiss.IO_FLAG_MMAP_IFC
    try:
        if path.stat().st_size != facts["bytes"]:
            raise RuntimeError(f"it has {path.stat().st_size} bytes, and was written with {facts['bytes']}")
        index = faiss.read_index(str(path), how | faiss.IO_FLAG_READ_ONLY)
    except (OSError, RuntimeError) as exc:
        raise ModelDamaged(
            f"{path} cannot be read: {exc}; bring it back from a copy, or export the model again"
        ) from exc
    width = rows.centers.shape[-1] + (rows.biases is not None)
    if (index.ntotal, index.d) != (num_held * rows.centers_each, width):
        raise ModelDamaged(
            f"{path} is an index of {index.ntotal} rows of {index.d} numbers, another size than that of {num_held} "
            f"centers {list(rows.centers.shape[1:])}; export the model again"
        )
    return FaissShortcut(index, facts["kind"], facts["effort"])


def load_faiss() -> Any:
    """Import faiss. Raises ConfigError if it is not installed."""
    logging.getLogger("faiss.loader").setLevel(logging.WARNING)  # it logs each instruction set it tries
    try:
        import faiss
    except ImportError as exc:
        raise ConfigError(f"an index of faiss needs a library: pip install 'geartrain[serve]' ({exc})") from exc
    return faiss


def _widened(features_ND: Floats, rows: EncodedRows) -> npt.NDArray[np.float32]:
    """Append a 1 to the features, which multiplies the bias."""
    if rows.biases is None:
        return features_ND
    return np.column_stack([features_ND, np.ones(len(features_ND), np.float32)])
