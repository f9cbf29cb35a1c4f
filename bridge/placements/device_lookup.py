"""Look-ups of rows on the ranks' devices: ids are routed to the rank of their row, summed there, and sent back.

With one rank nothing is routed. With several, a step has, whatever the number of fields, one exchange of counts between
the hosts (by the caller) and three all-to-alls: 16 bytes for each id; 4 · D bytes for each vector that has ids on
another rank; and as many for its gradient in the backward pass. Buffers are packed and unpacked in one pass each, see
:mod:`geartrain.bridge.kernels.exchange`.

Legend: D width, V vectors of a field, U distinct rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TypeVar

import torch
from torch import Tensor

from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.optimizers.registry import RowOptimizerSpec
from geartrain.bridge.kernels.exchange import RankPairs, arrived, route
from geartrain.bridge.kernels.launch import runs_kernels
from geartrain.bridge.kernels.lookup import (
    PLACE_BITS,
    BagPiece,
    Entries,
    RowSpan,
    SortedGradients,
    VectorGradients,
    checksum,
    on_device,
    pool,
    row_gradients,
)
from geartrain.bridge.kernels.optimizers import step_numbers
from geartrain.bridge.placements.device_rows import DeviceRows, number_rows
from geartrain.bridge.rows.gradient_carrier import squared_sum
from geartrain.bridge.rows.transfers import Readback

T = TypeVar("T")

_PLAIN = {"float32", "bfloat16", "float16"}
"""Dtypes of rows and slots that this module's kernels read and write."""


class RequestedIds:
    """Ids of one batch; with several ranks sorted by the rows' ranks, with their counts on the way to the host.

    If the batch is made ahead (``gt.prefetch``), the host does not wait for the counts.
    """

    def __init__(self, tables: Sequence[DeviceRows], entries: Entries) -> None:
        """``tables`` are on the same ranks and one device, and so are the ids."""
        self.entries, link = entries, tables[0].link
        self.routed, self.starts = None, None
        if not link.is_alone:
            self.routed = route(entries, [table.share or 1 for table in tables], link.world_size)
            self.starts = Readback(self.routed.starts_Q)


class DeviceLookup:
    """Look-up of all fields of one batch. Every rank makes the same calls, with as many fields."""

    def __init__(self, tables: Sequence[DeviceRows], asked: RequestedIds, *, makes_rows: bool = True) -> None:
        """``makes_rows``: create rows for new ids of tables without a bound. Sends nothing yet."""
        self._tables, self._asked, self._makes_rows = tables, asked.entries, makes_rows
        self._growing = [number for number, table in enumerate(tables) if table.ids.table is not None]
        self._dims = [table.spec.dim for table in tables]
        self._link = tables[0].link
        self._rows: list[RowSpan] = []
        self.counts: list[int] = []
        """Counts that ranks exchange: of each rank and field, ids sent there and vectors that have them; of each table
        without a bound, new rows that have room here; and whether the ids have weights."""
        self._here = self._asked
        """Entries that all ranks ask of this rank's rows."""
        if asked.routed is None or asked.starts is None:
            return
        pieces, num_fields = self._asked.pieces, len(self._asked.pieces)
        starts = asked.starts.values().tolist()  # the host waits here for a device's counts that have not arrived
        ids, pairs = ([stop - start for start, stop in pairwise(own)] for own in starts)
        self._words = asked.routed.words[: starts[0][-1]]
        rooms = [table.ids.table.room for table in self._tables if table.ids.table is not None]
        self.counts = [*ids, *pairs, *rooms, int(self._asked.weights_N is not None)]
        num_vectors, dims = [piece.num_vectors for piece in pieces], [self._dims[piece.table] for piece in pieces]
        self._pairs = RankPairs(asked.routed.pairs_RV, _parts(pairs, num_fields), num_vectors, dims)

    def _reserve(self, counts: Sequence[Sequence[int]]) -> None:
        """Make room for the rows that all ranks' ids may create. If a rank lacks memory, every rank raises."""
        ranks, num_fields = self._link.world_size, len(self._asked.pieces)

        def arriving(rank: int, table: int) -> int:
            own = [number for number, piece in enumerate(self._asked.pieces) if piece.table == table]
            return sum(count[rank * num_fields + number] for count in counts for number in own)

        def grow() -> None:
            for table in self._growing:
                self._tables[table].reserve(arriving(self._link.rank, table))

        first_room = 2 * ranks * num_fields
        if any(
            arriving(rank, table) > counts[rank][first_room + number]
            for rank in range(ranks)
            for number, table in enumerate(self._growing)
        ):
            self._link.run_together(grow, "there was no room for new rows of embeddings")

    def _number(self, entries: Entries, ids_N: Tensor) -> Entries:
        """Return the entries with row numbers in their keys; ``ids_N`` are the ids asked of this rank."""
        pieces = [(piece.table, piece.num_ids) for piece in entries.pieces]
        given = ids_N, entries.key_N, entries.place_N, entries.bits, pieces
        key_N = number_rows(self._tables, *given, makes=self._makes_rows)
        return dataclasses.replace(entries, key_N=key_N, ids_N=None)

    def vectors(self, counts: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return the vectors [V, D] of each field, float32, given every rank's ``counts``. Two all-to-alls."""
        if self._link.is_alone:
            if self._asked.ids_N is not None:
                self._here = self._number(self._asked, self._asked.ids_N)
            return self._pooled()
        self._reserve(counts)
        num_fields, rank = len(self._asked.pieces), self._link.rank
        num_parts = self._link.world_size * num_fields
        pieces: list[BagPiece] = []
        first_pairs: list[int] = []
        for count in counts:
            ids, pairs = count[:num_parts], count[num_parts : 2 * num_parts]
            pair = sum(pairs[: rank * num_fields])
            for at, asked in enumerate(self._asked.pieces, rank * num_fields):
                pieces.append(BagPiece(asked.table, ids[at], pairs[at]))
                first_pairs.append(pair)
                pair += pairs[at]
        arriving = [sum(piece.num_ids for piece in own) for own in _parts(pieces, num_fields)]
        leaving = [sum(own) for own in _parts(self.counts[:num_parts], num_fields)]
        words = self._link.all_to_all(self._words, leaving, arriving)
        are_weighted = any(count[-1] for count in counts)
        self._here = arrived(words, self._asked, pieces, first_pairs, are_weighted=are_weighted)
        if self._growing:
            ids_N, device = self._here.key_N, self._here.key_N.device
            numbers = [*(piece.table for piece in pieces), *(piece.table not in self._growing for piece in pieces)]
            table_Q, is_in_key_Q = on_device(numbers, device).view(2, -1)
            piece_N = self._here.place_N >> PLACE_BITS
            key_N = (table_Q[piece_N] << self._here.bits) | (ids_N * is_in_key_Q[piece_N])
            self._here = self._number(dataclasses.replace(self._here, key_N=key_N), ids_N)
        self._sizes = [
            sum(piece.num_vectors * self._dims[piece.table] for piece in own) for own in _parts(pieces, num_fields)
        ]
        sums = torch.empty(sum(self._sizes), dtype=torch.float32, device=words.device)
        self._pooled(sums)
        return self._pairs.combine(self._link.all_to_all(sums, self._sizes, self._pairs.sizes), self._asked.factor_V)

    def _pooled(self, into: Tensor | None = None) -> list[Tensor]:
        self._rows = [RowSpan(table.rows_LD, table.first) for table in self._tables]
        is_plain = all(table.steps is None and table.spec.dtype in _PLAIN for table in self._tables)
        return pool(self._here, self._rows, None if is_plain else self._current_rows, into=into)

    def _current_rows(self, table: int, numbers_U: Tensor) -> Tensor:
        return self._tables[table].current_rows(numbers_U)

    def _upstream_here(self, upstream: Sequence[Tensor | None], scale: float) -> VectorGradients:
        """Return the gradients of vectors for this rank's rows, and the entries of fields that have one.

        Rows that only fields without a gradient have asked for are left out. With several ranks one all-to-all.
        """
        if self._link.is_alone:
            is_used = [gradient is not None for gradient in upstream]
            if all(is_used):
                return VectorGradients(self._here, upstream, scale)
            return VectorGradients(self._here.of(on_device(is_used, self._here.key_N.device) == 1), upstream, scale)
        num_flags, num_fields = self._pairs.num_flags, len(self._asked.pieces)
        leaving, here = ([size + num_flags for size in sizes] for sizes in (self._pairs.sizes, self._sizes))
        flat = self._link.all_to_all(self._pairs.spread(upstream, self._asked.factor_V), leaving, here)
        flags = [flat[at : at + num_fields] for at in accumulate(here[:-1], initial=0)]
        starts: list[tuple[int, int]] = []
        at = 0
        for number, piece in enumerate(self._here.pieces):
            at += 0 if number % num_fields else num_flags
            starts.append((at, self._dims[piece.table]))
            at += piece.num_vectors * self._dims[piece.table]
        return VectorGradients(self._here.of(torch.cat(flags) != 0), [flat[:, None]], scale, starts)

    def gradients(
        self, tables: Sequence[Sequence[DeviceRows]], upstream: Sequence[Tensor | None], scale: float
    ) -> tuple[list[RowGradients], Tensor]:
        """Return the gradients of this rank's rows for each update of ``tables``, and a checksum.

        Args:
            tables: Tables of each update; together all tables, in their order.
            upstream: Gradients of the vectors; None: no gradient.
            scale: Factor of the gradients.

        The checksum (0-dim, float64) is finite if the gradients are.
        """
        here = self._upstream_here(upstream, scale)
        if all(map(_is_fused, self._tables)):
            finite = checksum([own.detach() for own in here.upstream if own is not None])
            numbers = {id(table): number for number, table in enumerate(self._tables)}
            shared = _Waiting([here])
            return [UnsummedGradient({numbers[id(table)]: table for table in part}, shared) for part in tables], finite
        found = row_gradients(here.entries, self._rows, here.of_pieces(), scale)
        finite = torch.stack([rows_UD.double().square().sum() for _, rows_UD in found]).sum()
        rest = iter(found)
        return [BagGradient(part, [next(rest) for _ in part]) for part in tables], finite


def _parts(items: Sequence[T], size: int) -> list[Sequence[T]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


class BagGradient:
    """Gradients of the rows of several tables on this rank, of one or several micro-batches."""

    def __init__(self, tables: Sequence[DeviceRows], found: Sequence[tuple[Tensor, Tensor]]) -> None:
        """``found``: distinct row numbers [U] of each table, and their gradients [U, D], float32."""
        self._tables = tables
        self._found = [[item] for item in found]

    squares = None
    """No squares: those of other ranks are not here."""

    def merge(self, other: BagGradient) -> None:
        """Add the gradient of another micro-batch, which must not be used any more."""
        for mine, theirs in zip(self._found, other._found, strict=True):
            mine += theirs

    def _joint(self, place: int) -> tuple[Tensor, Tensor]:
        """Return distinct rows of a table, and their gradients."""
        parts = self._found[place]
        if len(parts) > 1:
            numbers_U, place_N = torch.unique(torch.cat([own for own, _ in parts]), return_inverse=True)
            sums_UD = parts[0][1].new_zeros(len(numbers_U), parts[0][1].shape[1])
            self._found[place] = [(numbers_U, sums_UD.index_add_(0, place_N, torch.cat([own for _, own in parts])))]
        return self._found[place][0]

    def squared_norm(self) -> float:
        return float(self.squares_on_device())

    def squares_on_device(self) -> Tensor:
        """Σ g² (0-dim, float64) over the rows of all ranks: an all-reduce of one number."""
        squares = [squared_sum(self._joint(place)[1]) for place in range(len(self._tables))]
        return self._tables[0].link.sum(torch.stack(squares).sum())

    def apply(self, optimizer: RowOptimizerSpec, scale: Tensor) -> None:
        """Update rows and slots by ``optimizer`` with ``scale`` (0-dim) times the gradient, and end the step."""
        for place, table in enumerate(self._tables):
            numbers_U, gradient_UD = self._joint(place)
            if len(numbers_U):
                table.update(numbers_U, gradient_UD, optimizer, scale.to(table.device))
            table.end_step(optimizer.lr)

    def discard(self) -> None:
        """Drop the gradients."""
        self._found = []


def _is_fused(table: DeviceRows) -> bool:
    """Return whether kernels sum the gradients of this table's rows as they update them."""
    spec = table.spec
    numbers = step_numbers(spec.optimizer)
    # Random bits are drawn for 8 numbers of a slot at a time.
    knows_slots = spec.slot_dtype == "float32" or (spec.slot_dim % spec.dim == 0 and spec.dim % 8 == 0)
    is_plain = {spec.dtype, spec.slot_dtype} <= _PLAIN and not spec.counts_steps
    return runs_kernels(table.device) and numbers is not None and is_plain and knows_slots


class _Waiting:
    """Gradients of micro-batches, sorted once for all optimizers whose updates share them."""

    def __init__(self, parts: Sequence[VectorGradients], versions: Sequence[Sequence[int]] | None = None) -> None:
        """``versions``: versions of the gradient tensors when they came; None: their current ones."""
        self.parts = parts
        self.versions = [_versions(part) for part in parts] if versions is None else versions
        self._sorted: SortedGradients | None = None

    def sorted(self) -> SortedGradients:
        if [_versions(part) for part in self.parts] != self.versions:
            raise InvalidArgument(
                "a gradient of the vectors of embeddings was changed in place between its backward pass and the step, "
                "which reads it there; make a new tensor, or call step() before"
            )
        if self._sorted is None:
            self._sorted = SortedGradients(self.parts)
        return self._sorted


def _versions(part: VectorGradients) -> list[int]:
    return [-1 if own is None else own._version for own in part.upstream]


class UnsummedGradient:
    """Gradients of vectors for this rank's rows; an update sums them by row."""

    squares = None

    def __init__(self, tables: Mapping[int, DeviceRows], waiting: _Waiting) -> None:
        """``tables`` by their numbers in keys."""
        self._tables, self._waiting = tables, waiting

    def merge(self, other: UnsummedGradient) -> None:
        """Add the gradient of another micro-batch, which must not be used any more."""
        mine, theirs = self._waiting, other._waiting
        self._waiting = _Waiting([*mine.parts, *theirs.parts], [*mine.versions, *theirs.versions])

    def squared_norm(self) -> float:
        return float(self.squares_on_device())

    def squares_on_device(self) -> Tensor:
        """Σ g² (0-dim, float64) over the rows of all ranks: an all-reduce of one number."""
        rows = {number: table.rows_LD for number, table in self._tables.items()}
        link = next(iter(self._tables.values())).link
        return link.sum(self._waiting.sorted().squares(rows))

    def apply(self, optimizer: RowOptimizerSpec, scale: Tensor) -> None:
        """Update rows and slots by ``optimizer`` with ``scale`` (0-dim) times the gradient, and end the step."""
        tables = {number: table.stored for number, table in self._tables.items()}
        numbers = step_numbers(optimizer)
        assert numbers is not None
        self._waiting.sorted().update(tables, numbers, optimizer.lr, scale)

    def discard(self) -> None:
        """Drop the gradients."""
        self._waiting = _Waiting([])


RowGradients = BagGradient | UnsummedGradient
