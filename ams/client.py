"""The client: tables as a program sees them, and the calls to their shards.

Cost: one request per shard and operation, all shards at once. N ids of a table of dim D travel as 8·N bytes, their
rows as itemsize·N·D bytes; ids that occur twice travel once. To and from a shard on this machine nothing of that
travels: it lies in memory that both share.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from geartrain.ams.arguments import real_number
from geartrain.ams.arrays import ids_array, like, rows_array
from geartrain.ams.aside import BackgroundFuture, BrokenOff, Leave, aside, is_on_main_thread
from geartrain.ams.config import ClientConfig
from geartrain.ams.core import ops
from geartrain.ams.errors import (
    GeartrainError,
    InvalidArgument,
    NonFinite,
    ShardRestarted,
    ShardUnavailable,
    StaleCluster,
    TableNotFound,
    Unavailable,
)
from geartrain.ams.hosted_calls import HostedCalls
from geartrain.ams.messages import (
    Assign,
    CallContext,
    Describe,
    Done,
    Pull,
    Push,
    Reply,
    Request,
    ShardState,
    SyncGroup,
)
from geartrain.ams.placement import NUM_BUCKETS, split_by_shard
from geartrain.ams.specs import Ids, TableSpec
from geartrain.ams.transport.carrier import AttemptFailed, ClusterView, ShardCarrier
from geartrain.ams.words import counted
from geartrain.ams.writes import ClientStream, Write

Outcome = Reply | BaseException
logger = logging.getLogger(__name__)

_FIRST_BACKOFF_SECONDS = 0.05
_LONGEST_BACKOFF_SECONDS = 1.0
_ASYNC_THREADS = 4
_CLOSED = "this cluster is closed; use it inside the 'with' block, or before close()"


class ShardCalls:
    """Calls to the shards of one cluster, with retries. Thread-safe."""

    def __init__(
        self,
        view: ClusterView,
        open_carrier: Callable[[str], ShardCarrier],
        refresh: Callable[[], ClusterView],
        config: ClientConfig,
        *,
        remote: bool,
    ) -> None:
        self.remote = remote
        """Whether rows travel at all."""
        self.config = config
        self._view = view
        self._refresh = refresh
        self._carriers = [open_carrier(entry.address) for entry in view.shards]
        self._executor: ThreadPoolExecutor | None = None
        self._is_closing = self._closed = False
        self._process = os.getpid()
        self._given_up = threading.Event()
        self._lock = threading.Lock()

    @property
    def is_forked(self) -> bool:
        """Whether this is a forked child of the process that opened the cluster.

        It would number its writes as its parent does, so that the shards took one of two for a repetition; and neither
        connections nor threads came with it.
        """
        return os.getpid() != self._process

    def require_own_process(self) -> None:
        """Raise Unavailable in a forked child."""
        if self.is_forked:
            raise Unavailable(
                f"this cluster was opened by process {self._process} and cannot be used in process {os.getpid()}, "
                "which was forked from it; open one there (gt.connect)"
            )

    def require_usable(self) -> None:
        """Raise Unavailable in a forked child, and once the cluster is closed."""
        self.require_own_process()
        if self._closed or self._given_up.is_set():
            raise Unavailable(_CLOSED)

    @property
    def view(self) -> ClusterView:
        """The cluster as last seen."""
        return self._view

    def deliver(
        self,
        calls: Sequence[tuple[int, Request]],
        context: CallContext,
        timeout_seconds: float | None = None,
        *,
        recovery_seconds: float | None = None,
    ) -> list[Outcome]:
        """Make all calls side by side, each retried while that can help; return replies and errors in order.

        An attempt may take ``timeout_seconds``, or the client's ``attempt_timeout_seconds``; a shard that does not
        answer is waited for ``recovery_seconds`` (0: it is asked once), or the client's ``recovery_timeout_seconds``.

        Returns only when no carrier uses the requests' arrays any more. So it is, too, if Ctrl-C breaks it off (but a
        second one does not wait for that): what is under way is not sent again then, and whether it was done is
        unknown.
        """
        self.require_usable()
        recovery_seconds = self.config.recovery_timeout_seconds if recovery_seconds is None else recovery_seconds
        patience = _Patience(recovery_seconds, self._given_up)  # one for all, or dead shards would add up
        if not is_on_main_thread():
            return self._deliver(calls, context, timeout_seconds, patience)
        leaves = []
        for number, (shard, request) in enumerate(calls := list(calls)):
            if isinstance(request, Pull | Push | Assign):
                leaves.append(Leave())
                calls[number] = shard, replace(request, leave=leaves[-1])

        def break_off() -> None:
            patience.end()
            for leave in leaves:
                leave.end()
            for leave in leaves:
                leave.wait()

        return aside(
            partial(self._deliver, calls, context, timeout_seconds, patience),
            if_broken_off=break_off,
        )

    def _deliver(
        self,
        calls: Sequence[tuple[int, Request]],
        context: CallContext,
        timeout_seconds: float | None,
        patience: _Patience,
    ) -> list[Outcome]:
        def attempt(shard: int, request: Request, *, alone: bool) -> Future[Reply]:
            patience.require_a_caller()
            return self._attempt(shard, request, context=context, timeout_seconds=timeout_seconds, alone=alone)

        futures = [attempt(shard, request, alone=len(calls) == 1) for shard, request in calls]
        outcomes: list[Outcome] = []
        for (shard, request), future in zip(calls, futures, strict=True):
            try:
                outcomes.append(self._settle(shard, future, patience, partial(attempt, shard, request, alone=True)))
            except GeartrainError as exc:
                outcomes.append(exc)
        return outcomes

    def read(self, calls: Sequence[tuple[int, Request]]) -> list[Reply]:
        """Make calls that change nothing; raises the first error."""
        replies: list[Reply] = []
        for outcome in self.deliver(calls, CallContext()):
            if isinstance(outcome, BaseException):
                raise outcome
            replies.append(outcome)
        return replies

    def on_all_shards(
        self,
        request: Request,
        timeout_seconds: float | None = None,
        *,
        recovery_seconds: float | None = None,
        caller: CallContext | None = None,
    ) -> list[Outcome]:
        """:meth:`deliver` the same request, which is no write, to every shard. ``caller`` says who may be fenced."""
        calls = [(shard, request) for shard in range(self._view.num_shards)]
        return self.deliver(calls, caller or CallContext(), timeout_seconds, recovery_seconds=recovery_seconds)

    def background(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Future[Any]:
        """Run ``function`` on a thread of the client's own."""
        self.require_own_process()
        future = BackgroundFuture(partial(function, *arguments, **keywords))
        aside(partial(self._submit, future), if_broken_off=future.cancel)
        return future

    def _submit(self, future: BackgroundFuture) -> None:
        with self._lock:
            self.require_usable()
            if self._is_closing:
                raise Unavailable(_CLOSED)
            if self._executor is None:
                self._executor = ThreadPoolExecutor(_ASYNC_THREADS, thread_name_prefix="geartrain-client")
            self._executor.submit(future.run)

    def give_up(self) -> None:
        """End every wait for a shard: calls under way, also in the background, fail soon, later ones at once."""
        aside(self._give_up)

    def _give_up(self) -> None:
        self._given_up.set()
        for carrier in self._carriers:
            carrier.close()

    def close(self) -> None:
        """Finish background calls and close the connections. Idempotent."""
        aside(self._close)

    def _close(self) -> None:
        with self._lock:
            self._is_closing = True
        if self._executor is not None:
            self._executor.shutdown(wait=True)
        self._closed = True
        for carrier in self._carriers:
            carrier.close()

    def _attempt(
        self, shard: int, request: Request, *, context: CallContext, timeout_seconds: float | None, alone: bool
    ) -> Future[Reply]:
        fenced = CallContext(
            stream=context.stream,
            incarnation=context.incarnation,
            sequence=context.sequence,
            oldest_unacknowledged=context.oldest_unacknowledged,
            shard_incarnation=self._view.shards[shard].incarnation,
            cluster_version=self._view.cluster_version,
        )
        timeout_seconds = self.config.attempt_timeout_seconds if timeout_seconds is None else timeout_seconds
        return self._carriers[shard].submit(fenced, request, timeout_seconds, alone=alone)

    def _settle(
        self, shard: int, future: Future[Reply], patience: _Patience, again: Callable[[], Future[Reply]]
    ) -> Reply:
        has_looked = False
        while True:
            try:
                return future.result()
            except (AttemptFailed, ShardUnavailable, StaleCluster) as exc:
                if self._given_up.is_set():
                    raise Unavailable(f"this cluster was closed while shard {shard} was waited for") from exc
                if isinstance(exc, StaleCluster) and not has_looked:
                    # The shard answers: it is this client that has not heard, and no waiting would tell it.
                    has_looked = True
                    self._look_again(shard)
                    future = again()
                    continue
                if patience.is_fresh:
                    logger.warning(
                        "shard %d does not answer, waiting for it up to %g s: %s", shard, patience.seconds, exc
                    )
                if not patience.pause():
                    address = self._view.shards[shard].address
                    raise ShardUnavailable(
                        f"shard {shard} at {address} did not answer within {patience.seconds:g} s: "
                        f"{exc}. Is its server running? ('geartrain status'; client setting recovery_timeout_seconds)"
                    ) from exc
                self._look_again(shard)
                future = again()

    def _look_again(self, shard: int) -> None:
        """Learn the cluster version anew. Raises ShardRestarted if ``shard`` came back without our rows."""
        try:
            view = self._refresh()
        except (AttemptFailed, GeartrainError):
            return  # the shard may answer all the same
        before, now = self._view.shards[shard], view.shards[shard]
        if now.incarnation not in (0, before.incarnation):
            raise ShardRestarted(
                f"shard {shard} was restarted at {now.address}: the rows in its memory are gone; start the job again"
            )
        # Not the incarnations: they are those of the shards that hold our rows.
        self._view = replace(self._view, cluster_version=view.cluster_version)


class _Patience:
    """Waits between attempts, longer each time, until the time is used up."""

    def __init__(self, seconds: float, given_up: threading.Event) -> None:
        self.seconds = seconds
        self._has_ended = False
        self._given_up = given_up
        self._deadline: float | None = None
        self._backoff = _FIRST_BACKOFF_SECONDS

    def end(self) -> None:
        """Nobody waits any more: nothing is sent again."""
        self._has_ended = True

    def require_a_caller(self) -> None:
        """Raise BrokenOff if nobody waits any more."""
        if self._has_ended:
            raise BrokenOff("the caller has gone")

    @property
    def is_fresh(self) -> bool:
        """Whether nothing was waited for yet."""
        return self._deadline is None and self.seconds > 0

    def pause(self) -> bool:
        if self._deadline is None:  # counted from the first failure
            self._deadline = time.monotonic() + self.seconds
        left = self._deadline - time.monotonic()
        if left <= 0:
            return False
        # Jitter keeps the workers of a job from knocking all at once.
        self._given_up.wait(min(left, self._backoff * random.uniform(0.5, 1.0)))
        self._backoff = min(_LONGEST_BACKOFF_SECONDS, self._backoff * 2)
        return True


class Table:
    """A table of the cluster: pull, push, assign. Thread-safe.

    ids are integers [N] in [0, num_rows) (any >= 0 in a hashed table), rows and gradients [N, dim]. numpy arrays and
    torch tensors are taken, and answered in kind.
    """

    def __init__(self, spec: TableSpec, calls: ShardCalls, stream: ClientStream) -> None:
        self.spec = spec
        self._calls = calls
        self._stream = stream

    def __repr__(self) -> str:
        rows = "hashed" if self.spec.num_rows is None else counted(self.spec.num_rows, "row")
        return f"Table({self.spec.name!r}, {rows}, dim={self.spec.dim}, {self.spec.dtype}, {self.spec.optimizer})"

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
        self.pull_into(checked, out)
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
            if table.spec.name == self.spec.name:
                return table.pushes
        raise TableNotFound(f"shard {reply.shard} has no table {self.spec.name!r} any more; was it dropped?")

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
        group: SyncGroup | None = None,
        sequence: int | None = None,
    ) -> Done:
        """Apply gradients with the table's optimizer, exactly once per shard; gradients of equal ids are summed.

        ``lr`` replaces the table's learning rate, ``scale`` multiplies the gradients, ``group`` makes the push one
        rank's part of a synchronous one. ``sequence`` numbers the push, for example by the step, as the only write of
        that number to this table: sent again under the same number and stream name, by this process or one started in
        its place, it changes nothing and answers ``duplicate``; see :meth:`Cluster.acknowledge`.
        Raises InvalidIds, InvalidRows, NonFinite (nothing changed anywhere), StaleClient, SyncError, ShardUnavailable
        (whether that shard applied it is unknown; see :meth:`prepare_push`).
        """
        # All or nothing: a shard looks for itself, so what goes to one shard at once need not be looked at twice.
        looks = self._calls.view.num_shards > 1 or group is not None
        return _send_once(
            self._prepared_push(ids, gradients, lr=lr, scale=scale, group=group, sequence=sequence, looks=looks)
        )

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
        group: SyncGroup | None = None,
        sequence: int | None = None,
        step_goes_on: bool = False,
        known_finite: bool = False,
    ) -> Write:
        """Check a push and number it, but send nothing: the write can be sent again after an error, applied once.

        ``step_goes_on``: more pushes of the same step follow, and rows that none of them has are to move once.
        ``known_finite``: the caller has looked for NaN and infinity; else that is done here, a pass over the gradients.
        """
        return self._prepared_push(
            ids,
            gradients,
            lr=lr,
            scale=scale,
            group=group,
            sequence=sequence,
            looks=not known_finite,
            known_finite=known_finite,
            step_goes_on=step_goes_on,
        )

    def _prepared_push(
        self,
        ids: Any,
        gradients: Any,
        *,
        lr: float | None,
        scale: float,
        group: SyncGroup | None,
        sequence: int | None,
        looks: bool,
        known_finite: bool = False,
        step_goes_on: bool = False,
    ) -> Write:
        """:meth:`prepare_push`; without ``looks`` it is left to the shard to find what is not finite."""
        checked = ids_array(ids, self.spec.num_rows)
        rows = rows_array(gradients, len(checked), self.spec.dim)
        lr = None if lr is None else real_number("lr", lr)
        scale = real_number("scale", scale)
        if not np.isfinite(scale):
            raise NonFinite(f"scale is {scale!r}; it must be finite (a skipped step pushes nothing)")
        if looks:
            _require_finite(rows, checked)
        merged, _, rows = ops.merge_duplicates(checked, rows)
        if looks and merged is not checked:
            _require_finite(rows, merged)  # a sum may be infinite where its terms are not
        if looks or known_finite:
            _require_finite_product(rows, scale)
        every_shard = group is not None or self.spec.counts_steps
        requests = [
            (
                shard,
                Push(
                    table=self.spec.name,
                    ids=part,
                    gradients=part_rows,
                    lr=lr,
                    scale=scale,
                    group=group,
                    step_goes_on=step_goes_on,
                ),
            )
            for shard, part, part_rows in self._split(merged, rows, every_shard=every_shard)
        ]
        return Write(self._stream.numbers(self.spec.name, sequence), requests, self._calls.deliver)

    def assign(self, ids: Any, rows: Any, *, sequence: int | None = None) -> Done:
        """Overwrite rows [N, dim] of the table's dtype; their slots become zero. ids must be distinct.

        ``sequence`` numbers the write as it does a :meth:`push`. Raises InvalidIds, InvalidRows, NonFinite,
        StaleClient, ShardUnavailable.
        """
        checked = ids_array(ids, self.spec.num_rows)
        values = rows_array(rows, len(checked), self.spec.dim, dtype=self.spec.numpy_dtype)
        _require_finite(values, checked)
        distinct, _, _ = ops.merge_duplicates(checked)
        if len(distinct) < len(checked):
            raise InvalidArgument(
                f"{len(checked)} ids to assign hold {counted(len(checked) - len(distinct), 'duplicate')}"
            )
        requests = [
            (shard, Assign(table=self.spec.name, ids=part, rows=part_rows))
            for shard, part, part_rows in self._split(checked, values, every_shard=False)
        ]
        numbers = self._stream.numbers(self.spec.name, sequence)
        return _send_once(Write(numbers, requests, self._calls.deliver))

    def hosted(self, model: str) -> HostedCalls:
        """Return the way to a hosted model beside this table's rows; see :mod:`geartrain.ams.hosted`."""
        return HostedCalls(self.spec, model, self._calls, partial(self._stream.numbers, self.spec.name, None))

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
        calls: list[tuple[int, Request]] = []
        for shard, positions in self._routes(ids):
            part = ids if positions is None else ids[positions]
            pull = Pull(
                table=self.spec.name,
                ids=part,
                out=out,
                positions=positions,
                present=present,
                required_sync=required_sync,
            )
            calls.append((shard, pull))
        self._calls.read(calls)

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
