"""Partitions of a slow gear: leased from the scheduler, renewed, and rebalanced when others come or go."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np

from geartrain.ams.gear.partitions import NUM_PARTITIONS, partitions_of
from geartrain.ams.values.errors import GeartrainError, NotHolder, SchedulerUnavailable, StaleClient
from geartrain.ams.values.scheduler_messages import StreamLease, StreamRenewal
from geartrain.ams.values.specs import Ids

logger = logging.getLogger(__name__)

_TICKS_PER_LEASE = 10
_LONGEST_TICK_SECONDS = 1.0
_SOON_SECONDS = 0.02
_MARGIN = 0.05
"""Part of a lease by which a slow gear considers it ended earlier than the scheduler does."""


class Leases(Protocol):
    """The methods of :class:`geartrain.ams.client.data_streams.DataStreams` that are used here."""

    def lease(self) -> StreamLease:
        """Lease this gear's share."""

    def commit(self) -> StreamRenewal:
        """Renew the lease."""

    def release(self, streams: Sequence[int] | None = None) -> None:
        """Release partitions; None: all."""


class HeldPartitions:
    """Partitions that this slow gear serves. Thread-safe; :meth:`tick` is for one thread.

    ``before_release`` is called before partitions go to others, to apply their waiting gradients first.
    """

    def __init__(
        self,
        leases: Leases,
        *,
        before_release: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._leases = leases
        self._before_release = before_release
        self._clock = clock
        self._held: frozenset[int] = frozenset()
        self._until = float("-inf")
        self._lease_seconds = 1.0
        self._has_lease = self._is_leaving = self._has_left = False
        self._background = ThreadPoolExecutor(1, thread_name_prefix="gear-release")
        self._applying: Future[None] | None = None

    @property
    def now(self) -> frozenset[int]:
        """Partitions it holds; none once the lease may have ended."""
        return self._held if self._clock() < self._until else frozenset()

    @property
    def tick_seconds(self) -> float:
        """Interval at which :meth:`tick` should be called."""
        if self._applying is not None:
            return _SOON_SECONDS
        return min(_LONGEST_TICK_SECONDS, self._lease_seconds / _TICKS_PER_LEASE)

    def require(self, ids: Ids) -> None:
        """Raise NotHolder unless it holds the partitions of all ``ids``."""
        held = self.now
        if self._is_leaving:
            raise NotHolder("this slow gear is leaving; ask the scheduler for the holder of its partitions")
        if len(held) == NUM_PARTITIONS:
            return
        is_held = np.zeros(NUM_PARTITIONS, np.bool_)
        is_held[sorted(held)] = True
        parts = partitions_of(ids)
        if not is_held[parts].all():
            index = int(np.flatnonzero(~is_held[parts])[0])
            raise NotHolder(
                f"partition {parts[index]} (of id {ids[index]}) is not held by this slow gear, which holds {len(held)} "
                "partitions; ask the scheduler for its holder"
            )

    def tick(self) -> None:
        """Renew the lease; lease and release partitions as the scheduler asks. Raises StaleClient if another process
        has this gear's address."""
        if self._has_left:
            return
        try:
            began = self._clock()
            if not self._has_lease:
                self._lease(began)
                return
            renewal = self._leases.commit()
        except SchedulerUnavailable as exc:
            logger.warning("the scheduler does not answer; keeping %d partitions meanwhile: %s", len(self.now), exc)
            return
        except StaleClient as exc:
            logger.warning("lease lost: %s", exc)
            self._has_lease, self._held = False, frozenset()
            self._lease(self._clock())
            return
        self._until = began + self._lease_seconds * (1 - _MARGIN)
        self._held = frozenset(renewal.held) - frozenset(renewal.release)
        if renewal.release:
            self._release(renewal.release)
        elif renewal.can_lease and not self._is_leaving:
            self._lease(self._clock())

    def refuse(self) -> None:
        """Refuse all requests from now on; the lease continues."""
        self._is_leaving = True

    def release_all(self) -> None:
        """Release all partitions."""
        self.refuse()
        self._background.shutdown(wait=True)
        self._has_left = True
        if self._has_lease:
            self._has_lease, self._held = False, frozenset()
            try:
                self._leases.release()
            except GeartrainError as exc:
                logger.warning("cannot release partitions, which are free once their lease ends: %s", exc)

    def _release(self, partitions: Sequence[int]) -> None:
        """Release partitions once their waiting gradients are applied; meanwhile the lease is renewed."""
        if self._applying is None:
            self._applying = self._background.submit(self._before_release)
        if self._applying.done():
            applied, self._applying = self._applying, None
            applied.result()
            self._leases.release(partitions)
            logger.info("released %d partitions to other slow gears, %d are left", len(partitions), len(self._held))

    def _lease(self, began: float) -> None:
        lease = self._leases.lease()
        self._lease_seconds = lease.lease_seconds
        self._until = began + lease.lease_seconds * (1 - _MARGIN)
        if len(lease.cursors) != len(self._held):
            logger.info("this slow gear holds %d of %d partitions", len(lease.cursors), NUM_PARTITIONS)
        self._held = frozenset(lease.cursors)
        self._has_lease = True


class Ticker:
    """A thread that ticks until it is stopped, whatever a tick raises. ``on_stale`` is called once if StaleClient ends
    it.
    """

    def __init__(
        self,
        tick: Callable[[], None],
        seconds: Callable[[], float],
        on_stale: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._tick = tick
        self._seconds = seconds
        self._on_stale = on_stale
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gear-ticker", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread. Idempotent."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self._tick()
            except StaleClient as exc:
                logger.error("%s", exc)
                self._on_stale(str(exc))
                return
            except GeartrainError as exc:
                logger.warning("%s", exc)
            except Exception:  # the user's module may raise anything: the lease goes on
                logger.exception("periodic work of the slow gear failed; retrying")
            self._ended.wait(self._seconds())
