"""A hash table on a device that grows: int64 ids to slot numbers, for tables of rows whose ids have no bound.

Slots are numbers handed out in the order in which ids first occur, and not where the index keeps them: rows stay where
they are when the table grows, and the slots are the same on every device. The index is that of HierarchicalKV (Wang et
al. 2022): buckets of 128 entries whose digests, a byte each, are one line of the cache, so an id costs a line and, most
often, one entry. Entries are never taken out and fill a bucket from its front: a last digest of 0 ends a search.

Legend: N ids, C slots, B buckets, E = 128·B entries.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from geartrain.ams.kernels.position_lru import PositionLru
from geartrain.ams.values.errors import InvalidArgument
from geartrain.bridge.kernels.launch import Cost, launch, runs_kernels

NO_ID = -(2**63)
"""Stands for no id: the only int64 that a table does not take."""
_BUCKET = 128
_SLOTS = 96
"""A bucket's share of the slots: three quarters full, a table seldom needs a second bucket, and searches end."""
_MOST_SLOTS = _SLOTS * 2**24  # entries are counted in int32


class HashTable:
    """Maps int64 ids (all but ``NO_ID``) to the slots 0, 1, … in the order in which they first occur.

    ::

        table.make_room(len(ids_N))
        slots_N = table.find_or_insert(ids_N)   # rows of a table with table.capacity of them

    The same ids in the order of their slots, inserted into another table, have the same slots there: so it is saved.
    On a CUDA device with Triton it takes 15 bytes a slot, and the host waits at most when the table is about to grow.
    Elsewhere the index is the compiled one of the host, 56 to 72 bytes a slot.
    The hash has no key: whoever chooses ids can put many into a bucket, which costs time and no more.
    """

    _index: PositionLru
    """Of the host, where no kernels run."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        """Room for ``num_slots`` at least."""
        self.ids_C = torch.empty(0, dtype=torch.int64, device=device)
        """The id of each slot; ``NO_ID`` where none was handed out."""
        self.num_ids, self.num_refused = torch.zeros(2, dtype=torch.int64, device=device)
        """int64 (0-dim): slots handed out; new ids that got none, counted again in each call."""
        self._num_read = torch.zeros((), dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
        self._reading: torch.cuda.Event | None = None
        self._since = 0  # ids of calls after the one whose number is read
        self._most = 0  # ids that may be in the table, for all that the host knows
        self.grow(num_slots)

    @property
    def capacity(self) -> int:
        """Slots (C): 96 times a power of two."""
        return len(self.ids_C)

    def find(self, ids_N: Tensor) -> Tensor:
        """Slots, int64 [N], of ids, int64 [N]; -1 where an id is unknown or ``NO_ID``."""
        if not runs_kernels(ids_N.device):
            return torch.from_numpy(self._index.find(ids_N.cpu().numpy(), touch=False)).to(ids_N.device)
        from geartrain.bridge.kernels.triton import hashing as kernels

        slots_N = torch.empty_like(ids_N)
        launch(
            kernels.find,
            (-(-len(ids_N) // kernels.FOUND),),
            ids_N,
            self.ids_C,
            self._digests_E,
            self._slots_E,
            slots_N,
            len(ids_N),
            len(self._fill_B),
            cost=Cost(num_bytes=len(ids_N) * (8.0 + 128 + 32 + 32 + 8)),  # 32: what the device reads at least
            BLOCK=kernels.FOUND,
            num_warps=4,
        )
        return slots_N

    def find_or_insert(self, ids_N: Tensor) -> Tensor:
        """The same, and each unknown id gets the next slot: -1 if there is none, and ``num_refused`` rises.

        None is refused after :meth:`make_room`. The host does not wait.
        """
        slots_N = self.find(ids_N)
        if not len(ids_N):
            return slots_N
        if not runs_kernels(ids_N.device):
            self._add(ids_N[(slots_N < 0) & (ids_N != NO_ID)])
            return self.find(ids_N)
        is_new_N = (slots_N < 0) & (ids_N != NO_ID)
        first_N = _first_places(ids_N, is_new_N)
        is_first_N = is_new_N & (first_N == torch.arange(len(ids_N), device=ids_N.device))
        next_N = self.num_ids + is_first_N.cumsum(0)
        given_N = torch.where(is_first_N & (next_N <= self.capacity), next_N - 1, -1)
        self._insert(ids_N, given_N)
        self.num_ids.copy_(next_N[-1].clamp(max=self.capacity))
        self.num_refused += (next_N[-1] - self.capacity).clamp(min=0)
        self._most += len(ids_N)
        self._since += len(ids_N)
        if self._reading is None:
            self._num_read.copy_(self.num_ids, non_blocking=True)
            self._since = 0
            if ids_N.is_cuda:
                self._reading = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._reading.record(torch.cuda.current_stream(ids_N.device))
            else:
                self._most = int(self._num_read)
        return torch.where(is_new_N, given_N[first_N], slots_N)

    def _add(self, new_N: Tensor) -> None:
        """Number unknown ids, which may occur again and again, by the index of the host."""
        own = new_N.cpu().numpy()
        distinct = own[np.sort(np.unique(own, return_index=True)[1])]
        taken = distinct[: self.capacity - self._most]
        self._index.place(taken)
        self.ids_C[self._most : self._most + len(taken)] = torch.from_numpy(taken)
        self._most += len(taken)
        self.num_ids.fill_(self._most)
        self.num_refused += len(distinct) - len(taken)

    def make_room(self, num_ids: int) -> None:
        """Grow unless ``num_ids`` new ids surely fit: to twice the capacity, or more if these need it."""
        self.grow(self.needed(num_ids))

    @property
    def most(self) -> int:
        """Ids that may be in the table, for all that the host knows: it counts with their number after an earlier call,
        and as if all ids since were new. Waits for nothing."""
        if self._reading is not None and self._reading.query():  # type: ignore[no-untyped-call]
            self._count()
        return self._most

    @property
    def room(self) -> int:
        """New ids that surely fit."""
        return self.capacity - self.most

    def _count(self) -> None:
        """What was asked for is here."""
        self._reading = None
        self._most = int(self._num_read) + self._since

    def needed(self, num_ids: int) -> int:
        """Slots that surely take ``num_ids`` new ids: the capacity, or else at least twice as many.

        The host waits for an earlier call where otherwise the table might grow for nothing.
        """
        if self.most + num_ids > self.capacity and self._reading is not None:
            self._reading.synchronize()
            self._count()
        wanted = self._most + num_ids
        return self.capacity if wanted <= self.capacity else _capacity_for(max(2 * self.capacity, wanted))

    def grow(self, num_slots: int) -> None:
        """Room for ``num_slots`` at least. Ids keep their slots; the index is made anew, in one pass of the device."""
        capacity = _capacity_for(num_slots)
        if capacity <= self.capacity:
            return
        num_buckets, device, held_C = capacity // _SLOTS, self.ids_C.device, self.ids_C
        ids_C = torch.full((capacity,), NO_ID, device=device)
        ids_C[: len(held_C)] = held_C
        if not runs_kernels(device):
            if len(held_C):
                self._index.grow(len(ids_C))
            else:
                self._index = PositionLru(len(ids_C))
            self.ids_C = ids_C
            return
        digests_E = torch.zeros(num_buckets * _BUCKET, dtype=torch.uint8, device=device)
        slots_E = torch.empty(num_buckets * _BUCKET, dtype=torch.int32, device=device)
        fill_B = torch.zeros(num_buckets, dtype=torch.int32, device=device)
        slots_C = torch.where(held_C == NO_ID, -1, torch.arange(len(held_C), device=device))
        # Only once there is memory for all: where there is not, the table stays as it was.
        self.ids_C, self._digests_E, self._slots_E, self._fill_B = ids_C, digests_E, slots_E, fill_B
        self._insert(held_C, slots_C)

    def _insert(self, ids_N: Tensor, slots_N: Tensor) -> None:
        """Put ids, all unknown and different, into the index, where their slots are not -1."""
        from geartrain.bridge.kernels.triton import hashing as kernels

        launch(
            kernels.insert,
            (-(-len(ids_N) // kernels.INSERTED),),
            ids_N,
            slots_N,
            self.ids_C,
            self._digests_E,
            self._slots_E,
            self._fill_B,
            len(ids_N),
            len(self._fill_B),
            cost=Cost(num_bytes=len(ids_N) * (8.0 + 8)),  # as if none were new, as most are not in a step
            BLOCK=kernels.INSERTED,
            num_warps=4,
        )


def _capacity_for(num_slots: int) -> int:
    capacity = _SLOTS << (max(1, -(-num_slots // _SLOTS)) - 1).bit_length()
    if capacity > _MOST_SLOTS:
        raise InvalidArgument(
            f"a hash table of {num_slots:,} slots is more than the {_MOST_SLOTS:,} that one takes; spread the "
            "ids over more ranks, or over more tables"
        )
    return capacity


def _first_places(ids_N: Tensor, is_new_N: Tensor) -> Tensor:
    """Where each of the ids that are new first occurs among them, int64 [N]; for others any place."""
    num, device = len(ids_N), ids_N.device
    from geartrain.bridge.kernels.triton import hashing as kernels

    size = 1 << (2 * num - 1).bit_length()
    first = torch.full((size,), num, dtype=torch.int32, device=device)
    place_N = torch.empty(num, dtype=torch.int64, device=device)
    launch(
        kernels.claim,
        (-(-num // kernels.INSERTED),),
        ids_N,
        is_new_N,
        first,
        place_N,
        num,
        size,
        cost=Cost(num_bytes=num * (8.0 + 1 + 8) + 4.0 * size),
        BLOCK=kernels.INSERTED,
        num_warps=4,
    )
    return first[place_N].clamp_(max=num - 1).to(torch.int64)


def owners(ids_N: Tensor, ranks: int) -> Tensor:
    """Which of ``ranks`` (below 2^31) an id's row is on, int64 [N], the same everywhere: ranks · splitmix64(id) / 2^64.

    By the upper 32 bits of that hash, and so apart from the buckets of an index, which go by another one.
    """
    word = ids_N + _GOLDEN  # wraps, as all that follows
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        word = (word ^ _right(word, shift)) * factor
    return (_right(word ^ _right(word, 31), 32) * ranks) >> 32


def _right(word: Tensor, shift: int) -> Tensor:
    """A shift of unsigned numbers."""
    return (word >> shift) & ((1 << (64 - shift)) - 1)


_GOLDEN, _FIRST, _SECOND = (word - 2**64 for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""Of Steele, Lea and Flood (OOPSLA 2014), as the core has them."""
