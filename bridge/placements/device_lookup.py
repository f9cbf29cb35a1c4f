"""Rows on the ranks' devices, looked up by ids: routed to the rank of each row, added up there, and sent back.

With one rank nothing is routed. With several, per step, whatever the number of fields: one exchange of counts between
the hosts (the caller's), and three all-to-alls: 16 bytes for each id; 4 · D bytes for each vector that has ids on
another rank, and as many for its gradient in the backward pass.

Legend: R ranks, F fields, N ids in all, P pairs of a vector and a rank that has rows of it, D width, V vectors of a
field, U distinct rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.optimizers.registry import RowOptimizerSpec
from geartrain.bridge.kernels.launch import runs_kernels
from geartrain.bridge.kernels.lookup import (
    PLACE_BITS,
    BagPiece,
    Entries,
    RowSpan,
    SortedGradients,
    VectorGradients,
    on_device,
    pool,
    row_gradients,
)
from geartrain.bridge.kernels.optimizers import step_numbers
from geartrain.bridge.placements.device_rows import DeviceRows
from geartrain.bridge.rows.gradient_carrier import squared_sum
from geartrain.bridge.rows.transfers import download

T = TypeVar("T")

_PLAIN = {"float32", "bfloat16", "float16"}
"""Types of rows and slots that kernels of this module read and write."""
_WORDS = 4
"""int32 of an id that travels: its key (two), whether it is the first of its vector, and its weight."""


class DeviceLookup:
    """The vectors of all fields of one batch. Every rank makes the same calls, with as many fields."""

    def __init__(self, tables: Sequence[DeviceRows], asked: Entries) -> None:
        """``tables`` are over the same ranks, on one device, and so are the ids. Nothing travels yet."""
        self._tables, self._asked = tables, asked
        self._link = tables[0].link
        self._rows = [RowSpan(table.rows_LD, table.first) for table in tables]
        self.counts: list[int] = []
        """What several ranks exchange: for each rank and field how many ids go there, and how many vectors have them;
        and whether the ids have weights."""
        self._here = asked
        """What is asked of the rows of this rank, by all."""
        if self._link.world_size > 1:
            self._route()

    def _route(self) -> None:
        asked, device = self._asked, self._asked.key_N.device
        ranks, num_fields, num_ids = self._link.world_size, len(asked.pieces), len(asked.key_N)
        share_T = on_device([*(table.share or 1 for table in self._tables), 1], device)
        key_N = asked.key_N.to(torch.int64)
        rank_N = (key_N & ((1 << asked.bits) - 1)) // share_T[key_N >> asked.bits]
        rank_N = torch.where(key_N < asked.none, rank_N, ranks)  # no rank's
        order_N = torch.argsort(rank_N, stable=True)  # the fields one after the other for each rank
        rank_N, key_N, place_N = rank_N[order_N], key_N[order_N], asked.place_N[order_N]
        field_N = place_N >> PLACE_BITS
        is_first_N = torch.ones_like(rank_N)
        is_first_N[1:] = ((rank_N.diff() != 0) | (place_N.diff() != 0)).to(torch.int64)
        weights_N = torch.ones(num_ids, device=device) if asked.weights_N is None else asked.weights_N[order_N]
        in_words = [key_N.view(torch.int32).view(-1, 2), is_first_N.to(torch.int32)[:, None]]
        self._leaving_NW = torch.cat([*in_words, weights_N.view(torch.int32)[:, None]], 1)
        part_N = rank_N * num_fields + field_N  # for each rank, the fields
        counts = torch.zeros(2, (ranks + 1) * num_fields, dtype=torch.int64, device=device)
        counts[0].index_add_(0, part_N, torch.ones_like(part_N))
        counts[1].index_add_(0, part_N, is_first_N)
        vector_N = place_N & ((1 << PLACE_BITS) - 1)
        vector_P = torch.empty_like(vector_N).scatter_(0, is_first_N.cumsum(0) - 1, vector_N)
        self.counts = download(counts[:, : ranks * num_fields].flatten()).tolist()  # of a device the host waits here
        num_vectors = self.counts[ranks * num_fields :]
        self._vectors_of = vector_P[: sum(num_vectors)].split_with_sizes(num_vectors)
        """For each rank and field the vectors that have rows there."""
        self.counts.append(int(asked.weights_N is not None))

    def vectors(self, counts: Sequence[Sequence[int]]) -> list[Tensor]:
        """The vectors [V, D] of each field, float32, from the ``counts`` of every rank. Two all-to-alls."""
        if self._link.world_size == 1:
            return self._pooled()
        ranks, num_fields = self._link.world_size, len(self._asked.pieces)
        mine = slice(self._link.rank * num_fields, (self._link.rank + 1) * num_fields)
        ids_RF = [count[: ranks * num_fields][mine] for count in counts]
        vectors_RF = [list(count[ranks * num_fields :][mine]) for count in counts]
        words = [_WORDS * sum(item) for item in ids_RF]
        leaving = [_WORDS * sum(part) for part in _parts(self.counts[: ranks * num_fields], num_fields)]
        leaving_NW = self._leaving_NW[: sum(leaving) // _WORDS]
        arrived_NW = self._link.all_to_all(leaving_NW.reshape(-1), leaving, words).view(-1, _WORDS)
        self._here = self._arrived(arrived_NW, ids_RF, vectors_RF, any(count[-1] for count in counts))
        answers = [sums.flatten() for sums in self._pooled()]
        arrived = self._exchanged(answers, self._answer_sizes(), self._sizes())
        vectors: list[Tensor] = []
        first_vectors = self._asked.first_vectors
        for number, piece in enumerate(self._asked.pieces):
            dim = self._tables[piece.table].spec.dim
            out_VD = arrived[number].new_zeros(piece.num_vectors, dim)
            for rank in range(ranks):
                place = rank * num_fields + number
                out_VD.index_add_(0, self._vectors_of[place], arrived[place].view(-1, dim))
            if self._asked.factor_V is not None:
                out_VD *= self._asked.factor_V[first_vectors[number] : first_vectors[number + 1], None]
            vectors.append(out_VD)
        return vectors

    def _arrived(
        self,
        words_NW: Tensor,
        ids_RF: Sequence[Sequence[int]],
        vectors_RF: Sequence[Sequence[int]],
        are_weighted: bool,
    ) -> Entries:
        """What the ranks ask for, of these many ids and vectors for each rank and field."""
        asked, device = self._asked, words_NW.device
        tables = [piece.table for piece in asked.pieces]
        pieces = tuple(
            BagPiece(table, ids, vectors)
            for of_rank, own in zip(ids_RF, vectors_RF, strict=True)
            for table, ids, vectors in zip(tables, of_rank, own, strict=True)
        )
        sum_N = words_NW[:, 2].cumsum(0) - 1
        counts_Q = on_device([piece.num_ids for piece in pieces], device)
        piece_N = torch.repeat_interleave(torch.arange(len(pieces), device=device), counts_Q, output_size=len(words_NW))
        firsts = [0, *accumulate(piece.num_vectors for piece in pieces)]
        place_N = (piece_N << PLACE_BITS) | (sum_N - on_device(firsts, device)[piece_N])
        return Entries(
            asked.bits,
            asked.num_tables,
            pieces,
            words_NW[:, :2].contiguous().view(torch.int64).view(-1).to(asked.key_N.dtype),
            place_N,
            torch.searchsorted(sum_N, torch.arange(firsts[-1] + 1, device=device)),
            words_NW[:, 3].contiguous().view(torch.float32) if are_weighted else None,
        )

    def _pooled(self) -> list[Tensor]:
        is_plain = all(table.steps is None and table.spec.dtype in _PLAIN for table in self._tables)
        return pool(self._here, self._rows, None if is_plain else self._current_rows)

    def _current_rows(self, table: int, numbers_U: Tensor) -> Tensor:
        return self._tables[table].current_rows(numbers_U)

    def here(self, upstream: Sequence[Tensor | None]) -> tuple[Entries, list[Tensor | None]]:
        """What is asked of the rows of this rank by fields whose vectors have a gradient, and those gradients.

        Rows that no field with a gradient has asked for are left out. With several ranks one all-to-all.
        """
        if self._link.world_size == 1:
            if all(gradient is not None for gradient in upstream):
                return self._here, list(upstream)
            used = on_device([gradient is not None for gradient in upstream], self._here.key_N.device)
            return self._here.of(used == 1), list(upstream)
        ranks, num_fields = self._link.world_size, len(self._asked.pieces)
        device = self._tables[0].device
        is_used = on_device([gradient is not None for gradient in upstream], device).to(torch.float32)
        sizes, leaving, first_vectors = self._sizes(), [], self._asked.first_vectors
        scaled = list(upstream)
        for number, gradient in enumerate(upstream):
            if gradient is not None:
                own = gradient.detach().to(torch.float32)
                if self._asked.factor_V is not None:
                    own = own * self._asked.factor_V[first_vectors[number] : first_vectors[number + 1], None]
                scaled[number] = own
        for place, vectors in enumerate(self._vectors_of):
            gradient = scaled[place % num_fields]
            leaving.append(
                torch.zeros(sizes[place], device=device) if gradient is None else gradient[vectors].flatten()
            )
        flags = [is_used] * ranks
        arrived = self._exchanged(leaving, sizes, self._answer_sizes(), flags)
        used_Q = torch.stack(flags).flatten() == 1
        dims = [self._tables[piece.table].spec.dim for piece in self._here.pieces]
        return self._here.of(used_Q), [part.view(-1, dim) for part, dim in zip(arrived, dims, strict=True)]

    def gradients(
        self, tables: Sequence[Sequence[DeviceRows]], upstream: Sequence[Tensor | None], scale: float
    ) -> tuple[list[RowGradients], Tensor]:
        """Of ``scale`` times the vectors' gradients (None: there is none) those of the rows of this rank, for each
        update of ``tables`` (all of them, in their order); and a number that is finite if they are (0-dim, float64).
        """
        entries, own = self.here(upstream)
        if all(map(_is_fused, self._tables)):
            given = [gradient.detach() for gradient in own if gradient is not None]
            checksum = torch.stack(torch._foreach_norm(given, 1)).sum().double()  # of squares less would be too much
            numbers = {id(table): number for number, table in enumerate(self._tables)}
            shared = _Waiting([VectorGradients(entries, own, scale)])
            return [
                UnsummedGradient({numbers[id(table)]: table for table in part}, shared) for part in tables
            ], checksum
        found = row_gradients(entries, self._rows, own, scale)
        checksum = torch.stack([rows_UD.double().square().sum() for _, rows_UD in found]).sum()
        rest = iter(found)
        return [BagGradient(part, [next(rest) for _ in part]) for part in tables], checksum

    def _dim_at(self, place: int) -> int:
        return self._tables[self._asked.pieces[place % len(self._asked.pieces)].table].spec.dim

    def _sizes(self) -> list[int]:
        """Numbers of what each rank has of each field's vectors of this rank."""
        return [len(item) * self._dim_at(place) for place, item in enumerate(self._vectors_of)]

    def _answer_sizes(self) -> list[int]:
        """Numbers of what this rank has of each rank's vectors, field by field."""
        return [piece.num_vectors * self._dim_at(place) for place, piece in enumerate(self._here.pieces)]

    def _exchanged(
        self,
        leaving: Sequence[Tensor],
        sizes: Sequence[int],
        arriving: Sequence[int],
        flags: list[Tensor] | None = None,
    ) -> list[Tensor]:
        """Send the pieces, those of each field for each rank, and return what arrives; ``flags`` of all fields, too."""
        num_fields = len(self._asked.pieces)
        more = 0 if flags is None else num_fields
        pieces: list[Tensor] = []
        for rank, own in enumerate(_parts(leaving, num_fields)):
            pieces += [*([] if flags is None else [flags[rank]]), *own]
        there = [sum(own) + more for own in _parts(sizes, num_fields)]
        here = [sum(own) + more for own in _parts(arriving, num_fields)]
        arrived: list[Tensor] = []
        parts = self._link.all_to_all(torch.cat(pieces), there, here).split_with_sizes(here)
        for rank, (part, nums) in enumerate(zip(parts, _parts(arriving, num_fields), strict=True)):
            if flags is not None:
                flags[rank] = part[:more]
            arrived += part[more:].split_with_sizes(list(nums))
        return arrived


def _parts(items: Sequence[T], size: int) -> list[Sequence[T]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


class BagGradient:
    """The gradients of rows of several tables on this rank, of one or several micro-batches."""

    def __init__(self, tables: Sequence[DeviceRows], found: Sequence[tuple[Tensor, Tensor]]) -> None:
        """``found``: of each table distinct row numbers [U] and their gradients [U, D], float32."""
        self._tables = tables
        self._found = [[item] for item in found]

    squares = None
    """Those of other ranks are not here."""

    def merge(self, other: BagGradient) -> None:
        """Add the gradient of another micro-batch, which is used up."""
        for mine, theirs in zip(self._found, other._found, strict=True):
            mine += theirs

    def _joint(self, place: int) -> tuple[Tensor, Tensor]:
        """The rows of a table, each once."""
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
        """Update the rows and slots by ``optimizer`` with ``scale`` (0-dim) times the gradient; that ends the step."""
        for place, table in enumerate(self._tables):
            numbers_U, gradient_UD = self._joint(place)
            if len(numbers_U):
                table.update(numbers_U, gradient_UD, optimizer, scale.to(table.device))
            table.end_step(optimizer.lr)

    def discard(self) -> None:
        """Let go of them."""
        self._found = []


def _is_fused(table: DeviceRows) -> bool:
    """Whether kernels sum the gradients of its rows where they update them."""
    spec = table.spec
    numbers = step_numbers(spec.optimizer)
    # Draws of 16 bits begin at every eighth number of a slot.
    knows_slots = spec.slot_dtype == "float32" or (spec.slot_dim % spec.dim == 0 and spec.dim % 8 == 0)
    is_plain = {spec.dtype, spec.slot_dtype} <= _PLAIN and not spec.counts_steps
    return runs_kernels(table.device) and numbers is not None and is_plain and knows_slots


class _Waiting:
    """The gradients of micro-batches, which the updates of several optimizers may share; sorted once."""

    def __init__(self, parts: Sequence[VectorGradients], versions: Sequence[Sequence[int]] | None = None) -> None:
        """``versions``: what the gradients were when they came; None: what they are now."""
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
    """The gradients of vectors on this rank's rows; those of the rows are summed where rows are updated."""

    squares = None

    def __init__(self, tables: Mapping[int, DeviceRows], waiting: _Waiting) -> None:
        """``tables`` by their numbers in keys."""
        self._tables, self._waiting = tables, waiting

    def merge(self, other: UnsummedGradient) -> None:
        """Add the gradient of another micro-batch, which is used up."""
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
        """Update the rows and slots by ``optimizer`` with ``scale`` (0-dim) times the gradient; that ends the step."""
        tables = {number: table.stored for number, table in self._tables.items()}
        numbers = step_numbers(optimizer)
        assert numbers is not None
        self._waiting.sorted().update(tables, numbers, optimizer.lr, scale)

    def discard(self) -> None:
        """Let go of them."""
        self._waiting = _Waiting([])


RowGradients = BagGradient | UnsummedGradient
