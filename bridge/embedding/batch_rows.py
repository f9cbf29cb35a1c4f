"""The rows that one batch looks up, as they were when they were pulled, or pulled again since."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from geartrain.ams.client.table import pull_together
from geartrain.ams.kernels.embedding import FeatureIds, Lookup
from geartrain.ams.values.specs import Ids
from geartrain.bridge.embedding.hosted_bags import HostedLookup
from geartrain.bridge.embedding.ids import BatchIds
from geartrain.bridge.rows.same_rows import incarnation_of

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
