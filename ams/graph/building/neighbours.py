"""Table of the nearest neighbours of every class, and the selection of a batch's active classes from it.

Legend: C classes, E entries of all lists, k neighbours wanted, B labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from geartrain.ams.kernels import ops
from geartrain.ams.values.errors import InvalidArgument, InvalidIds
from geartrain.ams.values.specs import Ids

NeighbourIds = npt.NDArray[np.int64 | np.int32]
"""Class ids of neighbours: int32 while they fit (half the memory), else int64."""


def id_dtype(num_classes: int) -> type[np.int32] | type[np.int64]:
    """Return the narrower dtype that holds every class id of a table."""
    return np.int32 if num_classes <= 2**31 else np.int64


@dataclass(frozen=True, eq=False)
class NeighbourTable:
    """Lists of neighbours, best first, one after the other (CSR). The arrays are read-only. Thread-safe.

    Memory: 8 · (C + 1) bytes of offsets and 4 (from 2**31 classes on: 8) · E of neighbours, E = C · min(k, C - 1).
    """

    offsets: npt.NDArray[np.int64]
    """int64 [C + 1], ascending from 0 to E."""
    neighbours: NeighbourIds
    """[E] class ids, best first; the class itself is in no list."""
    k: int
    """Requested neighbours of a class; each has min(k, C - 1)."""
    first: int = 0
    """Class of the first list."""
    total: int | None = None
    """Number C of classes if the lists are those of ``first`` and some after it; None: of all."""

    @staticmethod
    def bytes_for(num_classes: int, k: int, parts: int = 1) -> int:
        """Return the bytes of a graph of ``num_classes`` with ``k`` neighbours each, or of its largest of ``parts``."""
        num_lists = -(-num_classes // parts)
        entries = num_lists * min(k, num_classes - 1)
        return entries * np.dtype(id_dtype(num_classes)).itemsize + (num_lists + 1) * 8

    def __post_init__(self) -> None:
        """Check the shapes and ids; O(E). Raises InvalidArgument, InvalidIds."""
        if self.k < 1:
            raise InvalidArgument(f"k is {self.k}; a table of neighbours needs at least 1")
        _check_vector(self.offsets, "offsets", (np.int64,))
        _check_vector(self.neighbours, "neighbours", (np.int64, np.int32))
        num_ids = len(self.neighbours)
        least = 2 if self.total is None else 1
        if len(self.offsets) < least or self.offsets[0] != 0 or self.offsets[-1] != num_ids:
            raise InvalidArgument(
                f"offsets has {len(self.offsets)} values from {self.offsets[:1]} to {self.offsets[-1:]}; it must have"
                f" at least {least}, from 0 to the number of neighbours {num_ids}"
            )
        if not 0 <= self.first <= self.num_classes - self.num_lists:
            raise InvalidArgument(
                f"the lists are of classes {self.first} to {self.first + self.num_lists}; there are {self.num_classes}"
            )
        if np.any(self.offsets[1:] < self.offsets[:-1]):
            place = int(np.flatnonzero(self.offsets[1:] < self.offsets[:-1])[0])
            raise InvalidArgument(
                f"offsets falls from {self.offsets[place]} to {self.offsets[place + 1]} at index {place}; it must rise "
                "from 0 to the number of neighbours"
            )
        if num_ids and not 0 <= int(self.neighbours.min()) <= int(self.neighbours.max()) < self.num_classes:
            raise InvalidIds(
                f"neighbours lie in [{self.neighbours.min()}, {self.neighbours.max()}]; the table has classes"
                f" [0, {self.num_classes})"
            )

    @property
    def num_classes(self) -> int:
        """Number C of classes."""
        return self.num_lists if self.total is None else self.total

    @property
    def num_lists(self) -> int:
        """Number of lists: C, or that of a part."""
        return len(self.offsets) - 1

    @property
    def num_bytes(self) -> int:
        """Bytes of both arrays."""
        return self.offsets.nbytes + self.neighbours.nbytes

    def row(self, class_id: int) -> Ids:
        """Return the neighbours of one class, int64, best first. Raises InvalidIds."""
        at = class_id - self.first
        if not 0 <= at < self.num_lists:
            stop = self.first + self.num_lists
            raise InvalidIds(f"class {class_id} is outside the table; classes lie in [{self.first}, {stop})")
        return self.neighbours[self.offsets[at] : self.offsets[at + 1]].astype(np.int64)

    def part(self, first: int, stop: int) -> NeighbourTable:
        """Return the lists of classes ``first`` … ``stop`` - 1 of a whole table, copied."""
        begin, end = int(self.offsets[first]), int(self.offsets[stop])
        lists = (self.offsets[first : stop + 1] - begin, self.neighbours[begin:end].copy())
        return NeighbourTable(*lists, self.k, first, self.num_classes)

    def select(self, labels: Ids, budget: int, *, seed: int, step: int) -> Ids:
        """Return the active classes of a batch: a pure function, the same wherever it is computed.

        The distinct labels are always chosen and enlarge the budget if they are more. Then come their neighbours in
        order of rank (rank 0 of every distinct label, labels ascending, then rank 1 of every one, …), each class once,
        until ``budget`` are chosen; then ``ams.kernels.ops.sample_ids`` of all classes under (seed, step)
        fills up. From Algorithm 1 of the 100-million-class paper, section 3.2.1; in order of rank, so that a cut drops
        the least similar.

        Args:
            labels: int64 [B], any order, repeats allowed; without labels all classes are sampled.
            budget: Number of classes, at least 1; more than C counts as C.
            seed: Key of the sampled rest, with the step; any integer, modulo 2**64.
            step: Any integer, modulo 2**64.

        Returns:
            int64 [max(min(budget, C), distinct labels)], ascending.

        Raises:
            InvalidArgument: ``budget`` is below 1, or the table has a part of the lists.
            InvalidIds: a label is not an int64, or lies outside [0, C).
        """
        if self.total is not None:
            raise InvalidArgument(
                f"the table has the lists of {self.num_lists} of {self.total} classes; select needs all"
            )
        return ops.select_neighbours(self.offsets, self.neighbours, labels, budget, seed=seed, step=step)


def _check_vector(values: Any, name: str, dtypes: tuple[type, ...]) -> None:
    if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype not in dtypes:
        found = f"{values.dtype} {list(values.shape)}" if isinstance(values, np.ndarray) else type(values).__name__
        allowed = " or ".join(dtype.__name__ for dtype in dtypes)
        raise InvalidArgument(f"{name} is {found}; it must be a numpy vector of {allowed}")
    if not (values.flags.c_contiguous and values.flags.aligned):
        raise InvalidArgument(f"{name} is not contiguous in memory; pass np.ascontiguousarray of it")
