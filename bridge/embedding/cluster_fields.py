"""Storage of a group's rows in a cluster: rows are pulled, or pooled by the shards for hosted fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from geartrain.ams.client.table import Table, next_step
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.specs import TableSpec
from geartrain.bridge.embedding.autograd_node import Vectors
from geartrain.bridge.embedding.field import table_specs
from geartrain.bridge.embedding.group_rows import GroupRows, GroupSettings, TrainedTables, by_optimizer
from geartrain.bridge.embedding.hosted_bags import HostedLookup
from geartrain.bridge.embedding.ids import batch_ids, ids_of_batch, plain_features
from geartrain.bridge.embedding.lookups import BatchRows, LookupPlan, pull
from geartrain.bridge.embedding.modes import SSP, BoundedLead
from geartrain.bridge.embedding.update import EmbeddingUpdate
from geartrain.bridge.embedding.vectors import feature_ids, merged_ids, require_no_max_weights, weighted
from geartrain.bridge.placements.placement import ClusterPlacement
from geartrain.bridge.placements.row_cache import bytes_of_place, pull_through, row_caches
from geartrain.bridge.rows.ranks import SyncRanks

if TYPE_CHECKING:
    from geartrain.ams.client.cluster import Cluster


class ClusterFields(GroupRows):
    """:class:`GroupRows` in the tables of a cluster."""

    summary = "the rows that a batch needs travel; any id"

    def __init__(self, settings: GroupSettings) -> None:
        """Create or open the tables. Raises as :class:`~geartrain.bridge.embedding.group.EmbeddingGroup`."""
        cluster = settings.cluster
        if cluster is None:
            raise InvalidArgument(f"{settings.name!r} has no cluster and rows='pull'; give one, or rows='ranks'")
        self._fields = settings.fields
        with_rows = [self._fields[number] for number in settings.with_rows]
        self.specs = table_specs(self._fields, settings.names, settings.optimizer, settings.seed)
        order = by_optimizer(self.specs)
        group, mode = settings.process_group, settings.mode
        if group is not None and mode != "sync":
            raise InvalidArgument(
                f"mode is {mode!r} and a process_group was given; ranks step together in mode='sync', or with "
                "rows='ranks'"
            )
        joined = mode == "sync" and (group is not None or dist.is_initialized())
        ranks = [SyncRanks(settings.name, group) if joined else None for _ in order]
        cache_places = _cache_places(settings, joined, self.specs)
        made = _made_by_all(cluster, self.specs, ranks[0], reuse=settings.reuse)
        self._caches = row_caches(made, cache_places, by_clock=isinstance(mode, SSP))
        self._lead = BoundedLead(cluster, settings.name, mode) if isinstance(mode, SSP) else None
        self.worker_steps = None if self._lead is None else self._lead.steps
        hosted = {field.table_name for field in with_rows if field.where == "hosted"}
        self.is_bounded = joined or self._lead is not None
        self.pushes_rows_alone = not hosted and len(with_rows) == len(self._fields)
        self.parts = self._parts = []
        for tables, its_ranks in zip(order, ranks, strict=True):
            places = frozenset(place for place, table in enumerate(tables) if table in hosted)
            own = [made[table] for table in tables]
            kept = [self._caches[table] for table in tables] if self._caches else ()
            update = EmbeddingUpdate(own, hosted=places, ranks=its_ranks, pace=self._lead, caches=kept)
            update.step = _first_step(own, its_ranks)
            self._parts.append(TrainedTables(update, _ClusterTables(cluster, update)))
        names = [table for tables in order for table in tables]
        self._numbers = {name: number for number, name in enumerate(names)}
        self._tables = [made[name] for name in names]
        self._num_rows = [table.spec.num_rows for table in self._tables]
        self._plan = LookupPlan(
            [part.row_update for part in self._parts],
            self._tables,
            [table.spec.dim for table in self._tables],
            [table.spec.numpy_dtype for table in self._tables],
            self.is_bounded,
        )
        self.write_logs = list(dict.fromkeys(table.write_log for table in self._tables))
        # Fields whose rows are pulled come first.
        self._order = sorted(settings.with_rows, key=lambda number: self._fields[number].where == "hosted")
        self._num_pulled = sum(field.where != "hosted" for field in with_rows)
        self._kinds = [
            (field.name, self._numbers[field.table_name], field.pooling, field.padding_id) for field in with_rows
        ]

    def table(self, name: str) -> Table:
        return self._tables[self._numbers[name]]

    def join(self) -> None:
        if self._lead is not None and torch.is_grad_enabled():
            self._lead.join()

    def merged(self, batch: Any) -> BatchRows:
        features = plain_features(batch, self._kinds) if self.pushes_rows_alone else None
        if features is not None:
            return BatchRows(self._plan, features, None, merged_ids(self._fields, features, self._num_rows), None)
        given = ids_of_batch(batch, [field.name for field in self._fields], batch_ids)
        for field, ids in zip(self._fields, given, strict=True):
            require_no_max_weights(field, ids)
            if field.where == "hosted" and ids.given_weights is not None:
                raise InvalidArgument(
                    f"the weights of field {field.name!r} need a gradient, which is made of the rows, and these stay "
                    "where they are; detach() the weights, or give the field where='pull'"
                )
        own = [self._fields[number] for number in self._order]
        features = [
            feature_ids(self._numbers[field.table_name], field, given[number])
            for number, field in zip(self._order, own, strict=True)
        ]
        num_pulled, hosted = self._num_pulled, None
        lookup = merged_ids(own[:num_pulled], features[:num_pulled], self._num_rows)
        if features[num_pulled:]:
            hosted = HostedLookup(own[num_pulled:], features[num_pulled:], self._tables)
        return BatchRows(self._plan, features[:num_pulled], given, lookup, hosted)

    def pull(self, merged: BatchRows) -> None:
        lead = self._lead
        if not self._caches or (lead is not None and not torch.is_grad_enabled()):  # no clock goes on then
            pull([merged])
            return
        caches = [self._caches[name] for name in self._numbers]
        oldest, clock = (None, 0) if lead is None else (lead.oldest, lead.steps.done - lead.steps.ahead)
        rows = list(zip(merged.tables, merged.ids, merged.rows, strict=True))
        merged.pulled_at, merged.on_device = pull_through(caches, rows, oldest=oldest, clock=clock)
        merged.is_pulled = True

    def move_to(self, device: torch.device) -> None:
        for cache in self._caches.values():
            cache.store.move_to(device)

    def cache_report(self) -> dict[str, dict[str, Any]]:
        return {name: cache.report() for name, cache in self._caches.items()}

    def vectors(self, merged: BatchRows, device: torch.device) -> Sequence[Tensor]:
        trained, stand_ins, first = [], [], 0
        if torch.is_grad_enabled():
            ids = merged.ids if merged.hosted is None else merged.hosted.with_ids(merged.ids)
            for part in self._parts:
                update = part.row_update
                part.recent = ids[first : first + len(update.tables)]
                first += len(update.tables)
                if update.is_trained:
                    trained.append(update)
                    stand_ins.append(update.stand_in_on(device))
        found: Sequence[Tensor]
        if trained:
            look_up = partial(merged.vectors, device, want_gradient=True)
            found = Vectors.apply(merged, trained, look_up, *stand_ins)  # type: ignore[no-untyped-call]
        else:
            found = merged.vectors(device, want_gradient=False)
        if merged.given is None:
            return found
        in_order = {
            number: weighted(self._fields[number], merged.given[number], vectors)
            for number, vectors in zip(self._order, found, strict=True)
        }
        return [in_order[number] for number in sorted(self._order)]


def _cache_places(settings: GroupSettings, joined: bool, specs: Mapping[str, TableSpec]) -> dict[str, int]:
    """Return the rows to cache of each table, by :attr:`Field.table_name`. Raises InvalidArgument."""
    left = settings.device_cache_bytes
    if not left:
        return {}
    what = f"device_cache_bytes of {settings.name!r} is {left:,} and"
    fields = [settings.fields[number] for number in settings.with_rows]
    for name, spec in specs.items():
        if spec.counts_steps:
            raise InvalidArgument(f"{what} rows of table {name!r} move at steps that do not touch them; leave it out")
    if joined:
        raise InvalidArgument(f"{what} ranks step together: no rank knows which rows the others change; leave it out")
    if any(field.pooling == "max" or field.where == "hosted" for field in fields):
        raise InvalidArgument(f"{what} a field has pooling 'max' or where='hosted'; put it into a group of its own")
    need = {name: (spec.num_rows or 2**31 - 2) * bytes_of_place(spec) for name, spec in specs.items()}
    places: dict[str, int] = {}
    for name in sorted(need, key=need.__getitem__):  # equal shares; a table's unused share goes to the next ones
        item = bytes_of_place(specs[name])
        places[name] = min(left // (len(need) - len(places)), need[name]) // item
        if not places[name]:
            raise InvalidArgument(f"{what} a row of table {name!r}, one of {len(need)}, takes {item} bytes; give more")
        left -= places[name] * item
    return places


class _ClusterTables(ClusterPlacement):
    def __init__(self, cluster: Cluster, update: EmbeddingUpdate) -> None:
        super().__init__(cluster, update.tables, update.ranks)
        self._update = update

    def adopt_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        self._update.resume_at(max((int(state["step"]) for state in states), default=0))


def _made_by_all(
    cluster: Cluster, specs: Mapping[str, TableSpec], ranks: SyncRanks | None, *, reuse: bool
) -> dict[str, Table]:
    """Create or open the tables; if ranks step together, rank 0 creates them and the others open them."""
    make = partial(_made, cluster, specs)
    if ranks is None:
        return make(reuse=reuse)
    return ranks.first_then_others(partial(make, reuse=reuse), partial(make, reuse=True))


def _first_step(tables: Sequence[Table], ranks: SyncRanks | None) -> int:
    """Return the latest step of tables that count steps; starting lower, rows would not age until it is reached."""
    clocked = [table for table in tables if table.spec.asks_for_clock]
    if ranks is None or not clocked:
        return next_step(clocked) if clocked else 0
    return ranks.share(ranks.first_then_others(partial(next_step, clocked), lambda: 0))


def _made(cluster: Cluster, specs: Mapping[str, TableSpec], *, reuse: bool) -> dict[str, Table]:
    made: dict[str, Table] = {}
    try:
        for table, spec in specs.items():
            made[table] = cluster.create_table(
                spec.name,
                dim=spec.dim,
                optimizer=spec.optimizer,
                num_rows=spec.num_rows,
                initializer=spec.initializer,
                seed=spec.seed,
                dtype=spec.dtype,
                slot_dtype=spec.slot_dtype,
                admission=spec.admission,
                expiry=spec.expiry,
                max_bytes=spec.max_bytes,
                reuse=reuse,
            )
    except BaseException:
        if not reuse:  # then this call created all of them
            for item in made.values():
                cluster.drop_table(item.spec.name)
        raise
    return made
