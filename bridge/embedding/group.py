"""Embeddings of all sparse features of a model, looked up together."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from geartrain.ams.kernels.embedding import BadId, FeatureIds, Lookup
from geartrain.ams.values.arguments import boolean
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.optimizers.registry import RowOptimizerSpec
from geartrain.ams.values.specs import TableSpec
from geartrain.ams.values.text import quoted
from geartrain.bridge.embedding.autograd_node import LookupCall, Vectors
from geartrain.bridge.embedding.batch_rows import BatchRows, pull
from geartrain.bridge.embedding.dense_features import distinct_features, feature_vectors
from geartrain.bridge.embedding.field import Field, table_specs
from geartrain.bridge.embedding.hosted_bags import HostedLookup
from geartrain.bridge.embedding.ids import BatchIds, bags_as_torch, ids_of_batch
from geartrain.bridge.embedding.modes import SSP, BoundedLead, Mode, checked_mode
from geartrain.bridge.embedding.trained_tables import TrainedTables
from geartrain.bridge.embedding.update import EmbeddingUpdate
from geartrain.bridge.embedding.vector_shapes import out_of_range, shaped
from geartrain.bridge.rows.eager import runs_eagerly
from geartrain.bridge.rows.pending import RowModule
from geartrain.bridge.rows.ranks import SyncRanks

if TYPE_CHECKING:
    from geartrain.ams.client.cluster import Cluster
    from geartrain.ams.client.rows.write_log import WriteLog
    from geartrain.ams.client.table import Table
    from geartrain.ams.client.worker_steps import JobSteps


class EmbeddingGroup(nn.Module):
    """Embeddings of several fields: the ids of a batch in, a dict of their vectors out.

        fields = gt.EmbeddingGroup(cluster, "ctr", [gt.Field("user", dim=16), gt.Field("item", dim=16, pooling="mean")],
                                   optimizer=gt.Adagrad(0.05))
        rows = gt.RowOptimizer(fields)                   # or optimizer = gt.joint(torch.optim.Adam(...), fields)
        vectors = fields({"user": users, "item": (items, offsets)})
        model(vectors).backward(); rows.step(); rows.zero_grad()

    The rows are in tables of the cluster, ``ctr/user`` and ``ctr/item``; the module has no parameters. An id that was
    never pushed has its initial value, and no row is made by looking it up. Ids are merged across the fields of a
    table, gradients summed by the same index. The gradient that reaches the rows is exact; in ``torch.no_grad()``
    nothing is queued. Not thread-safe.

    Cost of a step with N ids, U of them distinct: O(N·D) here; 8·U bytes of ids and 4·U·D of rows each way.
    """

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        fields: Sequence[Field],
        *,
        optimizer: RowOptimizerSpec | None = None,
        seed: int = 0,
        reuse: bool = False,
        mode: Mode = "async",
        process_group: dist.ProcessGroup | None = None,
        per_node: bool = False,
    ) -> None:
        """Make the tables.

        Args:
            cluster: Where the rows are.
            name: Comes before the names of the tables.
            fields: Of the model; those that name one table share its rows.
            optimizer: Of every table whose fields name none; None: ``Adagrad(lr=0.05)``.
            seed: Of the initial values.
            reuse: Open tables that are there with equal specs.
            mode: What several workers wait for. ``"async"``: nothing, a push applies when it arrives. ``"sync"``: the
                ranks step together; rows change once by the mean of their gradients, weighted by samples (bags), which
                equals one worker with the joint batch up to rounding, and every rank sees them at its next look-up.
                :class:`geartrain.SSP`: those that are more than some steps behind.
            process_group: The ranks that step together; None: those of torch.distributed, if it is initialised, else
                this process alone.
            per_node: Of a batch with levels (``gt.TreeSamples``, or samples with ``dedup``) ids are looked up and
                pooled once for each of the N nodes of a level, and every sample is given its node's vector. True: the
                vectors stay those of the nodes, [N, D], for ``gt.per_level`` and ``gt.LevelLinear``.

        Raises:
            InvalidArgument: The fields contradict each other, or lack something.
            TableExists: A table is there, and not ``reuse``: a script that runs twice never trains on yesterday's rows
                by accident.
            SpecMismatch: A table is there with another spec.
        """
        super().__init__()
        self.name = name
        self.fields = tuple(fields)
        _require_fields(name, self.fields)
        with_rows = [one for one in self.fields if one.features is None]
        names = {one.table_name: self._full_name(one.table_name) for one in with_rows}
        specs = table_specs(self.fields, names, optimizer, seed)
        by_optimizer: dict[RowOptimizerSpec, list[str]] = {}
        for table, spec in specs.items():
            by_optimizer.setdefault(spec.optimizer, []).append(table)
        checked_mode(mode, process_group)
        joined = mode == "sync" and (process_group is not None or dist.is_initialized())
        ranks = [SyncRanks(name, process_group) if joined else None for _ in by_optimizer]
        made = _made_by_all(cluster, specs, next(iter(ranks)), reuse=reuse)
        self._lead = BoundedLead(cluster, name, mode) if isinstance(mode, SSP) else None
        hosted = {one.table_name for one in self.fields if one.where == "hosted"}
        self.cluster = cluster
        self.per_node = per_node
        self.is_bounded = joined or self._lead is not None
        """Whether the look-up of a step must see what others have pushed by then."""
        self.features = nn.ModuleList(distinct_features(self.fields))
        """Modules that some fields have their vectors from."""
        self.pushes_rows_alone = not hosted and not self.features
        """Whether a step sends nothing but pushes of rows."""
        self.parts = nn.ModuleList(
            _trained(cluster, {table: made[table] for table in tables}, hosted, its, self._lead)
            for tables, its in zip(by_optimizer.values(), ranks, strict=True)
        )
        in_order = [table for tables in by_optimizer.values() for table in tables]
        self._tables = [made[table] for table in in_order]
        self._table_of = {one.name: in_order.index(one.table_name) for one in with_rows}
        self.register_buffer("_place", torch.empty(0), persistent=False)  # says where the vectors are wanted

    def _full_name(self, table: str) -> str:
        return f"{self.name}/{table}"

    def __iter__(self) -> Iterator[RowModule]:
        """What RowOptimizer trains: the tables of one optimizer each, and modules that compute features."""
        yield from self.trained
        yield from cast("Iterator[RowModule]", iter(self.features))

    @property
    def trained(self) -> list[TrainedTables]:
        """The tables, those of one optimizer together."""
        return cast("list[TrainedTables]", list(self.parts))

    def table(self, field: str) -> Table:
        """The table of a field, for pulls, pushes and assigns of one's own. Raises InvalidArgument."""
        if field not in self._table_of:
            names = ", ".join(map(repr, self._table_of))
            raise InvalidArgument(f"there is no field {field!r} with a table; those that have one are {names}")
        return self._tables[self._table_of[field]]

    @property
    def worker_steps(self) -> JobSteps | None:
        """With ``mode=gt.SSP(...)`` how far this worker is among the others. ``worker_steps.leave()`` has none of them
        wait for it any more, until its next training batch: before a long evaluation, or at its end; closing the
        cluster does so, too.
        """
        return None if self._lead is None else self._lead.steps

    @property
    def write_logs(self) -> list[WriteLog]:
        """Which rows this process writes, of the clusters of the tables."""
        return list(dict.fromkeys(table.write_log for table in self._tables))

    def forward(self, batch: Any) -> dict[str, Tensor]:
        """Look the ids of a batch up.

        Args:
            batch: A mapping with the ids of every field under its name (others are left alone): integers [B] or [B, L];
                ``(values, offsets)`` or ``(values, offsets, weights)`` with B + 1 offsets; a jagged nested tensor;
                something with ``values()`` and ``lengths()``. Or something with ``keys()``, ``values()`` and
                ``lengths()``, as TorchRec's KeyedJaggedTensor. Of a batch with levels (``gt.TreeSamples``, or samples
                with ``dedup``) ids are looked up and pooled once a node.

        Returns:
            Of each pooled field [B, D], float32, on the module's device (``.to("cuda")``). Without pooling [B, D] of
            ids [B], [B, L, D] of [B, L], else a jagged nested tensor [B, ?, D].

        Raises:
            InvalidArgument: A field is not in the batch, or weights are no numbers.
            InvalidIds: Ids are no integers, negative or out of range, or offsets fall: names field, row and value.
            ShardUnavailable, ShardRestarted: see ``Table.pull``.
        """
        pulled = self.merged(batch)
        return self._shaped(pulled, self._looked_up(pulled))

    def merged(self, batch: Any) -> BatchRows:
        """The ids of a batch as :meth:`forward` takes it, for :func:`~geartrain.bridge.embedding.batch_rows.pull` and
        then :meth:`vectors_of`. Raises as forward does. Any thread may call it.
        """
        return self._merged(ids_of_batch(batch, [one.name for one in self.fields]))

    def vectors_of(self, pulled: BatchRows) -> Any:
        """What :meth:`forward` returns, from rows that were pulled."""
        return self._shaped(pulled, self._pooled(pulled))

    def join(self) -> None:
        """To be called before rows are pulled to be trained: with ``mode=gt.SSP(...)`` others wait from now on."""
        if self._lead is not None and torch.is_grad_enabled():
            self._lead.join()

    def _shaped(self, pulled: BatchRows, vectors: Sequence[Tensor]) -> dict[str, Tensor]:
        in_order = sorted(zip(self._in_order, pulled.given, vectors, strict=True), key=lambda one: one[0])
        return {
            self.fields[number].name: shaped(self.fields[number], ids, own, per_node=self.per_node)
            for number, ids, own in in_order
        }

    @runs_eagerly
    def _looked_up(self, pulled: BatchRows) -> tuple[Tensor, ...]:
        for part in self.trained:
            part.row_update.flush()
        self.join()
        pull([pulled])
        return self._pooled(pulled)

    @property
    def _in_order(self) -> list[int]:
        """Numbers of the fields whose rows are pulled, then of the hosted ones, then of those that have features."""
        return sorted(range(len(self.fields)), key=lambda number: self.fields[number].kind)

    def _num_of(self, kind: int) -> int:
        return sum(one.kind == kind for one in self.fields)

    def _merged(self, given: Sequence[BatchIds]) -> BatchRows:
        for field, ids in zip(self.fields, given, strict=True):
            if field.pooling == "max" and ids.weights is not None:
                raise InvalidArgument(f"field {field.name!r} has weights and pooling 'max', which takes none")
            if field.where == "hosted" and ids.given_weights is not None:
                raise InvalidArgument(
                    f"the weights of field {field.name!r} need a gradient, which is made of the rows, and these stay "
                    "where they are; detach() the weights, or give the field where='pull'"
                )
        order = self._in_order
        given = [given[number] for number in order]
        num_pulled, num_features = self._num_of(0), self._num_of(2)
        with_rows = order[: len(order) - num_features]
        features = [
            FeatureIds(self._table_of[field.name], ids.values, ids.bags, ids.weights, field.pooling, field.padding_id)
            for field, ids in zip((self.fields[number] for number in with_rows), given, strict=False)
        ]
        threads, first = torch.get_num_threads(), 0
        try:
            lookup = Lookup(features[:num_pulled], [table.spec.num_rows for table in self._tables], threads)
            first = num_pulled
            hosted = HostedLookup(features[first:], self._tables, threads) if features[first:] else None
        except BadId as bad:
            number, place = bad.args
            field, feature = self.fields[order[first + number]], features[first + number]
            raise out_of_range(field, feature, place, self._tables[feature.table].spec.num_rows) from None
        return BatchRows(self._tables, features[:num_pulled], given, lookup, is_bounded=self.is_bounded, hosted=hosted)

    @runs_eagerly
    def _pooled(self, pulled: BatchRows) -> tuple[Tensor, ...]:
        hosted, num_features = pulled.hosted, self._num_of(2)
        given = pulled.given[: len(pulled.given) - num_features]
        call = LookupCall(pulled.lookup, pulled.features, given, pulled.rows, pulled.pulled_at, self.trained, hosted)
        device = cast("Tensor", self._place).device
        dense: list[Tensor] = []
        if num_features:
            own = [self.fields[number] for number in self._in_order[-num_features:]]
            dense = feature_vectors(own, pulled.given[-num_features:], device)
        if not torch.is_grad_enabled():
            return (*call.vectors(device, want_gradient=False), *dense)
        all_ids = iter(enumerate(pulled.ids))
        for part in self.trained:
            for place in range(len(part.row_update.tables)):
                table, ids = next(all_ids)
                part.note(place, hosted.ids_of(table) if hosted is not None and not len(ids) else ids)
        carriers = [part.row_update.carrier for part in self.trained]
        vectors: tuple[Tensor, ...] = Vectors.apply(call, device, *carriers, *call.weights)  # type: ignore[no-untyped-call]
        return (*vectors, *dense)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Neither copy nor pickle: rows are trained in one place."""
        raise InvalidArgument(
            f"{type(self).__name__} {self.name!r} cannot be copied or pickled: its rows are not in the module. "
            "geartrain.save(model, folder) saves a model with its rows"
        )

    def extra_repr(self) -> str:
        """The fields, for print()."""
        widths: dict[str, Any] = {one.name: one.features.dim for one in self.fields if one.features is not None}
        widths |= {name: self._tables[table].spec.dim for name, table in self._table_of.items()}
        return "\n".join([repr(self.name), *(f"{one.name}: {widths[one.name]} × {one.pooling}" for one in self.fields)])


class Embedding(EmbeddingGroup):
    """The embedding of one field: its ids in, its vectors out. See :class:`EmbeddingGroup`.

    users = gt.Embedding(cluster, "user", dim=18)
    vectors_BD = users(ids_B)
    vectors_BD = users(ids_N, offsets_B, weights_N)     # as nn.EmbeddingBag is called
    """

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        dim: int,
        *,
        optimizer: RowOptimizerSpec | None = None,
        seed: int = 0,
        reuse: bool = False,
        mode: Mode = "async",
        process_group: dist.ProcessGroup | None = None,
        include_last_offset: bool = False,
        **settings: Any,
    ) -> None:
        """Make its table. Raises as the group does.

        Args:
            cluster: Where the rows are.
            name: Of the table.
            dim: Width of the vectors.
            optimizer: Of the rows; None: ``Adagrad(lr=0.05)``.
            seed: Of the initial values.
            reuse: Open the table if it is there with an equal spec.
            mode: What several workers wait for, as of :class:`EmbeddingGroup`.
            process_group: The ranks that step together, as there.
            include_last_offset: Whether ``offsets`` of a call end with the number of ids, as of ``nn.EmbeddingBag``.
            settings: Those of a :class:`Field`.
        """
        field = Field(name, dim, **settings)
        self.include_last_offset = boolean("include_last_offset", include_last_offset)
        super().__init__(
            cluster,
            name,
            [field],
            optimizer=optimizer,
            seed=seed,
            reuse=reuse,
            mode=mode,
            process_group=process_group,
        )

    def _full_name(self, table: str) -> str:
        return table

    def forward(self, ids: Any, offsets: Any = None, per_sample_weights: Any = None) -> Tensor:  # type: ignore[override]
        """Look ids up; returns vectors as :class:`EmbeddingGroup` does, and raises what it does.

        Args:
            ids: In any form that a field of a group takes.
            offsets: Where each bag of ids [N] begins, [B] (with ``include_last_offset`` B + 1).
            per_sample_weights: A number for each id, in their shape.
        """
        name = self.fields[0].name
        given = bags_as_torch(ids, offsets, per_sample_weights, ends=self.include_last_offset, name=name)
        return super().forward({name: given})[name]

    def vectors_of(self, pulled: BatchRows) -> Any:
        """See the base class."""
        return super().vectors_of(pulled)[self.fields[0].name]


def _require_fields(name: str, fields: Sequence[Field]) -> None:
    for one in fields:
        if not isinstance(one, Field):
            raise InvalidArgument(f"a field of {name!r} is {quoted(one)}; it must be a gt.Field('user', dim=16)")


def _trained(
    cluster: Cluster,
    tables: Mapping[str, Table],
    hosted: Collection[str],
    ranks: SyncRanks | None,
    pace: BoundedLead | None,
) -> TrainedTables:
    """The ``tables`` of one optimizer, by name; the bags of those ``hosted`` are pooled by the shards."""
    places = frozenset(place for place, table in enumerate(tables) if table in hosted)
    in_order = list(tables.values())
    return TrainedTables(cluster, in_order, EmbeddingUpdate(in_order, hosted=places, ranks=ranks, pace=pace))


def _made_by_all(
    cluster: Cluster, specs: Mapping[str, TableSpec], ranks: SyncRanks | None, *, reuse: bool
) -> dict[str, Table]:
    """Where ranks step together the first makes the tables, and the others open them."""
    make = partial(_made, cluster, specs)
    if ranks is None:
        return make(reuse=reuse)
    return ranks.first_then_others(partial(make, reuse=reuse), partial(make, reuse=True))


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
        if not reuse:  # then all of them are of this call
            for one in made.values():
                cluster.drop_table(one.spec.name)
        raise
    return made
