"""Retries of calls to the shards of a cluster, after their first attempt.

The caller makes the first attempt and passes its outcome for each shard. Each shard is then retried while that can
help: busy, unresponsive or lost shards are waited for, connections are reopened, and unresponsive shards are logged.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from geartrain.ams.kernels._core import RowsClient
from geartrain.ams.rpc.carrier import AttemptFailed, ShardCarrier
from geartrain.ams.rpc.client.backoff import Backoff
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
from geartrain.ams.values.interrupts import BufferLease, CallerGone, uninterrupted
from geartrain.ams.values.scheduler_messages import ClusterView
from geartrain.ams.values.shard_messages import Done, Reply

Outcome = Reply | BaseException
RowAttempt = Callable[[int, float, Callable[[Sequence[int]], object]], Any]
"""One attempt at the rows of a shard, with a time-out in seconds, whose watch may abort it. Returns the compiled code's
result for the shard: (created, duplicate) if done, an error, False if no reply came, None if no connection."""
Refusals = Mapping[int, BaseException]
"""Errors of shards that a call has just failed to connect to: each counts as an attempt."""
NONE_REFUSED: Refusals = MappingProxyType({})
CLOSED = "this cluster is closed; use it inside the 'with' block, or before close()"
_CONNECTED_AT_ONCE = 16
logger = logging.getLogger(__name__)
_all: weakref.WeakSet[Retries] = weakref.WeakSet()


def _refuse_in_child() -> None:
    for each in list(_all):
        each.is_forked, each.is_ready = True, False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_refuse_in_child)


class CallBackoff(Backoff):
    """Retry budget of one call, which ends with its caller."""

    _has_ended = False

    def stop(self) -> None:
        """Record that the caller has left: nothing is sent again."""
        self._has_ended = True

    def require_a_caller(self) -> None:
        """Raise CallerGone if the caller has left."""
        if self._has_ended:
            raise CallerGone("the caller stopped waiting")


class Attempts(NamedTuple):
    """Attempts at one call of a shard: each waits for the reply, or raises."""

    shard: int
    first: Callable[[], Reply]
    later: Callable[[], Reply]


class Retries:
    """Calls with retries to the shards of one cluster. Thread-safe."""

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
        """Whether the shards run in other processes."""
        self.config = config
        self.view = view
        """Description of the cluster, as last received."""
        self.silence = SilenceWatch()
        self.is_forked = False
        """Whether this is a forked child of the process that opened the cluster. It would number its writes as its
        parent does, and shards would take one of two for a duplicate; connections and threads do not survive a fork
        either."""
        self.is_ready = False
        """Whether row calls need no :meth:`prepare`."""
        self.client = RowsClient(np.ascontiguousarray(view.bucket_shards), view.num_shards)
        """Makes row calls, each to all shards at once."""
        self.client.set_cluster_version(view.cluster_version)
        self._refresh, self._open_carrier = refresh, open_carrier
        self._carriers = [open_carrier(entry.address, entry.shard) for entry in view.shards]
        self._closed, self._given_up, self._process = False, threading.Event(), os.getpid()
        for shard, carrier in enumerate(self._carriers):
            if carrier.engine is not None:
                self.client.set_endpoint(shard, view.shards[shard].incarnation, carrier.engine, None)
        self.unconnected = {shard for shard, carrier in enumerate(self._carriers) if carrier.engine is None}
        """Shards without a connection."""
        self._untried = sorted(self.unconnected)
        """Shards to which no connection was ever tried."""
        _all.add(self)

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
            self.is_ready = False
            raise Unavailable(CLOSED)

    def prepare(self) -> Refusals:
        """Connect, before a first row call, to shards not tried yet. A shard that cannot be reached is left to the
        calls that need it. Raises Unavailable if no call is possible.
        """
        self.is_ready = not self.is_forked
        self.require_usable()
        untried, self._untried = self._untried, []
        return uninterrupted(partial(self._connect_to_all, untried)) if untried else NONE_REFUSED

    def adopt(self, view: ClusterView) -> None:
        """Continue with the present shards. Tables that were not restored there are not found any more."""
        for shard, now in enumerate(view.shards):
            before = self.view.shards[shard]
            if (now.incarnation, now.address) != (before.incarnation, before.address):
                old, self._carriers[shard] = self._carriers[shard], self._open_carrier(now.address, shard)
                old.close()
                self.unconnected.add(shard)
                self._untried = sorted({*self._untried, shard})
        self.view = replace(self.view, shards=view.shards, cluster_version=view.cluster_version)
        self.client.set_cluster_version(view.cluster_version)
        self.is_ready = False

    def backoff(self, recovery_seconds: float | None = None) -> CallBackoff:
        """Return a retry budget for related calls: the total wait for shards; None: the client's
        ``recovery_timeout_seconds``.
        """
        seconds = self.config.recovery_timeout_seconds if recovery_seconds is None else recovery_seconds
        return CallBackoff(seconds, given_up=self._given_up)

    def peer(self, shard: int) -> Peer:
        """Return a shard's name and address for messages about waits."""
        return Peer(f"shard {shard}", self.view.shards[shard].address)

    def naming(self, silent: Callable[[], Sequence[Peer]], seconds: float) -> AbstractContextManager[None]:
        """Log, during the block of up to ``seconds``, those of ``silent`` that do not answer."""
        return self.silence.over(silent, f"up to {seconds:g} s") if self.remote else nullcontext()

    def naming_silent_shards(self) -> AbstractContextManager[None]:
        """Log shards that do not answer, during a block in which another role calls all shards for this process."""
        peers = [self.peer(shard) for shard in range(self.view.num_shards)]
        return self.naming(lambda: peers, self.config.attempt_timeout_seconds)

    def record_replies(self, asked: Sequence[int], left: Sequence[int]) -> None:
        """Record that all of ``asked`` but those ``left`` have answered."""
        for shard in set(asked).difference(left):
            self.silence.record_reply(self.peer(shard))

    def again(
        self,
        left: Sequence[tuple[int, Any]],
        attempt: RowAttempt,
        refused: Refusals = NONE_REFUSED,
        backoff: CallBackoff | None = None,
    ) -> list[Outcome]:
        """Finish row calls that a first attempt has ``left``, each with the compiled code's result for its shard;
        return their outcomes. Waits no longer than ``backoff`` has left.

        Returns only when the caller's arrays are no longer in use, also after Ctrl-C (but a second Ctrl-C does not wait
        for that).
        """
        waits, lease, seconds = backoff or self.backoff(), BufferLease(), self.config.attempt_timeout_seconds

        def watch(_: Sequence[int]) -> None:
            if lease.has_ended:
                raise CallerGone("the caller stopped waiting")

        def once_more(shard: int) -> Done:
            waits.require_a_caller()
            if shard in self.unconnected:
                self._connect(shard, seconds)
            with lease.held():
                outcome = attempt(shard, seconds, watch)
            if isinstance(outcome, tuple):
                return Done(created=outcome[0], duplicate=outcome[1])
            raise self._error(shard, outcome) or AttemptFailed(f"{self._name(shard)}: the connection was lost")

        attempts = []
        for shard, outcome in left:
            error, later = self._error(shard, outcome) or refused.get(shard), partial(once_more, shard)
            attempts.append(Attempts(shard, later if error is None else partial(_raise, error), later))

        def break_off() -> None:
            waits.stop()
            lease.revoke()
            lease.wait()

        return uninterrupted(partial(self.finish_all, attempts, waits, seconds), on_interrupt=break_off)

    def finish_all(
        self,
        attempts: Sequence[Attempts],
        backoff: CallBackoff,
        seconds: float,
        has_ended: Callable[[int], bool] = lambda _: False,
    ) -> list[Outcome]:
        """Retry all calls to their end; meanwhile log shards that do not answer."""
        settled = 0

        def silent() -> list[Peer]:
            """Return peers with open calls; of retried calls only the one being settled: the others' first attempt has
            ended."""
            left = range(settled, len(attempts))
            return [self.peer(attempts[n].shard) for n in left if n == settled or not has_ended(n)]

        outcomes: list[Outcome] = []
        with self.naming(silent, seconds + backoff.seconds):
            for settled, calls in enumerate(attempts):  # noqa: B007
                try:
                    outcomes.append(self._finish(calls, backoff))
                except GeartrainError as exc:
                    outcomes.append(exc)
        return outcomes

    def _finish(self, attempts: Attempts, backoff: CallBackoff) -> Reply:
        """Retry a shard until it answers, or until retries cannot help."""
        shard, ask, again = attempts
        meant: int | None = None  # cluster version of the attempt; unknown for the first one
        looked = set[int | None]()
        while True:
            try:
                reply = ask()
                if self.silence.named:
                    self.silence.record_reply(self.peer(shard))
                return reply
            except CallerGone:
                raise
            except StepPending:
                self._require_not_given_up(shard)
                backoff.reset()  # the shard is up: it waits for other ranks, and has its own time-out
            except Busy as exc:
                self._require_not_given_up(shard)
                self._wait_for_busy(shard, exc, backoff)
            except (AttemptFailed, ShardUnavailable, StaleCluster) as exc:
                self._require_not_given_up(shard)
                if isinstance(exc, StaleCluster) and meant not in looked:
                    # The shard answers, but this client's view is outdated. Retry while a refresh of it brings news:
                    # the cluster may change once more meanwhile.
                    looked.add(meant)
                else:
                    self._wait_for_silent(shard, exc, backoff)
                self._refresh_cluster(shard)
            ask, meant = again, self.view.cluster_version

    def _wait_for_busy(self, shard: int, busy: Busy, backoff: CallBackoff) -> None:
        if backoff.is_fresh:
            logger.info("shard %d is busy, asking it again for up to %g s: %s", shard, backoff.seconds, busy)
        if not backoff.pause(busy.retry_after_seconds):
            raise Busy(
                f"shard {shard} at {self.view.shards[shard].address} was busy for {backoff.seconds:g} s "
                f"(client setting recovery_timeout_seconds): {busy}",
                busy.retry_after_seconds,
            ) from busy

    def _wait_for_silent(self, shard: int, error: BaseException, backoff: CallBackoff) -> None:
        address = self.view.shards[shard].address
        if backoff.is_fresh and self.silence.should_warn(self.peer(shard)):  # once for all tables and threads
            text = "shard %d at %s does not answer, waiting for it up to %g s: %s"
            logger.warning(text, shard, address, backoff.seconds, error)
        if not backoff.pause():
            raise ShardUnavailable(
                f"shard {shard} at {address} did not answer within {backoff.seconds:g} s: "
                f"{error}. Is its server running? ('geartrain status'; client setting recovery_timeout_seconds)"
            ) from None

    def _require_not_given_up(self, shard: int) -> None:
        if self._given_up.is_set():
            raise Unavailable(f"this cluster was closed while shard {shard} was waited for") from None

    def _refresh_cluster(self, shard: int) -> None:
        """Refresh the cluster version. Raises ShardRestarted if ``shard`` came back without this client's rows."""
        try:
            view = self._refresh()
        except (AttemptFailed, GeartrainError):
            return  # the shard may still answer
        before, now = self.view.shards[shard], view.shards[shard]
        if now.incarnation not in (0, before.incarnation):
            raise ShardRestarted(
                f"shard {shard} was restarted at {now.address}: the rows in its memory are gone; "
                "connect again and restore a snapshot, or start the job again"
            ) from None
        # Not the incarnations: these stay those of the shards that hold this client's rows.
        self.view = replace(self.view, cluster_version=view.cluster_version)
        self.client.set_cluster_version(view.cluster_version)

    def _connect_to_all(self, shards: Sequence[int]) -> Refusals:
        waiting, refused = dict.fromkeys(shards), {}

        def connect(shard: int) -> None:
            try:
                self._connect(shard, self.config.attempt_timeout_seconds)
            except (AttemptFailed, GeartrainError) as exc:
                refused[shard] = exc
            del waiting[shard]

        pool = ThreadPoolExecutor(min(_CONNECTED_AT_ONCE, len(shards)), thread_name_prefix="geartrain-connect")
        seconds = self.config.attempt_timeout_seconds + self.config.recovery_timeout_seconds
        with self.naming(lambda: [self.peer(shard) for shard in list(waiting)], seconds), pool:
            list(pool.map(connect, shards))
        return refused

    def _connect(self, shard: int, seconds: float) -> None:
        """Connect to a shard. Raises AttemptFailed, DataPortClosed, or the shard's error."""
        plane = self._carriers[shard].data_plane
        assert plane is not None
        self.client.set_endpoint(shard, self.view.shards[shard].incarnation, None, plane.connect(seconds))
        self.unconnected.discard(shard)

    def _error(self, shard: int, outcome: BaseException | bool | None) -> BaseException | None:
        """Return the error of an attempt at a shard; None: it must be reconnected, and can then be retried at once."""
        if isinstance(outcome, BaseException):
            return outcome
        plane = self._carriers[shard].data_plane
        assert plane is not None
        is_late = outcome is False
        if not plane.may_go_on(is_late=is_late) or not is_late:  # or another call has reopened it
            self.unconnected.add(shard)
        return AttemptFailed(f"{self._name(shard)} does not answer: no reply in time") if is_late else None

    def _name(self, shard: int) -> str:
        return f"shard at {self.view.shards[shard].address}"


def _raise(error: BaseException) -> Any:
    raise error


class CallWatch:
    """Callback of a first attempt, every 0.1 s with the shards it waits for; logs those that do not answer."""

    def __init__(self, retries: Retries) -> None:
        self._retries = retries
        self._waiting: Sequence[int] = ()
        self._naming: AbstractContextManager[None] | None = None

    def __call__(self, waiting: Sequence[int]) -> None:
        self._waiting = waiting
        if self._naming is None:
            uninterrupted(self._start)  # starts threads

    def update(self, waiting: Sequence[int]) -> None:
        """Do the same for calls without end: ``waiting`` may be empty."""
        if waiting:
            self(waiting)
        else:
            self.stop()

    def stop(self) -> None:
        """Stop: the call is over."""
        self._waiting = ()
        naming, self._naming = self._naming, None
        if naming is not None:
            uninterrupted(partial(naming.__exit__, None, None, None))

    def _start(self) -> None:
        config = self._retries.config
        naming = self._retries.naming(self._silent, config.attempt_timeout_seconds + config.recovery_timeout_seconds)
        naming.__enter__()
        self._naming = naming

    def _silent(self) -> list[Peer]:
        return [self._retries.peer(shard) for shard in self._waiting]
