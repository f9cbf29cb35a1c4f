"""Sums of the features of any number of classes, in bounded memory: what does not fit waits in a file.

Legend: N features of a batch, D width, C classes, S of them.
"""

from __future__ import annotations

import itertools
import tempfile
from typing import IO, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from geartrain.ams.errors import InvalidArgument
from geartrain.ams.specs import Ids

_ENTRY_BYTES = 128
"""What the place of a class in memory costs beside its sum."""


class ClassSums:
    """A float32 sum [D] for each class that has features.

    ``memory_bytes`` hold the classes met most recently. When they are full they are added to a file, class by class in
    rising order: one read and one write of 4·D bytes a class, or of several with consecutive numbers. The file takes
    4·D bytes of disk for each class met, has no name, and ends with this object or its process. It lies in
    ``tempfile.gettempdir()`` (``TMPDIR``). One byte for each of the C classes is kept beside it.
    """

    def __init__(self, num_classes: int, dim: int, memory_bytes: int) -> None:
        self._num_classes, self._dim = num_classes, dim
        self._capacity = max(1, min(num_classes, memory_bytes // (4 * dim + _ENTRY_BYTES)))
        self._sums: npt.NDArray[np.float32] = np.zeros((self._capacity, dim), np.float32)  # taken when it is touched
        self._places: dict[int, int] = {}
        self._file: IO[bytes] | None = None
        self._in_file: npt.NDArray[np.bool_] = np.zeros(num_classes, np.bool_)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, features_ND: Tensor, labels_N: Ids) -> None:
        """Add features, float32 on the host, to the sums of their classes.

        Raises InvalidArgument if the file cannot be written.
        """
        classes, inverse_N = np.unique(labels_N, return_inverse=True)
        for first in range(0, len(classes), self._capacity):
            part = classes[first : first + self._capacity].tolist()
            if len(self._places) + sum(one not in self._places for one in part) > self._capacity:
                self._spill()
            places = torch.tensor([self._places.setdefault(one, len(self._places)) for one in part])
            here = torch.from_numpy(np.flatnonzero((inverse_N >= first) & (inverse_N < first + len(part))))
            rows_N = places[torch.from_numpy(inverse_N)[here] - first]
            torch.from_numpy(self._sums).index_add_(0, rows_N, features_ND[here])

    def settle(self) -> None:
        """Write the rest to the file, if there is one, and let go of the memory; nothing is added any more."""
        if self._file is not None:
            self._spill()
            self._sums = np.empty((0, self._dim), np.float32)

    def met(self, first: int, stop: int) -> npt.NDArray[np.bool_]:
        """Which of the classes ``first`` … ``stop`` − 1 have features; once settled."""
        if self._file is None and not self._in_file.any():
            self._in_file[list(self._places)] = True
        return self._in_file[first:stop]

    def of(self, ids: Ids) -> Tensor:
        """Sums [S, D] of rising classes; zeros where there are no features. Once settled."""
        if self._file is not None:
            return torch.from_numpy(self._stored(self._file, ids))
        sums_SD = np.zeros((len(ids), self._dim), np.float32)
        found = [(at, self._places[one]) for at, one in enumerate(ids.tolist()) if one in self._places]
        if found:
            at, places = np.array(found).T
            sums_SD[at] = self._sums[places]
        return torch.from_numpy(sums_SD)

    def _spill(self) -> None:
        ids = np.fromiter(self._places, np.int64, len(self._places))
        order = np.argsort(ids)
        ids = ids[order]
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="geartrain-imprint-")  # noqa: SIM115 (closed by __exit__)
                self._file.truncate(self._num_classes * 4 * self._dim)  # holes are zeros, and take no room
            for run in _runs(ids):
                sums_SD = self._sums[order[run]]
                if self._in_file[ids[run]].any():
                    sums_SD += self._stored(self._file, ids[run])
                self._file.seek(int(ids[run.start]) * 4 * self._dim)
                self._file.write(memoryview(sums_SD))  # type: ignore[arg-type]
            self._file.flush()
        except OSError as exc:
            raise InvalidArgument(
                f"the sums of classes do not fit into memory_bytes, and {tempfile.gettempdir()} cannot take them "
                f"({exc}): up to {4 * self._dim * self._num_classes:,} bytes for {self._num_classes:,} classes of dim "
                f"{self._dim}. Set TMPDIR to a folder with as much room, or pass more memory_bytes"
            ) from exc
        self._in_file[ids] = True
        self._sums[: len(ids)] = 0
        self._places.clear()

    def _stored(self, file: IO[bytes], ids: Ids) -> npt.NDArray[np.float32]:
        sums_SD = np.empty((len(ids), self._dim), np.float32)
        for run in _runs(ids):
            file.seek(int(ids[run.start]) * 4 * self._dim)
            file.readinto(memoryview(sums_SD[run]))  # type: ignore[attr-defined, arg-type]
        return sums_SD


def _runs(ids: Ids) -> list[slice]:
    """The pieces of rising ``ids`` that are consecutive numbers."""
    if not len(ids):
        return []
    bounds = [0, *(np.flatnonzero(np.diff(ids) != 1) + 1).tolist(), len(ids)]
    return [slice(low, high) for low, high in itertools.pairwise(bounds)]
