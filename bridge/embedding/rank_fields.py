"""Rows of a group on the ranks' devices: each table is split by rows over the ranks.

Every rank looks up its own batch: ids are sent to the ranks of their rows, which add up the rows of each bag and return
one vector a bag and rank; gradients take the same way. A single rank sends nothing. Cost of a step of several ranks,
whatever the number of fields: one exchange between the hosts, three all-to-alls
(:mod:`geartrain.bridge.placements.device_lookup`), and an all-reduce of one number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from geartrain.ams.kernels.embedding import FeatureIds
from geartrain.ams.values.errors import (
    GeartrainError,
    InvalidArgument,
    InvalidIds,
    NonFinite,
    SpecMismatch,
    StepMismatch,
    SyncError,
)
from geartrain.ams.values.specs import TableSpec
from geartrain.bridge.collectives.communicator import Communicator
from geartrain.bridge.embedding.autograd_node import Vectors
from geartrain.bridge.embedding.field import Field, table_specs
from geartrain.bridge.embedding.group_rows import GroupRows, GroupSettings, TrainedTables, by_optimizer, name_of
from geartrain.bridge.embedding.ids import FieldIds, ids_of_batch, tensor_ids
from geartrain.bridge.embedding.modes import SSP
from geartrain.bridge.embedding.vectors import out_of_range, pooled, require_no_max_weights
from geartrain.bridge.kernels.lookup import FieldShape, index_fields
from geartrain.bridge.placements.device_lookup import DeviceLookup, RequestedIds, RowGradients
from geartrain.bridge.placements.device_rows import DeviceRows
from geartrain.bridge.placements.device_snapshot import DevicePlacement
from geartrain.bridge.placements.device_update import DeviceUpdate
from geartrain.bridge.rows.transfers import Readback, packed


class RankBatch:
    """Ids of one batch on the device of the rows; or the error of their look-up, of which all ranks then learn."""

    tables = ids = rows = ()  # nothing is pulled ahead

    def __init__(
        self,
        given: Sequence[FieldIds],
        asked: RequestedIds | None,
        status: Tensor | None,
        failure: GeartrainError | None = None,
    ) -> None:
        self.given = given
        self.asked, self.status = asked, status
        """Ids of the fields with rows, and the status of their check (``index_fields``)."""
        self.failure = failure
        self.is_bounded = False


class RankTablesUpdate(DeviceUpdate[RowGradients]):
    """Update of several tables, named after all."""

    @property
    def name(self) -> str:
        """Names of the tables."""
        return name_of([table.spec for table in self.tables])


class RankFields(GroupRows):
    """:class:`GroupRows` on the devices of the ranks."""

    summary = "rows are here, split over the ranks"

    def __init__(self, settings: GroupSettings) -> None:
        """Raises InvalidArgument, and SpecMismatch on every rank unless all give equal settings."""
        self._name, self._fields = settings.name, settings.fields
        self._link = link = Communicator(settings.process_group)
        try:
            self.specs = _specs(settings)
        except GeartrainError as exc:
            link.require_equal({"error": str(exc)}, f"embeddings {settings.name!r}")
            raise
        described = {name: spec.to_dict() for name, spec in self.specs.items()}
        described |= {
            f"field {field.name!r}": {"table": field.table_name, "pooling": field.pooling} for field in self._fields
        }
        link.require_equal(described, f"embeddings {settings.name!r}")
        tables = {name: DeviceRows(spec, link, link.device) for name, spec in self.specs.items()}
        order = by_optimizer(self.specs)
        self._updates = [RankTablesUpdate(*(tables[name] for name in names)) for names in order]
        self.parts = [TrainedTables(update, DevicePlacement(update)) for update in self._updates]
        self._names = [name for names in order for name in names]
        self._tables = [tables[name] for name in self._names]
        self._num_rows = [table.spec.num_rows for table in self._tables]
        self._under_way: deque[tuple[Readback, Sequence[FieldIds]]] = deque()
        """Statuses of checked ids on their way to the host, with the ids."""
        self.write_logs = []
        self._with_rows = settings.with_rows

    def table(self, name: str) -> DeviceRows:
        return self._tables[self._names.index(name)]

    @property
    def _device(self) -> torch.device:
        return self._tables[0].device

    def move_to(self, device: torch.device) -> None:
        if device != self._device:
            for update in self._updates:
                update.discard()
            for table in self._tables:
                table.move_to(device)

    def merged(self, batch: Any) -> RankBatch:
        try:
            given = ids_of_batch(batch, [field.name for field in self._fields], tensor_ids)
            for field, ids in zip(self._fields, given, strict=True):
                require_no_max_weights(field, ids)
            return self._asked(given)
        except GeartrainError as exc:
            return RankBatch((), None, None, exc)

    def _asked(self, given: list[FieldIds]) -> RankBatch:
        """Copy the batch to the device: one copy of ids and offsets, and one of weights if there are any."""
        device, fields = self._device, [self._fields[number] for number in self._with_rows]
        for number, field in enumerate(self._fields):
            if field.features is not None:
                given[number] = replace(given[number], values=given[number].values.to(device))
        own = [given[number] for number in self._with_rows]
        shapes = [
            FieldShape(
                self._names.index(field.table_name),
                len(ids.values),
                len(ids.values) if _is_by_id(field, ids) else ids.num_bags,
                1 if _is_by_id(field, ids) else ids.bags if isinstance(ids.bags, int) else 0,
                "sum" if _is_by_id(field, ids) else str(field.pooling),
                field.padding_id,
            )
            for field, ids in zip(fields, own, strict=True)
        ]
        jagged = [place for place, ids in enumerate(own) if not isinstance(ids.bags, int)]
        jagged.sort(key=lambda place: shapes[place].length)  # fields pooled by offsets first
        bounds = [cast("Tensor", own[place].bags) for place in jagged]
        numbers = packed([*(ids.values for ids in own), *bounds], torch.int64, device)
        parts = numbers.split_with_sizes([*(len(ids.values) for ids in own), *map(len, bounds)])
        weights_N, weights = None, list[Tensor | None]([None] * len(own))
        if any(ids.weights is not None for ids in own):
            ones = [torch.ones(len(ids.values), dtype=torch.float32, device=ids.values.device) for ids in own]
            plain = [one if ids.weights is None else ids.weights for ids, one in zip(own, ones, strict=True)]
            weights_N = packed(plain, torch.float32, device).to(torch.float32)
            weights = list(weights_N.split_with_sizes([len(ids.values) for ids in own]))
            if any(ids.given_weights is not None for ids in own):  # they are applied later, so that they get a gradient
                weights_N = torch.cat(
                    [
                        torch.ones_like(cast("Tensor", mine)) if ids.given_weights is not None else cast("Tensor", mine)
                        for ids, mine in zip(own, weights, strict=True)
                    ]
                )
        ends = dict(zip(jagged, parts[len(own) :], strict=True))
        for place, (number, ids) in enumerate(zip(self._with_rows, own, strict=True)):
            own_weights = None if ids.weights is None else weights[place]
            given[number] = replace(ids, values=parts[place], bags=ends.get(place, ids.bags), weights=own_weights)
        num_ids = sum(len(ids.values) for ids in own)
        num_bounds = sum(shape.num_vectors + 1 for shape in shapes if not shape.length)
        offsets = numbers[num_ids : num_ids + num_bounds] if num_bounds else None
        ranks = self._link.world_size
        entries, status = index_fields(shapes, numbers[:num_ids], offsets, weights_N, self._num_rows, ranks)
        if device.type == "cpu" and (wrong := int(status)):
            raise self._wrong(wrong, given)
        return RankBatch(given, RequestedIds(self._tables, entries), status)

    def pull(self, merged: RankBatch) -> None:
        """Do nothing: the rows are here."""

    def _wrong(self, status: int, given: Sequence[FieldIds]) -> InvalidIds:
        """Return the error for a status of :func:`index_fields`."""
        place, kind = len(self._with_rows) - status // 4, status % 4
        field, ids = self._fields[self._with_rows[place]], given[self._with_rows[place]]
        if kind == 2:
            return InvalidIds(f"the offsets of field {field.name!r} must rise from 0 to its number of ids")
        if kind == 3:
            return InvalidIds(f"the weights of field {field.name!r} are not all finite; weights must be finite")
        num_rows = self.specs[field.table_name].num_rows
        is_bad = ids.values < 0
        if num_rows is not None:
            is_bad |= ids.values >= num_rows
        if field.padding_id is not None:
            is_bad &= ids.values != field.padding_id
        bags = ids.bags if isinstance(ids.bags, int) else ids.bags.cpu().numpy()
        feature = FeatureIds(0, ids.values.cpu().numpy(), bags, None, field.pooling, field.padding_id)
        return out_of_range(field, feature, int(is_bad.nonzero()[0]), num_rows)

    def _late_failure(self) -> InvalidIds | None:
        """Return the error of an earlier batch's ids on a device, whose check had not arrived."""
        while self._under_way and self._under_way[0][0].is_here:
            readback, given = self._under_way.popleft()
            if wrong := int(readback.values()):
                return self._wrong(wrong, given)
        return None

    def vectors(self, merged: RankBatch, device: torch.device) -> Sequence[Tensor]:
        fields = [self._fields[number] for number in self._with_rows]
        failure = self._late_failure() or merged.failure
        trained = [update for update in self._updates if torch.is_grad_enabled() and update.is_trained]
        lookup, given = None, list[FieldIds]()
        if failure is None:
            assert merged.asked is not None and merged.status is not None
            given = [merged.given[number] for number in self._with_rows]
            lookup = DeviceLookup(self._tables, merged.asked, makes_rows=bool(trained))
            if self._device.type != "cpu":
                self._under_way.append((Readback(merged.status), merged.given))
        ranks = self._link.world_size
        num_counts = 2 * ranks * len(fields) + self._num_rows.count(None) + 1 if not self._link.is_alone else 0
        agreed = self._agree(failure, lookup, num_counts, trains=bool(trained))
        assert lookup is not None and merged.status is not None
        if trained:
            call = _Call(self._updates, lookup, merged.status, 1 / ranks)
            stand_ins = [update.on(self._device) for update in trained]
            found = Vectors.apply(call, trained, partial(lookup.vectors, agreed), *stand_ins)  # type: ignore[no-untyped-call]
        else:
            found = lookup.vectors(agreed)
        return [
            _finished(field, ids, vectors).to(device) for field, ids, vectors in zip(fields, given, found, strict=True)
        ]

    def _agree(
        self, failure: GeartrainError | None, lookup: DeviceLookup | None, num_counts: int, *, trains: bool
    ) -> list[list[int]]:
        """Return the counts of every rank's look-up. One exchange between the hosts.

        If any rank cannot continue, every rank raises: its own error there, SyncError elsewhere.
        """
        counts = [0] * num_counts if lookup is None else lookup.counts
        refused = sum(update.pop_refused() for update in self._updates)
        step = self._updates[0].step
        answers = self._link.exchange([failure is None, trains, step, refused, *counts])
        sound, modes, steps, left = (list(column) for column in zip(*(answer[:4] for answer in answers), strict=True))
        if failure is not None:
            raise failure
        if 0 in sound:
            raise SyncError(f"rank {sound.index(0)} was given ids that it refused; its error tells why")
        if len(set(modes)) > 1:
            raise SpecMismatch(
                f"embeddings {self._name!r} are looked up with gradients on some ranks and without on others: "
                f"{[bool(mode) for mode in modes]}, in rank order; call them alike on every rank"
            )
        if len(set(steps)) > 1:
            raise StepMismatch(f"the ranks are at the steps {steps}; load the same state on every rank")
        if sum(left):
            raise NonFinite(
                f"the last step would have carried {sum(left)} rows of embeddings {self._name!r} beyond the range of "
                "their type, or its gradients were not finite; those rows were left as they were. Lower the learning "
                "rate, or use torch.amp.GradScaler"
            )
        return [answer[4:] for answer in answers]


def _specs(settings: GroupSettings) -> dict[str, TableSpec]:
    """Return the specs of the tables. Raises InvalidArgument for settings that rows on ranks do not support."""
    name = settings.name
    if settings.cluster is not None:
        raise InvalidArgument(
            f"{name!r} has rows='ranks' and a cluster, which holds none of them; give None in its place"
        )
    if settings.device_cache_bytes:
        raise InvalidArgument(f"{name!r} has rows='ranks' and device_cache_bytes: its rows are on devices already")
    if isinstance(settings.mode, SSP):
        raise InvalidArgument(
            f"{name!r} has rows='ranks' and mode {settings.mode!r}; ranks step together: leave it out"
        )
    specs = table_specs(settings.fields, settings.names, settings.optimizer, settings.seed)
    for number in settings.with_rows:
        field = settings.fields[number]
        spec = specs[field.table_name]
        if field.where != "pull":
            raise InvalidArgument(
                f"field {field.name!r} has where={field.where!r}, and rows='ranks' are pooled on their ranks; "
                "leave where= out"
            )
        if spec.num_rows is None and (spec.counts_steps or spec.is_scaled):
            raise InvalidArgument(
                f"table {field.table_name!r} (field {field.name!r}) has no num_rows, and on ranks tables that grow "
                "have neither rows that move untouched nor 8 bits: say how many ids there are, "
                f"gt.Field({field.name!r}, num_rows=1_000_000), or use untouched='freeze', or 16 bits"
            )
        for setting in ("admission", "expiry", "max_bytes"):
            if getattr(spec, setting) is not None:
                raise InvalidArgument(
                    f"table {field.table_name!r} (field {field.name!r}) has {setting}, and rows on ranks all stay; "
                    "leave it out, or keep the rows in a cluster (rows='pull')"
                )
    return specs


def _is_by_id(field: Field, ids: FieldIds) -> bool:
    """Return whether each id has its own vector, which this process pools if the field has bags."""
    return field.pooling in (None, "max") or ids.given_weights is not None


def _finished(field: Field, ids: FieldIds, vectors: Tensor) -> Tensor:
    """Return the vectors of a field from those looked up: of its bags, or of its ids (padding is 0)."""
    if not _is_by_id(field, ids) or (field.pooling is None and ids.given_weights is None):
        return vectors
    return pooled(field, ids, vectors)


class _Call:
    """One forward pass: its look-up, and the targets of its row gradients."""

    def __init__(
        self,
        updates: Sequence[RankTablesUpdate],
        lookup: DeviceLookup,
        status: Tensor,
        weight: float,
    ) -> None:
        """``weight`` is that of this rank's gradients among those of all ranks."""
        self._updates, self._lookup = updates, lookup
        self._weight, self._status = weight, status
        self._rows_versions = [update.rows_version for update in updates]
        self._made: tuple[object, dict[int, tuple[RowGradients, Tensor]]] | None = None
        """Upstream gradients and row gradients, as in :class:`~.lookups.BatchRows`."""

    def queue_row_gradients(self, upstream: Sequence[Tensor | None], update: RankTablesUpdate) -> None:
        """Add all ranks' gradients of the rows of ``update`` here; the first call computes those of all updates."""
        if self._made is None or self._made[0] is not upstream:
            self._made = upstream, self._gradients(upstream)
        update.add(*self._made[1].pop(id(update)), 1)

    def _gradients(self, upstream: Sequence[Tensor | None]) -> dict[int, tuple[RowGradients, Tensor]]:
        if [update.rows_version for update in self._updates] != self._rows_versions:
            raise InvalidArgument(
                f"rows of {self._updates[0].name} were loaded or restored between this forward pass and its backward; "
                "look the ids up again"
            )
        gradients, checksum = self._lookup.gradients(
            [update.tables for update in self._updates],
            upstream,
            self._weight,
        )
        if self._status.device.type != "cpu":
            checksum = torch.where(self._status == 0, checksum, torch.nan)  # for invalid ids: no row changes
        checksum = self._updates[0].table.link.sum(checksum)
        return {id(update): (gradient, checksum) for update, gradient in zip(self._updates, gradients, strict=True)}
