"""The rows that one batch looks up in a cluster, pulled (again) or hosted, and the autograd node in front of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from geartrain.ams.client.table import pull_together
from geartrain.ams.kernels.embedding import FeatureIds, Lookup
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.specs import Ids
from geartrain.bridge.embedding.group_rows import TrainedTables
from geartrain.bridge.embedding.hosted_bags import HostedLookup
from geartrain.bridge.embedding.ids import BatchIds
from geartrain.bridge.embedding.update import EmbeddingGradient, EmbeddingUpdate, TableGradient
from geartrain.bridge.embedding.vectors import pooled_on_device
from geartrain.bridge.rows.same_rows import incarnation_of
from geartrain.bridge.rows.transfers import downloaded, upload

if TYPE_CHECKING:
    from geartrain.ams.client.table import Table


class BatchRows:
    """The ids of a batch, merged, and the rows of each table. For one thread at a time."""

    def __init__(
        self,
        tables: Sequence[Table],
        features: Sequence[FeatureIds],
        given: Sequence[BatchIds],
        lookup: Lookup,
        *,
        is_bounded: bool,
        hosted: HostedLookup | None = None,
    ) -> None:
        """Of each table distinct ids [U] and memory for their rows [U, D], which :func:`pull` fills. ``is_bounded``:
        the writes of other workers count, too, as far as those of this one do. ``hosted`` are the features whose rows
        are not pulled: they come when vectors are made, as they are then. ``given`` are the ids of all, those last.
        """
        self.hosted = hosted
        self.tables = tables
        self.features = features
        self.given = given
        self.lookup = lookup
        self.ids = lookup.ids()
        self.rows: list[npt.NDArray[Any]] = [
            np.empty((len(own), table.spec.dim), table.spec.numpy_dtype)
            for table, own in zip(tables, self.ids, strict=True)
        ]
        self.pulled_at: list[tuple[int, ...] | None] = [None] * len(tables)
        """Of each table the writes that it had had on each shard when the oldest of these rows were read; None: no row
        of it was."""
        self.is_bounded = is_bounded
        self.is_pulled = False
        self._incarnations = [incarnation_of(table) for table in tables]
        self.on_device: Sequence[Tensor] = ()
        """Rows [U, D] of all tables, with caches on a device; those of ``rows`` are scratch then."""

    def outdated(self, number: int, touched: Sequence[Ids]) -> npt.NDArray[np.intp]:
        """The places of rows of a table that may be others now, after writes of the ids ``touched`` by this process."""
        table, own = self.tables[number], self.ids[number]
        incarnation = incarnation_of(table)
        is_another = incarnation != self._incarnations[number]  # it was restored
        self._incarnations[number] = incarnation
        if is_another or not self.is_pulled or (touched and (self.is_bounded or table.spec.counts_steps)):
            return np.arange(len(own))  # also of all others there may have been writes, or they move with every step
        found = [self.lookup.places_among(number, ids) for ids in touched]
        if len(found) < 2:
            return found[0].astype(np.intp) if found else np.empty(0, np.intp)
        return np.unique(np.concatenate(found)).astype(np.intp)


def pull(all_pulled: Iterable[BatchRows]) -> None:
    """Read the rows of all of them: tables of one cluster in one request to each shard. Raises what Table.pull does."""
    all_pulled = list(all_pulled)
    all_of = [(pulled, number) for pulled in all_pulled for number, ids in enumerate(pulled.ids) if len(ids)]
    writes = pull_together([(own.tables[number], own.ids[number], own.rows[number]) for own, number in all_of])
    for (pulled, number), pulled_at in zip(all_of, writes, strict=True):
        pulled.pulled_at[number] = tuple(pulled_at)
    for pulled in all_pulled:
        pulled.is_pulled = True


def pull_again(all_pulled: Sequence[BatchRows], touched: Callable[[Table], Sequence[Ids]]) -> int:
    """The same for the rows that writes since may have changed; ``touched`` says which ids of a table those wrote.

    Returns how many rows.
    """
    pulls, places_of = [], []
    for pulled in all_pulled:
        for number, table in enumerate(pulled.tables):
            places = pulled.outdated(number, touched(table))
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


Floats = npt.NDArray[np.float32]


class LookupCall:
    """One forward pass: what was looked up, and where its row gradients go."""

    def __init__(
        self,
        lookup: Lookup,
        features: Sequence[FeatureIds],
        rows: Sequence[npt.NDArray[Any]],
        pulled_at: Sequence[tuple[int, ...] | None],
        parts: Sequence[TrainedTables[EmbeddingUpdate]],
        hosted: HostedLookup | None = None,
        on_device: Sequence[Tensor] = (),
    ) -> None:
        """``rows`` [U, D] of each table of the lookup, in the order of the ``parts`` and of the tables in them, and the
        writes that the table had had on each shard then; None: nothing was pulled.
        """
        self._hosted = hosted
        self._lookup = lookup
        self._features = features
        self._rows = rows
        self._on_device = on_device
        self._dims = [row.shape[1] for row in rows]
        self._pulled_at = pulled_at
        self._parts = parts
        self._rows_versions = [part.row_update.rows_version for part in parts]
        self.trained = [part.row_update for part in parts if part.row_update.is_trained]
        self._made: tuple[object, dict[int, tuple[EmbeddingGradient, Tensor]]] | None = None
        """The row gradients by what upstream, and of each update by its id those that it has not taken."""

    def vectors(self, device: torch.device, *, want_gradient: bool) -> tuple[Tensor, ...]:
        """The vectors [V, D] of each feature, and of each hosted one, float32, on ``device``."""
        if self._on_device:
            places = [self._lookup.places_of(place) for place in range(len(self._features))]
            found = pooled_on_device(self._features, places, self._on_device)
            self._rows = self._on_device = ()
            return tuple(found)
        out = [np.empty((feature.num_vectors, self._dims[feature.table]), np.float32) for feature in self._features]
        self._lookup.pool(self._rows, out=out, keep_maxima=want_gradient)
        self._rows = ()  # none of them is needed again
        if self._hosted is not None:
            out += self._hosted.vectors()
        return tuple(upload(item, device) for item in out)

    def defer(self, upstream: Sequence[Tensor | None]) -> list[Tensor]:
        """Have the row gradients queued once autograd accumulates; return the stand-ins' gradients."""
        return [update.defer(self, upstream) for update in self.trained]

    def queue_row_gradients(self, upstream: Sequence[Tensor | None], update: EmbeddingUpdate) -> None:
        """Add the gradients of the rows of ``update``; those of all updates are made at once."""
        if self._made is None or self._made[0] is not upstream:
            self._made = upstream, self._gradients(upstream)
        if (made := self._made[1].pop(id(update), None)) is not None:
            update.add(*made, 1)  # ranks weigh alike, as in DDP's average

    def _gradients(self, upstream: Sequence[Tensor | None]) -> dict[int, tuple[EmbeddingGradient, Tensor]]:
        for part, version in zip(self._parts, self._rows_versions, strict=True):
            if part.row_update.rows_version != version:
                raise InvalidArgument(
                    f"rows of {part.row_update.name} were loaded or restored between this forward pass and its "
                    "backward; look the ids up again"
                )
            part.row_update.require_no_step()  # of all of them, before any takes something
        fetched = iter(downloaded([item for item in upstream if item is not None]))
        return self._sums(
            [None if item is None else next(fetched).to(torch.float32).contiguous().numpy() for item in upstream]
        )

    def _sums(self, every: Sequence[Floats | None]) -> dict[int, tuple[EmbeddingGradient, Tensor]]:
        """What each update is to add, by its id."""
        found: dict[int, tuple[EmbeddingGradient, Tensor]] = {}
        gradients, of_bags = every[: len(self._features)], every[len(self._features) :]
        updates = {} if self._hosted is None else self._hosted.updates(of_bags)
        ids = self._lookup.ids()
        sums = [np.empty((len(own), dim), np.float32) for own, dim in zip(ids, self._dims, strict=True)]
        squares = self._lookup.sum_gradients(gradients, out=sums)
        have_gradients: list[list[bool]] = [[] for _ in ids]
        """Of each table, whether each of its features has one."""
        for feature, gradient in zip(self._features, gradients, strict=True):
            have_gradients[feature.table].append(gradient is not None)
        used = [
            None if all(each) else np.zeros(len(own), np.bool_) for each, own in zip(have_gradients, ids, strict=True)
        ]
        for place, (feature, gradient) in enumerate(zip(self._features, gradients, strict=True)):
            mask = used[feature.table]
            if mask is not None and gradient is not None:
                places = self._lookup.places_of(place)
                mask[places[places >= 0]] = True
        first = 0
        # One number says of all whether they are finite; an optimizer that trains some of them hears it of all.
        checksum = torch.tensor(squares + sum(_squares_of(bag) for bag in of_bags if bag is not None))
        for part in self._parts:
            tables: dict[int, TableGradient] = {}
            for place, table in enumerate(part.row_update.tables):
                own, rows, mask = ids[first + place], sums[first + place], used[first + place]
                counts = None
                if table.spec.counts_occurrences:
                    counts = self._lookup.occurrences(first + place, [gradient is not None for gradient in gradients])
                if mask is not None:
                    own, rows, counts = own[mask], rows[mask], None if counts is None else counts[mask]
                # Rows that move at every step do so where a batch has no id, too.
                if len(own) or (table.spec.counts_steps and any(have_gradients[first + place])):
                    tables[place] = TableGradient(own, rows, counts, self._pulled_at[first + place])
            its_tables = range(len(part.row_update.tables))
            bags = {place: updates[first + place] for place in its_tables if first + place in updates}
            first += len(its_tables)
            if tables or bags or part.row_update.ranks is not None:  # ranks make every step together
                own_squares = squares if len(self._parts) == 1 else _squares(tables)
                collected = EmbeddingGradient(tables, own_squares, bags)
                found[id(part.row_update)] = collected, checksum
        return found


def _squares(tables: dict[int, TableGradient]) -> float:
    return sum(_squares_of(table.rows) for table in tables.values())


def _squares_of(rows: Floats) -> float:
    wide = rows.reshape(-1).astype(np.float64)
    return float(np.vdot(wide, wide))


class Vectors(torch.autograd.Function):
    """Vectors of all features; backward queues the row gradients."""

    @staticmethod
    def forward(ctx: Any, call: LookupCall, device: torch.device, *stand_ins: Tensor) -> tuple[Tensor, ...]:
        """``stand_ins`` of the trained tables: where autograd reaches them, row gradients count."""
        del stand_ins
        ctx.call = call
        ctx.set_materialize_grads(False)
        return call.vectors(device, want_gradient=True)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        """Queue the row gradients."""
        require_first_derivative()
        return (None, None, *ctx.call.defer(upstream))


def require_first_derivative() -> None:
    """Raise InvalidArgument within a backward pass by create_graph=True: the gradient would count as a constant."""
    if torch.is_grad_enabled():
        raise InvalidArgument(
            "embeddings have no second derivatives: create_graph=True cannot go through their rows; take the "
            "gradient without it"
        )
