"""Embeddings of all sparse features of a model, looked up together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from geartrain.ams.values.arguments import boolean, integer
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.optimizers.registry import RowOptimizerSpec
from geartrain.ams.values.text import quoted
from geartrain.bridge.embedding.cluster_fields import ClusterFields
from geartrain.bridge.embedding.field import Field
from geartrain.bridge.embedding.group_rows import GroupRows, GroupSettings, TrainedTables
from geartrain.bridge.embedding.ids import bags_as_torch
from geartrain.bridge.embedding.modes import Mode, checked_mode
from geartrain.bridge.embedding.rank_fields import RankFields
from geartrain.bridge.embedding.vectors import distinct_features, feature_vectors, shaped
from geartrain.bridge.rows.eager import runs_eagerly
from geartrain.bridge.rows.pending import RowModule

if TYPE_CHECKING:
    from geartrain.ams.client.cluster import Cluster
    from geartrain.ams.client.jobs.worker_steps import JobSteps


GROUP_ROWS: dict[str, type[GroupRows]] = {"pull": ClusterFields, "ranks": RankFields}
"""Kinds of row storage, by the names of ``rows=``; a kind of your own may be added."""


class EmbeddingGroup(nn.Module):
    """Embeddings of several fields: the ids of a batch in, a dict of their vectors out.

        fields = gt.EmbeddingGroup(cluster, "ctr", [gt.Field("user", dim=16), gt.Field("item", dim=16, pooling="mean")],
                                   optimizer=gt.Adagrad(0.05))
        rows = gt.RowOptimizer(fields)                   # or optimizer = gt.joint(torch.optim.Adam(...), fields)
        vectors = fields({"user": users, "item": (items, offsets)})
        model(vectors).backward(); rows.step(); rows.zero_grad()

    The rows are in tables of the cluster, ``ctr/user`` and ``ctr/item``. Each parameter has no elements and stands for
    the rows of one optimizer (``requires_grad_(False)`` freezes them). An id that was never pushed has its initial
    value; a look-up creates no row. Ids are merged across the fields of a table, and gradients summed by the same
    index. The gradient that reaches the rows is exact; in ``torch.no_grad()`` nothing is queued. Not thread-safe.

    Cost of a step with N ids, U of them distinct: O(N·D) here; 8·U bytes of ids and 4·U·D of rows each way.
    """

    def __init__(
        self,
        cluster: Cluster | None,
        name: str,
        fields: Sequence[Field],
        *,
        optimizer: RowOptimizerSpec | None = None,
        seed: int = 0,
        reuse: bool = False,
        mode: Mode = "async",
        process_group: dist.ProcessGroup | None = None,
        per_node: bool = False,
        rows: str = "pull",
        device_cache_bytes: int = 0,
    ) -> None:
        """Create the tables, or open them with ``reuse``.

        Args:
            cluster: Holds the rows; None with ``rows="ranks"``.
            name: Prefix of the names of the tables.
            fields: Input features of the model; fields that name one table share its rows.
            optimizer: Optimizer of tables whose fields name none; None: ``Adagrad(lr=0.05)``.
            seed: Seed of the initial values.
            reuse: Open existing tables of equal specs, and continue the count of steps at their latest push.
            mode: Consistency among several workers. ``"async"``: a push applies when it arrives. ``"sync"``: the
                ranks step together; rows change once by the average of their gradients, all ranks alike as in DDP and
                FSDP2, and every rank sees the change at its next look-up. With a loss by
                :func:`geartrain.mean_over_ranks` that is a step of one worker with the joint batch, up to rounding.
                :class:`geartrain.SSP`: a worker waits for those that are more than some steps behind.
            process_group: The ranks that step together; None: those of torch.distributed, if it is initialised, else
                this process alone.
            per_node: In a batch with levels (``gt.TreeSamples``, or samples with ``dedup``) ids are looked up and
                pooled once for each of the N nodes of a level. False: every sample receives its node's vector. True:
                the result holds one vector a node, [N, D], for ``gt.per_level`` and ``gt.LevelLinear``.
            rows: ``"pull"``: the rows are in the cluster, and those of a batch are pulled. ``"ranks"``: they are on the
                devices of the ranks (``process_group``; without torch.distributed this process alone), each table split
                by its rows, and there is no cluster. Without ``num_rows`` of a field, look-ups in training create rows,
                and the room for them doubles as needed. Every rank runs forward and backward on its own batch, and all
                step together: rows change once, by the average of the ranks' gradients, as in mode "sync". Rows move
                with ``.to(device)``. Cost of a step for N ids on a rank, whatever the number of fields: one exchange of
                counts between the hosts, three all-to-alls (16·N bytes of ids, 4·D for each bag and rank that has ids
                of it, and as much for its gradient) and an all-reduce of one number.
            device_cache_bytes: Memory on the module's device to cache rows of frequent ids, which need no pull then.
                Cached rows equal those of the shards; under SSP they are as old as it allows. Not available where
                ranks step together (``mode="sync"``), nor with fields of pooling "max" or ``where="hosted"``. 0: no
                cache. Its counters are :attr:`cache`.

        Raises:
            InvalidArgument: The fields contradict each other, or lack something.
            TableExists: A table exists and ``reuse`` is False: a script that runs twice never trains on old rows by
                accident.
            SpecMismatch: A table exists with another spec.
        """
        super().__init__()
        self.name = name
        self.fields = _checked_fields(name, fields)
        checked_mode(mode)
        self.cluster = cluster
        self.per_node = per_node
        self.features = nn.ModuleList(distinct_features(self.fields))
        """Modules that compute the vectors of some fields."""
        settings = GroupSettings(
            cluster=cluster,
            name=name,
            fields=self.fields,
            names={
                field.table_name: self._full_name(field.table_name) for field in self.fields if field.features is None
            },
            optimizer=optimizer,
            seed=seed,
            reuse=boolean("reuse", reuse),
            mode=mode,
            process_group=process_group,
            device_cache_bytes=integer("device_cache_bytes", device_cache_bytes, 0),
        )
        self.rows = GROUP_ROWS[_checked_rows(rows)](settings)
        """Storage of the rows, which looks them up."""
        self.parts = nn.ModuleList(self.rows.parts)
        self._with_rows = [field.name for field in self.fields if field.features is None]
        self.register_buffer("_place", torch.empty(0), persistent=False)  # its device is that of the vectors

    def _full_name(self, table: str) -> str:
        return f"{self.name}/{table}"

    def __iter__(self) -> Iterator[RowModule]:
        """Iterate over the parts that RowOptimizer trains: the tables of each optimizer, and feature modules."""
        yield from self.trained
        yield from cast("Iterator[RowModule]", iter(self.features))

    @property
    def trained(self) -> list[TrainedTables[Any]]:
        """The tables, grouped by optimizer."""
        return list(self.rows.parts)

    def table(self, field: str) -> Any:
        """Return the table of a field, for direct pulls, pushes and assigns.

        It is a :class:`~geartrain.ams.client.table.Table`. With ``rows="ranks"`` it has ``pull`` and ``assign``, which
        every rank calls, and ``num_present``, its rows on this rank. Raises InvalidArgument.
        """
        names = {field.name: field.table_name for field in self.fields if field.features is None}
        if field not in names:
            raise InvalidArgument(
                f"there is no field {field!r} with a table; those that have one are {', '.join(map(repr, names))}"
            )
        return self.rows.table(names[field])

    @property
    def cache(self) -> dict[str, dict[str, Any]]:
        """Counters of each table's device cache: ``hits`` and ``misses`` (distinct ids of look-ups), ``hit_rate``,
        ``entries``, ``capacity``, ``evicted``, ``cleared`` (times that all rows were dropped after writes of others),
        ``saved_bytes`` (of pulls), ``bytes`` and ``host_bytes``. Empty without ``device_cache_bytes``.
        """
        return self.rows.cache_report()

    @property
    def worker_steps(self) -> JobSteps | None:
        """Steps of this worker and the others with ``mode=gt.SSP(...)``, else None.

        After ``worker_steps.leave()`` the others do not wait for this worker until its next training batch: call it
        before a long evaluation, or at the end. Closing the cluster does the same.
        """
        return self.rows.worker_steps

    @runs_eagerly
    def forward(self, batch: Any) -> dict[str, Tensor]:
        """Look the ids of a batch up.

        Args:
            batch: A mapping with the ids of every field under its name (others are ignored): integers [B] or [B, L];
                ``(values, offsets)`` or ``(values, offsets, weights)`` with B + 1 offsets; a jagged nested tensor;
                an object with ``values()`` and ``lengths()``. Or an object with ``keys()``, ``values()`` and
                ``lengths()``, as TorchRec's KeyedJaggedTensor. In a batch with levels (``gt.TreeSamples``, or samples
                with ``dedup``) ids are looked up and pooled once a node.

        Returns:
            The vectors of each field, float32, on the module's device (``.to("cuda")``): [B, D] with pooling. Without
            it [B, D] for ids [B], [B, L, D] for [B, L], else a jagged nested tensor [B, ?, D].

        Raises:
            InvalidArgument: A field is not in the batch, or weights are no numbers.
            InvalidIds: Ids are no integers, negative or out of range, or offsets fall: names field, row and value.
            OutOfMemory: No memory for new rows on ranks; no row has changed then.
            ShardUnavailable, ShardRestarted: As ``Table.pull``.
        """
        merged = self.rows.merged(batch)
        for part in self.rows.parts:
            if part.row_update.background is not None:
                part.row_update.flush()
        if self.rows.worker_steps is not None:
            self.rows.join()
        self.rows.pull(merged)
        return self._vectors(merged)

    def merged(self, batch: Any) -> Any:
        """Return the merged ids of a batch, whose rows may be pulled ahead of :meth:`vectors_of`.

        Batch and errors are those of :meth:`forward`. Any thread may call it.
        """
        return self.rows.merged(batch)

    @runs_eagerly
    def vectors_of(self, merged: Any) -> Any:
        """Return the result of :meth:`forward` from merged ids whose rows were pulled."""
        return self._vectors(merged)

    def _vectors(self, merged: Any) -> dict[str, Tensor]:
        device = cast("Tensor", self._place).device
        vectors = dict(zip(self._with_rows, self.rows.vectors(merged, device), strict=True))
        if merged.given is None:
            return vectors
        own = [(field, ids) for field, ids in zip(self.fields, merged.given, strict=True) if field.features is not None]
        if own:
            fields, given = zip(*own, strict=True)
            found = feature_vectors(fields, given, device)
            vectors |= {field.name: item for field, item in zip(fields, found, strict=True)}
        return {
            field.name: shaped(field, ids, vectors[field.name], per_node=self.per_node)
            for field, ids in zip(self.fields, merged.given, strict=True)
        }

    def _apply(self, *arguments: Any, **settings: Any) -> Any:
        super()._apply(*arguments, **settings)  # type: ignore[no-untyped-call]
        self.rows.move_to(cast("Tensor", self._place).device)
        return self

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse to copy or pickle: rows are trained in one place."""
        raise InvalidArgument(
            f"{type(self).__name__} {self.name!r} cannot be copied or pickled: its rows are not in the module. "
            "geartrain.save(model, folder) saves a model with its rows"
        )

    def extra_repr(self) -> str:
        """Return the fields, for print()."""
        widths: dict[str, Any] = {field.name: field.features.dim for field in self.fields if field.features is not None}
        widths |= {field.name: self.rows.specs[field.table_name].dim for field in self.fields if field.features is None}
        return "\n".join(
            [repr(self.name), *(f"{field.name}: {widths[field.name]} × {field.pooling}" for field in self.fields)]
        )


class Embedding(EmbeddingGroup):
    """Embedding of one field: its ids in, its vectors out. An :class:`EmbeddingGroup` of one.

    users = gt.Embedding(cluster, "user", dim=18)
    vectors_BD = users(ids_B)
    vectors_BD = users(ids_N, offsets_B, weights_N)     # as nn.EmbeddingBag is called
    """

    def __init__(
        self,
        cluster: Cluster | None,
        name: str,
        dim: int,
        *,
        optimizer: RowOptimizerSpec | None = None,
        seed: int = 0,
        reuse: bool = False,
        mode: Mode = "async",
        process_group: dist.ProcessGroup | None = None,
        rows: str = "pull",
        include_last_offset: bool = False,
        device_cache_bytes: int = 0,
        **settings: Any,
    ) -> None:
        """Create the table, or open it with ``reuse``. Raises as :class:`EmbeddingGroup`.

        Args:
            cluster: Holds the rows; None with ``rows="ranks"``.
            name: Name of the table.
            dim: Width of the vectors.
            optimizer: Optimizer of the rows; None: ``Adagrad(lr=0.05)``.
            seed: Seed of the initial values.
            reuse: Open an existing table of an equal spec.
            mode: Consistency among several workers, as in :class:`EmbeddingGroup`.
            process_group: The ranks that step together, as there.
            rows: Storage of the rows, as there.
            include_last_offset: Whether ``offsets`` of a call end with the number of ids, as in ``nn.EmbeddingBag``.
            device_cache_bytes: Size of the cache, as there.
            settings: Arguments of :class:`Field`.
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
            rows=rows,
            device_cache_bytes=device_cache_bytes,
        )

    def _full_name(self, table: str) -> str:
        return table

    def forward(self, ids: Any, offsets: Any = None, per_sample_weights: Any = None) -> Tensor:  # type: ignore[override]
        """Look ids up; returns and raises as :class:`EmbeddingGroup`.

        Args:
            ids: In any form that a field of a group takes.
            offsets: Start of each bag in ids [N], [B] (with ``include_last_offset`` B + 1).
            per_sample_weights: A weight for each id, in the shape of ``ids``.
        """
        name = self.fields[0].name
        given = bags_as_torch(ids, offsets, per_sample_weights, ends=self.include_last_offset, name=name)
        return super().forward({name: given})[name]

    def vectors_of(self, merged: Any) -> Any:
        """Return the vectors of the field."""
        return super().vectors_of(merged)[self.fields[0].name]


def _checked_fields(name: str, fields: Sequence[Field]) -> tuple[Field, ...]:
    if not isinstance(fields, Iterable):
        raise InvalidArgument(f"the fields of {name!r} are {quoted(fields)}; give a list: [gt.Field('user', dim=16)]")
    for field in (found := tuple(fields)):
        if not isinstance(field, Field):
            raise InvalidArgument(f"a field of {name!r} is {quoted(field)}; it must be a gt.Field('user', dim=16)")
    return found


def _checked_rows(rows: str) -> str:
    if not isinstance(rows, str) or rows not in GROUP_ROWS:
        known = ", ".join(f"{name!r} ({row.summary})" for name, row in GROUP_ROWS.items())
        raise InvalidArgument(f"rows is {quoted(rows)}; it must be one of {known}")
    return rows
