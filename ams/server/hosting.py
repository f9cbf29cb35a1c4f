"""Host of hosted models on one shard: their view of the rows, and the write of their gradients.

A write of a model changes all of its rows or none. Gradients of up to HELD_BYTES are made first and pushed at once. Of
more, each chunk is made and pushed while it is in a core's cache, once it is known that no push can be refused: from
the model's bound of its gradients (O(1) work), else by making all of them once for the check alone (half as much time
again as the model's two passes).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from geartrain.ams.programs.hosted import HELD_BYTES, Float32, Gradients, HostedModel, HostedModels
from geartrain.ams.tables.row_table import RowTable
from geartrain.ams.values.arguments import check_time
from geartrain.ams.values.errors import InternalError, InvalidArgument, StepMismatch
from geartrain.ams.values.placement import NUM_BUCKETS, bucket_of
from geartrain.ams.values.shard_messages import Computed, ComputeHosted, UpdateHosted
from geartrain.ams.values.specs import Ids, TableSpec

T = TypeVar("T")
R = TypeVar("R")


class ShardRows:
    """Rows of one table on this shard, a :class:`geartrain.ams.programs.hosted.HostedRows`."""

    def __init__(self, table: RowTable, owned_buckets: Ids, side_by_side: Callable[..., Any]) -> None:
        self._table = table
        self._buckets = owned_buckets
        self._is_owned = np.zeros(NUM_BUCKETS, np.bool_)
        self._is_owned[owned_buckets] = True
        self.side_by_side = side_by_side

    @property
    def spec(self) -> TableSpec:
        return self._table.spec

    @property
    def num_owned(self) -> int:
        num_rows = self.spec.num_rows
        if num_rows is None:
            raise InvalidArgument(
                f"table {self.spec.name!r} is hashed; a model that works through all rows needs a table with num_rows"
            )
        whole, rest = divmod(num_rows, NUM_BUCKETS)
        return whole * len(self._buckets) + int(np.searchsorted(self._buckets, rest))

    def owned_ids(self, start: int, stop: int) -> Ids:
        turns, places = np.divmod(np.arange(start, stop, dtype=np.int64), max(1, len(self._buckets)))
        ids: Ids = turns * NUM_BUCKETS + self._buckets[places]
        return ids

    def owns(self, ids: Ids) -> npt.NDArray[np.bool_]:
        return self._is_owned[bucket_of(ids, dense=self.spec.num_rows is not None)]

    def read(self, ids: Ids) -> Float32:
        out = np.empty((len(ids), self.spec.dim), self.spec.numpy_dtype)
        self._table.pull(ids, out)
        return out.astype(np.float32, copy=False)


class Hosting:
    """Models of one shard and their threads. Used by the thread that has the shard's turn."""

    def __init__(self, models: HostedModels, owned_buckets: Ids, threads: int) -> None:
        self._models = models
        self._owned_buckets = owned_buckets
        self._threads = threads
        self._executor: ThreadPoolExecutor | None = None

    def compute(self, table: RowTable, request: ComputeHosted) -> Computed:
        """Answer a request that changes nothing. Raises InvalidArgument, and what the model raises."""
        model = self._model(request.model)
        return Computed(arrays=model.compute(self._rows(table), request.operation, request.inputs))

    def update(self, table: RowTable, request: UpdateHosted, before_changes: Callable[[], None]) -> int:
        """Apply the gradients of a model; return the number of new rows.

        Calls ``before_changes`` when nothing can refuse the write any more; an error of it stops the write. Raises
        InvalidArgument, NonFinite, MemoryError, and what the model raises: no row has changed then.
        """
        rows = self._rows(table)
        gradients = self._model(request.model).gradients(rows, request.inputs)
        if gradients.batch is not None and gradients.batch.unix_seconds is not None:
            check_time(gradients.batch.unix_seconds, "this shard")
        if gradients.batch is not None or gradients.num_rows * table.spec.dim * 4 <= HELD_BYTES:
            made = self._side_by_side(lambda chunk: (gradients.ids(chunk), gradients.make(chunk)), gradients.chunks)
            before_changes()
            none = np.empty(0, np.int64), np.empty((0, table.spec.dim), np.float32)  # without rows, it is still a step
            several = (np.concatenate(column) for column in zip(none, *made, strict=True))
            ids, values = made[0] if len(made) == 1 else several
            return table.push(ids, values, batch=gradients.batch, **_settings_of(request))
        return self._update_by_chunks(table, rows, gradients, request, before_changes)

    def close(self) -> None:
        """Stop the threads."""
        if self._executor is not None:
            self._executor.shutdown()

    def _update_by_chunks(
        self,
        table: RowTable,
        rows: ShardRows,
        gradients: Gradients,
        request: UpdateHosted,
        before_changes: Callable[[], None],
    ) -> int:
        settings = _settings_of(request)

        def check(chunk: Any) -> None:
            table.check_push(gradients.ids(chunk), gradients.make(chunk), **settings)

        def apply(chunk: Any) -> int:
            return table.push(gradients.ids(chunk), gradients.make(chunk), **settings, ends_step=False)

        if not table.cannot_overflow(gradients.largest, **settings):
            self._side_by_side(check, gradients.chunks)
        if table.spec.num_rows is None:  # for all chunks at once, or each would reserve the same room
            table.reserve(np.concatenate([gradients.ids(chunk) for chunk in gradients.chunks]))
        elif table.num_present < rows.num_owned:
            for chunk in gradients.chunks:
                table.reserve(gradients.ids(chunk))
        table.reserve_copies(gradients.num_rows)
        before_changes()
        try:
            created = sum(self._side_by_side(apply, gradients.chunks))
            table.end_step(lr=request.lr)
            return created
        except Exception as error:
            table.torn = (
                f"an update of table {table.spec.name!r} that had been checked was refused half-way ({error!r}): some "
                "of its rows changed, and it is neither read nor written any more; go back to a snapshot"
            )
            raise InternalError(table.torn) from error

    def _rows(self, table: RowTable) -> ShardRows:
        return ShardRows(table, self._owned_buckets, self._side_by_side)

    def _model(self, name: str) -> HostedModel:
        try:
            return self._models[name]
        except KeyError:
            raise InvalidArgument(
                f"this shard hosts no model {name!r}; it hosts {', '.join(map(repr, self._models)) or 'none'}. Start "
                "it with 'geartrain server', or embed it with geartrain.local()"
            ) from None

    def _side_by_side(self, function: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Return the results in order, once all are done; raise the first error."""
        if self._threads == 1 or len(items) < 2:
            return [function(item) for item in items]
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self._threads, thread_name_prefix="hosted")
        futures = [self._executor.submit(function, item) for item in items]
        wait(futures)
        return [future.result() for future in futures]


def _settings_of(request: UpdateHosted) -> dict[str, Any]:
    return {"lr": request.lr, "scale": request.scale, "optimizer_scalars": request.optimizer_scalars}


def joint_update(updates: list[UpdateHosted]) -> UpdateHosted:
    """Return the update that equals those of all ranks, given in rank order: the mean weighted by sample counts."""
    groups = [update.group for update in updates if update.group is not None]
    total = sum(group.sample_count for group in groups)
    first = updates[0]
    for update in updates:
        if update.model != first.model:
            raise StepMismatch(
                f"one rank updates table {first.table!r} with model {first.model!r}, another with {update.model!r}; "
                "all ranks of a step must agree"
            )
    inputs = tuple(
        replace(batch, weight=batch.weight * update.scale * (group.sample_count / total if total else 0.0))
        for update, group in zip(updates, groups, strict=True)
        for batch in update.inputs
    )
    return replace(first, inputs=inputs, scale=1.0, group=None)
