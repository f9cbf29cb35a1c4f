"""Pulls, pushes and assigns of rows: each is one call of compiled code, which sends to all shards at once.

Or only sent so: :mod:`~geartrain.ams.client.rows.row_futures` has the replies brought then.

That is the first attempt. What it does not bring to its end, shard by shard, is left to
:class:`~geartrain.ams.client.shard_calls.ShardCalls`: whether to ask again, and for how long.

Cost: the interpreter lock is given up once a call. A thread that waits holds nothing; on the main thread Ctrl-C ends
the wait within 0.1 s, and the caller's arrays are its own then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from geartrain.ams.client.rows.row_futures import PreparedCall, RowFuture, RowFutures
from geartrain.ams.client.rows.write_log import WriteLog
from geartrain.ams.kernels import ops
from geartrain.ams.kernels._core import PreparedWrite, RowsClient, ScatteredRows, TableFacts
from geartrain.ams.observe import traces
from geartrain.ams.rpc.carrier import AttemptFailed, ShardCarrier
from geartrain.ams.rpc.client.silence import Peer, SilenceWatch
from geartrain.ams.values.config import ClientConfig
from geartrain.ams.values.errors import GeartrainError
from geartrain.ams.values.interrupts import BrokenOff, BufferLease, shielded
from geartrain.ams.values.placement import split_by_shard
from geartrain.ams.values.scheduler_messages import ClusterView
from geartrain.ams.values.shard_messages import CallContext, Done, SyncGroup
from geartrain.ams.values.specs import Ids

_NO_WATCH: AbstractContextManager[None] = nullcontext()
_MOST_SENT_BYTES = 256 << 10
"""What a caller that does not wait sends by itself; more is sent from the background."""
_MOST_PULLED_BYTES = 512 << 20
"""Of one request; more is pulled piece by piece."""
_NOTHING_MORE = Done()
_AT_ONCE = 16
"""Shards that are connected to side by side."""
Refusals = Mapping[int, BaseException]
"""Of shards that a call has just tried to connect to in vain, why: that was an attempt at them."""
_NONE_REFUSED: Refusals = MappingProxyType({})
WriteOutcome = Done | BaseException
"""What a shard answered to its part of a write, or why it did not."""
RowAttempt = Callable[[int, BufferLease, float], Done]
"""One more attempt at a shard, while the lease lasts, for so many seconds.

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

    def again(
        self, ended: Sequence[tuple[int, BaseException | None]], attempt: RowAttempt, patience: Any = None
    ) -> Sequence[Any]:
        """What calls of shards come to, replies or errors, whose first attempts have ended so; None: the next one can
        be made at once. No longer is waited than ``patience`` has left.
        """

    def naming(self, silent: Callable[[], Sequence[Peer]], seconds: float) -> AbstractContextManager[None]:
        """While the block lasts, name those of ``silent`` that do not answer."""

    def elsewhere(self, work: Callable[[], object]) -> None:
        """Do work that may wait on a thread of the client's own."""

    def settle(self, work: Callable[[], object]) -> None:
        """The same for work that waits for no number of a write: nobody who does holds it up."""

    def peer(self, shard: int) -> Peer:
        """A shard as those are told of it who wait."""


def _describe_pull(table: TableFacts, _: int, ids: Ids, *__: object) -> dict[str, str | int]:
    return {"table": table.name, "rows": len(ids)}


class RowCalls:
    """See the module. Thread-safe."""

    def __init__(self, calls: RetriedCalls, carriers: Sequence[ShardCarrier]) -> None:
        self._calls = calls
        self._carriers = carriers
        view = calls.view
        self._client = RowsClient(np.ascontiguousarray(view.bucket_shards), view.num_shards)
        self._client.set_cluster_version(view.cluster_version)
        self._traced = traces.traced(
            self._client,
            pull=_describe_pull,
            pull_scattered=_describe_pull,
            pull_together=lambda pulls, *_: {"rows": sum(len(ids) for _, _, ids, *_ in pulls)},
            write=lambda *_: {},
            write_and_pull=lambda *_: {},
        )
        self._unconnected = {n for n, carrier in enumerate(carriers) if carrier.engine is None}
        """Shards that no connection leads to."""
        self._untried = list(self._unconnected)
        """Those that none was ever made to."""
        for shard, carrier in enumerate(carriers):
            if carrier.engine is not None:
                self._client.set_endpoint(shard, view.shards[shard].incarnation, carrier.engine, None)
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
        if isinstance(out, ScatteredRows):
            scattered = self._traced.pull_scattered
            self._pull(table, ids, partial(scattered, table, table_incarnation, ids, out, required_sync))
        elif out.nbytes <= _MOST_PULLED_BYTES or len(ids) < 2:
            self._pull(table, ids, self._read(table, table_incarnation, ids, out, present, required_sync))
        else:
            for part in np.array_split(np.arange(len(ids)), -(-out.nbytes // _MOST_PULLED_BYTES)):
                where = slice(part[0], part[-1] + 1)
                some = None if present is None else present[where]
                self.pull(table, table_incarnation, ids[where], out[where], present=some, required_sync=required_sync)

    def _pull(self, table: TableFacts, ids: Ids, read: Callable[..., list[tuple[int, Any]] | None]) -> None:
        refused = self._prepare()
        with self._watch() as watch:
            left = read(self._seconds, watch)
        if left is not None or self._calls.silence.has_named:
            self._pull_rest(table, ids, left, read, refused)

    def _read(
        self,
        table: TableFacts,
        table_incarnation: int,
        ids: Ids,
        out: npt.NDArray[Any],
        present: npt.NDArray[np.bool_] | None,
        required_sync: SyncGroup | None,
    ) -> Callable[..., list[tuple[int, Any]] | None]:
        """A pull without its seconds, its watch and the shards that it asks."""
        bits, code = ops.as_bits(out, "out")
        bits_present = None if present is None else present.view(np.uint8)
        return partial(self._traced.pull, table, table_incarnation, ids, bits, code, bits_present, required_sync)

    def _pull_rest(
        self,
        table: TableFacts,
        ids: Ids,
        left: list[tuple[int, Any]] | None,
        read: Callable[..., list[tuple[int, Any]] | None],
        refused: Refusals = _NONE_REFUSED,
    ) -> None:
        """Read the rows that the first attempt has left; None: it has left none."""
        if self._calls.silence.has_named:
            self._heard([shard for shard, _ in self.routes(table, ids)], [shard for shard, _ in left or ()])
        if left is None:
            return

        def once_more(shard: int, seconds: float, watch: _LeaseWatch) -> Any:
            undone = read(seconds, watch, (shard,))
            return (0, False) if undone is None else undone[0][1]

        for outcome in self._again(left, once_more, refused):
            if isinstance(outcome, BaseException):
                raise outcome

    def pull_together(self, pulls: Sequence[tuple[TableFacts, int, Ids, npt.NDArray[Any]]]) -> list[list[int]]:
        """:meth:`pull` of (table, incarnation, distinct ids, out) each: one request to each shard for all of them.

        Returns of each the writes that every shard had applied to the table; -1: it was not asked, or does not tell.
        Raises the first error of a shard; the rows of the shards that have answered are read then.
        """
        if sum(out.nbytes for *_, out in pulls) > _MOST_PULLED_BYTES:
            for table, incarnation, ids, out in pulls:
                self.pull(table, incarnation, ids, out)
            return [[-1] * self._calls.view.num_shards for _ in pulls]
        refused = self._prepare()
        requests = [(table, number, ids, *ops.as_bits(out, "out")) for table, number, ids, out in pulls]
        with self._watch() as watch:
            pulled = self._traced.pull_together(requests, self._seconds, watch)
        for (table, number, ids, out), (left, _) in zip(pulls, pulled, strict=True):
            self._pull_rest(table, ids, left, self._read(table, number, ids, out, None, None), refused)
        return [writes for _, writes in pulled]

    def is_sent_at_once(self, num_bytes: int) -> bool:
        """Whether a request of so many bytes, with those of its reply, is one for :meth:`begin`: it is small, and every
        shard is behind a connection. Shards of this process have nothing sent.
        """
        return self._calls.remote and num_bytes <= _MOST_SENT_BYTES and not self._unconnected

    def begin(self, prepare: Callable[[], PreparedCall]) -> RowFuture:
        """Begin a call whose caller does not wait for it; see :meth:`RowFutures.begin`."""
        self._calls.require_usable()
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
    ) -> PreparedCall:
        """:meth:`pull`, for :meth:`begin`; ``result`` makes what its future holds, once the rows are in ``out``."""
        bits, code = ops.as_bits(out, "out")

        def send(future: RowFuture) -> bool:
            return self._client.begin_pull(
                table, table_incarnation, ids, bits, code, required_sync, self._seconds, future
            )

        def finish(left: list[tuple[int, Any]] | None) -> Any:
            read = self._read(table, table_incarnation, ids, out, None, required_sync)
            self._pull_rest(table, ids, left, read)
            return result()

        return PreparedCall(send, finish)

    def prepared(
        self,
        table: TableFacts,
        ids: Ids,
        rows: npt.NDArray[Any] | ScatteredRows,
        *,
        check: int,
        every_shard: bool = False,
        **settings: Any,
    ) -> PreparedWrite:
        """Merge equal ids of a push, look at the numbers, round them to the type they travel in, and cut the rows by
        shard. They stay the caller's. Raises NonFinite.
        """
        bits, code = (rows, 0) if isinstance(rows, ScatteredRows) else ops.as_bits(rows)
        return PreparedWrite(self._client, table, ids, bits, code, check=check, every_shard=every_shard, **settings)

    def write(self, writes: Sequence[tuple[PreparedWrite, Sequence[int], CallContext]]) -> list[Sequence[WriteOutcome]]:
        """Send writes to the shards that are left of each: what goes to a shard for the first time, in one request for
        all of them. Returns what each of those shards answered.
        """
        refused = self._prepare()
        patience = self._calls.patience()
        are_whole = [len(shards) == prepared.num_parts for prepared, shards, _ in writes]
        whole = [write for write, is_whole in zip(writes, are_whole, strict=True) if is_whole]
        replies = iter(self._first_attempt(whole) if whole else ())
        outcomes = []
        for write, is_whole in zip(writes, are_whole, strict=True):
            reply = next(replies) if is_whole else self._first_attempt([write], write[1])[0]
            outcomes.append(self.written(*write, reply, refused, patience))
        return outcomes

    def write_and_pull(
        self, prepared: PreparedWrite, context: CallContext, out: ScatteredRows
    ) -> tuple[Sequence[WriteOutcome], tuple[int, ...] | None]:
        """Send a push of no group to all of its shards, and read its rows [N, dim] into ``out`` as they are after it,
        in the same requests.

        The second result is the writes that each shard with rows had applied to the table by then; None: not all of
        the rows came.
        """
        refused = self._prepare()
        with self._watch() as watch:
            reply, writes = self._traced.write_and_pull(prepared, context, out, self._seconds, watch)
        return self.written(prepared, prepared.shards, context, reply, refused), writes

    def begin_write(self, prepared: PreparedWrite, context: CallContext, future: RowFuture) -> bool:
        """Send a write. False: not now; see :class:`PreparedCall`."""
        return self._client.begin_write(prepared, context, self._seconds, future)

    def written(
        self,
        prepared: PreparedWrite,
        shards: Sequence[int],
        context: CallContext,
        reply: Any,
        refused: Refusals = _NONE_REFUSED,
        patience: Any = None,
    ) -> Sequence[WriteOutcome]:
        """What a write has come to on each of ``shards``, once each is asked again that the first attempt, which
        replied so, did not bring to its end.
        """
        if isinstance(reply, tuple):
            self._heard(shards, ())
            return [Done(created=reply[0], duplicate=reply[1]), *[_NOTHING_MORE] * (len(shards) - 1)] if shards else ()
        left = [(shard, outcome) for shard, outcome in zip(shards, reply, strict=True) if type(outcome) is not tuple]
        self._heard(shards, [shard for shard, _ in left])

        def once_more(shard: int, seconds: float, watch: _LeaseWatch) -> Any:
            (outcome,) = self._client.write([(prepared, context)], seconds, watch, (shard,))
            return outcome if isinstance(outcome, tuple) else outcome[0]

        settled = iter(self._again(left, once_more, refused, patience))
        return [
            Done(created=outcome[0], duplicate=outcome[1]) if isinstance(outcome, tuple) else next(settled)
            for outcome in reply
        ]

    def _first_attempt(
        self, writes: Sequence[tuple[PreparedWrite, Sequence[int], CallContext]], shards: Sequence[int] = ()
    ) -> list[Any]:
        with self._watch() as watch:
            calls = [(prepared, context) for prepared, _, context in writes]
            return self._traced.write(calls, self._seconds, watch, shards)

    def _watch(self) -> AbstractContextManager[_Watch | None]:
        """For as long as a first attempt lasts; nobody is silent in this process."""
        return _Watch(self._calls) if self._calls.remote else _NO_WATCH

    @property
    def _seconds(self) -> float:
        return self._calls.config.attempt_timeout_seconds

    @property
    def _all_seconds(self) -> float:
        return self._seconds + self._calls.config.recovery_timeout_seconds

    def _prepare(self) -> Refusals:
        """Before a first attempt: connect to shards that no call has tried yet. One that cannot be connected to is left
        to the calls that need it. Raises Unavailable if no call can be made.
        """
        self._calls.require_usable()
        if not self._untried:
            return _NONE_REFUSED
        untried, self._untried = self._untried, []
        return shielded(partial(self._connect_to_all, untried))

    def _connect_to_all(self, shards: Sequence[int]) -> Refusals:
        waiting, refused = dict.fromkeys(shards), {}

        def connect(shard: int) -> None:
            try:
                self._connect(shard, self._seconds)
            except (AttemptFailed, GeartrainError) as exc:
                refused[shard] = exc
            del waiting[shard]

        def silent() -> list[Peer]:
            return [self._calls.peer(shard) for shard in list(waiting)]

        pool = ThreadPoolExecutor(min(_AT_ONCE, len(shards)), thread_name_prefix="geartrain-connect")
        with self._calls.naming(silent, self._all_seconds), pool:
            list(pool.map(connect, shards))
        return refused

    def _connect(self, shard: int, seconds: float) -> None:
        """Raises AttemptFailed, DataPortClosed, or what the shard says."""
        plane = self._carriers[shard].data_plane
        assert plane is not None
        self._client.set_endpoint(shard, self._calls.view.shards[shard].incarnation, None, plane.connect(seconds))
        self._unconnected.discard(shard)

    def _again(
        self,
        left: Sequence[tuple[int, Any]],
        attempt: Callable[[int, float, _LeaseWatch], Any],
        refused: Refusals,
        patience: Any = None,
    ) -> Sequence[Any]:
        """What calls come to whose first attempts have ended so."""

        def once_more(shard: int, buffer_lease: BufferLease, seconds: float) -> Done:
            if shard in self._unconnected:
                self._connect(shard, seconds)
            with buffer_lease.held():
                outcome = attempt(shard, seconds, _LeaseWatch(buffer_lease))
            if isinstance(outcome, tuple):
                return Done(created=outcome[0], duplicate=outcome[1])
            raise self._error(shard, outcome) or AttemptFailed(f"{self._name(shard)}: the connection was lost")

        ended = [(shard, self._error(shard, outcome) or refused.get(shard)) for shard, outcome in left]
        return self._calls.again(ended, once_more, patience)

    def routes(self, table: TableFacts, ids: Ids) -> list[tuple[int, Ids | None]]:
        """Each shard that has some of the ``ids`` [N], and the positions of those (None: all)."""
        view = self._calls.view
        return split_by_shard(ids, view.bucket_shards, view.num_shards, dense=table.is_dense)

    def _error(self, shard: int, outcome: BaseException | bool | None) -> BaseException | None:
        """What an attempt at a shard ended with; None: it has to be connected to, and can be asked at once then."""
        if isinstance(outcome, BaseException):
            return outcome
        plane = self._carriers[shard].data_plane
        assert plane is not None
        is_late = outcome is False
        if not plane.may_go_on(is_late=is_late) or not is_late:  # or it was made anew for somebody else
            self._unconnected.add(shard)
        return AttemptFailed(f"{self._name(shard)} does not answer: no reply in time") if is_late else None

    def _name(self, shard: int) -> str:
        return f"shard at {self._calls.view.shards[shard].address}"

    def _heard(self, asked: Sequence[int], left: Sequence[int]) -> None:
        """Note that all of ``asked`` but those ``left`` have answered."""
        if self._calls.silence.has_named:
            for shard in set(asked).difference(left):
                self._calls.silence.heard(self._calls.peer(shard))


class _LeaseWatch:
    """Told every 0.1 s that an attempt waits; breaks it off when the lease has ended."""

    def __init__(self, buffer_lease: BufferLease) -> None:
        self._buffer_lease = buffer_lease

    def __call__(self, _: Sequence[int]) -> None:
        if self._buffer_lease.has_ended:
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
