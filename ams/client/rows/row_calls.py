"""Pulls, pushes and assigns of rows: each is one call of compiled code, which sends to all shards at once.

That call is the first attempt; :class:`~geartrain.ams.client.retries.Retries` retries the shards it leaves undone. A
call may also only be sent; :mod:`~geartrain.ams.client.rows.row_futures` then collects the replies.

Cost: the interpreter lock is released once a call. A waiting thread holds no lock; on the main thread Ctrl-C ends the
wait within 0.1 s, and the caller's arrays are then free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from geartrain.ams.client.retries import NONE_REFUSED, CallBackoff, CallWatch, Refusals, Retries
from geartrain.ams.client.rows.row_futures import PreparedCall, RowFuture, RowFutures
from geartrain.ams.client.rows.table_plan import TablePlan
from geartrain.ams.client.rows.write_log import WriteLog
from geartrain.ams.kernels._core import PreparedWrite, ScatteredRows, TableFacts
from geartrain.ams.observe import traces
from geartrain.ams.values.placement import split_by_shard
from geartrain.ams.values.shard_messages import Done, SyncGroup
from geartrain.ams.values.specs import Ids

_MAX_SENT_BYTES = 256 << 10
"""Most bytes that a non-blocking caller sends by itself; larger requests are sent in the background."""
_MAX_PULLED_BYTES = 512 << 20
"""Most bytes of one request; larger pulls are split."""
WriteOutcome = Done | BaseException
"""A shard's answer to its part of a write, or the error."""
WriteReply = tuple[int, bool] | Sequence[WriteOutcome]
"""The shards' answers to a write: (created, duplicate) if all have done it, else each one's answer."""
WriteContext = tuple[str, int, int, int, int]
"""Stream, its incarnation, number of the write, oldest unacknowledged number, and incarnation of the table."""
RowsToWrite = tuple[PreparedWrite, WriteContext, Sequence[int]]
"""A write, and the shards that have not answered."""


def _describe_pull(table: TableFacts, _: int, ids: Ids, *__: object) -> dict[str, str | int]:
    return {"table": table.name, "rows": len(ids)}


class RowCalls:
    """Row calls of one cluster. Thread-safe."""

    def __init__(
        self,
        retries: Retries,
        elsewhere: Callable[[Callable[[], object]], None],
        settle: Callable[[Callable[[], object]], None],
    ) -> None:
        """``elsewhere`` and ``settle`` are as in :class:`RowFutures`."""
        self._retries = retries
        self._client = retries.client
        self._traced = traces.traced(
            self._client,
            pull=_describe_pull,
            pull_scattered=_describe_pull,
            pull_together=lambda pulls, *_: {"rows": sum(len(ids) for _, _, ids, *_ in pulls)},
            write=lambda *_: {},
            write_and_pull=lambda *_: {},
        )
        self._futures = RowFutures(self._client, elsewhere, settle, CallWatch(retries).update)
        self.write_log = WriteLog()
        """Log of this client's row writes."""

    def close(self) -> None:
        """Wait for the calls started by :meth:`start`."""
        self._futures.close()

    def pull(
        self,
        table: TablePlan,
        ids: Ids,
        out: npt.NDArray[Any] | ScatteredRows,
        *,
        present: npt.NDArray[np.bool_] | None = None,
        required_sync: SyncGroup | None = None,
    ) -> None:
        """Read the rows of ``ids`` [N] into ``out`` [N, dim], and which exist into ``present`` [N].

        ``present`` is None for rows of several arrays. Raises the first error of a shard.
        """
        if not isinstance(out, ScatteredRows) and out.nbytes > _MAX_PULLED_BYTES and len(ids) > 1:
            self._pull_in_pieces(table, ids, out, present, required_sync)
            return
        left, refused = self._first_attempt(self._attempt_pull, table, ids, out, present, required_sync)
        if left is not None or self._retries.silence.named:
            self._pull_rest(table, ids, out, left, refused, present, required_sync)

    def _first_attempt(self, call: Callable[..., Any], *given: Any) -> tuple[Any, Refusals]:
        """Return the result of a call of compiled code, and the shards that could not be connected to before it. Logs
        shards that do not answer meanwhile.
        """
        retries = self._retries
        refused = NONE_REFUSED if retries.is_ready else retries.prepare()
        seconds = retries.config.attempt_timeout_seconds
        if not retries.remote:
            return call(*given, seconds, None), refused
        watch = CallWatch(retries)
        try:
            return call(*given, seconds, watch), refused
        finally:
            watch.stop()

    def _attempt_pull(
        self,
        table: TablePlan,
        ids: Ids,
        out: npt.NDArray[Any] | ScatteredRows,
        present: npt.NDArray[np.bool_] | None,
        required_sync: SyncGroup | None,
        seconds: float,
        watch: Callable[[Sequence[int]], object] | None,
        shards: Sequence[int] = (),
    ) -> list[tuple[int, Any]] | None:
        """Return what compiled code left undone, of these shards or, by default, of all; None: nothing."""
        asked = table.facts, table.incarnation, ids
        if isinstance(out, ScatteredRows):
            return self._traced.pull_scattered(*asked, out, required_sync, seconds, watch, shards)
        bits = out if table.dtype_code == 0 else out.view(np.uint16)
        flags = None if present is None else present.view(np.uint8)
        return self._traced.pull(*asked, bits, table.dtype_code, flags, required_sync, seconds, watch, shards)

    def _pull_in_pieces(
        self,
        table: TablePlan,
        ids: Ids,
        out: npt.NDArray[Any],
        present: npt.NDArray[np.bool_] | None,
        required_sync: SyncGroup | None,
    ) -> None:
        for part in np.array_split(np.arange(len(ids)), -(-out.nbytes // _MAX_PULLED_BYTES)):
            where = slice(part[0], part[-1] + 1)
            some = None if present is None else present[where]
            self.pull(table, ids[where], out[where], present=some, required_sync=required_sync)

    def _pull_rest(
        self,
        table: TablePlan,
        ids: Ids,
        out: npt.NDArray[Any] | ScatteredRows,
        left: list[tuple[int, Any]] | None,
        refused: Refusals = NONE_REFUSED,
        present: npt.NDArray[np.bool_] | None = None,
        required_sync: SyncGroup | None = None,
    ) -> None:
        """Read the rows that the first attempt has ``left``; None: none."""
        if self._retries.silence.named:
            self._retries.record_replies(
                [shard for shard, _ in self.routes(table, ids)], [shard for shard, _ in left or ()]
            )
        if left is None:
            return

        def attempt(shard: int, seconds: float, watch: Any) -> Any:
            undone = self._attempt_pull(table, ids, out, present, required_sync, seconds, watch, (shard,))
            return (0, False) if undone is None else undone[0][1]

        for outcome in self._retries.again(left, attempt, refused):
            if isinstance(outcome, BaseException):
                raise outcome

    def pull_together(self, pulls: Sequence[tuple[TablePlan, Ids, npt.NDArray[Any]]]) -> list[list[int]]:
        """:meth:`pull` from several tables (distinct ids each), in one request to each shard.

        Returns, for each table, the writes that every shard had applied to it; -1: not asked, or unknown. Raises the
        first error of a shard; the rows of shards that answered are then read.
        """
        if sum([out.nbytes for _, _, out in pulls]) > _MAX_PULLED_BYTES:
            for table, ids, out in pulls:
                self.pull(table, ids, out)
            return [[-1] * self._retries.view.num_shards for _ in pulls]
        requests = [
            (plan.facts, plan.incarnation, ids, out if plan.dtype_code == 0 else out.view(np.uint16), plan.dtype_code)
            for plan, ids, out in pulls
        ]
        (left, writes), refused = self._first_attempt(self._traced.pull_together, requests)
        if left is not None or self._retries.silence.named:
            for number, (table, ids, out) in enumerate(pulls):
                self._pull_rest(table, ids, out, None if left is None else left[number], refused)
        return cast("list[list[int]]", writes)

    def is_sent_at_once(self, num_bytes: int) -> bool:
        """Return whether a request of ``num_bytes``, reply included, suits :meth:`start`: it is small, and every shard
        is connected. Shards of this process need no sending.
        """
        return self._retries.remote and num_bytes <= _MAX_SENT_BYTES and not self._retries.unconnected

    def start(self, prepare: Callable[[], PreparedCall]) -> RowFuture:
        """Start a call without waiting for it, as :meth:`RowFutures.start`."""
        self._retries.require_usable()
        return self._futures.start(prepare)

    def pull_to_begin(
        self,
        table: TablePlan,
        ids: Ids,
        out: npt.NDArray[Any],
        result: Callable[[], Any],
        *,
        required_sync: SyncGroup | None = None,
    ) -> PreparedCall:
        """Prepare :meth:`pull` for :meth:`start`; ``result`` makes the future's result once the rows are in ``out``."""
        bits = out if table.dtype_code == 0 else out.view(np.uint16)

        def send(future: RowFuture) -> bool:
            seconds = self._retries.config.attempt_timeout_seconds
            asked = table.facts, table.incarnation, ids
            return self._client.begin_pull(*asked, bits, table.dtype_code, required_sync, seconds, future)

        def finish(left: list[tuple[int, Any]] | None) -> Any:
            self._pull_rest(table, ids, out, left, required_sync=required_sync)
            return result()

        return PreparedCall(send, finish)

    def write(self, writes: Sequence[RowsToWrite]) -> list[WriteReply]:
        """Send writes, each to the shards that have not answered, in one request to each shard."""
        replies: list[WriteReply]
        replies, refused = self._first_attempt(self._traced.write, writes)
        backoff: CallBackoff | None = None
        for number, reply in enumerate(replies):
            if type(reply) is not tuple or self._retries.silence.named:
                backoff = backoff or self._retries.backoff()  # shared by all, or dead shards would add up
                replies[number] = self.written(writes[number], reply, refused, backoff)
        return replies

    def write_and_pull(self, write: RowsToWrite, out: ScatteredRows) -> tuple[WriteReply, tuple[int, ...] | None]:
        """Send a push without a group to all of its shards, and read its rows [N, dim] after it into ``out``, in the
        same requests.

        The second result is the number of table writes that each shard with rows had applied by then; None: not all of
        the rows came.
        """
        (reply, writes), refused = self._first_attempt(self._traced.write_and_pull, *write[:2], out)
        return self.written(write, reply, refused), writes

    def start_write(self, write: RowsToWrite, future: RowFuture) -> bool:
        """Send a write to all of its shards. False: not now, as in :class:`PreparedCall`."""
        return self._client.begin_write(*write[:2], self._retries.config.attempt_timeout_seconds, future)

    def written(
        self,
        write: RowsToWrite,
        reply: Any,
        refused: Refusals = NONE_REFUSED,
        backoff: CallBackoff | None = None,
    ) -> WriteReply:
        """Retry a write where its first attempt, which replied ``reply``, left it undone; return the result."""
        prepared, context, shards = write
        if type(reply) is tuple:
            if self._retries.silence.named:
                self._retries.record_replies(shards, ())
            return reply
        left = [(shard, outcome) for shard, outcome in zip(shards, reply, strict=True) if type(outcome) is not tuple]
        self._retries.record_replies(shards, [shard for shard, _ in left])

        def attempt(shard: int, seconds: float, watch: Any) -> Any:
            (outcome,) = self._client.write([(prepared, context, (shard,))], seconds, watch)
            return outcome if isinstance(outcome, tuple) else outcome[0]

        settled: Any = iter(self._retries.again(left, attempt, refused, backoff))
        return [
            Done(created=outcome[0], duplicate=outcome[1]) if isinstance(outcome, tuple) else next(settled)
            for outcome in reply
        ]

    def routes(self, table: TablePlan, ids: Ids) -> list[tuple[int, Ids | None]]:
        """Return each shard that owns some of the ``ids`` [N], with their positions (None: all)."""
        view = self._retries.view
        return split_by_shard(ids, view.bucket_shards, view.num_shards, dense=table.facts.is_dense)
