"""Growing hash table on a device, from int64 ids to slot numbers: for tables whose ids have no bound.

Slots are numbered in the order in which ids first occur, not by their place in the index: rows stay where they are when
the table grows, and the slots are the same on every device. The index is that of HierarchicalKV (Wang et al. 2022):
buckets of 128 entries whose digests, a byte each, fill one cache line, so a search reads a line and, most often, one
entry. Entries are never removed and fill a bucket from its front: a last digest of 0 ends a search.

Legend: N ids, C slots, B buckets, E = 128·B entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from geartrain.ams.kernels.position_lru import PositionLru
from geartrain.ams.values.errors import InvalidArgument
from geartrain.bridge.kernels.launch import Cost, address, launch, on_device, runs_kernels

NO_ID = -(2**63)
"""Marker for no id: the only int64 that a table does not accept."""
NUMBER_BITS = 31
"""Most bits of a slot number."""
_BUCKET = 128
_SLOTS = 96
"""Slots for each bucket: at three quarters full a search seldom needs a second bucket, and it ends."""
_MAX_SLOTS = _SLOTS * 2**24  # entries are counted in int32


class HashTable:
    """Maps int64 ids (all but ``NO_ID``) to the slots 0, 1, … in the order in which they first occur.

    ::

        table.reserve(len(ids_N))
        slots_N = table.find_or_insert(ids_N)   # rows of a table with table.capacity of them

    The same ids in the order of their slots, inserted into another table, have the same slots there: so it is saved.
    On a CUDA device with Triton it takes 15 bytes a slot, and the host waits only when the table may have to grow.
    Elsewhere a compiled index on the host serves it, at 56 to 72 bytes a slot.
    The hash has no key: chosen ids can collide in one bucket, which only costs time.
    """

    _index: PositionLru
    """Index on the host, where no kernels run."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        """Make room for at least ``num_slots``."""
        self.ids_C = torch.empty(0, dtype=torch.int64, device=device)
        """Id of each slot; ``NO_ID`` in a free one."""
        self.num_ids, self.num_refused = torch.zeros(2, dtype=torch.int64, device=device)
        """Used slots; and new ids refused for want of a slot, counted again in each call: int64 (0-dim)."""
        self._num_read = torch.zeros((), dtype=torch.int64, device="cpu")
        self._reading: torch.cuda.Event | None = None
        self._since = 0  # ids of calls after the one whose count is being read
        self._most = 0  # upper bound of the ids in the table
        self.grow(num_slots)

    @property
    def capacity(self) -> int:
        """Number of slots (C): 96 times a power of two."""
        return len(self.ids_C)

    def find(self, ids_N: Tensor) -> Tensor:
        """Return the slots, int64 [N], of ids, int64 [N]; -1 where an id is unknown or ``NO_ID``."""
        if not runs_kernels(ids_N.device):
            return torch.from_numpy(self._index.find(ids_N.cpu().numpy(), touch=False)).to(ids_N.device)
        key_N, numbers = (ids_N == NO_ID).to(torch.int64), on_device(_numbers(self), ids_N.device)
        return _find(numbers, 1, ids_N, key_N, 0).clamp_(min=-1)

    def find_or_insert(self, ids_N: Tensor) -> Tensor:
        """Return the slots of ids as :meth:`find` does, and insert unknown ids: each gets the next slot.

        Without a free slot an id gets -1 and ``num_refused`` rises, which :meth:`reserve` prevents. The host does
        not wait.
        """
        if not runs_kernels(ids_N.device):
            self._add(ids_N[(self.find(ids_N) < 0) & (ids_N != NO_ID)])
            return self.find(ids_N)
        key_N = (ids_N == NO_ID).to(torch.int64)
        pieces = [(0, len(ids_N))]
        return number_ids([self], ids_N, key_N, torch.zeros_like(ids_N), 0, pieces, makes=True).slots_N.clamp_(min=-1)

    def _add(self, new_N: Tensor) -> None:
        """Insert unknown ids, which may repeat, by the index of the host."""
        own = new_N.cpu().numpy()
        distinct = own[np.sort(np.unique(own, return_index=True)[1])]
        taken = distinct[: self.capacity - self._most]
        self._index.place(taken)
        self.ids_C[self._most : self._most + len(taken)] = torch.from_numpy(taken)
        self._most += len(taken)
        self.num_ids.fill_(self._most)
        self.num_refused += len(distinct) - len(taken)

    def reserve(self, num_ids: int) -> None:
        """Grow unless ``num_ids`` new ids surely fit: to twice the capacity, or more if they need it."""
        self.grow(self.needed(num_ids))

    @property
    def most(self) -> int:
        """Upper bound of the ids in the table, read without waiting: the count after an earlier call, plus all ids
        since then as if they were new."""
        if self._reading is not None and self._reading.query():  # type: ignore[no-untyped-call]
            self._count()
        return self._most

    @property
    def room(self) -> int:
        """Number of new ids that surely fit."""
        return self.capacity - self.most

    def _count(self) -> None:
        """Use the count of an earlier call, which has arrived on the host."""
        self._reading = None
        self._most = int(self._num_read) + self._since

    def needed(self, num_ids: int) -> int:
        """Return a number of slots that surely takes ``num_ids`` new ids: the capacity, or at least twice as many.

        The host waits for the count of an earlier call if the table might otherwise grow for nothing.
        """
        if self.most + num_ids > self.capacity and self._reading is not None:
            self._reading.synchronize()
            self._count()
        wanted = self._most + num_ids
        return self.capacity if wanted <= self.capacity else _capacity_for(max(2 * self.capacity, wanted))

    def grow(self, num_slots: int) -> None:
        """Grow to at least ``num_slots``. Ids keep their slots; one pass of the device rebuilds the index."""
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
        from geartrain.bridge.kernels.triton import hashing as kernels

        # Assigned only after every allocation: if one fails, the table is unchanged.
        self.ids_C, self._digests_E, self._slots_E, self._fill_B = ids_C, digests_E, slots_E, fill_B
        launch(
            kernels.rehash,
            (-(-len(held_C) // kernels.INSERTED),),
            ids_C,
            digests_E,
            slots_E,
            fill_B,
            len(held_C),
            num_buckets,
            cost=Cost(num_bytes=len(held_C) * (8.0 + 32 + 32 + 32)),
            BLOCK=kernels.INSERTED,
            num_warps=4,
        )


def _capacity_for(num_slots: int) -> int:
    capacity = _SLOTS << (max(1, -(-num_slots // _SLOTS)) - 1).bit_length()
    if capacity > _MAX_SLOTS:
        raise InvalidArgument(
            f"a hash table needs {num_slots:,} slots, and has at most {_MAX_SLOTS:,}; spread the ids over more ranks, "
            "or over more tables"
        )
    return capacity


class NumberedIds(NamedTuple):
    """Result of :func:`number_ids`."""

    slots_N: Tensor
    """Slots, int64; -2: not asked for; -1: no room."""
    made_N: Tensor
    """Slots of new ids where each first occurs, int64; else -1."""
    key_N: Tensor
    """Keys with slots in the place of ids, int64."""


def number_ids(
    tables: Sequence[HashTable | None],
    ids_N: Tensor,
    key_N: Tensor,
    place_N: Tensor,
    bits: int,
    pieces: Sequence[tuple[int, int]],
    *,
    makes: bool,
) -> NumberedIds:
    """Find or insert the ids of many tables at once, by kernels.

    Args:
        tables: The tables; None: its ids are not asked for.
        ids_N: int64.
        key_N: Table << bits, with equal lower bits for equal ids; without a table: len(tables) << bits.
        place_N: int64: piece << 40, with any lower bits.
        bits: Lower bits of a key.
        pieces: Table and number of ids of each piece; the pieces follow one another.
        makes: Whether unknown ids are inserted. If not, each occurrence of one gets a free slot, for the caller's use
            until the next call.

    The host does not wait.
    """
    from geartrain.bridge.kernels.triton import hashing as kernels

    num, num_tables, device = len(ids_N), len(tables), ids_N.device
    found = NumberedIds(*(torch.empty(num, dtype=torch.int64, device=device) for _ in range(3)))
    if not num:
        return found
    first_ids = [0, *accumulate(count for _, count in pieces)]
    offsets, ends, at = [0] * len(pieces), [0], 0
    for table in range(num_tables):
        for piece in (piece for piece, (own, _) in enumerate(pieces) if own == table):
            offsets[piece] = at - first_ids[piece]
            at += pieces[piece][1]
        ends.append(at)
    spans = list(pairwise(ends))
    numbers = on_device([*_numbers(*tables, spans=spans), *offsets], device)
    slots_N = _find(numbers, num_tables, ids_N, key_N, bits)
    grid, common = (-(-num // kernels.INSERTED),), {"MAKES": makes, "BLOCK": kernels.INSERTED, "num_warps": 4}
    first, claimed_N = slots_N, slots_N  # unused
    if makes:
        size = 1 << (2 * num - 1).bit_length()
        first = torch.full((size,), num, dtype=torch.int32, device=device)
        claimed_N = torch.empty(num, dtype=torch.int32, device=device)
        given = [key_N, ids_N, slots_N, first, claimed_N, num, size]
        launch(kernels.claim, grid, *given, cost=Cost(num * 28.0 + 4.0 * size), BLOCK=kernels.INSERTED, num_warps=4)
    flags = torch.empty(num + 1, dtype=torch.int32, device=device)
    offsets_Q = numbers[8 * (num_tables + 1) :]
    given = [offsets_Q, place_N, slots_N, first, claimed_N, flags, num]
    launch(kernels.mark, grid, *given, cost=Cost(num * 20.0), **common)
    sums = flags.cumsum(0, dtype=torch.int32)
    like = [torch.empty(0, dtype=dtype, device=device) for dtype in (torch.uint8, torch.int32)]
    given = [numbers, offsets_Q, key_N, ids_N, place_N, sums, *like, slots_N, found.made_N, num, bits]
    launch(kernels.insert, grid, *given, cost=Cost(num * 28.0), **common)  # as if none were new, as most are not
    counts_T = torch.empty(num_tables, dtype=torch.int64, device=device)
    given = [numbers, key_N, slots_N, first, claimed_N, sums, found.key_N, counts_T, num]
    given += [bits, num_tables << bits, num_tables]
    launch(kernels.finish_inserts, grid, *given, cost=Cost(num * 24.0), **common)
    if makes:
        _count(tables, [end - start for start, end in spans], counts_T)
    return found._replace(slots_N=slots_N)


def _numbers(*tables: HashTable | None, spans: Sequence[tuple[int, int]] | None = None) -> list[int]:
    """Return the kernels' arguments for the tables, and for none behind them, of which no id is asked."""
    found: list[int] = []
    for table, span in zip(tables, spans or [(0, 0)] * len(tables), strict=True):
        if table is None:
            found += [0] * 8
        else:
            held = (table.ids_C, table._digests_E, table._slots_E, table._fill_B)
            found += [*map(address, held), len(table._fill_B), address(table.num_ids), *span]
    return [*found, *[0] * 8]


def _find(numbers: Tensor, num_tables: int, ids_N: Tensor, key_N: Tensor, bits: int) -> Tensor:
    from geartrain.bridge.kernels.triton import hashing as kernels

    num = len(ids_N)
    found_N = torch.empty_like(ids_N)
    like = [torch.empty(0, dtype=dtype, device=ids_N.device) for dtype in (torch.uint8, torch.int32)]
    launch(
        kernels.find,
        (-(-num // kernels.FOUND),),
        numbers,
        key_N,
        ids_N,
        *like,
        found_N,
        num,
        bits,
        num_tables << bits,
        cost=Cost(num_bytes=num * (16.0 + 128 + 32 + 32 + 8)),  # 32: what the device reads at least
        BLOCK=kernels.FOUND,
        num_warps=4,
    )
    return found_N


def _count(tables: Sequence[HashTable | None], asked: Sequence[int], counts_T: Tensor) -> None:
    """Start copying the tables' counts of ids to the host; it does not wait."""
    late = [table for table in tables if table is not None and table._reading is None]
    host, event = torch.empty(0), None
    if late:
        host = torch.empty(counts_T.shape, dtype=torch.int64, device="cpu", pin_memory=counts_T.device.type == "cuda")
        host.copy_(counts_T, non_blocking=True)
    if late and counts_T.is_cuda:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(counts_T.device))
    for number, (table, num) in enumerate(zip(tables, asked, strict=True)):
        if table is not None:
            table._most += num
            table._since += num
            if table._reading is None:
                table._reading, table._num_read, table._since = event, host[number], 0
                if event is None:
                    table._count()


def owners(ids_N: Tensor, ranks: int) -> Tensor:
    """Return the rank (of ``ranks``, below 2^31) of each id's row, int64 [N]: ranks · splitmix64(id) / 2^64.

    It is the same on every device. It uses the upper 32 bits of that hash; buckets of an index use another hash.
    """
    word = ids_N + _GOLDEN  # wraps, as all that follows
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        word = (word ^ _right(word, shift)) * factor
    return (_right(word ^ _right(word, 31), 32) * ranks) >> 32


def _right(word: Tensor, shift: int) -> Tensor:
    """Shift right as unsigned numbers."""
    return (word >> shift) & ((1 << (64 - shift)) - 1)


_GOLDEN, _FIRST, _SECOND = (word - 2**64 for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""Constants of splitmix64 (Steele, Lea and Flood, OOPSLA 2014), as in the compiled core."""
