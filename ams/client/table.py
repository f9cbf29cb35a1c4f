"""The client: tables as a program sees them.

Cost: one request per shard and operation, all shards at once. N ids of a table of dim D travel as 8·N bytes, their
rows as itemsize·N·D bytes; ids that occur twice travel once. To and from a shard on this machine nothing of that
travels: it lies in memory that both share.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from geartrain.ams.client.hosted_calls import HostedCalls
from geartrain.ams.client.shard_calls import ShardCalls
from geartrain.ams.client.writes import ClientStream, Deliver, Write
from geartrain.ams.kernels import ops
from geartrain.ams.values.arguments import real_number
from geartrain.ams.values.arrays import ids_array, like, rows_array
from geartrain.ams.values.errors import InvalidArgument, NonFinite, TableNotFound
from geartrain.ams.values.optimizers.spec import NO_SCALARS
from geartrain.ams.values.placement import NUM_BUCKETS, split_by_shard
from geartrain.ams.values.shard_messages import (
    Assign,
    Describe,
    Done,
    Pull,
    Push,
    Reply,
    Request,
    ShardState,
    SyncGroup,
)
from geartrain.ams.values.specs import Ids, TableSpec
from geartrain.ams.values.text import counted


class Table:
    """A table of the cluster: pull, push, assign. Thread-safe.

    ids are integers [N] in [0, num_rows) (any >= 0 in a hashed table), rows and gradients [N, dim]. numpy arrays and
    torch tensors are taken, and answered in kind. Once the table was dropped, every method raises TableNotFound, also
    where another was made under its name, unless this process has restored that one.
    """

    def __init__(self, spec: TableSpec, calls: ShardCalls, stream: ClientStream) -> None:
        self.spec = spec
        self._calls = calls
        self._stream = stream

    def __repr__(self) -> str:
        rows = "hashed" if self.spec.num_rows is None else counted(self.spec.num_rows, "row")
        return f"Table({self.spec.name!r}, {rows}, dim={self.spec.dim}, {self.spec.dtype}, {self.spec.optimizer})"

    @property
    def incarnation(self) -> int:
        """Which table of its name it is; that of the restored one after this process has restored it. 0: not known."""
        return self._calls.incarnation_of(self.spec)

    def pull(self, ids: Any) -> Any:
        """Read rows: [N] -> [N, dim] of the table's dtype. A row never written has its initial value; none is created.

        Raises InvalidIds, ShardUnavailable, ShardRestarted.
        """
        checked = ids_array(ids, self.spec.num_rows)
        out = np.empty((len(checked), self.spec.dim), self.spec.numpy_dtype)
        if self._calls.remote:
            distinct, inverse, _ = ops.merge_duplicates(checked)
            if len(distinct) < len(checked):
                return like(self._pulled(distinct)[inverse], ids)
        self._read(checked, out)
        return like(out, ids)

    def pull_async(self, ids: Any) -> Future[Any]:
        """:meth:`pull` in the background."""
        return self._calls.background(self.pull, ids)

    def present(self, ids: Any) -> npt.NDArray[np.bool_]:
        """Say which rows exist, [N] bool: were pushed or assigned."""
        checked = ids_array(ids, self.spec.num_rows)
        out = np.empty((len(checked), self.spec.dim), self.spec.numpy_dtype)
        present = np.zeros(len(checked), np.bool_)
        self._read(checked, out, present=present)
        return present

    def version(self) -> int:
        """Return the table version: the writes applied to it on the shard that has had the fewest, assigns included.

        Of a table all of whose rows are in every write (dense ids, no shard without rows counts) that is the number of
        writes that are in every row pulled from now on. It goes on after a restore. Cost and errors are those of
        :meth:`versions`.
        """
        return min(self.versions())

    def versions(self) -> tuple[int, ...]:
        """Return the writes applied to the table by each shard, of dense ids by each that has rows, in their order.

        No row has changed while these have not, though their lowest, the table version, may stay where one moves: a
        write that was given up half way is on some shards only. Costs one small request per shard. Raises
        TableNotFound, ShardUnavailable, ShardRestarted.
        """
        first_ids = np.arange(min(self.spec.num_rows or NUM_BUCKETS, NUM_BUCKETS), dtype=np.int64)
        is_dense = self.spec.num_rows is not None
        shards = [shard for shard, _ in self._routes(first_ids)] if is_dense else range(self._calls.view.num_shards)
        return tuple(self._writes_in(reply) for reply in self._calls.read([(shard, Describe()) for shard in shards]))

    def _writes_in(self, reply: Reply) -> int:
        assert isinstance(reply, ShardState)
        for table in reply.tables:
            both = self.incarnation, table.spec.incarnation
            if table.spec.name == self.spec.name and (0 in both or both[0] == both[1]):
                return table.writes
        raise TableNotFound(
            f"shard {reply.shard} has no table {self.spec.name!r} any more, or another: it was dropped; if there is "
            f"one again, open that: cluster.table({self.spec.name!r}), or make its head, dense module or slow gear anew"
        )

    def pull_into(self, ids: Ids, out: npt.NDArray[Any], *, required_sync: SyncGroup | None = None) -> None:
        """Read rows into ``out`` [N, dim] of the table's dtype, C-contiguous, without further copies.

        With ``required_sync``, raises StepMismatch unless exactly the group's writes before it are applied.
        """
        checked = ids_array(ids, self.spec.num_rows)
        is_array = isinstance(out, np.ndarray)
        if not is_array or out.shape != (len(checked), self.spec.dim) or out.dtype != self.spec.numpy_dtype:
            found = f"{out.dtype} {out.shape}" if is_array else f"a {type(out).__name__}"
            raise InvalidArgument(
                f"out is {found}; it must be a numpy array of {self.spec.numpy_dtype} ({len(checked)}, {self.spec.dim})"
            )
        if not out.flags.carray:
            raise InvalidArgument("out must be writable, aligned and C-contiguous; pass a fresh array")
        self._read(checked, out, required_sync=required_sync)

    def pull_into_async(
        self, ids: Ids, out: npt.NDArray[Any], *, required_sync: SyncGroup | None = None
    ) -> Future[None]:
        """:meth:`pull_into` in the background; ``out`` must be left alone until the future is done."""
        return self._calls.background(self.pull_into, ids, out, required_sync=required_sync)

    def push(
        self,
        ids: Any,
        gradients: Any,
        *,
        lr: float | None = None,
        scale: float = 1.0,
        optimizer_scalars: Mapping[str, float] = NO_SCALARS,
        group: SyncGroup | None = None,
        sequence: int | None = None,
    ) -> Done:
        """Apply gradients with the table's optimizer, exactly once per shard; gradients of equal ids are summed.

        ``lr`` replaces the table's learning rate, ``optimizer_scalars`` other numbers of its optimizer by name
        (``{"momentum": 0.85}``; ``beta1`` and ``beta2`` of Adam), ``scale`` multiplies the gradients, ``group`` makes
        the push one rank's part of a synchronous one. ``sequence`` numbers the push, for example by the step, as the
        only write of that number to this table: sent again under the same number and stream name, by this process or
        one started in its place, it changes nothing and answers ``duplicate``; see :meth:`Cluster.acknowledge`. Raises
        InvalidArgument, InvalidIds, InvalidRows, NonFinite (nothing changed anywhere), StaleClient, SyncError,
        ShardUnavailable (whether that shard applied it is unknown; see :meth:`prepare_push`).
        """
        # All or nothing: a shard looks for itself, so what goes to one shard at once need not be looked at twice.
        check_finite = self._calls.view.num_shards > 1 or group is not None
        push = Push(
            table=self.spec.name,
            ids=ids,
            gradients=gradients,
            lr=lr,
            scale=scale,
            optimizer_scalars=dict(optimizer_scalars),
            group=group,
        )
        return _send_once(self._prepared(push, sequence, check_finite=check_finite))

    def push_async(
        self, ids: Any, gradients: Any, *, lr: float | None = None, scale: float = 1.0, sequence: int | None = None
    ) -> Future[Done]:
        """:meth:`push` in the background; the arrays must be left alone until the future is done."""
        return self._calls.background(self.push, ids, gradients, lr=lr, scale=scale, sequence=sequence)

    def prepare_push(
        self,
        ids: Any,
        gradients: Any,
        *,
        lr: float | None = None,
        scale: float = 1.0,
        optimizer_scalars: Mapping[str, float] = NO_SCALARS,
        group: SyncGroup | None = None,
        sequence: int | None = None,
        step_goes_on: bool = False,
        known_finite: bool = False,
    ) -> Write:
        """Check a push and number it, but send nothing: the write can be sent again after an error, applied once.

        Args:
            ids: [N] of the rows.
            gradients: [N, dim]; those of equal ids are summed.
            lr: Replaces the table's learning rate.
            scale: Multiplies the gradients.
            optimizer_scalars: Replace other numbers of the table's optimizer, by name.
            group: Makes the push one rank's part of a synchronous one.
            sequence: Numbers it in the stream, see :meth:`push`.
            step_goes_on: More pushes of the same step follow, and rows that none of them has are to move once.
            known_finite: The caller has looked for NaN and infinity; else that is done here, a pass over the gradients.

        Raises what :meth:`push` does before it sends.
        """
        push = Push(
            table=self.spec.name,
            ids=ids,
            gradients=gradients,
            lr=lr,
            scale=scale,
            optimizer_scalars=dict(optimizer_scalars),
            group=group,
            step_goes_on=step_goes_on,
        )
        return self._prepared(push, sequence, check_finite=not known_finite, known_finite=known_finite)

    def _prepared(self, push: Push, sequence: int | None, *, check_finite: bool, known_finite: bool = False) -> Write:
        """Check ``push``, of all shards, and cut it; without ``check_finite`` a shard finds what is not finite."""
        checked = ids_array(push.ids, self.spec.num_rows)
        rows = rows_array(push.gradients, len(checked), self.spec.dim)
        lr = None if push.lr is None else real_number("lr", push.lr)
        scale = real_number("scale", push.scale)
        self.spec.optimizer.for_push(push.optimizer_scalars)
        if not np.isfinite(scale):
            raise NonFinite(f"scale is {scale!r}; it must be finite (a skipped step pushes nothing)")
        if check_finite:
            _require_finite(rows, checked)
        merged, rows = ops.merged(checked, rows)
        if check_finite and merged is not checked:
            _require_finite(rows, merged)  # a sum may be infinite where its terms are not
        if check_finite or known_finite:
            _require_finite_product(rows, scale)
        every_shard = push.group is not None or self.spec.counts_steps
        requests = [
            (shard, replace(push, ids=part, gradients=part_rows, lr=lr, scale=scale))
            for shard, part, part_rows in self._split(merged, rows, every_shard=every_shard)
        ]
        return Write(self._stream.numbers(self.spec.name, sequence), requests, self._deliver())

    def assign(self, ids: Any, rows: Any, *, sequence: int | None = None) -> Done:
        """Overwrite rows [N, dim] of the table's dtype; their slots become zero. ids must be distinct.

        ``sequence`` numbers the write as it does a :meth:`push`. Raises InvalidIds, InvalidRows, NonFinite,
        StaleClient, ShardUnavailable.
        """
        checked = ids_array(ids, self.spec.num_rows)
        values = rows_array(rows, len(checked), self.spec.dim, dtype=self.spec.numpy_dtype)
        _require_finite(values, checked)
        num_distinct = ops.num_distinct(checked)
        if num_distinct < len(checked):
            raise _duplicates(checked, len(checked) - num_distinct)
        requests = [
            (shard, Assign(table=self.spec.name, ids=part, rows=part_rows))
            for shard, part, part_rows in self._split(checked, values, every_shard=False)
        ]
        numbers = self._stream.numbers(self.spec.name, sequence)
        return _send_once(Write(numbers, requests, self._deliver()))

    def hosted(self, model: str) -> HostedCalls:
        """Return the way to a hosted model beside this table's rows; see :mod:`geartrain.ams.programs.hosted`."""
        return HostedCalls(self.spec, model, self._calls, partial(self._stream.numbers, self.spec.name, None))

    def _deliver(self) -> Deliver:
        # A write means the table there is when it is prepared: half of it may be lost with a table restored since.
        return partial(self._calls.deliver, table_incarnation=self.incarnation)

    def _pulled(self, ids: Ids) -> npt.NDArray[Any]:
        out = np.empty((len(ids), self.spec.dim), self.spec.numpy_dtype)
        self._read(ids, out)
        return out

    def _read(
        self,
        ids: Ids,
        out: npt.NDArray[Any],
        *,
        present: npt.NDArray[np.bool_] | None = None,
        required_sync: SyncGroup | None = None,
    ) -> None:
        name, incarnation, routes = self.spec.name, self.incarnation, self._routes(ids)
        if self._calls.pull_here(name, incarnation, routes, ids, out, present, required_sync):
            return
        calls: list[tuple[int, Request]] = []
        for shard, positions in routes:
            part = ids if positions is None else ids[positions]
            pull = Pull(
                table=name,
                ids=part,
                out=out,
                positions=positions,
                present=present,
                required_sync=required_sync,
            )
            calls.append((shard, pull))
        self._calls.read(calls, table_incarnation=incarnation)

    def _routes(self, ids: Ids) -> list[tuple[int, Ids | None]]:
        view = self._calls.view
        return split_by_shard(ids, view.bucket_shards, view.num_shards, dense=self.spec.num_rows is not None)

    def _split(self, ids: Ids, rows: npt.NDArray[Any], *, every_shard: bool) -> list[tuple[int, Ids, npt.NDArray[Any]]]:
        """Cut a write by shard. With ``every_shard`` it goes to each, if need be empty: they count ranks, or steps."""
        routes = dict(self._routes(ids))
        if len(routes) == 1 and next(iter(routes.values())) is None:
            return [(0, ids, rows)]
        nothing = np.empty(0, np.int64)
        shards = range(self._calls.view.num_shards) if every_shard else sorted(routes)
        parts = []
        for shard in shards:
            positions = routes.get(shard)
            chosen = nothing if positions is None else positions
            parts.append((shard, ids[chosen], rows[chosen]))
        return parts


def _send_once(write: Write) -> Done:
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


def _require_finite_product(rows: npt.NDArray[Any], scale: float) -> None:
    if abs(scale) <= 1 or not rows.size:
        return
    largest = float(np.abs(rows).max())
    with np.errstate(over="ignore"):
        if not np.isfinite(np.float32(largest) * np.float32(scale)):
            raise NonFinite(f"scale {scale!r} times the largest gradient {largest!r} is infinite; nothing was sent")


def _require_finite(rows: npt.NDArray[Any], ids: Ids) -> None:
    if ops.all_finite(rows):
        return
    bad = ~np.isfinite(rows.astype(np.float32)).all(axis=1)
    index = int(np.flatnonzero(bad)[0])
    raise NonFinite(
        f"{int(bad.sum())} of {len(ids)} rows hold NaN or infinity, first row {index} (id {int(ids[index])}); "
        "nothing was sent"
    )
