"""Pulls, pushes and assigns of rows: each is one call of compiled code, which sends to all shards at once.

Or only sent so: :mod:`~geartrain.ams.client.rows.row_futures` has the replies brought then.

That is the first attempt. What it does not bring to its end, shard by shard, is left to
:class:`~geartrain.ams.client.shard_calls.ShardCalls`: whether to ask again, for how long, and by which way.

Cost: the interpreter lock is given up once a call. A thread that waits holds nothing; on the main thread Ctrl-C ends
the wait within 0.1 s, and the caller's arrays are its own then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from geartrain.ams.client.rows.row_futures import RowFuture, RowFutures, Sendable
from geartrain.ams.client.rows.row_parts import Call, Delivered, PartRequest, RowParts, Shards, joint, row_parts
from geartrain.ams.client.rows.write_log import WriteLog
from geartrain.ams.kernels import ops
from geartrain.ams.kernels._core import PreparedWrite, RowsClient, ScatteredRows, TableFacts
from geartrain.ams.rpc.carrier import AttemptFailed, ShardCarrier
from geartrain.ams.rpc.client.silence import Peer, SilenceWatch
from geartrain.ams.rpc.local import LocalCarrier
from geartrain.ams.values.config import ClientConfig
from geartrain.ams.values.interrupts import BrokenOff, BufferLease, held, shielded
from geartrain.ams.values.placement import split_by_shard
from geartrain.ams.values.scheduler_messages import ClusterView
from geartrain.ams.values.shard_messages import CallContext, Done, Pull, Pulled, Reply, SyncGroup
from geartrain.ams.values.specs import DTYPES, Ids

_DTYPES = tuple(DTYPES.values())
_NO_WATCH: AbstractContextManager[None] = nullcontext()
_MOST_SENT_BYTES = 256 << 10
"""What a caller that does not wait sends by itself; more is sent from the background."""
RowAttempt = Callable[[int, BufferLease | None, float], Done | None]
"""One more attempt at a shard, while the lease lasts, for so many seconds; None: no compiled code leads there.

Raises AttemptFailed, the error of the shard, and BrokenOff.
"""


class RetriedCalls(Protocol):
    """What first attempts here need of who makes the later ones:
    :class:`~geartrain.ams.client.shard_calls.ShardCalls`, which holds the :class:`RowCalls` and so is above them.
    """

    remote: bool
    config: ClientConfig
    silence: SilenceWatch

    @property
    def view(self) -> ClusterView:
        """The cluster as last seen."""

    def require_usable(self) -> None:
        """Raise Unavailable if no call can be made from here."""

    def patience(self) -> Any:
        """How long calls that belong together wait for shards, all in all."""

    def deliver(
        self,
        calls: Sequence[Call],
        context: CallContext,
        *,
        begun: Sequence[BaseException | None] = (),
        again: RowAttempt | None = None,
        patience: Any = None,
    ) -> list[Reply | BaseException]:
        """Make all calls, each retried while that can help, after first attempts that ended as ``begun`` says.

        ``again`` is tried first when a call is made once more. No longer is waited than ``patience`` has left.
        """

    def read(
        self,
        calls: Sequence[Call],
        *,
        table_incarnation: int = 0,
        begun: Sequence[BaseException | None] = (),
        again: RowAttempt | None = None,
    ) -> list[Reply]:
        """Make calls that change nothing; raises the first error."""

    def naming(self, silent: Callable[[], Sequence[Peer]], seconds: float) -> AbstractContextManager[None]:
        """While the block lasts, name those of ``silent`` that do not answer."""

    def elsewhere(self, work: Callable[[], object]) -> None:
        """Do work that may wait on a thread of the client's own."""

    def settle(self, work: Callable[[], object]) -> None:
        """The same for work that waits for no number of a write: nobody who does holds it up."""

    def peer(self, shard: int) -> Peer:
        """A shard as those are told of it who wait."""


class RowCalls:
    """See the module. Thread-safe."""

    def __init__(self, calls: RetriedCalls, carriers: Sequence[ShardCarrier]) -> None:
        self._calls = calls
        self._carriers = carriers
        view = calls.view
        self._client = RowsClient(np.ascontiguousarray(view.bucket_shards), view.num_shards)
        self._client.set_cluster_version(view.cluster_version)
        self._unconnected = {n for n, carrier in enumerate(carriers) if not isinstance(carrier, LocalCarrier)}
        """Shards that no connection leads to, for now or ever."""
        for shard, carrier in enumerate(carriers):
            if isinstance(carrier, LocalCarrier):
                self._client.set_way(shard, view.shards[shard].incarnation, carrier.engine, None)
        self._futures = RowFutures(self._client, calls.elsewhere, calls.settle, _Watch(calls).look)
        self.write_log = WriteLog()
        """Writes of rows of this client."""

    def close(self) -> None:
        """Wait for the calls that :meth:`begin` began."""
        self._futures.close()

    def set_cluster_version(self, version: int) -> None:
        """Later calls mean the cluster of this version."""
        self._client.set_cluster_version(version)

    def pull(
        self,
        table: TableFacts,
        table_incarnation: int,
        ids: Ids,
        out: npt.NDArray[Any] | ScatteredRows,
        *,
        present: npt.NDArray[np.bool_] | None = None,
        required_sync: SyncGroup | None = None,
    ) -> None:
        """Read the rows of ``ids`` [N] into ``out`` [N, dim], and which exist into ``present`` [N].

        ``present`` is None for rows of several arrays. Raises the first error of a shard.
        """
        self._calls.require_usable()
        undone: list[tuple[int, Any]] | None = None
        if self._has_a_way():
            with self._watch() as watch:
                if isinstance(out, ScatteredRows):
                    undone = self._client.pull_scattered(
                        table, table_incarnation, ids, out, required_sync, self._seconds, watch
                    )
                else:
                    bits, code = ops.as_bits(out, "out")
                    bits_present = None if present is None else present.view(np.uint8)
                    undone = self._client.pull(
                        table, table_incarnation, ids, bits, code, bits_present, required_sync, self._seconds, watch
                    )
            if self._pulled(table, ids, undone):
                return
        if not isinstance(out, ScatteredRows):
            self._pull_again(table, table_incarnation, ids, out, present, required_sync, undone)
            return
        rows = np.empty((len(ids), table.dim), np.float32)
        self._pull_again(table, table_incarnation, ids, rows, None, required_sync, undone)
        for shard, positions in self.routes(table, ids):
            if undone is None or any(shard == other for other, _ in undone):
                out.place(rows, positions)

    def pull_together(self, pulls: Sequence[tuple[TableFacts, int, Ids, npt.NDArray[Any]]]) -> list[list[int]]:
        """:meth:`pull` of (table, incarnation, distinct ids, out) each: one request to each shard for all of them.

        Returns of each the writes that every shard had applied to the table; -1: it was not asked, or does not tell.
        Raises the first error of a shard; the rows of the shards that have answered are read then.
        """
        self._calls.require_usable()
        if not self._has_a_way():
            told = [self._pull_again(table, number, ids, out, None, None, None) for table, number, ids, out in pulls]
            return [[writes.get(shard, -1) for shard in range(self._calls.view.num_shards)] for writes in told]
        requests = [(table, number, ids, *ops.as_bits(out, "out")) for table, number, ids, out in pulls]
        with self._watch() as watch:
            pulled = self._client.pull_together(requests, self._seconds, watch)
        for (table, number, ids, out), (left, writes) in zip(pulls, pulled, strict=True):
            if not self._pulled(table, ids, left):
                for shard, more in self._pull_again(table, number, ids, out, None, None, left).items():
                    writes[shard] = more
        return [writes for _, writes in pulled]

    def sends_at_once(self, num_bytes: int) -> bool:
        """Whether a request of so many bytes, with those of its reply, is one for :meth:`begin`: it is small, and every
        shard is behind a connection. Shards of this process have nothing sent.
        """
        if not self._calls.remote or num_bytes > _MOST_SENT_BYTES:
            return False
        self._calls.require_usable()
        return self._has_a_way() and not self._unconnected

    def begin(self, prepare: Callable[[], Sendable]) -> RowFuture:
        """Begin a call whose caller does not wait for it; see :meth:`RowFutures.begin`."""
        return self._futures.begin(prepare)

    def pull_to_begin(
        self,
        table: TableFacts,
        table_incarnation: int,
        ids: Ids,
        out: npt.NDArray[Any],
        result: Callable[[], Any],
        *,
        required_sync: SyncGroup | None = None,
    ) -> Sendable:
        """:meth:`pull`, for :meth:`begin`; ``result`` makes what its future holds, once the rows are in ``out``."""
        bits, code = ops.as_bits(out, "out")

        def send(future: RowFuture) -> bool:
            return self._client.begin_pull(
                table, table_incarnation, ids, bits, code, required_sync, self._seconds, future
            )

        def finish(undone: list[tuple[int, Any]] | None) -> Any:
            if not self._pulled(table, ids, undone):
                self._pull_again(table, table_incarnation, ids, out, None, required_sync, undone)
            return result()

        return Sendable(send, finish)

    def begin_write(self, parts: RowParts, context: CallContext, future: RowFuture) -> bool:
        """Send the calls of a write. False: not now; see :class:`Sendable`."""
        return self._client.begin_write(parts.prepared, context, self._seconds, future)

    def delivered(self, parts: RowParts, context: CallContext, reply: Any, patience: Any = None) -> Delivered:
        """What the calls of :meth:`begin_write` have come to, once each is retried that has not come to its end."""
        if isinstance(reply, tuple) and not self._calls.silence.has_named:
            return Delivered(Done(created=reply[0], duplicate=reply[1]), [])
        return self._deliver_again(parts, context, reply, patience)

    def _pulled(self, table: TableFacts, ids: Ids, undone: list[tuple[int, Any]] | None) -> bool:
        """Whether the first attempt has read all rows."""
        if self._calls.silence.has_named:
            self._heard([shard for shard, _ in self.routes(table, ids)], [shard for shard, _ in undone or ()])
        return undone is None

    def prepared(
        self,
        table: TableFacts,
        ids: Ids,
        rows: npt.NDArray[Any] | ScatteredRows,
        *,
        check: int,
        request: PartRequest,
        every_shard: bool = False,
        **settings: Any,
    ) -> RowParts:
        """Merge equal ids of a push, look at the numbers, round them to the type they travel in, and cut the rows by
        shard. They stay the caller's.

        ``request`` makes the request of a part, ``settings`` are those of all. Raises NonFinite.
        """
        bits, code = (rows, 0) if isinstance(rows, ScatteredRows) else ops.as_bits(rows)
        prepared = PreparedWrite(self._client, table, ids, bits, code, check=check, every_shard=every_shard, **settings)
        return RowParts(prepared, request)

    def deliver(self, parts: RowParts | Sequence[Call], context: CallContext) -> Delivered:
        """Make the calls of one write, side by side. See :meth:`RetriedCalls.deliver`."""
        return self.deliver_together([(row_parts(parts), context)])[0]

    def deliver_together(self, writes: Sequence[tuple[RowParts, CallContext]]) -> list[Delivered]:
        """Make the calls of several writes: one request to each shard for all that go there for the first time."""
        self._calls.require_usable()
        patience = self._calls.patience()
        if not self._has_a_way():
            return [self._deliver_again(parts, context, None, patience) for parts, context in writes]
        fresh = [write for write in writes if write[0].shards is None]
        replies = iter(self._written(fresh) if fresh else ())
        delivered = []
        for parts, context in writes:
            reply = next(replies) if parts.shards is None else self._written([(parts, context)], parts.shards)[0]
            delivered.append(self.delivered(parts, context, reply, patience))
        return delivered

    def deliver_and_pull(
        self, parts: RowParts, context: CallContext, out: ScatteredRows
    ) -> tuple[Delivered, tuple[int, ...] | None]:
        """Make the calls of a push of no group, and read its rows [N, dim] into ``out`` as they are after it, in the
        same requests.

        The second result is the writes that each shard with rows had applied to the table by then; None: not all of
        the rows came.
        """
        self._calls.require_usable()
        if parts.shards is not None or not self._has_a_way():
            return self.deliver(parts, context), None
        with self._watch() as watch:
            reply, writes = self._client.write_and_pull(parts.prepared, context, out, self._seconds, watch)
        return self.delivered(parts, context, reply), writes

    def _written(self, writes: Sequence[tuple[RowParts, CallContext]], shards: Shards = ()) -> list[Any]:
        """The replies to first attempts."""
        calls = [(parts.prepared, context) for parts, context in writes]
        with self._watch() as watch:
            return self._client.write(calls, self._seconds, watch, shards)

    def _watch(self) -> AbstractContextManager[_Watch | None]:
        """For as long as a first attempt lasts; nobody is silent in this process."""
        return _Watch(self._calls) if self._calls.remote else _NO_WATCH

    @property
    def _seconds(self) -> float:
        return self._calls.config.attempt_timeout_seconds

    def _has_a_way(self) -> bool:
        """Whether a shard can be reached by compiled code. Looks for connections that there are by now."""
        if self._unconnected:
            for shard in tuple(self._unconnected):
                connection = self._carriers[shard].row_connection
                if connection is not None:
                    self._client.set_way(shard, self._calls.view.shards[shard].incarnation, None, connection)
                    self._unconnected.discard(shard)
        return len(self._unconnected) < len(self._carriers)

    def _deliver_again(
        self, parts: RowParts, context: CallContext, reply: list[Any] | tuple[int, bool] | None, patience: Any
    ) -> Delivered:
        """Make the calls that the first attempt left undone; None: there was none."""
        if isinstance(reply, tuple):
            self._heard(parts.prepared.shards if parts.shards is None else parts.shards, [])
            return Delivered(Done(created=reply[0], duplicate=reply[1]), [])

        def write(shard: int, seconds: float, watch: _LeaseWatch) -> Any:
            (one,) = self._client.write([(parts.prepared, context)], seconds, watch, (shard,))
            return one if isinstance(one, tuple) else one[0]

        calls, once_more = parts.calls(), partial(self._attempt, write)
        if reply is None:
            return joint(calls, self._calls.deliver(calls, context, again=once_more, patience=patience))
        outcomes: list[object] = [
            Done(created=one[0], duplicate=one[1]) if isinstance(one, tuple) else None for one in reply
        ]
        again = [n for n, outcome in enumerate(outcomes) if outcome is None]
        self._heard([shard for shard, _ in calls], [calls[n][0] for n in again])
        begun = [self._error(calls[n][0], reply[n]) for n in again]
        undone = [calls[n] for n in again]
        settled = self._calls.deliver(undone, context, begun=begun, again=once_more, patience=patience)
        for n, outcome in zip(again, settled, strict=True):
            outcomes[n] = outcome
        return joint(calls, outcomes)

    def _pull_again(
        self,
        table: TableFacts,
        table_incarnation: int,
        ids: Ids,
        out: npt.NDArray[Any],
        present: npt.NDArray[np.bool_] | None,
        required_sync: SyncGroup | None,
        undone: list[tuple[int, Any]] | None,
    ) -> dict[int, int]:
        """Read the rows of shards that the first attempt left undone; None: there was none.

        Returns the writes that they had applied, of those that tell.
        """
        distinct, inverse, _ = ops.merge_duplicates(ids) if undone is None else (ids, ids, None)
        if len(distinct) < len(ids):
            some = np.empty((len(distinct), out.shape[1]), out.dtype)
            some_present = None if present is None else np.zeros(len(distinct), np.bool_)
            writes = self._pull_again(table, table_incarnation, distinct, some, some_present, required_sync, None)
            np.take(some, inverse, axis=0, out=out)
            if present is not None and some_present is not None:
                np.take(some_present, inverse, out=present)
            return writes
        errors = {} if undone is None else {shard: self._error(shard, outcome) for shard, outcome in undone}
        wire = _DTYPES[table.wire_code]
        arrived = out if wire == out.dtype else np.empty(out.shape, wire)
        """Where rows of messages are written."""
        in_place: set[int] = set()
        """Shards whose rows compiled code has written to ``out``."""
        calls: list[tuple[int, Pull]] = []
        for shard, positions in self.routes(table, ids):
            if undone is None or shard in errors:
                part = ids if positions is None else ids[positions]
                options: dict[str, Any] = {"positions": positions, "present": present, "required_sync": required_sync}
                calls.append((shard, Pull(table=table.name, ids=part, out=arrived, **options)))
        bits, code = ops.as_bits(out, "out")
        bits_present = None if present is None else present.view(np.uint8)

        def read(shard: int, seconds: float, watch: _LeaseWatch) -> Any:
            left = self._client.pull(
                table, table_incarnation, ids, bits, code, bits_present, required_sync, seconds, watch, (shard,)
            )
            if left is None:
                in_place.add(shard)
            return (0, False) if left is None else left[0][1]

        begun = [errors.get(shard) for shard, _ in calls]
        again = partial(self._attempt, read)
        replies = self._calls.read(calls, table_incarnation=table_incarnation, begun=begun, again=again)
        if arrived is not out:
            for positions in (call.positions for shard, call in calls if shard not in in_place):
                where: Any = slice(None) if positions is None else positions
                out[where] = arrived[where]
        both = zip(calls, replies, strict=True)
        return {shard: reply.writes for (shard, _), reply in both if isinstance(reply, Pulled)}

    def _attempt(
        self,
        call: Callable[[int, float, _LeaseWatch], Any],
        shard: int,
        buffer_lease: BufferLease | None,
        seconds: float,
    ) -> Done | None:
        """A :data:`RowAttempt`, of which ``call`` brings the outcome."""
        if self._carriers[shard].row_connection is None or not self._has_a_way() or shard in self._unconnected:
            return None
        with held(buffer_lease):
            outcome = call(shard, seconds, _LeaseWatch(buffer_lease))
        if isinstance(outcome, tuple):
            return Done(created=outcome[0], duplicate=outcome[1])
        error = self._error(shard, outcome)
        if error is None:
            return None
        raise error

    def routes(self, table: TableFacts, ids: Ids) -> list[tuple[int, Ids | None]]:
        """Each shard that has some of the ``ids`` [N], and the positions of those (None: all)."""
        view = self._calls.view
        return split_by_shard(ids, view.bucket_shards, view.num_shards, dense=table.is_dense)

    def _error(self, shard: int, outcome: BaseException | bool | None) -> BaseException | None:
        """What the first attempt at a shard ended with; None: the same can be sent another way at once."""
        if isinstance(outcome, BaseException):
            return outcome
        if outcome is False:
            self._carriers[shard].had_no_answer()
        if outcome is None or self._carriers[shard].row_connection is None:  # or another than was used
            self._unconnected.add(shard)
        if outcome is None:
            return None
        address = self._calls.view.shards[shard].address
        return AttemptFailed(f"shard at {address} does not answer: no reply in time")

    def _heard(self, asked: Sequence[int], undone: Sequence[int]) -> None:
        """Note that all of ``asked`` but those ``undone`` have answered."""
        if self._calls.silence.has_named:
            for shard in set(asked).difference(undone):
                self._calls.silence.heard(self._calls.peer(shard))


class _LeaseWatch:
    """Told every 0.1 s that an attempt waits; breaks it off when the lease has ended."""

    def __init__(self, buffer_lease: BufferLease | None) -> None:
        self._buffer_lease = buffer_lease

    def __call__(self, _: Sequence[int]) -> None:
        if self._buffer_lease is not None and self._buffer_lease.has_ended:
            raise BrokenOff("the caller has gone")


class _Watch:
    """Told every 0.1 s of the shards that a call waits for; has those that are silent named."""

    def __init__(self, calls: RetriedCalls) -> None:
        self._calls = calls
        self._waiting: Sequence[int] = ()
        self._naming: ExitStack | None = None

    def __call__(self, waiting: Sequence[int]) -> None:
        self._waiting = waiting
        if self._naming is None:
            self._naming = ExitStack()
            shielded(self._begin)  # threads are begun there

    def look(self, waiting: Sequence[int]) -> None:
        """The same, for calls that go on and on: ``waiting`` may be empty."""
        if waiting:
            self(waiting)
        else:
            self.end()

    def __enter__(self) -> _Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """The call is over."""
        self._waiting = ()
        naming, self._naming = self._naming, None
        if naming is not None:
            shielded(naming.close)

    def _begin(self) -> None:
        assert self._naming is not None
        seconds = self._calls.config.attempt_timeout_seconds + self._calls.config.recovery_timeout_seconds
        self._naming.enter_context(self._calls.naming(self._silent, seconds))

    def _silent(self) -> list[Peer]:
        return [self._calls.peer(shard) for shard in self._waiting]
