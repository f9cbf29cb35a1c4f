"""Maps of ids to the rows of a rank: which ids have their row here, and which row each has.

There are two, with one interface for rows, slots, updates, look-ups and snapshots: ids of a range, and ids of any
value, which a hash spreads over the ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from geartrain.bridge.kernels.hashing import HashTable, owners


def row_range(num_rows: int, world_size: int, rank: int) -> tuple[int, int]:
    """Return the first id of a rank and of the next one: ceil(C / ranks) on each, and fewer, even none, on the last.

    ``torch.chunk`` and DTensors cut in the same way.
    """
    share = -(-num_rows // world_size)
    first = min(rank * share, num_rows)
    return first, min(first + share, num_rows)


class IdRange:
    """Ids 0 … num_rows - 1, consecutive ones on each rank: row r has the id ``first`` + r."""

    table = None
    ids_L = None

    def __init__(self, num_rows: int, world_size: int, rank: int) -> None:
        self.first, self.stop = row_range(num_rows, world_size, rank)
        self.share = row_range(num_rows, world_size, 0)[1]
        """Rows of each rank; the last may have fewer."""

    @property
    def num_rows(self) -> int:
        """Number of rows on this rank."""
        return self.stop - self.first

    capacity = num_rows

    def are_here(self, ids_N: Tensor) -> Tensor:
        """Return whether each id is on this rank, bool [N]."""
        return (ids_N >= self.first) & (ids_N < self.stop)

    def move_to(self, device: torch.device) -> None:
        """Do nothing: no part of this is on a device."""

    def clear(self) -> None:
        """Do nothing: every id always has a row."""


class HashedIds:
    """Any ids >= 0, on ranks chosen by a hash (:func:`~geartrain.bridge.kernels.hashing.owners`).

    Rows are numbered in the order in which their ids first came to the rank. ``first`` and ``share`` are there for the
    interface of :class:`IdRange`.
    """

    first, share = 0, 1

    def __init__(self, world_size: int, rank: int, device: torch.device) -> None:
        self._world_size, self._rank = world_size, rank
        self.table = HashTable(1, device)

    @property
    def ids_L(self) -> Tensor:
        """Id of each row, int64."""
        return self.table.ids_C

    @property
    def num_rows(self) -> int:
        """Number of ids with a row on this rank. The host waits for the device."""
        return int(self.table.num_ids)

    @property
    def capacity(self) -> int:
        """Number of rows that there is room for."""
        return self.table.capacity

    stop = capacity

    def are_here(self, ids_N: Tensor) -> Tensor:
        """Return whether each id has, or would have, its row on this rank: bool [N]."""
        return owners(ids_N, self._world_size) == self._rank

    def move_to(self, device: torch.device) -> None:
        """Move the ids to another device, with their row numbers."""
        held, self.table = self.table, HashTable(self.capacity, device)
        self.table.find_or_insert(held.ids_C[: int(held.num_ids)].to(device))

    def clear(self) -> None:
        """Remove all ids."""
        self.table = HashTable(1, self.table.ids_C.device)
