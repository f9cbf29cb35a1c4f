"""Sums of the features of any number of classes, in memory or, beyond its limit, in a file.

Legend: N features of a batch, D width, C classes, S of them.
"""

from __future__ import annotations

import errno
import itertools
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.specs import Ids


class ClassSums:
    """A float32 sum [D] for each class that has features: in memory if ``memory_bytes`` hold all, else in a file.

    Each class of a batch then costs one read and one write of 4·D bytes, several with consecutive numbers together. The
    file takes 4·D bytes of disk for each class met, has no name, and ends with this object or its process. It lies in
    ``tempfile.gettempdir()`` (``TMPDIR``). One byte for each of the C classes is kept beside it.
    """

    def __init__(self, num_classes: int, dim: int, memory_bytes: int) -> None:
        self._num_classes, self._dim = num_classes, dim
        fits = 4 * dim * num_classes <= memory_bytes
        self._sums: npt.NDArray[np.float32] = np.zeros((num_classes if fits else 0, dim), np.float32)
        self._file: IO[bytes] | None = None
        self._met: npt.NDArray[np.bool_] = np.zeros(num_classes, np.bool_)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, features_ND: Tensor, labels_N: Ids) -> None:
        """Add features, float32 on the host, to the sums of their classes.

        Raises InvalidArgument if the file cannot be written.
        """
        if not len(labels_N):
            return
        order = np.argsort(labels_N, kind="stable")
        classes, starts = np.unique(labels_N[order], return_index=True)
        batch_sums = np.add.reduceat(features_ND.numpy()[order], starts)  # index_add_ takes ten times as long
        if len(self._sums):
            self._sums[classes] += batch_sums
        else:
            self._add_in_file(classes, batch_sums)
        self._met[classes] = True

    def met(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Return which of the classes have features, as a mask."""
        return self._met[ids]

    def of(self, ids: Ids) -> Tensor:
        """Return sums [S, D] of ascending classes; zeros where there are no features."""
        if len(self._sums):
            return torch.from_numpy(self._sums[ids])
        if self._file is None:
            return torch.zeros(len(ids), self._dim, dtype=torch.float32, device="cpu")
        with self._on_disk():
            return torch.from_numpy(self._stored(self._file, ids))

    def _add_in_file(self, ids: Ids, sums_SD: npt.NDArray[np.float32]) -> None:
        with self._on_disk():
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="geartrain-imprint-", buffering=0)  # noqa: SIM115
                self._file.truncate(self._num_classes * 4 * self._dim)  # holes are zeros, and take no disk
            again = self._met[ids]
            sums_SD[again] += self._stored(self._file, ids[again])
            for piece, offset in self._pieces(ids, sums_SD):
                if os.pwrite(self._file.fileno(), piece, offset) < len(piece):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _stored(self, file: IO[bytes], ids: Ids) -> npt.NDArray[np.float32]:
        sums_SD = np.empty((len(ids), self._dim), np.float32)
        for piece, offset in self._pieces(ids, sums_SD):
            if os.preadv(file.fileno(), [piece], offset) < len(piece):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return sums_SD

    @contextmanager
    def _on_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            raise InvalidArgument(
                f"the sums of classes do not fit into memory_bytes, and {tempfile.gettempdir()} cannot take them "
                f"({exc}): up to {4 * self._dim * self._num_classes:,} bytes for {self._num_classes:,} classes of dim "
                f"{self._dim}. Set TMPDIR to a folder with as much room, or pass more memory_bytes"
            ) from exc

    def _pieces(self, ids: Ids, sums_SD: npt.NDArray[np.float32]) -> Iterator[tuple[memoryview, int]]:
        """Yield (bytes of the sums, position in the file) of each run of consecutive numbers in ascending ``ids``."""
        if not len(ids):
            return
        row_bytes = 4 * self._dim
        view = memoryview(sums_SD.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        bounds = [0, *(np.flatnonzero(np.diff(ids) != 1) + 1).tolist(), len(ids)]
        for (low, high), number in zip(itertools.pairwise(bounds), ids[bounds[:-1]].tolist(), strict=True):
            yield view[low * row_bytes : high * row_bytes], number * row_bytes
