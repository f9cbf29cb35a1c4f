"""Calls of a client to its shards that carry no rows; its threads, and its open tables."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from geartrain.ams.client.retries import CLOSED, Attempts, Outcome, Retries
from geartrain.ams.client.rows.row_calls import RowCalls
from geartrain.ams.rpc.carrier import AttemptFailed, ShardCarrier
from geartrain.ams.values.config import ClientConfig
from geartrain.ams.values.errors import GeartrainError, Unavailable
from geartrain.ams.values.interrupts import BackgroundFuture, uninterrupted
from geartrain.ams.values.scheduler_messages import ClusterView
from geartrain.ams.values.shard_messages import CallContext, Reply, Request, Thaw
from geartrain.ams.values.specs import TableSpec

_SHUTDOWN_SECONDS = 1.0
_ASYNC_THREADS = 4
_NOBODY = CallContext()


class OpenTable(Protocol):
    """A table that this process has open."""

    spec: TableSpec
    incarnation: int

    def adopt_settings(self, spec: TableSpec) -> None:
        """Continue with the settings of ``spec``, which is the same table."""


class ShardCalls(Retries):
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
        super().__init__(view, open_carrier, partial(self._refreshed, refresh), config, remote=remote)
        self._executor: ThreadPoolExecutor | None = None
        self._settling: ThreadPoolExecutor | None = None
        self._is_closing = False
        self.held_snapshots: set[str] = set()
        """Ids of snapshots that the shards hold frozen for this process."""
        self._restored: dict[str, TableSpec] = {}
        """Tables restored by this process, by name."""
        self._open_tables: weakref.WeakSet[OpenTable] = weakref.WeakSet()
        self._lock = threading.Lock()
        self.rows = RowCalls(self, self.elsewhere, self.finish_in_background)
        """Pulls and writes of rows."""

    @property
    def has_given_up(self) -> bool:
        """Whether every call fails from now on."""
        return self._closed or self._given_up.is_set()

    def deliver(
        self,
        calls: Sequence[tuple[int, Request]],
        context: CallContext,
        timeout_seconds: float | None = None,
        *,
        recovery_seconds: float | None = None,
    ) -> list[Outcome]:
        """Make all calls side by side, each with retries; return replies and errors in order.

        An attempt may take ``timeout_seconds``, by default ``attempt_timeout_seconds``; a shard that does not answer is
        waited for ``recovery_seconds`` (0: a single attempt), by default ``recovery_timeout_seconds``.

        After Ctrl-C calls in flight are not sent again, and whether they were done is unknown.
        """
        self.require_usable()
        backoff = self.backoff(recovery_seconds)  # shared by all, or dead shards would add up
        seconds = self.config.attempt_timeout_seconds if timeout_seconds is None else timeout_seconds

        def attempt(shard: int, request: Request, *, alone: bool) -> Future[Reply]:
            backoff.require_a_caller()
            entry, version = self.view.shards[shard], self.view.cluster_version
            meant = replace(context, shard_incarnation=entry.incarnation, cluster_version=version)
            return self._carriers[shard].submit(meant, request, seconds, alone=alone)

        def once(shard: int, request: Request) -> Reply:
            return attempt(shard, request, alone=True).result()

        def deliver() -> list[Outcome]:
            later = [partial(once, shard, request) for shard, request in calls]
            if len(calls) == 1:
                return self.finish_all([Attempts(calls[0][0], later[0], later[0])], backoff, seconds)
            begun = [attempt(shard, request, alone=False) for shard, request in calls]
            attempts = [
                Attempts(shard, first.result, again)
                for (shard, _), first, again in zip(calls, begun, later, strict=True)
            ]
            return self.finish_all(attempts, backoff, seconds, lambda n: begun[n].done())

        return uninterrupted(deliver, on_interrupt=backoff.stop)

    def read(self, calls: Sequence[tuple[int, Request]], context: CallContext = _NOBODY) -> list[Reply]:
        """:meth:`deliver` read-only calls; raises the first error."""
        return all_of(self.deliver(calls, context))

    def restored(self, tables: Iterable[TableSpec]) -> None:
        """Record that this process has restored tables: its open tables of these names mean them from now on."""
        restored = {table.name: table for table in tables}
        with self._lock:
            self._restored.update(restored)
            for table in list(self._open_tables):
                if table.spec.name in restored:
                    table.adopt_settings(table.spec)
        self.update_settings(restored.values())

    def opened(self, table: OpenTable) -> None:
        """Register an open table: it receives its settings, now and, while it exists, whenever they or the table it
        means change.
        """
        with self._lock:
            self._open_tables.add(table)
            table.adopt_settings(table.spec)

    def update_settings(self, tables: Iterable[TableSpec]) -> None:
        """Pass the present settings of tables to those that are open here."""
        known = {(spec.name, spec.incarnation): spec for spec in tables}
        with self._lock:
            for table in list(self._open_tables):
                now = known.get((table.spec.name, table.incarnation))
                if now is not None and now != table.spec:
                    table.adopt_settings(now)

    def _refreshed(self, refresh: Callable[[], ClusterView]) -> ClusterView:
        view = refresh()
        self.update_settings(view.tables)
        return view

    def incarnation_of(self, table: TableSpec) -> int:
        """Return the incarnation of the table meant: the opened one, or one that this process has restored since and
        that differs in settings alone.
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
        """:meth:`deliver` the same read-only request to every shard. ``caller`` identifies a caller that may be
        fenced."""
        calls = [(shard, request) for shard in range(self.view.num_shards)]
        return self.deliver(calls, caller or _NOBODY, timeout_seconds, recovery_seconds=recovery_seconds)

    def background(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Future[Any]:
        """Run ``function`` on a thread of the client."""
        self.require_own_process()
        future = BackgroundFuture(partial(function, *arguments, **keywords))
        uninterrupted(partial(self._submit, future), on_interrupt=future.cancel)
        return future

    def _submit(self, future: BackgroundFuture) -> None:
        with self._lock:
            self.require_usable()
            if self._is_closing:
                raise Unavailable(CLOSED)
            self._threads().submit(future.run)

    def elsewhere(self, work: Callable[[], object]) -> None:
        """Run work that may block on a thread of the client. Closing waits first for the callers of this."""
        with self._lock:
            self._threads().submit(work)

    def finish_in_background(self, work: Callable[[], object]) -> None:
        """Run work that waits for no write number; work that does could occupy all threads of :meth:`elsewhere`."""
        with self._lock:
            if self._settling is None:
                self._settling = ThreadPoolExecutor(_ASYNC_THREADS, thread_name_prefix="geartrain-settle")
            self._settling.submit(work)

    def _threads(self) -> ThreadPoolExecutor:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(_ASYNC_THREADS, thread_name_prefix="geartrain-client")
        return self._executor

    def cancel_waits(self) -> None:
        """Abort every wait for a shard: calls in progress, also in the background, soon fail, later ones at once."""
        uninterrupted(self._cancel_waits)

    def _cancel_waits(self) -> None:
        if self.remote and not self._closed:
            self._release_freezes()
        self._given_up.set()
        self.is_ready = False
        for carrier in self._carriers:
            carrier.close()

    def _release_freezes(self) -> None:
        """Ask the shards, once and briefly, to release everything frozen for this process's snapshots."""
        told = []
        for snapshot_id in list(self.held_snapshots):
            for carrier, entry in zip(self._carriers, self.view.shards, strict=True):
                context = CallContext(shard_incarnation=entry.incarnation)
                thaw = Thaw(snapshot_id=snapshot_id, kept=False)
                told.append(carrier.submit(context, thaw, _SHUTDOWN_SECONDS))
        for future in told:
            with suppress(GeartrainError, AttemptFailed):  # an unreachable shard releases it when the lease ends
                future.result()

    def close(self) -> None:
        """Finish background calls and close the connections. Idempotent."""
        uninterrupted(self._close)

    def _close(self) -> None:
        with self._lock:
            self._is_closing = True
        self.rows.close()
        for executor in (self._settling, self._executor):  # the first ends what the second may wait for
            if executor is not None:
                executor.shutdown(wait=True)
        self._closed = True
        self.is_ready = False
        for carrier in self._carriers:
            carrier.close()


def all_of(outcomes: Iterable[Any]) -> list[Any]:
    """Return the replies, or raise the first error among them."""
    replies = []
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
        replies.append(outcome)
    return replies
