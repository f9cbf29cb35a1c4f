"""Client of slow gears in other processes: they are found through the scheduler, with retries.

Legend: D width of a dense feature, K distinct ids.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from geartrain.ams.gear.client.ledger import GearLedger
from geartrain.ams.gear.client.pending_delivery import DeliveryPart, PendingDelivery, routes
from geartrain.ams.gear.partitions import NUM_PARTITIONS
from geartrain.ams.rpc.carrier import AttemptFailed, NotSent
from geartrain.ams.rpc.client.backoff import Backoff
from geartrain.ams.rpc.client.gear import GrpcGearCarrier
from geartrain.ams.values.config import ClientConfig
from geartrain.ams.values.errors import (
    GeartrainError,
    GearUnavailable,
    InvalidArgument,
    NotHolder,
    SchedulerUnavailable,
)
from geartrain.ams.values.gear_messages import (
    Delivery,
    DeliveryAck,
    Failure,
    FeatureReply,
    Freshness,
    GearAccount,
    GearState,
    address_of,
    process_at,
)
from geartrain.ams.values.scheduler_messages import StreamHolders
from geartrain.ams.values.specs import Ids

logger = logging.getLogger(__name__)

R = TypeVar("R")
AwaitReply = Callable[[], R]
_BYTES_BESIDE = 24
"""Bytes of an id in a message, beside its vector."""
_PASSING = (AttemptFailed, NotHolder, GearUnavailable)
"""Errors that a retry may cure."""
_DESCRIBE_SECONDS = 5.0
_LONGEST_PAUSE_SECONDS = 0.5
_LEASES = 1.5
"""Leases to wait: partitions of a dead slow gear are free after one, and the others need a moment to take them over."""


class RemoteGears:
    """Client of a dense part's slow gears, a :class:`geartrain.ams.values.gear_messages.GearPort`. Thread-safe.

    A request goes to the slow gears that hold the partitions of its ids, in messages of at most ``part_bytes``. If one
    does not answer, or no longer holds a partition, the scheduler is asked again, for ``recovery_timeout_seconds`` or
    one and a half leases, whichever is longer (0: not at all).

    A part of a delivery keeps its source and number until it is acknowledged. A part that no process can have received
    (it was refused, or there was no connection) is split anew for the present holders. Otherwise it is sent again to
    the same process while that one holds any partition: so it counts once. Whether a process applied it before it died
    is unknown. As no gradient may be applied twice, the part is then given up, counted in ``account().lost`` and
    logged: an upper bound of the gradients missing from the weights. But for a slow gear that stores gradients, half of
    the time is spent waiting for its replacement, which knows.
    """

    def __init__(
        self,
        name: str,
        dim: int,
        holders: Callable[[], StreamHolders],
        open_carrier: Callable[[str, Callable[[], None]], GrpcGearCarrier],
        config: ClientConfig,
        *,
        wait: bool,
        freshness: Freshness,
    ) -> None:
        """``open_carrier`` (address, on_wait) opens a connection to a slow gear, which calls on_wait now and then
        during a wait for a reply. ``wait``: a delivery returns once the updates it triggered are applied. Raises
        GearUnavailable, InvalidArgument (the slow gears make features of another width)."""
        self._name = name
        self._dim = dim
        self._ask_holders = holders
        self._open_carrier = open_carrier
        self._config = config
        self._wait = wait
        self._freshness = freshness
        self.gradients_per_id = 0
        """Gradients that trigger one backward pass in the slow gears."""
        self._ledger = GearLedger(name)
        self._carriers: dict[str, GrpcGearCarrier] = {}
        self._holders: tuple[str | None, ...] = (None,) * NUM_PARTITIONS
        self._incarnations: Mapping[str, int] = {}
        self._lease_seconds = 0.0
        self._versions: dict[str, int] = {}
        self._keepers: set[str] = set()
        """Processes that store gradients for their replacement."""
        self._successors: dict[str, str] = {}
        """Address of the slow gear that succeeds a process, by process."""
        self._source = ""
        self._pending: PendingDelivery | None = None
        self._lock = threading.Lock()
        self._delivering = threading.Lock()
        self._glancing = threading.Lock()
        self._max_ids = max(1, config.part_bytes // (4 * dim + _BYTES_BESIDE))
        self._await_gears()

    @property
    def dense_version(self) -> int:
        with self._lock:
            return max(self._versions.values(), default=0)

    def features(self, ids: Ids) -> FeatureReply:
        vectors_KD = np.zeros((len(ids), self._dim), np.float32)
        versions, times = np.zeros(len(ids), np.int64), np.zeros(len(ids), np.float64)
        failures: dict[int, Failure] = {}
        left = np.arange(len(ids))
        backoff = self._backoff()
        while len(left):
            calls = [
                (address, places, self._asked(address, ids[places]))
                for address, places in routes(ids, left, self._holders, self._max_ids)
            ]
            unanswered = []
            for address, places, call in calls:
                try:
                    reply = call()
                except _PASSING as exc:
                    backoff.error = exc
                    unanswered.append(places)
                    continue
                vectors_KD[places], versions[places], times[places] = reply.vectors_KD, reply.versions, reply.times
                failures.update(reply.failures)
                self._record_version(address, reply.dense_version)
            left = np.concatenate([np.empty(0, np.int64), *unanswered])
            if len(left):
                self._pause(backoff)
                self._refresh()
        return FeatureReply(
            vectors_KD=vectors_KD,
            versions=versions,
            times=times,
            failures=failures,
            dense_version=self.dense_version,
        )

    def deliver(self, delivery: Delivery) -> GearAccount:
        """Send a delivery. After an error, the same delivery continues with the parts not acknowledged."""
        with self._delivering:
            self._source = delivery.source
            if self._pending is None or self._pending.number != (delivery.source, delivery.sequence):
                self._pending = PendingDelivery(delivery, self._holders, self._max_ids)
            pending, parts = self._pending, self._pending.parts
            delivery = replace(delivery, lost=self._ledger.total().lost)
            backoff, began = self._backoff(), time.monotonic()
            while parts:
                calls = [(part, self._send(delivery, part)) for part in parts]
                parts[:] = map(self._sent, parts)  # from now on they may be counted, until a reply denies it
                left: list[tuple[DeliveryPart, DeliveryPart, Exception]] = []
                for (before, call), part in zip(calls, list(parts), strict=True):
                    try:
                        self._taken(before, call(), delivery.sequence)
                        parts.remove(part)
                    except _PASSING as exc:
                        backoff.error = exc
                        left.append((before, part, exc))
                if left:
                    self._pause(backoff)
                    self._refresh()
                waits = time.monotonic() - began < self._config.recovery_timeout_seconds / 2
                for before, part, error in left:
                    parts.remove(part)
                    parts.extend(self._again(pending, self._known(before, part, error), waits=waits))
            self._pending = None
        return self._ledger.total()

    def flush(self) -> None:
        done: set[str] = set()
        backoff = self._backoff()
        timeout = self._config.hosted_timeout_seconds

        def flush(carrier: GrpcGearCarrier) -> AwaitReply[int]:
            return carrier.flush(self._name, timeout)

        while left := [address for address in self._addresses() if address not in done]:
            for address, call in [(address, self._start(address, flush)) for address in left]:
                try:
                    self._record_version(address, call())
                    done.add(address)
                except _PASSING as exc:
                    backoff.error = exc
            if not done >= set(left):
                self._pause(backoff)
                self._refresh()

    def account(self, source: str | None = None) -> GearAccount:
        """Return the account of the gradients. For a dead slow gear, ``lost`` is known once its lease has ended."""
        self._refresh()
        if source is None:
            states, _ = self._describe([])
            return sum((state.account for state in states), GearAccount())
        self._account()
        return self._ledger.total()

    def close(self) -> None:
        with self._lock:
            carriers, self._carriers = self._carriers, {}
        for carrier in carriers.values():
            carrier.close()

    def _await_gears(self) -> None:
        backoff = self._backoff()
        while True:
            try:
                self._refresh(required=True)
                states, silent = self._describe([])
            except (AttemptFailed, SchedulerUnavailable) as exc:
                backoff.error = exc
                states, silent = [], []
            if states and not silent and None not in self._holders:
                break
            self._pause(backoff)
        for state in states:
            if state.dim != self._dim:
                raise InvalidArgument(
                    f"dim is {self._dim}; the slow gear of {self._name!r} at {state.address} makes features of "
                    f"width {state.dim}"
                )
            self._record_version(state.address, state.dense_version)
            self.gradients_per_id = state.gradients_per_id
        self._record_keepers(states)

    def _asked(self, address: str | None, ids: Ids) -> AwaitReply[FeatureReply]:
        timeout = self._config.hosted_timeout_seconds
        return self._start(
            address, lambda carrier: carrier.features(self._name, ids, self._dim, self._freshness, timeout)
        )

    def _send(self, delivery: Delivery, part: DeliveryPart) -> AwaitReply[DeliveryAck]:
        sent = replace(
            delivery,
            source=part.source,
            ids=delivery.ids[part.positions],
            gradients_KD=delivery.gradients_KD[part.positions],
            versions=delivery.versions[part.positions],
        )
        config = self._config
        timeout = config.hosted_timeout_seconds if self._wait else config.attempt_timeout_seconds
        return self._start(
            part.address,
            lambda carrier: carrier.deliver(
                self._name, sent, wait=self._wait, sent_to=part.process, timeout_seconds=timeout
            ),
        )

    def _taken(self, part: DeliveryPart, taken: DeliveryAck, sequence: int) -> None:
        self._record_version(part.address, taken.dense_version)
        if taken.is_repeat and not part.process:
            logger.warning(
                "delivery %d of %r is a duplicate: an earlier process of this name came further. Nothing is counted "
                "twice. Continue at its step (load_state_dict of the SlowGear), or use another stream name",
                sequence,
                part.source,
            )
        self._ledger.record(taken.process, taken.account)

    def _sent(self, part: DeliveryPart) -> DeliveryPart:
        """Return a part marked as sent to the process at its address."""
        return part if part.process or part.address is None else replace(part, process=self._process(part.address))

    def _known(self, before: DeliveryPart, part: DeliveryPart, error: Exception) -> DeliveryPart:
        """Return a part after an error, with the process that may have counted it."""
        answered = self._process(before.address or ""), self._successors.get(part.process) == before.address
        if isinstance(error, NotHolder) and (part.process == answered[0] or answered[1]):
            return replace(part, process="")  # the process has said that it lacks the part
        return before if isinstance(error, NotSent | NotHolder) else part

    def _again(self, pending: PendingDelivery, part: DeliveryPart, *, waits: bool) -> list[DeliveryPart]:
        """Return where an unacknowledged part goes next: nowhere, if only a process that is gone knows of it."""
        if not part.process:
            return pending.cut_anew(part, self._holders, self._max_ids)
        owner = address_of(part.process)
        if owner in self._addresses() and self._process(owner) == part.process:
            return [replace(part, address=owner)]
        if part.process in self._keepers:
            self._account()  # finds its successor
            successor = self._successors.get(part.process)
            if successor in self._addresses() or waits:
                return [replace(part, address=successor)]
        self._ledger.record_loss(part.process, len(part.positions))
        return []

    def _process(self, address: str) -> str:
        return process_at(address, self._incarnations.get(address, 0))

    def _start(self, address: str | None, begin: Callable[[GrpcGearCarrier], AwaitReply[R]]) -> AwaitReply[R]:
        def nobody() -> R:
            raise NotSent(f"no slow gear of {self._name!r} holds some partitions")

        if address is None:
            return nobody
        with self._lock:
            carrier = self._carriers.get(address)
            if carrier is None:
                carrier = self._carriers[address] = self._open_carrier(address, self._glance)
        try:
            return begin(carrier)
        except AttemptFailed as exc:  # another thread has just closed the connection
            error = exc

        def failed() -> R:
            raise error

        return failed

    def _glance(self) -> None:
        """Close connections, during a wait for a reply, to slow gears that no longer hold a partition."""
        if self._glancing.acquire(blocking=False):
            try:
                self._read_holders()
            except SchedulerUnavailable as exc:
                logger.debug("%s", exc)
            finally:
                self._glancing.release()

    def _refresh(self, *, required: bool = False) -> None:
        """Ask the scheduler for the holders; account for those that are gone."""
        try:
            self._read_holders()
        except SchedulerUnavailable:
            if required:
                raise
            return  # it may come back; the known slow gears stay
        if self._ledger.knows_gone(self._addresses()):
            self._account()

    def _read_holders(self) -> None:
        found = self._ask_holders()
        self._lease_seconds = found.lease_seconds
        if len(found.holders) == NUM_PARTITIONS:
            self._holders, self._incarnations = found.holders, found.incarnations
        live = self._addresses()
        with self._lock:
            gone = [self._carriers.pop(address) for address in list(self._carriers) if address not in live]
            self._versions = {address: version for address, version in self._versions.items() if address in live}
        for carrier in gone:
            carrier.close()

    def _account(self) -> None:
        states, silent = self._describe([self._source])
        self._record_keepers(states)
        self._ledger.update(states, silent, self._keepers)
        for state in states:
            self._record_version(state.address, state.dense_version)

    def _record_keepers(self, states: Sequence[GearState]) -> None:
        for state in states:
            if state.keeps_gradients:
                self._keepers.add(state.process)
                self._successors.update(dict.fromkeys(state.taken_over, state.address))

    def _describe(self, sources: Sequence[str]) -> tuple[list[GearState], list[str]]:
        """Return the reports of every slow gear, and the addresses of those that do not answer."""
        timeout = min(_DESCRIBE_SECONDS, self._config.attempt_timeout_seconds)
        calls = [
            (address, self._start(address, lambda carrier: carrier.describe(sources, timeout)))
            for address in self._addresses()
        ]
        states, silent = [], []
        for address, call in calls:
            try:
                states.append(call())
            except (AttemptFailed, GeartrainError) as exc:
                logger.debug("slow gear %s: %s", address, exc)
                silent.append(address)
        return states, silent

    def _addresses(self) -> list[str]:
        return sorted({holder for holder in self._holders if holder is not None})

    def _record_version(self, address: str | None, dense_version: int) -> None:
        """Record a slow gear's version; all of them go on side by side, and back together at a restore."""
        if address is not None:
            with self._lock:
                self._versions[address] = dense_version

    def _backoff(self) -> Backoff:
        return Backoff(self._config.recovery_timeout_seconds, longest_pause_seconds=_LONGEST_PAUSE_SECONDS)

    def _pause(self, backoff: Backoff) -> None:
        """Back off before the next attempt. Raises GearUnavailable after the time limit."""
        if backoff.seconds:  # the length of a lease is known once the holders are
            backoff.seconds = max(self._config.recovery_timeout_seconds, _LEASES * self._lease_seconds)
        if backoff.is_fresh:
            logger.warning(
                "slow gears of %r: %s; waiting up to %g s (the ids of one that died are free when its lease ends: "
                "scheduler setting stream_lease_seconds)",
                self._name,
                backoff.error or "some ids have no holder",
                backoff.seconds,
            )
        if not backoff.pause():
            raise GearUnavailable(
                f"the slow gears of {self._name!r} did not answer for all ids within {backoff.seconds:g} s: "
                f"{backoff.error or 'some partitions have no holder'}. Start them with 'geartrain slowgear', or raise "
                "the client setting recovery_timeout_seconds (it is waited for one and a half leases at least)"
            ) from backoff.error
