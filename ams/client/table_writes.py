"""The writes of one table: checked as a whole, cut by shard and numbered, before anything is sent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from geartrain.ams.client.rows.push_options import (
    CHECK_FINITE,
    NO_CHECK,
    BatchSettings,
    PushOptions,
    batch_of,
    require_known,
)
from geartrain.ams.client.rows.row_calls import WriteOutcome
from geartrain.ams.client.shard_calls import ShardCalls
from geartrain.ams.client.writes import ClientStream, RowWrite, Write
from geartrain.ams.kernels import ops
from geartrain.ams.kernels._core import PreparedWrite, ScatteredRows, TableFacts
from geartrain.ams.values.arguments import real_number
from geartrain.ams.values.arrays import ids_array, rows_array
from geartrain.ams.values.errors import InvalidArgument, NonFinite
from geartrain.ams.values.optimizers.spec import NO_SCALARS
from geartrain.ams.values.shard_messages import CallContext, Done, Remove, SyncGroup
from geartrain.ams.values.specs import Ids, TableSpec
from geartrain.ams.values.text import counted


class TableWrites:
    """Thread-safe. Arguments and errors are those of :class:`~geartrain.ams.client.table.Table`."""

    def __init__(self, spec: TableSpec, facts: TableFacts, calls: ShardCalls, stream: ClientStream) -> None:
        self._spec = spec
        self._facts = facts
        self._calls = calls
        self._stream = stream
        self._counts_steps = spec.counts_steps

    @property
    def _incarnation(self) -> int:
        return self._calls.incarnation_of(self._spec)

    def check_on_send(self, group: SyncGroup | None) -> int:
        """How far a push that is sent at once is looked through before."""
        # All or nothing: a shard looks for itself, so what goes to one shard at once need not be looked at twice.
        return NO_CHECK if self._calls.view.num_shards == 1 and group is None else CHECK_FINITE

    def push(
        self,
        ids: Any,
        gradients: Any,
        options: PushOptions,
        *,
        check: int | None = None,
        step_goes_on: bool = False,
        known_distinct: bool = False,
    ) -> RowWrite:
        """Check a push and cut it; ``check`` is that of :meth:`RowCalls.prepared`, or None: of one that is sent at
        once. Raises as :meth:`Table.push`.
        """
        settings = self.settings_of(options)
        checked = ids_array(ids, self._spec.num_rows)
        is_scattered = isinstance(gradients, ScatteredRows)
        rows = gradients if is_scattered else rows_array(gradients, len(checked), self._spec.dim)
        settings["check"] = self.check_on_send(settings["group"]) if check is None else check
        settings |= {"step_goes_on": step_goes_on, "are_distinct": known_distinct}
        return self.cut(checked, rows, settings, options, options.get("sequence"))

    def settings_of(self, options: PushOptions) -> dict[str, Any]:
        """What pushes with these options say to the compiled code, whatever table of this optimizer they are of."""
        require_known(options)
        lr, scalars = options.get("lr"), options.get("optimizer_scalars", NO_SCALARS)
        scale = real_number("scale", options.get("scale", 1.0))
        self._spec.optimizer.for_push(scalars)
        if not math.isfinite(scale):
            raise NonFinite(f"scale is {scale!r}; it must be finite (a skipped step pushes nothing)")
        return {
            "lr": None if lr is None else real_number("lr", lr),
            "scale": scale,
            "scalars": dict(scalars),
            "group": options.get("group"),
        }

    def cut(
        self,
        ids: Ids,
        rows: Any,
        settings: Mapping[str, Any],
        batch: BatchSettings,
        sequence: int | None = None,
    ) -> RowWrite:
        """Cut and number a push of checked ids and rows."""
        group = settings["group"]
        prepared = self._calls.rows.prepared(
            self._facts,
            ids,
            rows,
            every_shard=group is not None or self._counts_steps,  # they count ranks, or steps
            is_assign=False,
            batch=batch_of(self._spec, len(ids), batch),
            **settings,
        )
        return self._write(prepared, sequence, ids, group)

    def assign(self, ids: Any, rows: Any, sequence: int | None) -> RowWrite:
        """Check rows [N, dim] that overwrite others, and cut them."""
        checked = ids_array(ids, self._spec.num_rows)
        values = rows_array(rows, len(checked), self._spec.dim, dtype=self._spec.numpy_dtype)
        num_distinct = ops.num_distinct(checked)
        if num_distinct < len(checked):
            raise _duplicates(checked, len(checked) - num_distinct)
        prepared = self._calls.rows.prepared(
            self._facts,
            checked,
            values,
            check=CHECK_FINITE,
            is_assign=True,
            lr=None,
            scale=1.0,
            scalars=NO_SCALARS,
            group=None,
            step_goes_on=False,
        )
        return self._write(prepared, sequence, checked)

    def remove(self, ids: Any, sequence: int | None) -> int:
        """Take rows out, in as many writes as that takes, and return how many went."""
        checked = ids_array(ids, self._spec.num_rows)
        most = max(1, self._calls.config.part_bytes // checked.itemsize)
        if sequence is not None and len(checked) > most:
            raise InvalidArgument(
                f"sequence {sequence} is that of one write, and {len(checked)} ids to remove are several; give at most "
                f"{most} at once"
            )
        return sum(self._remove(checked[start : start + most], sequence) for start in range(0, len(checked), most))

    def _remove(self, ids: Ids, sequence: int | None) -> int:
        requests = {
            shard: Remove(table=self._spec.name, ids=ids if of_shard is None else ids[of_shard])
            for shard, of_shard in self._calls.rows.routes(self._facts, ids)
        }

        def deliver(shards: Sequence[int], context: CallContext) -> list[WriteOutcome]:
            return cast("list[WriteOutcome]", self._calls.deliver([(n, requests[n]) for n in shards], context))

        numbers = self._stream.numbers(self._spec.name, sequence)
        logged = self._calls.rows.write_log.begin(self._spec.name, ids)
        try:
            return send_once(Write(numbers, list(requests), deliver, self._spec.name, self._incarnation)).created
        finally:
            if logged is not None:
                self._calls.rows.write_log.end(logged)

    def _write(
        self, prepared: PreparedWrite, sequence: int | None, ids: Ids, group: SyncGroup | None = None
    ) -> RowWrite:
        # A write means the table there is when it is prepared: half of it may be lost with a table restored since.
        numbers = self._stream.numbers(self._spec.name, sequence)
        return RowWrite(numbers, prepared, self._calls.rows, self._spec.name, self._incarnation, ids, group)


def send_once(write: Write) -> Done:
    """Send a write that nobody will send again: after an error it is abandoned."""
    try:
        return write.send()
    except BaseException:
        write.abandon()
        raise


def _duplicates(ids: Ids, count: int) -> InvalidArgument:
    found, counts = np.unique(ids, return_counts=True)
    first = int(np.flatnonzero(np.isin(ids, found[counts > 1]))[0])
    both = np.flatnonzero(ids == ids[first])[:2]
    return InvalidArgument(
        f"{len(ids)} ids to assign hold {counted(count, 'duplicate')}: id {int(ids[first])} is at positions "
        f"{both[0]} and {both[1]}; give each id once (a push would sum the gradients of equal ids). Nothing was sent"
    )
