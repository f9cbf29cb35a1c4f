"""Look-up of one batch in a cluster, from its ids to the gradients of its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from geartrain.ams.client.table import pull_together
from geartrain.ams.kernels.embedding import FeatureIds, Lookup
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.specs import Ids
from geartrain.bridge.embedding.hosted_bags import HostedLookup
from geartrain.bridge.embedding.ids import FieldIds
from geartrain.bridge.embedding.update import (
    EmbeddingGradient,
    EmbeddingUpdate,
    TableGradient,
    squares_of,
)
from geartrain.bridge.embedding.vectors import pooled_on_device
from geartrain.bridge.rows.transfers import downloaded, upload

if TYPE_CHECKING:
    from geartrain.ams.client.table import Table


@dataclass(frozen=True)
class LookupPlan:
    """The part of a look-up that is equal for all batches."""

    updates: Sequence[EmbeddingUpdate]
    tables: Sequence[Table]
    """Tables of all updates, in order."""
    dims: list[int]
    """Row width of each table."""
    dtypes: Sequence[np.dtype[Any]]
    is_bounded: bool
    """Whether writes of other workers outdate pulled rows too, as under sync and SSP."""


class BatchRows:
    """Merged ids of a batch, the rows of each table, and their gradients. For one thread at a time."""

    def __init__(
        self,
        plan: LookupPlan,
        features: Sequence[FeatureIds],
        given: Sequence[FieldIds] | None,
        lookup: Lookup,
        hosted: HostedLookup | None,
    ) -> None:
        """``lookup`` holds for each table distinct ids [U] and memory for their rows [U, D], filled by :func:`pull`.
        ``hosted`` are the features whose rows are not pulled: their vectors are computed later, from the rows of that
        time. ``given`` are the ids of all fields, hosted ones last; None: vectors need no shaping.
        """
        self.plan, self.tables, self.is_bounded = plan, plan.tables, plan.is_bounded
        self.features, self.given, self.lookup, self.hosted = features, given, lookup, hosted
        self.ids = lookup.ids
        self.rows: list[npt.NDArray[Any]] = [
            np.empty((len(own), dim), dtype) for own, dim, dtype in zip(self.ids, plan.dims, plan.dtypes, strict=True)
        ]
        self.pulled_at: list[tuple[int, ...] | None] = [None] * len(self.ids)
        """Write counts of each table by shard, when the oldest of these rows was read; None: no row was read."""
        self.is_pulled = False
        self._incarnations = [table.incarnation for table in plan.tables]
        self.on_device: Sequence[Tensor] = ()
        """Rows [U, D] of all tables if caches on a device hold them; ``rows`` is scratch then."""
        self._made: tuple[object, dict[EmbeddingUpdate, tuple[EmbeddingGradient, Tensor]]] | None = None
        """Upstream gradients, and row gradients made of them that updates have not taken yet."""

    def stale_rows(self, number: int, touched: Sequence[Ids]) -> npt.NDArray[np.intp]:
        """Return the places of a table's rows that may have changed since their pull.

        ``touched`` are the ids that this process has written since.
        """
        table, own = self.tables[number], self.ids[number]
        is_another = table.incarnation != self._incarnations[number]  # the table was restored
        self._incarnations[number] = table.incarnation
        if is_another or not self.is_pulled or (touched and (self.is_bounded or table.spec.counts_steps)):
            return np.arange(len(own))  # any row may be stale: other workers write, or each step changes all rows
        is_touched = np.zeros(len(own), np.bool_)
        for ids in touched:
            is_touched[self.lookup.places_among(number, ids)] = True
        return np.flatnonzero(is_touched)

    def vectors(self, device: torch.device, *, want_gradient: bool) -> tuple[Tensor, ...]:
        """Return the vectors, float32 [V, D], of each feature and hosted feature, on ``device``. Call it once."""
        self._device, self._rows_versions = device, [update.rows_version for update in self.plan.updates]
        rows, self.rows = self.rows, []  # the rows are not needed again
        if self.on_device:
            places = [self.lookup.places_of(number) for number in range(len(self.features))]
            found, self.on_device = pooled_on_device(self.features, places, self.on_device), ()
            return tuple(found)
        out = self.lookup.pool(rows, keep_maxima=want_gradient)
        if self.hosted is not None:
            out += self.hosted.vectors()
        if device.type == "cpu":
            return tuple(map(torch.from_numpy, out))
        return tuple([upload(item, device) for item in out])

    def queue_row_gradients(self, upstream: Sequence[Tensor | None], update: EmbeddingUpdate) -> None:
        """Queue the row gradients of ``update``; the first call computes those of all updates."""
        if self._made is None or self._made[0] is not upstream:
            self._made = upstream, self._gradients(upstream)
        if (made := self._made[1].pop(update, None)) is not None:
            update.add(*made, 1)  # ranks have equal weight, as in DDP's average

    def _gradients(self, upstream: Sequence[Tensor | None]) -> dict[EmbeddingUpdate, tuple[EmbeddingGradient, Tensor]]:
        """Return the gradient for each update, from those of the vectors (None: the vector was not used)."""
        for update, version in zip(self.plan.updates, self._rows_versions, strict=True):
            if update.rows_version != version:
                raise InvalidArgument(
                    f"rows of {update.name} were loaded or restored between this forward pass and its backward; look "
                    "the ids up again"
                )
            update.require_no_step()  # check all updates before any receives a gradient
        if self._device.type != "cpu":
            host = iter(downloaded([item for item in upstream if item is not None]))
            upstream = [None if item is None else next(host) for item in upstream]
        every = [None if item is None else item.numpy(force=True) for item in upstream]
        gradients, of_bags = every[: len(self.features)], every[len(self.features) :]
        unused = [number for number, gradient in enumerate(gradients) if gradient is None]
        squares, sums = self.lookup.sum_gradients(gradients, self.plan.dims)
        bags, of_bag_squares = {}, 0.0
        if self.hosted is not None:
            bags = self.hosted.updates(of_bags)
            of_bag_squares = sum(squares_of(bag) for bag in of_bags if bag is not None)
        # One checksum covers all; each optimizer gets that of all tables.
        checksum = torch.tensor(squares + of_bag_squares, dtype=torch.float32, device="cpu")
        found, first = {}, 0
        for update in self.plan.updates:
            tables = self._of_tables(update, first, sums, unused)
            its_bags = bags and {
                place - first: own for place, own in bags.items() if first <= place < first + len(update.tables)
            }
            first += len(update.tables)
            if tables or its_bags or update.ranks is not None:  # ranks make every step together
                its_squares = squares if len(self.plan.updates) == 1 else None
                found[update] = EmbeddingGradient(tables, its_squares, its_bags), checksum
        return found

    def _of_tables(
        self, update: EmbeddingUpdate, first: int, sums: list[npt.NDArray[np.float32]], unused: list[int]
    ) -> dict[int, TableGradient]:
        """Return gradients by place in ``update``; ``first`` is the number of its first table here."""
        tables, facts = {}, update.facts()
        for place, number in enumerate(range(first, first + len(update.tables))):
            ids, rows, counts = self.ids[number], sums[number], None
            if place in facts.counting:
                wanted = [feature not in unused for feature in range(len(self.features))]
                counts = self.lookup.occurrences(number, wanted)
            has_any = True
            if unused:
                is_used, has_any = self._used(number, unused)
                ids, rows, counts = ids[is_used], rows[is_used], None if counts is None else counts[is_used]
            # Rows that move at every step also move if a batch has none of their ids.
            if len(ids) or (has_any and place in facts.moving):
                tables[place] = TableGradient(ids, rows, counts, self.pulled_at[number])
        return tables

    def _used(self, number: int, unused: list[int]) -> tuple[npt.NDArray[np.bool_] | slice, bool]:
        """Return a mask of the table's distinct ids in features that are not ``unused``, and whether there are any."""
        own = [feature for feature, ids in enumerate(self.features) if ids.table == number]
        used = [feature for feature in own if feature not in unused]
        if len(used) == len(own):
            return slice(None), bool(own)
        mask = np.zeros(len(self.ids[number]), np.bool_)
        for feature in used:
            places = self.lookup.places_of(feature)
            mask[places[places >= 0]] = True
        return mask, bool(used)


def pull(all_pulled: Iterable[BatchRows]) -> None:
    """Pull the rows of several batches: one request to each shard of a cluster. Raises as Table.pull."""
    pulls, places = [], []
    for pulled in all_pulled:
        for number, one in enumerate(zip(pulled.tables, pulled.ids, pulled.rows, strict=True)):
            if len(one[1]):
                pulls.append(one)
                places.append((pulled, number))
    for (pulled, number), writes in zip(places, pull_together(pulls), strict=True):
        pulled.pulled_at[number] = tuple(writes)
        pulled.is_pulled = True


def pull_again(all_pulled: Sequence[BatchRows], touched: Callable[[Table], Sequence[Ids]]) -> int:
    """Pull the rows again that later writes may have changed; return their number.

    ``touched`` returns the ids of a table that were written.
    """
    pulls, places_of = [], []
    for pulled in all_pulled:
        for number, table in enumerate(pulled.tables):
            places = pulled.stale_rows(number, touched(table))
            if len(places):
                fresh = np.empty((len(places), table.spec.dim), table.spec.numpy_dtype)
                pulls.append((table, pulled.ids[number][places], fresh))
                places_of.append((pulled, number, places))
    writes = pull_together(pulls)
    for (pulled, number, places), (_, _, fresh), pulled_at in zip(places_of, pulls, writes, strict=True):
        pulled.rows[number][places] = fresh
        if len(places) == len(pulled.ids[number]):
            pulled.pulled_at[number] = tuple(pulled_at)
    for pulled in all_pulled:
        pulled.is_pulled = True
    return sum(len(fresh) for _, _, fresh in pulls)
