"""The calls of a client to the shards of its cluster: side by side, each retried while that can help."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

from geartrain.ams.client.rows.row_calls import RowAttempt, RowCalls
from geartrain.ams.rpc.carrier import AttemptFailed, ShardCarrier
from geartrain.ams.rpc.client.patience import Patience
from geartrain.ams.rpc.client.silence import Peer, SilenceWatch
from geartrain.ams.values.config import ClientConfig
from geartrain.ams.values.errors import (
    Busy,
    GeartrainError,
    ShardRestarted,
    ShardUnavailable,
    StaleCluster,
    StepPending,
    Unavailable,
)
from geartrain.ams.values.interrupts import BackgroundFuture, BrokenOff, BufferLease, shielded
from geartrain.ams.values.scheduler_messages import ClusterView
from geartrain.ams.values.shard_messages import CallContext, Reply, Request, Thaw
from geartrain.ams.values.specs import TableSpec

Outcome = Reply | BaseException
logger = logging.getLogger(__name__)

_FAREWELL_SECONDS = 1.0
_ASYNC_THREADS = 4
_num_forks = 0
"""Between the process that imported this and this one: to ask the system who we are takes longer than a small pull."""
_CLOSED = "this cluster is closed; use it inside the 'with' block, or before close()"


def _count_fork() -> None:
    global _num_forks
    _num_forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


class OpenTable(Protocol):
    """A table that this process has open."""

    @property
    def spec(self) -> TableSpec:
        """What it is, as far as this process knows."""

    @property
    def incarnation(self) -> int:
        """Which table of its name is meant."""

    def take_settings(self, spec: TableSpec) -> None:
        """Go on with the settings of ``spec``, which is the same table."""


class ShardCalls:
    """Calls to the shards of one cluster, with retries. Thread-safe."""

    def __init__(
        self,
        view: ClusterView,
        open_carrier: Callable[[str, int], ShardCarrier],
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
        self._carriers = [open_carrier(entry.address, entry.shard) for entry in view.shards]
        self._executor: ThreadPoolExecutor | None = None
        self._settling: ThreadPoolExecutor | None = None
        self._is_closing = self._closed = False
        self._process, self._forks = os.getpid(), _num_forks
        self._given_up = threading.Event()
        self.held_snapshots: set[str] = set()
        """Ids of those whose moment the shards hold for this process."""
        self.silence = SilenceWatch()
        self._restored: dict[str, TableSpec] = {}
        """By name."""
        self._open_tables: weakref.WeakSet[OpenTable] = weakref.WeakSet()
        self._lock = threading.Lock()
        self.rows = RowCalls(self, self._carriers)
        """Pulls and writes of rows."""

    @property
    def is_forked(self) -> bool:
        """Whether this is a forked child of the process that opened the cluster.

        It would number its writes as its parent does, so that the shards took one of two for a repetition; and neither
        connections nor threads came with it.
        """
        return _num_forks != self._forks

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
    def has_given_up(self) -> bool:
        """Whether no call can succeed any more."""
        return self._closed or self._given_up.is_set()

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

        If Ctrl-C breaks it off, what is under way is not sent again, and whether it was done is unknown.
        """
        self.require_usable()
        patience = self.patience(recovery_seconds)  # one for all, or dead shards would add up
        seconds = self.config.attempt_timeout_seconds if timeout_seconds is None else timeout_seconds

        def attempt(shard: int, request: Request, alone: bool) -> Future[Reply]:
            patience.require_a_caller()
            return self._attempt(shard, request, context=context, seconds=seconds, alone=alone)

        def once(shard: int, request: Request) -> Reply:
            return attempt(shard, request, True).result()

        def deliver() -> list[Outcome]:
            later = [partial(once, shard, request) for shard, request in calls]
            if len(calls) == 1:
                return self._settle_all([_Attempts(calls[0][0], later[0], later[0])], patience, seconds)
            begun = [attempt(shard, request, False) for shard, request in calls]
            attempts = [
                _Attempts(shard, first.result, again)
                for (shard, _), first, again in zip(calls, begun, later, strict=True)
            ]
            return self._settle_all(attempts, patience, seconds, lambda n: begun[n].done())

        return shielded(deliver, if_broken_off=patience.end)

    def again(
        self,
        ended: Sequence[tuple[int, BaseException | None]],
        attempt: RowAttempt,
        patience: CallPatience | None = None,
    ) -> list[Outcome]:
        """What calls of shards for rows come to whose first attempts have ended so; None: the next one can be made at
        once. No longer is waited than ``patience`` has left.

        Returns only when nobody uses the caller's arrays any more. So it is, too, if Ctrl-C breaks it off (but a second
        one does not wait for that).
        """
        waits = patience or self.patience()
        lease, seconds = BufferLease(), self.config.attempt_timeout_seconds

        def once_more(shard: int) -> Reply:
            waits.require_a_caller()
            return attempt(shard, lease, seconds)

        attempts = []
        for shard, error in ended:
            later = partial(once_more, shard)
            attempts.append(_Attempts(shard, later if error is None else partial(_raise, error), later))

        def break_off() -> None:
            waits.end()
            lease.end()
            lease.wait()

        return shielded(partial(self._settle_all, attempts, waits, seconds), if_broken_off=break_off)

    def _settle_all(
        self,
        attempts: Sequence[_Attempts],
        patience: CallPatience,
        seconds: float,
        has_ended: Callable[[int], bool] = lambda _: False,
    ) -> list[Outcome]:
        """Bring all calls to their end; meanwhile name shards that do not answer."""
        settled = 0

        def silent() -> list[Peer]:
            """Of a retried call the one that is settled: its first attempt has ended."""
            left = range(settled, len(attempts))
            return [self.peer(attempts[n].shard) for n in left if n == settled or not has_ended(n)]

        outcomes: list[Outcome] = []
        with self.naming(silent, seconds + patience.seconds):
            for settled, calls in enumerate(attempts):  # noqa: B007
                try:
                    outcomes.append(self._settle(calls, patience))
                except GeartrainError as exc:
                    outcomes.append(exc)
        return outcomes

    def patience(self, recovery_seconds: float | None = None) -> CallPatience:
        """How long calls that belong together wait for shards, all in all; None: the client's
        ``recovery_timeout_seconds``.
        """
        seconds = self.config.recovery_timeout_seconds if recovery_seconds is None else recovery_seconds
        return CallPatience(seconds, given_up=self._given_up)

    def naming_silent_shards(self) -> AbstractContextManager[None]:
        """While the block lasts, in which another role works with all shards for this process, name those that do not
        answer.
        """
        peers = [self.peer(shard) for shard in range(self._view.num_shards)]
        return self.naming(lambda: peers, self.config.attempt_timeout_seconds)

    def naming(self, silent: Callable[[], Sequence[Peer]], seconds: float) -> AbstractContextManager[None]:
        """While the block lasts, which may be ``seconds``, name those of ``silent`` that do not answer."""
        return self.silence.over(silent, f"up to {seconds:g} s") if self.remote else nullcontext()

    def peer(self, shard: int) -> Peer:
        """A shard as those are told of it who wait."""
        return Peer(f"shard {shard}", self._view.shards[shard].address)

    def read(self, calls: Sequence[tuple[int, Request]]) -> list[Reply]:
        """Make calls that change nothing; raises the first error."""
        replies: list[Reply] = []
        for outcome in self.deliver(calls, CallContext()):
            if isinstance(outcome, BaseException):
                raise outcome
            replies.append(outcome)
        return replies

    def restored(self, tables: Iterable[TableSpec]) -> None:
        """Note that this process has restored tables: what it has open of these names means them from now on."""
        restored = list(tables)
        self._restored.update({table.name: table for table in restored})
        self.note_settings(restored)

    def opened(self, table: OpenTable) -> None:
        """Let a table know, for as long as somebody has it, when its settings were altered."""
        with self._lock:
            self._open_tables.add(table)

    def note_settings(self, tables: Iterable[TableSpec]) -> None:
        """Let tables that are open here know the settings that they have now."""
        known = {(spec.name, spec.incarnation): spec for spec in tables}
        with self._lock:
            open_tables = list(self._open_tables)
        for table in open_tables:
            now = known.get((table.spec.name, table.incarnation))
            if now is not None and now != table.spec:
                table.take_settings(now)

    def incarnation_of(self, table: TableSpec) -> int:
        """Which table of its name is meant: the one that was opened, or that this process has restored since, if that
        differs in settings alone.
        """
        restored = self._restored.get(table.name) if self._restored else None
        if restored is None or not (restored == table or restored.is_same_table(table)):
            return table.incarnation
        return max(table.incarnation, restored.incarnation)

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
        shielded(partial(self._submit, future), if_broken_off=future.cancel)
        return future

    def _submit(self, future: BackgroundFuture) -> None:
        with self._lock:
            self.require_usable()
            if self._is_closing:
                raise Unavailable(_CLOSED)
            self._threads().submit(future.run)

    def elsewhere(self, work: Callable[[], object]) -> None:
        """Do work that may wait on a thread of the client's own. Who closes this waits first for what asks for it."""
        with self._lock:
            self._threads().submit(work)

    def settle(self, work: Callable[[], object]) -> None:
        """The same for work that waits for no number of a write: those that do may hold all threads of the others."""
        with self._lock:
            if self._settling is None:
                self._settling = ThreadPoolExecutor(_ASYNC_THREADS, thread_name_prefix="geartrain-settle")
            self._settling.submit(work)

    def _threads(self) -> ThreadPoolExecutor:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(_ASYNC_THREADS, thread_name_prefix="geartrain-client")
        return self._executor

    def give_up(self) -> None:
        """End every wait for a shard: calls under way, also in the background, fail soon, later ones at once."""
        shielded(self._give_up)

    def _give_up(self) -> None:
        if self.remote and not self._closed:
            self._let_go()
        self._given_up.set()
        for carrier in self._carriers:
            carrier.close()

    def _let_go(self) -> None:
        """Tell the shards, once and for a moment, to hold nothing more for this process's snapshots."""
        told = []
        for snapshot_id in list(self.held_snapshots):
            for carrier, entry in zip(self._carriers, self._view.shards, strict=True):
                context = CallContext(shard_incarnation=entry.incarnation)
                thaw = Thaw(snapshot_id=snapshot_id, kept=False)
                told.append(carrier.submit(context, thaw, _FAREWELL_SECONDS))
        for future in told:
            with suppress(GeartrainError, AttemptFailed):  # who cannot be told lets go when the lease is over
                future.result()

    def close(self) -> None:
        """Finish background calls and close the connections. Idempotent."""
        shielded(self._close)

    def _close(self) -> None:
        with self._lock:
            self._is_closing = True
        self.rows.close()
        for executor in (self._settling, self._executor):  # the first ends what the second may wait for
            if executor is not None:
                executor.shutdown(wait=True)
        self._closed = True
        for carrier in self._carriers:
            carrier.close()

    def _attempt(
        self, shard: int, request: Request, *, context: CallContext, seconds: float, alone: bool
    ) -> Future[Reply]:
        fenced = CallContext(
            stream=context.stream,
            incarnation=context.incarnation,
            sequence=context.sequence,
            oldest_unacknowledged=context.oldest_unacknowledged,
            shard_incarnation=self._view.shards[shard].incarnation,
            cluster_version=self._view.cluster_version,
            table_incarnation=context.table_incarnation,
        )
        return self._carriers[shard].submit(fenced, request, seconds, alone=alone)

    def _settle(self, attempts: _Attempts, patience: CallPatience) -> Reply:
        meant: int | None = None  # the cluster version of the attempt; of the first one unknown
        looked = set[int | None]()
        shard, ask, again = attempts
        while True:
            try:
                reply = ask()
                if self.silence.has_named:
                    self.silence.heard(self.peer(shard))
                return reply
            except BrokenOff:
                raise
            except StepPending:
                self._require_not_given_up(shard)
                patience.begin_anew()  # the shard is well: other ranks are waited for, and it says for how long
                ask = again
            except Busy as exc:
                self._require_not_given_up(shard)
                if patience.is_fresh:
                    logger.info("shard %d is busy, asking it again for up to %g s: %s", shard, patience.seconds, exc)
                if not patience.pause(exc.retry_after_seconds):
                    raise Busy(
                        f"shard {shard} at {self._view.shards[shard].address} was busy for {patience.seconds:g} s "
                        f"(client setting recovery_timeout_seconds): {exc}",
                        exc.retry_after_seconds,
                    ) from exc
                ask = again
            except (AttemptFailed, ShardUnavailable, StaleCluster) as exc:
                self._require_not_given_up(shard)
                if isinstance(exc, StaleCluster) and meant not in looked:
                    # The shard answers: it is this client that has not heard, and no waiting would tell it. Again as
                    # long as looking tells something new: the cluster may change once more meanwhile.
                    looked.add(meant)
                    self._look_again(shard)
                    ask, meant = again, self._view.cluster_version
                    continue
                if patience.is_fresh and self.silence.tell(self.peer(shard)):  # once for all tables and threads
                    address = self._view.shards[shard].address
                    logger.warning(
                        "shard %d at %s does not answer, waiting for it up to %g s: %s",
                        shard,
                        address,
                        patience.seconds,
                        exc,
                    )
                if not patience.pause():
                    address = self._view.shards[shard].address
                    raise ShardUnavailable(
                        f"shard {shard} at {address} did not answer within {patience.seconds:g} s: "
                        f"{exc}. Is its server running? ('geartrain status'; client setting recovery_timeout_seconds)"
                    ) from None
                self._look_again(shard)
                ask, meant = again, self._view.cluster_version

    def _require_not_given_up(self, shard: int) -> None:
        if self._given_up.is_set():
            raise Unavailable(f"this cluster was closed while shard {shard} was waited for") from None

    def _look_again(self, shard: int) -> None:
        """Learn the cluster version anew. Raises ShardRestarted if ``shard`` came back without our rows."""
        try:
            view = self._refresh()
        except (AttemptFailed, GeartrainError):
            return  # the shard may answer all the same
        before, now = self._view.shards[shard], view.shards[shard]
        if now.incarnation not in (0, before.incarnation):
            raise ShardRestarted(
                f"shard {shard} was restarted at {now.address}: the rows in its memory are gone; "
                "connect again and restore a snapshot, or start the job again"
            ) from None
        # Not the incarnations: they are those of the shards that hold our rows.
        self._view = replace(self._view, cluster_version=view.cluster_version)
        self.rows.set_cluster_version(view.cluster_version)
        self.note_settings(view.tables)


class _Attempts(NamedTuple):
    """Those at one call of a shard: each waits for the reply, or raises."""

    shard: int
    first: Callable[[], Reply]
    later: Callable[[], Reply]


def _raise(error: BaseException) -> Any:
    raise error


class CallPatience(Patience):
    """The patience of one call, which ends with its caller."""

    _has_ended = False

    def end(self) -> None:
        """Nobody waits any more: nothing is sent again."""
        self._has_ended = True

    def require_a_caller(self) -> None:
        """Raise BrokenOff if nobody waits any more."""
        if self._has_ended:
            raise BrokenOff("the caller has gone")
