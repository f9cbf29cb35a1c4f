"""Sums of rows for bags of ids, and the gradients of those rows: the ids of many fields and tables in one pass.

An id of a table is one integer, its key: table << bits | id. Keys of ids that count for nothing (padding, ids out of
range) are ``none``, which sorts after all others. So the ids of a whole batch are sorted at once, and no shape depends
on the ids: the host waits for nothing. For ids without a bound, a key holds the id's rank at first, and the number of
its row once that is known on the rank.

Legend: N ids, V vectors, Q pieces (the vectors of one field, for one rank), T tables, D width, U distinct rows.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from geartrain.bridge.kernels.hashing import NUMBER_BITS, owners
from geartrain.bridge.kernels.launch import Cost, launch, runs_kernels
from geartrain.bridge.kernels.launch import address as address
from geartrain.bridge.kernels.launch import on_device as on_device
from geartrain.bridge.kernels.optimizers import StepNumbers
from geartrain.bridge.kernels.row_update import RowArrays

PLACE_BITS = 40
_BLOCK = 256
_CHECKED = 1024
_PIECES = 65_535
"""Programs on the second axis of a grid, CUDA's limit: fields times ranks may be more."""


class FieldShape(NamedTuple):
    """Shape of a field's ids, as far as the host knows it."""

    table: int
    num_ids: int
    num_vectors: int
    length: int
    """Ids of each vector; 0: given by offsets."""
    pooling: str = "sum"
    """Or "mean", "sqrtn"."""
    padding_id: int | None = None


class BagPiece(NamedTuple):
    """Consecutive ids of one table, and the number of vectors that they are summed to."""

    table: int
    num_ids: int
    num_vectors: int


class RowSpan(NamedTuple):
    """Rows of the consecutive ids from ``first`` on, of one table."""

    rows_LD: Tensor
    first: int


@dataclass(frozen=True)
class Entries:
    """Ids of all pieces as keys, and the vector that each is summed to."""

    bits: int
    """Bits of an id in a key."""
    num_tables: int
    pieces: tuple[BagPiece, ...]
    key_N: Tensor
    """int32 or int64."""
    place_N: Tensor
    """int64: piece << 40 | vector in the piece; ascending."""
    bounds_V: Tensor
    """int64 [V + 1]: start of each vector's ids, and the end of the last ones."""
    weights_N: Tensor | None = None
    """float32, weight of each id; None: 1."""
    factor_V: Tensor | None = None
    """float32, factor of each vector; None: 1."""
    ids_N: Tensor | None = None
    """int64, the ids themselves, if some table's ids have no bound; else None."""

    @property
    def none(self) -> int:
        """The key of an id that counts for nothing."""
        return self.num_tables << self.bits

    @property
    def first_vectors(self) -> list[int]:
        """Number of each piece's first vector, and their total: [Q + 1]."""
        return [0, *accumulate(piece.num_vectors for piece in self.pieces)]

    @property
    def first_ids(self) -> list[int]:
        """Number of each piece's first id, and their total: [Q + 1]."""
        return [0, *accumulate(piece.num_ids for piece in self.pieces)]

    def of(self, is_used_Q: Tensor) -> Entries:
        """Return these entries without the ids of unused pieces; ``is_used_Q`` is bool."""
        return dataclasses.replace(
            self, key_N=torch.where(is_used_Q[self.place_N >> PLACE_BITS], self.key_N, self.none)
        )


def id_bits(num_rows: Sequence[int | None]) -> int:
    """Return the bits of an id in a key, for tables of ``num_rows``; None: ids without a bound."""
    return max(NUMBER_BITS if rows is None else max(1, (rows - 1).bit_length()) for rows in num_rows)


def index_fields(
    fields: Sequence[FieldShape],
    ids_N: Tensor,
    offsets: Tensor | None,
    weights_N: Tensor | None,
    num_rows: Sequence[int | None],
    ranks: int = 1,
) -> tuple[Entries, Tensor]:
    """Return the keys and bags of all fields' ids, and an error code (0-dim, int64; 0: no error).

    Args:
        fields: Shapes of the fields, in the order of their ids.
        ids_N: Integers, the ids of all fields, one field after another.
        offsets: Integers, [V + 1] of each field without a ``length``, one field after another; each starts at 0.
        weights_N: float32, or None.
        num_rows: Number of rows of each table, above all its ids; None: any id >= 0.
        ranks: Number of ranks that share the rows of tables without a bound.

    The code is that of the first bad field: (fields - field) · 4 + 1 for an id out of range, + 2 for offsets that do
    not ascend from 0 to the number of ids, + 3 for a weight that is not finite. Bad ids are not in the entries.
    """
    device, bits = ids_N.device, id_bits(num_rows)
    pieces = tuple(BagPiece(field.table, field.num_ids, field.num_vectors) for field in fields)
    num_vectors = sum(field.num_vectors for field in fields)
    none = len(num_rows) << bits
    key_N = torch.empty(len(ids_N), dtype=torch.int32 if none < 2**31 else torch.int64, device=device)
    place_N = torch.empty(len(ids_N), dtype=torch.int64, device=device)
    bounds_V = torch.empty(num_vectors + 1, dtype=torch.int64, device=device)
    has_factors = any(field.pooling != "sum" for field in fields)
    factor_V = torch.empty(num_vectors, dtype=torch.float32, device=device) if has_factors else None
    # A field without vectors has no offset that could be checked on the device against its ids: the host does.
    in_no_bag = [place for place, field in enumerate(fields) if field.num_ids > field.num_vectors == 0]
    number = (len(fields) - in_no_bag[0]) * 4 + 2 if in_no_bag else 0
    status = torch.full((), number, dtype=torch.int64, device=device)
    raw_N = ids_N.to(torch.int64) if None in num_rows else None
    found = Entries(bits, len(num_rows), pieces, key_N, place_N, bounds_V, weights_N, factor_V, raw_N)
    if not runs_kernels(device):
        _index_reference(found, fields, ids_N, offsets, num_rows, ranks, status)
        return found, status
    from geartrain.bridge.kernels.triton import lookup as kernels

    first_ids, first_vectors, at = found.first_ids, found.first_vectors, 0
    numbers: list[int] = []
    for place, field in enumerate(fields):
        flags = (field.padding_id is not None) + {"sum": 0, "mean": 2, "sqrtn": 4}[field.pooling]
        flags += 8 * (num_rows[field.table] is None)
        numbers += [field.table, _last_id(num_rows[field.table]), first_ids[place], field.num_ids, first_vectors[place]]
        numbers += [field.num_vectors, field.length, at, field.padding_id or 0, flags]
        at += 0 if field.length else field.num_vectors + 1
    most = max((max(field.num_ids, field.num_vectors) for field in fields), default=0)
    if not num_vectors:
        bounds_V.zero_()
    launch(
        kernels.index_fields,
        (-(-most // _BLOCK), len(fields)),
        on_device(numbers, device),
        ids_N,
        ids_N if offsets is None else offsets,
        ids_N if weights_N is None else weights_N,
        key_N,
        place_N,
        bounds_V,
        bounds_V if factor_V is None else factor_V,
        status,
        bits,
        none,
        ranks,
        cost=Cost(sum(map(_bytes, (ids_N, offsets, weights_N, key_N, place_N, bounds_V, factor_V)))),
        WEIGHTED=weights_N is not None,
        FACTORED=has_factors,
        BLOCK=_BLOCK,
        num_warps=8,
    )
    return found, status


def _index_reference(
    found: Entries,
    fields: Sequence[FieldShape],
    ids_N: Tensor,
    offsets: Tensor | None,
    num_rows: Sequence[int | None],
    ranks: int,
    status: Tensor,
) -> None:
    at, device = 0, ids_N.device
    for place, field in enumerate(fields):
        first, stop = found.first_ids[place : place + 2]
        ids = ids_N[first:stop].to(torch.int64)
        vectors = torch.arange(field.num_vectors + 1, device=device)
        number = (len(fields) - place) * 4
        if field.length:
            own = vectors * field.length
        else:
            assert offsets is not None
            given = offsets[at : at + field.num_vectors + 1].to(torch.int64)
            at += field.num_vectors + 1
            is_off = (given[0] != 0) | (given[-1] != len(ids)) | (given.diff() < 0).any()
            torch.maximum(status, torch.where(is_off, number + 2, 0), out=status)
            own = given.clamp(0, len(ids)).cummax(0).values
        bag_N = torch.searchsorted(own[1:], torch.arange(len(ids), device=device), right=True)
        bag_N.clamp_(max=max(0, field.num_vectors - 1))
        is_none = torch.zeros_like(ids, dtype=torch.bool) if field.padding_id is None else ids == field.padding_id
        is_bad = ((ids < 0) | (ids > _last_id(num_rows[field.table]))) & ~is_none
        torch.maximum(status, torch.where(is_bad.any(), number + 1, 0), out=status)
        weights = None if found.weights_N is None else found.weights_N[first:stop]
        if weights is not None:
            torch.maximum(status, torch.where(weights.isfinite().all(), 0, number + 3), out=status)
        in_key = ids if num_rows[field.table] is not None else owners(ids, ranks)
        found.key_N[first:stop] = torch.where(is_none | is_bad, found.none, (field.table << found.bits) | in_key)
        found.place_N[first:stop] = (place << PLACE_BITS) | bag_N
        first_vector = found.first_vectors[place]
        found.bounds_V[first_vector : first_vector + len(own)] = own + first
        if found.factor_V is not None:
            counts = (~is_none).to(torch.float32) if weights is None else torch.where(is_none, 0.0, weights)
            found.factor_V[first_vector : first_vector + field.num_vectors] = _factors(field, bag_N, counts)


def _last_id(num_rows: int | None) -> int:
    return 2**63 - 1 if num_rows is None else num_rows - 1


def _factors(field: FieldShape, bag_N: Tensor, weights_N: Tensor) -> Tensor:
    """Return 1 / Σ w or 1 / √Σ w² of each bag; 0 where the sum is 0."""
    if field.pooling == "sum":
        return weights_N.new_ones(field.num_vectors)
    squared = weights_N if field.pooling == "mean" else weights_N**2
    totals = weights_N.new_zeros(field.num_vectors).index_add_(0, bag_N, squared)
    by = torch.where(totals == 0, 1.0, totals if field.pooling == "mean" else totals.sqrt())
    return torch.where(totals == 0, 0.0, 1.0 / by)


def pool(
    entries: Entries,
    tables: Sequence[RowSpan],
    read: Callable[[int, Tensor], Tensor] | None = None,
    *,
    into: Tensor | None = None,
) -> list[Tensor]:
    """Return factor · Σ w · row over the ids of each vector, for each piece: float32 [V, D], summed in float32.

    ``read`` returns rows [U, D] of a table by their numbers [U] from ``first``, if the stored rows are not used as they
    are. With ``into`` [Σ V · D] the result is written there, piece by piece, and the list is empty.
    """
    device = entries.key_N.device
    if not runs_kernels(device) or read is not None:
        found = _pool_reference(entries, tables, read)
        if into is None:
            return found
        torch.cat([own.view(-1) for own in found], out=into)
        return []
    from geartrain.bridge.kernels.triton import lookup as kernels

    kinds = [(table.rows_LD.dtype, table.rows_LD.shape[1]) for table in tables]
    shifted = [_shifted(table) for table in tables]
    # With several ranks there are many pieces: one buffer, not a tensor for each.
    if into is None:
        outs = [
            torch.empty(item.num_vectors, kinds[item.table][1], dtype=torch.float32, device=device)
            for item in entries.pieces
        ]
        places = [address(out) for out in outs]
    else:
        outs, begin = [], address(into)
        sizes = [4 * item.num_vectors * kinds[item.table][1] for item in entries.pieces]
        places = [begin + size for size in accumulate(sizes, initial=0)]
    like_sums = outs[0] if into is None else into
    groups: dict[tuple[torch.dtype, int], list[int]] = {}
    for number, item in enumerate(entries.pieces):
        groups.setdefault(kinds[item.table], []).append(number)
    first_vectors = entries.first_vectors
    starts = [(key, at) for key, own in groups.items() for at in range(0, len(own), _PIECES)]
    for key, at in starts:
        dim, members = key[1], groups[key][at : at + _PIECES]
        own = [entries.pieces[number] for number in members]
        numbers: list[int] = []
        for number, item in zip(members, own, strict=True):
            numbers += [shifted[item.table], first_vectors[number], item.num_vectors, places[number]]
        like = tables[own[0].table].rows_LD
        tile = kernels.pool_tile(dim)
        num_ids, num_vectors = sum(item.num_ids for item in own), sum(item.num_vectors for item in own)
        each = dim * like.itemsize + entries.key_N.itemsize + (0 if entries.weights_N is None else 4)
        most = max(item.num_vectors for item in own)
        launch(
            kernels.pool_rows,
            (-(-most // tile["BLOCK_V"]), len(members)),
            on_device(numbers, device),
            like,
            entries.key_N,
            entries.bounds_V,
            like_sums if entries.weights_N is None else entries.weights_N,
            like_sums if entries.factor_V is None else entries.factor_V,
            entries.bits,
            entries.none,
            cost=Cost(num_ids * each + num_vectors * (4 * dim + 8)),
            WEIGHTED=entries.weights_N is not None,
            FACTORED=entries.factor_V is not None,
            DIM=dim,
            ALIGNED=dim * like.itemsize % 16 == 0 and all(number % 16 == 0 for number in numbers[3::4]),
            **tile,
        )
    return outs


def _bytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.nbytes


def _shifted(table: RowSpan) -> int:
    """Return the address at which the row of id 0 would be."""
    return address(table.rows_LD) - table.first * table.rows_LD.shape[1] * table.rows_LD.itemsize


class _LookupRequest:
    """Ids that all pieces ask of one table, in tensor operations. S: vectors of its pieces."""

    def __init__(self, entries: Entries, table: int, first: int) -> None:
        own = [number for number, piece in enumerate(entries.pieces) if piece.table == table]
        ids, vectors = entries.first_ids, entries.first_vectors
        self.pieces = own
        self.num_sums = sum(entries.pieces[number].num_vectors for number in own)

        def of(tensor: Tensor) -> Tensor:
            return torch.cat([tensor[ids[number] : ids[number + 1]] for number in own])

        key_N = of(entries.key_N).to(torch.int64)
        starts = [0, *accumulate(entries.pieces[number].num_vectors for number in own)]
        bags = [
            (entries.place_N[ids[number] : ids[number + 1]] & ((1 << PLACE_BITS) - 1)) + start
            for number, start in zip(own, starts, strict=False)
        ]
        self.sum_N = torch.cat(bags)
        self.weights_N = key_N.new_ones(len(key_N), dtype=torch.float32)
        if entries.weights_N is not None:
            self.weights_N = of(entries.weights_N)
        self.factor_S = None
        if entries.factor_V is not None:
            parts = [entries.factor_V[vectors[number] : vectors[number + 1]] for number in own]
            self.factor_S = torch.cat(parts)
        counts_N = key_N < entries.none
        if not bool(counts_N.all()):
            key_N, self.sum_N, self.weights_N = key_N[counts_N], self.sum_N[counts_N], self.weights_N[counts_N]
        numbers_N = (key_N & ((1 << entries.bits) - 1)) - first
        self.numbers_U, self.place_N = torch.unique(numbers_N, return_inverse=True)

    def sums(self, rows_UD: Tensor) -> Tensor:
        """Return the sum of rows for each vector, [S, D]."""
        sums = _bags(self.place_N, rows_UD.float(), self.sum_N, self.weights_N, self.num_sums)
        return sums if self.factor_S is None else sums * self.factor_S[:, None]

    def row_gradients(self, gradient_SD: Tensor) -> Tensor:
        """Return the gradients of the rows, [U, D]."""
        if self.factor_S is not None:
            gradient_SD = gradient_SD * self.factor_S[:, None]
        order_N = torch.argsort(self.place_N, stable=True)  # bags of gradients: many times faster than row by row
        return _bags(
            self.sum_N[order_N], gradient_SD, self.place_N[order_N], self.weights_N[order_N], len(self.numbers_U)
        )


def _bags(index_N: Tensor, values: Tensor, bag_N: Tensor, weights_N: Tensor, num_bags: int) -> Tensor:
    """Return Σ w · values[index] of each bag; ``bag_N`` is ascending."""
    if not num_bags or not len(index_N):
        return values.new_zeros(num_bags, values.shape[1])
    starts = torch.searchsorted(bag_N, torch.arange(num_bags, device=bag_N.device))
    return nn.functional.embedding_bag(index_N, values, starts, mode="sum", per_sample_weights=weights_N)


def _pool_reference(
    entries: Entries, tables: Sequence[RowSpan], read: Callable[[int, Tensor], Tensor] | None
) -> list[Tensor]:
    found: dict[int, Tensor] = {}
    for table in sorted({piece.table for piece in entries.pieces}):
        asked = _LookupRequest(entries, table, tables[table].first)
        rows_UD = tables[table].rows_LD[asked.numbers_U] if read is None else read(table, asked.numbers_U)
        sums = asked.sums(rows_UD).split_with_sizes([entries.pieces[number].num_vectors for number in asked.pieces])
        found.update(zip(asked.pieces, sums, strict=True))
    return [found[number] for number in range(len(entries.pieces))]


def row_gradients(
    entries: Entries, tables: Sequence[RowSpan], upstream: Sequence[Tensor | None], scale: float = 1.0
) -> list[tuple[Tensor, Tensor]]:
    """Return the numbers [U], from ``first``, and gradients [U, D] of each table's rows; in tensor operations.

    ``upstream`` holds the gradients of the pieces' vectors (None: zero), which are multiplied by ``scale``.
    """
    found: list[tuple[Tensor, Tensor]] = []
    for table, rows in enumerate(tables):
        dim = rows.rows_LD.shape[1]
        if not any(piece.table == table for piece in entries.pieces):
            device = rows.rows_LD.device
            empty = torch.empty(0, dtype=torch.int64, device=device)
            found.append((empty, torch.empty(0, dim, dtype=torch.float32, device=device)))
            continue
        asked = _LookupRequest(entries, table, rows.first)
        parts: list[Tensor] = []
        for number in asked.pieces:
            own = upstream[number]
            shape = (entries.pieces[number].num_vectors, dim)
            zero = torch.zeros(shape, dtype=torch.float32, device=rows.rows_LD.device)
            parts.append(zero if own is None else own.detach().to(torch.float32).reshape(shape) * scale)
        found.append((asked.numbers_U, asked.row_gradients(torch.cat(parts))))
    return found


def checksum(gradients: Sequence[Tensor]) -> Tensor:
    """Return a number (0-dim, float64) that is finite if all gradients are: float32 [V, D], of any strides."""
    device = gradients[0].device
    if not runs_kernels(device):
        return torch.stack([own.detach().abs().sum(dtype=torch.float64) for own in gradients]).sum()
    from geartrain.bridge.kernels.triton import lookup as kernels

    found = torch.zeros((), dtype=torch.float64, device=device)
    numbers = [num for own in gradients for num in (*own.shape, address(own), *own.stride())]
    most = max(own.numel() for own in gradients)
    launch(
        kernels.find_bad_numbers,
        (-(-most // _CHECKED), len(gradients)),
        on_device(numbers, device),
        gradients[0],
        found,
        cost=Cost(sum(own.numel() * own.itemsize for own in gradients)),
        BLOCK=_CHECKED,
    )
    return found


class VectorGradients(NamedTuple):
    """Gradients of one micro-batch: for each piece those of its vectors [V, D] (None: zero), and their scale."""

    entries: Entries
    upstream: Sequence[Tensor | None]
    scale: float = 1.0
    starts: Sequence[tuple[int, int]] | None = None
    """Start of each piece in ``upstream``, which then is one matrix [n, 1], and D; None: one tensor a piece."""

    def of_pieces(self) -> Sequence[Tensor | None]:
        """Return each piece's gradients [V, D]."""
        if self.starts is None or self.upstream[0] is None:
            return self.upstream
        flat, pieces = self.upstream[0], self.entries.pieces
        return [
            flat[start : start + piece.num_vectors * dim].view(-1, dim)
            for piece, (start, dim) in zip(pieces, self.starts, strict=True)
        ]


def _kind(table: RowArrays) -> tuple[Any, ...]:
    """Return a key of tables that one kernel start can update together."""
    rows, slots = table.rows_LD, table.slots_LS
    of_slots = (torch.float32, 0) if slots is None else (slots.dtype, slots.shape[1])
    return rows.dtype, rows.shape[1], *of_slots, table.updates_L is not None


class SortedGradients:
    """Gradients of vectors, sorted by the rows that they count for, ready for an update of rows by kernels.

    Gradients of rows are summed in registers, where they are used, and never stored. Only the sort passes over ids more
    than once. A row's gradients are summed in the order of its ids, so every run gives the same sum.
    """

    def __init__(self, parts: Sequence[VectorGradients]) -> None:
        entries = [part.entries for part in parts]
        first = self.entries = entries[0]
        self.pieces = [piece for own in entries for piece in own.pieces]
        keys, places = [own.key_N for own in entries], [own.place_N for own in entries]
        self.weights_N, self.factor_V = first.weights_N, first.factor_V
        if len(parts) > 1:
            before = [0, *accumulate(len(own.pieces) for own in entries)]
            places = [own + (shift << PLACE_BITS) for own, shift in zip(places, before, strict=False)]
            if any(own.weights_N is not None for own in entries):
                self.weights_N = torch.cat([_or_ones(own.weights_N, len(own.key_N), own) for own in entries])
            if any(own.factor_V is not None for own in entries):
                self.factor_V = torch.cat([_or_ones(own.factor_V, len(own.bounds_V) - 1, own) for own in entries])
        self.place_N = torch.cat(places) if len(parts) > 1 else places[0]
        self.key_N, self.order_N = torch.sort(torch.cat(keys) if len(parts) > 1 else keys[0], stable=True)
        self._gradients: list[Tensor | None] = []
        numbers: list[int] = []
        self._is_aligned = True
        first_vector = 0
        gradients = iter(in_rows([own for part in parts for own in part.upstream]))
        for part in parts:
            (scale,) = struct.unpack("i", struct.pack("f", part.scale))
            mine = list(islice(gradients, len(part.upstream)))
            self._gradients += mine
            at = [(address(own), 0 if own is None else own.stride(0)) for own in mine]
            if part.starts is not None:
                at = [(at[0][0] + 4 * start, dim) for start, dim in part.starts]
            for piece, (where, stride) in zip(part.entries.pieces, at, strict=True):
                self._is_aligned &= stride % 4 == 0 and where % 16 == 0
                numbers += [where, stride, scale, first_vector]
                first_vector += piece.num_vectors
        self._numbers = on_device(numbers, self.key_N.device)

    def squares(self, tables: Mapping[int, Tensor]) -> Tensor:
        """Return Σ g² (0-dim, float64) over the gradients g of the rows [L, D] of these tables, by table number."""
        from geartrain.bridge.kernels.triton import lookup as kernels

        total = torch.zeros((), dtype=torch.float64, device=self.key_N.device)
        groups: dict[int, list[int]] = {}
        for number, rows in tables.items():
            groups.setdefault(rows.shape[1], []).append(number)
        for dim, members in groups.items():
            tile = kernels.run_tile(dim)
            squares = total.new_empty(-(-len(self.key_N) // tile["BLOCK_N"]))
            self._start(kernels.square_rows, {member: [1] for member in members}, dim, [squares], squares.nbytes)
            total = total + squares.sum()
        return total

    def update(self, tables: Mapping[int, RowArrays], step: StepNumbers, lr: float, scale: Tensor) -> None:
        """Update each row once, by ``scale`` (0-dim) times its gradient; 16-bit values are rounded stochastically.

        A row that would leave the range of its dtype stays unchanged, with its slots, and is counted in ``refused``.
        """
        from geartrain.bridge.kernels.triton import lookup as kernels
        from geartrain.bridge.kernels.triton import row_step

        groups: dict[tuple[Any, ...], list[int]] = {}
        for number, table in tables.items():
            groups.setdefault(_kind(table), []).append(number)
        for members in groups.values():
            like = tables[members[0]]
            dim, slots_D = like.rows_LD.shape[1], like.slots_LS
            parts = [item for item in (like.rows_LD, slots_D, like.updates_L) if item is not None]
            each = sum(part.itemsize * (part.shape[1] if part.ndim > 1 else 1) for part in parts)
            numbers: dict[int, Sequence[int]] = {}
            num_rows = 0
            for member in members:
                own = tables[member]
                rows, slots, steps, first = own.rows_LD, own.slots_LS, own.updates_L, own.first
                asked = sum(piece.num_ids for piece in self.pieces if piece.table == member)
                num_rows += min(asked, len(rows))  # upper bound: all ids may be different
                at = [_shifted(RowSpan(rows, first)), 0 if slots is None else _shifted(RowSpan(slots, first))]
                steps_at = 0 if steps is None else address(steps) - 8 * first
                numbers[member] = [1, *at, steps_at, address(own.refused), own.key - (own.key >> 63 << 64)]
                numbers[member] = [*numbers[member], address(own.ids_L)]
            slot_bytes = 0 if slots_D is None else slots_D.shape[1] * slots_D.itemsize
            constants = {
                "ROWS_ALIGNED": dim * like.rows_LD.itemsize % 16 == 0 and slot_bytes % 16 == 0,
                "COUNTS": like.updates_L is not None,
                "KIND": getattr(row_step, step.kind).value,
                "SLOTS": 0 if slots_D is None else slots_D.shape[1],
            }
            more: list[Any] = [like.rows_LD, scale if slots_D is None else slots_D, scale]
            more += [lr, step.decay, step.a, step.b, step.eps]
            self._start(kernels.update_rows, numbers, dim, more, 2 * each * num_rows, **constants)

    def _start(
        self,
        kernel: Any,
        tables: Mapping[int, Sequence[int]],
        dim: int,
        more: Sequence[Any],
        num_bytes: float,
        **constants: Any,
    ) -> None:
        """Start ``kernel`` over all blocks of sorted ids, after partial sums of runs that cross a block's end.

        ``tables`` holds 8 numbers for each table of this start.
        """
        from geartrain.bridge.kernels.triton import lookup as kernels

        device, num_ids, tile = self.key_N.device, len(self.key_N), kernels.run_tile(dim)
        blocks = -(-num_ids // tile["BLOCK_N"])
        numbers: list[int] = []
        for table in range(self.entries.num_tables + 1):
            own = list(tables.get(table, ()))
            numbers += own + [0] * (8 - len(own))
        partial = torch.empty(blocks, tile["BLOCK_D"], dtype=torch.float32, device=device)
        common = [self._numbers, on_device(numbers, device), self.key_N, self.order_N, self.place_N]
        common += [partial if item is None else item for item in (self.weights_N, self.factor_V)]
        constants |= {
            "WEIGHTED": self.weights_N is not None,
            "FACTORED": self.factor_V is not None,
            "DIM": dim,
            "ALIGNED": self._is_aligned and dim % 4 == 0,
            **tile,
        }
        opened = {name: value for name, value in constants.items() if name in _OPEN_RUNS}
        cost = Cost(blocks * 2 * self.key_N.itemsize + partial.nbytes)  # upper bound: all runs cross
        launch(kernels.open_runs, (blocks,), *common, partial, num_ids, self.entries.bits, cost=cost, **opened)
        each = self.key_N.itemsize + 16 + 4 * (self.weights_N is not None)
        num_vectors = sum(piece.num_vectors for piece in self.pieces)
        cost = Cost(num_ids * each + num_vectors * 4 * dim + num_bytes)
        launch(kernel, (blocks,), *common, partial, *more, num_ids, self.entries.bits, cost=cost, **constants)


def in_rows(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the gradients in float32 with each row contiguous; those that are not are copied together."""
    found = [None if own is None or not len(own) else own.detach().to(torch.float32) for own in gradients]
    spread: dict[int, list[int]] = {}
    for number, own in enumerate(found):
        if own is not None and own.stride(1) != 1:
            spread.setdefault(own.shape[1], []).append(number)
    for members in spread.values():
        given = [own for number in members if (own := found[number]) is not None]
        for number, own in zip(members, torch.cat(given).split_with_sizes([len(own) for own in given]), strict=True):
            found[number] = own
    return found


_OPEN_RUNS = frozenset(["WEIGHTED", "FACTORED", "DIM", "ALIGNED", "BLOCK_N", "BLOCK_D", "num_warps"])


def _or_ones(values: Tensor | None, count: int, entries: Entries) -> Tensor:
    return torch.ones(count, dtype=torch.float32, device=entries.key_N.device) if values is None else values
