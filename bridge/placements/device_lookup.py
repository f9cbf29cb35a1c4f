"""Rows on the ranks' devices, looked up by ids: routed to the rank of each row, added up there, and sent back.

Per step, whatever the number of fields: one exchange of counts between the hosts (the caller's), and three
all-to-alls: 16 bytes for each id; 4 · D bytes for each vector that has ids on another rank, and as many for its
gradient in the backward pass.

Legend: R ranks, F fields, N ids in all, P pairs of a vector and a rank that has rows of it, D width, V vectors of a
field, U distinct rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from geartrain.ams.values.optimizers.registry import RowOptimizerSpec
from geartrain.bridge.placements.device_rows import DeviceRows
from geartrain.bridge.placements.workspace import Arithmetic, Scratch, Workspace
from geartrain.bridge.rows.gradient_carrier import squared_sum

T = TypeVar("T")

_WORDS = 4
"""int32 of an id that travels: the id, whether it is the first of its vector, and its weight."""


class FieldBags(NamedTuple):
    """What is asked of the rows of one field: each vector is Σ w · x over its ids."""

    table: int
    """Which of the tables."""
    ids_N: Tensor
    """int64, all of them rows of the table."""
    vector_N: Tensor
    """int64, rising: which vector each id counts in."""
    weights_N: Tensor | None
    """float32; None: 1 each."""
    num_vectors: int


class DeviceLookup:
    """The vectors of all fields of one batch. Every rank makes the same calls, with as many fields."""

    def __init__(self, tables: Sequence[DeviceRows], fields: Sequence[FieldBags]) -> None:
        """``tables`` are over the same ranks, on one device, and so are the ids. Nothing travels yet."""
        self._tables, self._fields = tables, fields
        self._link = tables[0].link
        device = tables[0].device
        ranks, num_fields = self._link.world_size, len(fields)
        firsts = [0, *accumulate(field.num_vectors for field in fields)]
        lengths = torch.tensor([len(field.ids_N) for field in fields], device=device)
        field_N = torch.repeat_interleave(torch.arange(num_fields, device=device), lengths)
        ids_N = torch.cat([field.ids_N for field in fields])
        vector_N = torch.cat([field.vector_N + first for field, first in zip(fields, firsts, strict=False)])
        weights_N = torch.cat(
            [
                torch.ones(len(field.ids_N), device=device) if field.weights_N is None else field.weights_N
                for field in fields
            ]
        )
        shares_F = torch.tensor([tables[field.table].share for field in fields], device=device)
        rank_N = ids_N // shares_F[field_N]
        order_N = torch.argsort(rank_N, stable=True)  # the fields one after the other for each rank
        rank_N, field_N, vector_N = rank_N[order_N], field_N[order_N], vector_N[order_N]
        pair_P, of_pair_N = torch.unique_consecutive(rank_N * firsts[-1] + vector_N, return_inverse=True)
        is_first_N = torch.ones_like(of_pair_N)
        is_first_N[1:] = of_pair_N.diff()
        in_words = [ids_N[order_N].view(torch.int32).view(-1, 2), is_first_N.to(torch.int32)[:, None]]
        self._leaving_NW = torch.cat([*in_words, weights_N[order_N].view(torch.int32)[:, None]], 1)
        place_N = rank_N * num_fields + field_N  # for each rank, the fields
        place_P = place_N[is_first_N == 1]
        counts = [torch.bincount(places, minlength=ranks * num_fields) for places in (place_N, place_P)]
        first_P = torch.tensor(firsts, device=device)[place_P % max(1, num_fields)]
        self.counts: list[int] = torch.stack(counts).flatten().tolist()
        """What the ranks exchange: for each rank and field how many ids go there, and how many vectors have them."""
        self._vectors_of = (pair_P % max(1, firsts[-1]) - first_P).split_with_sizes(self.counts[ranks * num_fields :])
        """For each rank and field the vectors that have rows there."""

    def vectors(self, counts: Sequence[Sequence[int]]) -> list[Tensor]:
        """The vectors [V, D] of each field, float32, from the ``counts`` of every rank. Two all-to-alls."""
        ranks, num_fields = self._link.world_size, len(self._fields)
        mine = slice(self._link.rank * num_fields, (self._link.rank + 1) * num_fields)
        ids_RF = [count[: ranks * num_fields][mine] for count in counts]
        self._vectors_RF = [list(count[ranks * num_fields :][mine]) for count in counts]
        """How many vectors of each rank and field have rows here."""
        words = [_WORDS * sum(item) for item in ids_RF]
        leaving = [_WORDS * sum(part) for part in _parts(self.counts[: ranks * num_fields], num_fields)]
        arrived_NW = self._link.all_to_all(self._leaving_NW.view(-1), leaving, words).view(-1, _WORDS)
        pieces = arrived_NW.split_with_sizes([num for of_rank in ids_RF for num in of_rank])
        self._asked = {
            table: _Asked(rows, [pieces[place] for place in self._places_of(table)])
            for table, rows in enumerate(self._tables)
        }
        answers: list[Tensor] = list(pieces)
        for table, asked in self._asked.items():
            sums = asked.sums().split_with_sizes([self._num_at(place) for place in self._places_of(table)])
            for place, item in zip(self._places_of(table), sums, strict=True):
                answers[place] = item.flatten()
        arrived = self._exchanged(answers, self._answer_sizes(), self._sizes())
        vectors: list[Tensor] = []
        for number, field in enumerate(self._fields):
            dim = self._tables[field.table].spec.dim
            out_VD = arrived[number].new_zeros(field.num_vectors, dim)
            for rank in range(ranks):
                place = rank * num_fields + number
                out_VD.index_add_(0, self._vectors_of[place], arrived[place].view(-1, dim))
            vectors.append(out_VD)
        return vectors

    def row_gradients(self, upstream: Sequence[Tensor | None]) -> list[tuple[Tensor, Tensor]]:
        """Of each table the numbers [U] of rows on this rank and their gradients [U, D], from those of the vectors.

        None: a field has none, on this rank; rows that no field with a gradient has asked for are left out. One
        all-to-all.
        """
        ranks, num_fields = self._link.world_size, len(self._fields)
        device = self._tables[0].device
        is_used = torch.tensor([float(gradient is not None) for gradient in upstream], device=device)
        sizes, leaving = self._sizes(), []
        for place, vectors in enumerate(self._vectors_of):
            gradient = upstream[place % num_fields]
            leaving.append(
                torch.zeros(sizes[place], device=device)
                if gradient is None
                else gradient.detach().to(torch.float32)[vectors].flatten()
            )
        flags = [is_used] * ranks
        arrived = self._exchanged(leaving, sizes, self._answer_sizes(), flags)
        used_RF = torch.stack(flags)
        is_all = bool((used_RF == 1).all())
        found: list[tuple[Tensor, Tensor]] = []
        for table, asked in self._asked.items():
            dim, places = self._tables[table].spec.dim, self._places_of(table)
            gradient_SD = torch.cat([arrived[place].view(-1, dim) for place in places])
            used_S = None
            if not is_all:
                nums = torch.tensor([self._num_at(place) for place in places], device=device)
                used_S = used_RF.flatten()[torch.tensor(places, device=device)].repeat_interleave(nums) == 1
            found.append(asked.row_gradients(gradient_SD, used_S))
        return found

    def _places_of(self, table: int) -> list[int]:
        """Of the fields of a table, for each rank."""
        num_fields = len(self._fields)
        own = [number for number, field in enumerate(self._fields) if field.table == table]
        return [rank * num_fields + number for rank in range(self._link.world_size) for number in own]

    def _num_at(self, place: int) -> int:
        return self._vectors_RF[place // len(self._fields)][place % len(self._fields)]

    def _dim_at(self, place: int) -> int:
        return self._tables[self._fields[place % len(self._fields)].table].spec.dim

    def _sizes(self) -> list[int]:
        """Numbers of what each rank has of each field's vectors of this rank."""
        return [len(item) * self._dim_at(place) for place, item in enumerate(self._vectors_of)]

    def _answer_sizes(self) -> list[int]:
        """Numbers of what this rank has of each rank's vectors, field by field."""
        return [self._num_at(place) * self._dim_at(place) for place in range(len(self._vectors_of))]

    def _exchanged(
        self,
        leaving: Sequence[Tensor],
        sizes: Sequence[int],
        arriving: Sequence[int],
        flags: list[Tensor] | None = None,
    ) -> list[Tensor]:
        """Send the pieces, those of each field for each rank, and return what arrives; ``flags`` of all fields, too."""
        num_fields = len(self._fields)
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


class _Asked:
    """What all ranks ask of the rows of one table on this rank. S: sums that are asked for."""

    def __init__(self, rows: DeviceRows, pieces: Sequence[Tensor]) -> None:
        words_NW = torch.cat(list(pieces))
        numbers_N = words_NW[:, :2].contiguous().view(torch.int64).view(-1) - rows.first
        self._rows = rows
        self._weights_N = words_NW[:, 3].contiguous().view(torch.float32)
        self._sum_N = words_NW[:, 2].cumsum(0) - 1
        self.numbers_U, self._place_N = torch.unique(numbers_N, return_inverse=True)

    def sums(self) -> Tensor:
        """[S, D]."""
        rows_UD = self._rows.current_rows(self.numbers_U).float()
        return _bags(self._place_N, rows_UD, self._sum_N, self._weights_N)

    def row_gradients(self, gradient_SD: Tensor, used_S: Tensor | None) -> tuple[Tensor, Tensor]:
        """Numbers [U] and gradients [U, D] of the rows, from those of the sums; of all sums, or of those used."""
        place_N, sum_N, weights_N, numbers_U = self._place_N, self._sum_N, self._weights_N, self.numbers_U
        if used_S is not None:
            chosen = used_S[sum_N]
            kept_U, place_N = torch.unique(place_N[chosen], return_inverse=True)
            sum_N, weights_N, numbers_U = sum_N[chosen], weights_N[chosen], numbers_U[kept_U]
        order_N = torch.argsort(place_N, stable=True)  # bags of gradients: many times as fast as adding row by row
        return numbers_U, _bags(sum_N[order_N], gradient_SD, place_N[order_N], weights_N[order_N])


def _bags(index_N: Tensor, values: Tensor, bag_N: Tensor, weights_N: Tensor) -> Tensor:
    """Σ w · values[index] of each bag; ``bag_N`` rises from 0, and no bag is left out."""
    num_bags = int(bag_N[-1]) + 1 if len(bag_N) else 0
    if not num_bags:
        return values.new_zeros(0, values.shape[1])
    starts = torch.searchsorted(bag_N, torch.arange(num_bags, device=bag_N.device))
    return nn.functional.embedding_bag(index_N, values, starts, mode="sum", per_sample_weights=weights_N)


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
            work = Workspace(Arithmetic.of(gradient_UD), Scratch())
            if len(numbers_U):
                table.update(work, numbers_U, gradient_UD, optimizer, scale.to(table.device))
            table.end_step(optimizer.lr)

    def discard(self) -> None:
        """Let go of them."""
        self._found = []
