"""Exact search in two stages: rows quantized to one byte a column select candidates, which get exact scores.

Legend: C classes, K centers of a class, R = C · K rows, P = R / 16 panels, D width, N features, k answers.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from geartrain.ams.kernels import neighbours as ops
from geartrain.ams.values.errors import InvalidRows, ModelDamaged

Floats = npt.NDArray[np.float32]
Positions = npt.NDArray[np.int64]
Answers = tuple[Floats, Positions]
"""Scores [N, k], descending, and positions [N, k] of their rows; of equal scores the lower position first."""
PANELS = "index.npy"
_ROWS_AT_ONCE = 1 << 16


@dataclass(frozen=True, eq=False)
class EncodedRows:
    """A set of rows to search. Immutable."""

    centers: Floats
    """[C, D] or [C, K, D]; may be mapped."""
    panels: npt.NDArray[np.uint8]
    """[P, bytes], from :func:`encoded`; may be mapped."""
    biases: Floats | None
    """[C], finite."""
    largest_bias: float
    positions: Positions | None
    """[C] positions of the classes in answers, ascending; None: 0 … C - 1."""
    centers_each: int
    """K."""

    @classmethod
    def of(
        cls,
        centers: Floats,
        biases: Floats | None = None,
        *,
        positions: Positions | None = None,
        panels: npt.NDArray[np.uint8] | None = None,
        threads: int = 1,
    ) -> EncodedRows:
        """Build from ``centers``; ``panels`` None: encode them. Raises InvalidRows."""
        centers = np.ascontiguousarray(centers, np.float32)
        if panels is None:
            panels = np.empty(panels_shape(centers), np.uint8)
            encode(centers, panels, threads)
        if biases is not None and not np.isfinite(biases).all():
            raise InvalidRows("a bias is not finite; train its class again")
        largest_bias = 0.0 if biases is None else float(np.abs(biases).max(initial=0))
        centers_each = 1 if centers.ndim == 2 else int(centers.shape[1])
        return cls(centers, panels, biases, largest_bias, positions, centers_each)

    def part(self, classes: Positions) -> EncodedRows | None:
        """Return a subset of the classes, with their positions; None if empty."""
        if not len(classes):
            return None
        biases = None if self.biases is None else self.biases[classes]
        return EncodedRows.of(self.centers[classes], biases, positions=classes)

    def search(self, features_ND: Floats, k: int, threads: int) -> Answers:
        """Return the k best classes, or all if there are fewer."""
        scores, classes = ops.best_classes(
            self.centers.reshape(-1, self.centers.shape[-1]),
            self.panels,
            features_ND,
            k,
            centers=self.centers_each,
            biases=self.biases,
            largest_bias=self.largest_bias,
            threads=threads,
        )
        return scores, classes if self.positions is None else self.positions[classes]

    def best_among(self, features_ND: Floats, rows_NW: npt.NDArray[np.int32], k: int, threads: int) -> Answers:
        """Return the k best classes among those of the given rows; fewer if the rows belong to fewer."""
        each = self.centers_each
        k, classes_NW = min(k, rows_NW.shape[1] // each), rows_NW // each
        of_classes = classes_NW if each == 1 else (classes_NW[:, :, None] * each + np.arange(each, dtype=np.int32))
        of_classes = np.ascontiguousarray(of_classes.reshape(len(rows_NW), -1), np.int32)
        scores_NW, counts = np.empty(of_classes.shape), np.full(len(rows_NW), of_classes.shape[1], np.int32)
        all_rows = self.centers.reshape(-1, self.centers.shape[-1])
        ops.exact_scores(features_ND, of_classes, counts, all_rows, 0, scores_NW, threads=threads)
        # over all centers of the class, found or not
        scores_NW = scores_NW.reshape(*classes_NW.shape, each).max(axis=2)
        if self.biases is not None:
            scores_NW += self.biases[classes_NW]
        with np.errstate(over="ignore"):
            scores, rows = ranked(scores_NW.astype(np.float32), rows_NW.astype(np.int64), rows_NW.shape[1])
        scores, classes = ops.first_of_each(scores, rows, k, each)
        classes = classes[:, :k]
        return scores[:, :k], classes if self.positions is None else self.positions[classes]


def panels_shape(centers: Floats) -> tuple[int, int]:
    """Return the shape of the panels of ``centers``."""
    rows = int(np.prod(centers.shape[:-1]))
    return -(-rows // ops.PANEL_ROWS), ops.panel_bytes(centers.shape[-1])


def encode(centers: Floats, panels: npt.NDArray[np.uint8], threads: int) -> None:
    """Fill ``panels``, block by block. Raises InvalidRows, naming a class with a number that is not finite."""
    rows = centers.reshape(-1, centers.shape[-1])
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        some = np.ascontiguousarray(rows[start : start + _ROWS_AT_ONCE], np.float32)
        finite = np.isfinite(some).all(axis=1)
        if not finite.all():
            place = (start + int(finite.argmin())) * len(centers) // len(rows)
            raise InvalidRows(f"the center at position {place} has a value that is not finite; train it again")
        stop = -(-(start + len(some)) // ops.PANEL_ROWS)
        ops.encode_rows(some, panels[start // ops.PANEL_ROWS : stop], threads=threads)


def write_panels(path: Path, centers: Floats, threads: int) -> None:
    """Write the panels of ``centers`` to a file for several processes to map. Raises InvalidRows, OSError."""
    panels = np.lib.format.open_memmap(path, "w+", np.uint8, panels_shape(centers))
    with path.open("rb+") as file:  # a full disk is an error here; in mapped memory it would kill the process
        os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    encode(centers, panels, threads)
    panels.flush()


def map_panels(path: Path, centers: Floats) -> npt.NDArray[np.uint8]:
    """Map the file that :func:`write_panels` wrote for ``centers``. Raises ModelDamaged."""
    try:
        panels: npt.NDArray[np.uint8] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as exc:
        raise ModelDamaged(
            f"{path} cannot be read: {exc}; bring it back from a copy, or export the model again"
        ) from exc
    if panels.dtype != np.uint8 or panels.shape != panels_shape(centers):
        raise ModelDamaged(
            f"{path} is an index of another size than the centers {list(centers.shape)} beside it; export the model "
            "again"
        )
    return panels


def best_of(several: list[Answers], k: int) -> Answers:
    """Merge answers to the same features about different rows into the k best."""
    if len(several) == 1:
        return several[0]
    scores, positions = (np.concatenate(parts, axis=1) for parts in zip(*several, strict=True))
    return ranked(scores, positions, k)


def ranked(scores: Floats, positions: Positions, k: int) -> Answers:
    """Return the k best by (score descending, position ascending)."""
    order = np.lexsort((positions, -scores), axis=1)[:, :k]
    return np.take_along_axis(scores, order, axis=1), np.take_along_axis(positions, order, axis=1)
