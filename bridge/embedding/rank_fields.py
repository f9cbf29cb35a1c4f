"""The rows of a group on the ranks' devices: each table is split by rows over the ranks.

Every rank looks up its own batch: ids travel to the ranks of their rows, which add the rows of each bag up, and one
vector a bag and rank travels back; gradients go the same way. Cost of a step, whatever the number of fields: one
exchange between the hosts, three all-to-alls (:mod:`geartrain.bridge.placements.device_lookup`), and an all-reduce of
one number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from geartrain.ams.kernels.embedding import FeatureIds
from geartrain.ams.values.errors import (
    GeartrainError,
    InvalidArgument,
    NonFinite,
    SpecMismatch,
    StepMismatch,
    SyncError,
)
from geartrain.ams.values.specs import TableSpec
from geartrain.bridge.collectives.communicator import Communicator
from geartrain.bridge.embedding.field import Field, table_specs
from geartrain.bridge.embedding.group_rows import GroupRows, GroupSettings, TrainedTables, by_optimizer
from geartrain.bridge.embedding.ids import TensorIds, ids_of_batch, tensor_ids
from geartrain.bridge.embedding.lookups import require_first_derivative
from geartrain.bridge.embedding.modes import SSP
from geartrain.bridge.embedding.vectors import (
    bag_of_each,
    counted_places,
    out_of_range,
    pooled,
    pooling_factors,
    require_no_max_weights,
)
from geartrain.bridge.placements.device_lookup import BagGradient, DeviceLookup, FieldBags
from geartrain.bridge.placements.device_rows import DeviceRows
from geartrain.bridge.placements.device_snapshot import DevicePlacement
from geartrain.bridge.placements.device_update import DeviceUpdate


class RankBatch:
    """The ids of one batch on the device of the rows; or why they cannot be looked up, which all ranks then hear."""

    tables = ids = ()  # nothing is pulled ahead

    def __init__(self, given: Sequence[TensorIds], failure: GeartrainError | None) -> None:
        self.given = given
        self.failure = failure
        self.is_bounded = False
        self.is_pulled = True


class RankTablesUpdate(DeviceUpdate[BagGradient]):
    """The update of several tables, under the names of all."""

    @property
    def name(self) -> str:
        """Of the tables."""
        return ", ".join(table.spec.name for table in self.tables)


class RankFields(GroupRows):
    """Implements :class:`GroupRows`."""

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
            names = [field.name for field in self._fields]
            given = ids_of_batch(batch, names, lambda own, name: tensor_ids(own, name, self._device))
            for field, ids in zip(self._fields, given, strict=True):
                require_no_max_weights(field, ids)
            for number in self._with_rows:
                self._require_in_range(self._fields[number], given[number])
            return RankBatch(given, None)
        except GeartrainError as exc:
            return RankBatch((), exc)

    def pull(self, merged: RankBatch) -> None:
        """Rows are here."""

    def _require_in_range(self, field: Field, ids: TensorIds) -> None:
        num_rows = self.specs[field.table_name].num_rows or 0
        is_bad = (ids.values < 0) | (ids.values >= num_rows)
        if field.padding_id is not None:
            is_bad &= ids.values != field.padding_id
        if bool(is_bad.any()):
            bags = ids.bags if isinstance(ids.bags, int) else ids.bags.cpu().numpy()
            feature = FeatureIds(0, ids.values.cpu().numpy(), bags, None, field.pooling, field.padding_id)
            raise out_of_range(field, feature, int(is_bad.nonzero()[0]), num_rows)

    def vectors(self, merged: RankBatch, device: torch.device) -> Sequence[Tensor]:
        fields = [self._fields[number] for number in self._with_rows]
        given = [merged.given[number] for number in self._with_rows] if merged.failure is None else []
        asked = [
            _Asked(self._names.index(field.table_name), field, ids) for field, ids in zip(fields, given, strict=False)
        ]
        lookup = DeviceLookup(self._tables, [own.bags for own in asked]) if asked else None
        samples = given[0].num_samples if given else 0
        agreed, weight = self._agree(merged.failure, samples, lookup, 2 * self._link.world_size * len(fields))
        assert lookup is not None
        call = _Call(self._updates, lookup, agreed, weight, samples)
        if torch.is_grad_enabled():
            carriers = [update.carrier_on(self._device) for update in self._updates]
            found = _Vectors.apply(call, *carriers)  # type: ignore[no-untyped-call]
        else:
            found = lookup.vectors(agreed)
        return [own.finished(vectors).to(device) for own, vectors in zip(asked, found, strict=True)]

    def _agree(
        self, failure: GeartrainError | None, samples: int, lookup: DeviceLookup | None, num_counts: int
    ) -> tuple[list[list[int]], float]:
        """The counts of every rank's look-up, and this rank's part of all samples. One exchange between the hosts.

        If any rank cannot go on, every rank raises: its own error there, SyncError elsewhere.
        """
        counts = [0] * num_counts if lookup is None else lookup.counts
        refused, trains = sum(update.take_refused() for update in self._updates), torch.is_grad_enabled()
        step = self._updates[0].step
        answers = self._link.exchange([failure is None, samples, trains, step, refused, *counts])
        sound, sizes, modes, steps, left = (
            list(column) for column in zip(*(answer[:5] for answer in answers), strict=True)
        )
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
        return [answer[5:] for answer in answers], samples / (sum(sizes) or 1)


def _specs(settings: GroupSettings) -> dict[str, TableSpec]:
    """The tables. Raises InvalidArgument for what rows on ranks have not."""
    name = settings.name
    if settings.cluster is not None:
        raise InvalidArgument(
            f"{name!r} has rows='ranks' and a cluster, which holds none of them; give None in its place"
        )
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
        if spec.num_rows is None:
            raise InvalidArgument(
                f"table {field.table_name!r} (field {field.name!r}) has no num_rows, and rows='ranks' splits a table "
                f"by its rows: say how many ids there are, gt.Field({field.name!r}, num_rows=1_000_000). Where that is "
                "not known, hash ids into a range, or keep the rows in a cluster, whose tables grow (rows='pull')"
            )
        for setting in ("admission", "expiry"):  # max_bytes goes with no num_rows
            if getattr(spec, setting) is not None:
                raise InvalidArgument(
                    f"table {field.table_name!r} (field {field.name!r}) has {setting}, and rows on ranks all stay; "
                    "leave it out, or keep the rows in a cluster (rows='pull')"
                )
    return specs


class _Asked:
    """What one field asks for, and what is made of the answer.

    Bags are added up where the rows are, unless that would not do: then each distinct id is a bag of its own.
    """

    def __init__(self, table: int, field: Field, ids: TensorIds) -> None:
        self._field, self._ids = field, ids
        self._counted = counted = counted_places(field, ids)
        values_N = ids.values[counted]
        self._row_of_N: Tensor | None = None
        if field.pooling in (None, "max") or ids.given_weights is not None:
            distinct_U, self._row_of_N = torch.unique(values_N, return_inverse=True)
            own_U = torch.arange(len(distinct_U), device=distinct_U.device)
            self.bags = FieldBags(table, distinct_U, own_U, None, len(distinct_U))
            return
        self._weights_N = None if ids.weights is None else ids.weights[counted]
        self.bags = FieldBags(table, values_N, bag_of_each(ids)[counted], self._weights_N, ids.num_bags)

    def finished(self, vectors: Tensor) -> Tensor:
        """The vectors of the field."""
        if self._row_of_N is not None:
            return pooled(self._field, self._ids, vectors[self._row_of_N], self._counted)
        if self._field.pooling == "sum":
            return vectors
        bags = self.bags
        return vectors * pooling_factors(self._field, bags.num_vectors, bags.vector_N, self._weights_N)[:, None]


class _Call:
    """One forward pass: what was looked up, and where its row gradients go."""

    def __init__(
        self,
        updates: Sequence[RankTablesUpdate],
        lookup: DeviceLookup,
        counts: Sequence[Sequence[int]],
        weight: float,
        samples: int,
    ) -> None:
        self._updates, self.lookup, self.counts = updates, lookup, counts
        self._weight, self._samples = weight, samples
        self._rows_versions = [update.rows_version for update in updates]

    def queue_row_gradients(self, upstream: Sequence[Tensor | None]) -> None:
        """Add those of all ranks to the updates of the rows that are here."""
        if [update.rows_version for update in self._updates] != self._rows_versions:
            raise InvalidArgument(
                f"rows of {self._updates[0].name} were loaded or restored between this forward pass and its backward; "
                "look the ids up again"
            )
        found = self.lookup.row_gradients(
            [None if gradient is None else gradient * self._weight for gradient in upstream]
        )
        squares = sum(rows_UD.double().square().sum() for _, rows_UD in found)
        checksum = self._updates[0].table.link.sum(cast("Tensor", squares))
        first = 0
        for update in self._updates:
            own = found[first : first + len(update.tables)]
            first += len(own)
            update.add(BagGradient(update.tables, own), checksum, self._samples)


class _Vectors(torch.autograd.Function):
    """Sums of the rows that all fields ask for; backward sends their gradients to the rows."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *carriers: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.num_carriers = call, len(carriers)
        ctx.set_materialize_grads(False)
        return tuple(call.lookup.vectors(call.counts))

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[None, ...]:
        require_first_derivative()
        ctx.call.queue_row_gradients(upstream)
        return (None, *[None] * ctx.num_carriers)
