"""Which ids have their rows on this rank, and which of its rows each of them has.

In two forms, which rows, slots, updates, look-ups and snapshots are alike for: an object beside the rows says what is
different, and there is one class of rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from geartrain.bridge.kernels.hashing import HashTable, owners


def row_range(num_rows: int, world_size: int, rank: int) -> tuple[int, int]:
    """First id of a rank and of the next: as ``torch.chunk`` and DTensors cut, ceil(C / ranks) on each, and
    fewer, if need be none, on the last."""
    share = -(-num_rows // world_size)
    first = min(rank * share, num_rows)
    return first, min(first + share, num_rows)


class IdRange:
    """Ids 0 … num_rows - 1: consecutive ones on each rank, row r is that of the id ``first`` + r."""

    table = None
    ids_L = None

    def __init__(self, num_rows: int, world_size: int, rank: int) -> None:
        self.first, self.stop = row_range(num_rows, world_size, rank)
        self.share = row_range(num_rows, world_size, 0)[1]
        """Rows of each rank, fewer on the last."""

    @property
    def num_rows(self) -> int:
        """On this rank."""
        return self.stop - self.first

    capacity = num_rows

    def are_here(self, ids_N: Tensor) -> Tensor:
        """Which of them are on this rank, bool [N]."""
        return (ids_N >= self.first) & (ids_N < self.stop)

    def move_to(self, device: torch.device) -> None:
        """Nothing of this is on a device."""

    def clear(self) -> None:
        """All ids have rows, always."""


class HashedIds:
    """Any ids >= 0: on the ranks that a hash says (:func:`~geartrain.bridge.kernels.hashing.owners`), with row numbers
    in the order in which they first came there. ``first`` and ``share`` stand for what an :class:`IdRange` has."""

    first, share = 0, 1

    def __init__(self, world_size: int, rank: int, device: torch.device) -> None:
        self._world_size, self._rank = world_size, rank
        self.table = HashTable(1, device)

    @property
    def ids_L(self) -> Tensor:
        """Of each row, int64."""
        return self.table.ids_C

    @property
    def num_rows(self) -> int:
        """Ids that have a row on this rank. The host waits for the device."""
        return int(self.table.num_ids)

    @property
    def capacity(self) -> int:
        """Rows that there is room for."""
        return self.table.capacity

    stop = capacity

    def are_here(self, ids_N: Tensor) -> Tensor:
        """Which of them would have their row on this rank, bool [N]."""
        return owners(ids_N, self._world_size) == self._rank

    def move_to(self, device: torch.device) -> None:
        """Take them to another device, with their row numbers."""
        held, self.table = self.table, HashTable(self.capacity, device)
        self.table.find_or_insert(held.ids_C[: int(held.num_ids)].to(device))

    def clear(self) -> None:
        """No id has a row any more."""
        self.table = HashTable(1, self.table.ids_C.device)
