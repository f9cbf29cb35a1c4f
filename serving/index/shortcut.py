"""Shortcuts of faiss: indexes that look at some of the rows; their answers get exact scores.

Legend: R rows, D width, N features, W rows that are looked at, k answers.
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
from geartrain.serving.index.exact import EncodedRows
from geartrain.serving.index.queries import Answers, Floats

FILE = "index.faiss"
KINDS = ("ivf", "hnsw", "flat")
_MORE = 16
"""Rows beyond k that get exact scores: those of faiss are of codes of 8 bits."""
_TRAINED_OF_A_LIST = 64
_LEAST_OF_A_LIST = 39
"""As faiss wants."""


class FaissShortcut:
    """An index of faiss. Thread-safe."""

    def __init__(self, index: Any, kind: str, effort: int) -> None:
        """``effort``: lists that are looked at (ivf), or rows in the queue (hnsw)."""
        self.index, self.kind, self.effort = index, kind, effort

    def search(self, rows: EncodedRows, features_ND: Floats, k: int, threads: int) -> Answers:
        """As :class:`geartrain.serving.index.nearest.Shortcut` says; features of which it finds too few are searched
        for exactly.
        """
        faiss = load_faiss()
        k = min(k, rows.num_living)
        width = min(k * rows.centers_each + _MORE, rows.num_living * rows.centers_each)
        faiss.omp_set_num_threads(threads)
        _, found_NW = self.index.search(_widened(features_ND, rows), width, params=self._parameters(faiss, rows, width))
        scores, positions = np.empty((len(features_ND), k), np.float32), np.empty((len(features_ND), k), np.int64)
        whole = (found_NW >= 0).all(axis=1)
        if whole.any():
            some_NW = found_NW[whole].astype(np.int32)
            scores[whole], positions[whole] = rows.best_among(features_ND[whole], some_NW, k, threads)
        if not whole.all():
            scores[~whole], positions[~whole] = rows.search(features_ND[~whole], k, threads)
        return scores, positions

    def _parameters(self, faiss: Any, rows: EncodedRows, width: int) -> Any:
        bits = rows.living.astype("<u2").view(np.uint8)
        selector = faiss.IDSelectorBitmap(len(bits), faiss.swig_ptr(bits))
        if self.kind == "flat":
            parameters = faiss.SearchParameters(sel=selector)
        elif self.kind == "ivf":
            parameters = faiss.SearchParametersIVF(sel=selector, nprobe=self.effort)
        else:
            parameters = faiss.SearchParametersHNSW(sel=selector, efSearch=max(self.effort, width))
        parameters.bits = bits  # faiss does not hold it
        return parameters


def build(kind: str, rows: EncodedRows, threads: int) -> FaissShortcut:
    """Make an index of one of KINDS. Raises ConfigError without faiss."""
    faiss = load_faiss()
    faiss.omp_set_num_threads(threads)
    centers = rows.centers.reshape(-1, rows.centers.shape[-1])
    values_RD = centers if rows.biases is None else np.column_stack([centers, rows.biases])
    lists = max(1, min(int(2 * math.sqrt(len(values_RD))), len(values_RD) // _LEAST_OF_A_LIST))
    spec = {"flat": "Flat", "ivf": f"IVF{lists},SQ8", "hnsw": "HNSW32,SQ8"}[kind]
    index = faiss.index_factory(values_RD.shape[1], spec, faiss.METRIC_INNER_PRODUCT)
    few = np.random.default_rng(0).permutation(len(values_RD))[: _TRAINED_OF_A_LIST * lists]
    index.train(np.ascontiguousarray(values_RD[np.sort(few)]))
    index.add(np.ascontiguousarray(values_RD))
    return FaissShortcut(index, kind, 1)


def write(shortcut: FaissShortcut, path: Path) -> None:
    """Write it for :func:`read`. Raises OSError."""
    try:
        load_faiss().write_index(shortcut.index, str(path))
    except RuntimeError as exc:  # also of a full disk
        raise OSError(errno.EIO, f"it cannot be written; is there room on the disk? ({exc})", str(path)) from exc


def read(path: Path, facts: Mapping[str, Any], rows: EncodedRows) -> FaissShortcut:
    """Map what :func:`write` wrote. Raises ConfigError without faiss, ModelDamaged."""
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
    if (index.ntotal, index.d) != (rows.centers.size // rows.centers.shape[-1], width):
        raise ModelDamaged(
            f"{path} is an index of {index.ntotal} rows of {index.d} numbers, another size than the centers "
            f"{list(rows.centers.shape)} beside it; export the model again"
        )
    return FaissShortcut(index, facts["kind"], facts["effort"])


def load_faiss() -> Any:
    """The library. Raises ConfigError where it is not installed."""
    logging.getLogger("faiss.loader").setLevel(logging.WARNING)  # says which instructions it tries
    try:
        import faiss
    except ImportError as exc:
        raise ConfigError(f"an index of faiss needs a library: pip install 'geartrain[serve]' ({exc})") from exc
    return faiss


def _widened(features_ND: Floats, rows: EncodedRows) -> npt.NDArray[np.float32]:
    """Features with a 1 behind them, which meets the bias."""
    if rows.biases is None:
        return features_ND
    return np.column_stack([features_ND, np.ones(len(features_ND), np.float32)])
