"""The slow gears of other processes, as a fast gear reaches them: found through the scheduler, asked again until one
answers.

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
from geartrain.ams.rpc.client.gear import GrpcGearCarrier
from geartrain.ams.rpc.client.patience import Patience
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
    Failure,
    FeatureReply,
    Freshness,
    GearAccount,
    GearState,
    Taken,
    address_of,
    process_at,
)
from geartrain.ams.values.scheduler_messages import StreamHolders
from geartrain.ams.values.specs import Ids

logger = logging.getLogger(__name__)

R = TypeVar("R")
AwaitReply = Callable[[], R]
_BYTES_BESIDE = 24
"""Of an id in a message, beside its vector."""
_PASSING = (AttemptFailed, NotHolder, GearUnavailable)
"""What may be another way in a moment."""
_DESCRIBE_SECONDS = 5.0
_LONGEST_PAUSE_SECONDS = 0.5
_LEASES = 1.5
"""The partitions of a slow gear that died are free after one lease; the others need a moment to take them."""


class RemoteGears:
    """Implements :class:`geartrain.ams.values.gear_messages.GearPort`. Thread-safe.

    A request goes to the slow gears that hold the partitions of its ids, in messages of at most ``part_bytes``. Where
    one does not answer, or holds a partition no more, the scheduler is asked again, for ``recovery_timeout_seconds`` or
    one and a half leases, whichever is longer (0: not at all).

    A part of a delivery keeps its source and number until it is acknowledged. Which nobody can have taken (it was
    refused, or there was no connection) is cut anew for the new holders. Else it is sent again to the same process
    while that one holds anything: so it counts once. Of one that died nobody can tell whether it had applied it. No
    gradient may be applied twice, so it is given up, counted in ``account().lost`` and logged: an upper bound of what
    is missing from the weights. But one that keeps gradients in a store is waited for, half of the time that there is:
    who is started in its place can tell.
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
        """``open_carrier`` (address, on_wait) opens the way to a slow gear; on_wait is to be called now and then while
        a reply is waited for. ``wait``: a delivery returns when the updates it made due are applied. Raises
        GearUnavailable, InvalidArgument (the slow gears make features of another width)."""
        self._name = name
        self._dim = dim
        self._ask_holders = holders
        self._open_carrier = open_carrier
        self._config = config
        self._wait = wait
        self._freshness = freshness
        self.gradients_per_id = 0
        """That make one backward pass in the slow gears."""
        self._ledger = GearLedger(name)
        self._carriers: dict[str, GrpcGearCarrier] = {}
        self._holders: tuple[str | None, ...] = (None,) * NUM_PARTITIONS
        self._incarnations: Mapping[str, int] = {}
        self._lease_seconds = 0.0
        self._versions: dict[str, int] = {}
        self._keepers: set[str] = set()
        """Processes that keep gradients for who is started in their place."""
        self._successors: dict[str, str] = {}
        """By process: the address of the slow gear that goes on for it."""
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
        patience = self._patience()
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
                    patience.error = exc
                    unanswered.append(places)
                    continue
                vectors_KD[places], versions[places], times[places] = reply.vectors_KD, reply.versions, reply.times
                failures.update(reply.failures)
                self._record_version(address, reply.dense_version)
            left = np.concatenate([np.empty(0, np.int64), *unanswered])
            if len(left):
                self._pause(patience)
                self._refresh()
        return FeatureReply(
            vectors_KD=vectors_KD,
            versions=versions,
            times=times,
            failures=failures,
            dense_version=self.dense_version,
        )

    def deliver(self, delivery: Delivery) -> GearAccount:
        """See :class:`GearPort`. After an error, the same delivery goes on with the parts not acknowledged."""
        with self._delivering:
            self._source = delivery.source
            if self._pending is None or self._pending.number != (delivery.source, delivery.sequence):
                self._pending = PendingDelivery(delivery, self._holders, self._max_ids)
            pending, parts = self._pending, self._pending.parts
            delivery = replace(delivery, lost=self._ledger.total().lost)
            patience, began = self._patience(), time.monotonic()
            while parts:
                calls = [(part, self._send(delivery, part)) for part in parts]
                parts[:] = map(self._sent, parts)  # from now on they may be counted, until somebody says they are not
                left: list[tuple[DeliveryPart, DeliveryPart, Exception]] = []
                for (before, call), part in zip(calls, list(parts), strict=True):
                    try:
                        self._taken(before, call(), delivery.sequence)
                        parts.remove(part)
                    except _PASSING as exc:
                        patience.error = exc
                        left.append((before, part, exc))
                if left:
                    self._pause(patience)
                    self._refresh()
                waits = time.monotonic() - began < self._config.recovery_timeout_seconds / 2
                for before, part, error in left:
                    parts.remove(part)
                    parts.extend(self._again(pending, self._known(before, part, error), waits=waits))
            self._pending = None
        return self._ledger.total()

    def flush(self) -> None:
        done: set[str] = set()
        patience = self._patience()
        timeout = self._config.hosted_timeout_seconds

        def flush(carrier: GrpcGearCarrier) -> AwaitReply[int]:
            return carrier.flush(self._name, timeout)

        while left := [address for address in self._addresses() if address not in done]:
            for address, call in [(address, self._start(address, flush)) for address in left]:
                try:
                    self._record_version(address, call())
                    done.add(address)
                except _PASSING as exc:
                    patience.error = exc
            if not done >= set(left):
                self._pause(patience)
                self._refresh()

    def account(self, source: str | None = None) -> GearAccount:
        """See :class:`GearPort`. Of one that is dead, ``lost`` is known once its lease has run out."""
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
        patience = self._patience()
        while True:
            try:
                self._refresh(required=True)
                states, silent = self._describe([])
            except (AttemptFailed, SchedulerUnavailable) as exc:
                patience.error = exc
                states, silent = [], []
            if states and not silent and None not in self._holders:
                break
            self._pause(patience)
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

    def _send(self, delivery: Delivery, part: DeliveryPart) -> AwaitReply[Taken]:
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

    def _taken(self, part: DeliveryPart, taken: Taken, sequence: int) -> None:
        self._record_version(part.address, taken.dense_version)
        if taken.is_repeat and not part.process:
            logger.warning(
                "delivery %d of %r was counted before, by a process of this name that came further: nothing is counted "
                "twice. Go on at its step (load_state_dict of the SlowGear), or take another stream name",
                sequence,
                part.source,
            )
        self._ledger.record(taken.process, taken.account)

    def _sent(self, part: DeliveryPart) -> DeliveryPart:
        """A part, when it is under way."""
        return part if part.process or part.address is None else replace(part, process=self._process(part.address))

    def _known(self, before: DeliveryPart, part: DeliveryPart, error: Exception) -> DeliveryPart:
        """A part, after an error: who may have counted it."""
        answered = self._process(before.address or ""), self._successors.get(part.process) == before.address
        if isinstance(error, NotHolder) and (part.process == answered[0] or answered[1]):
            return replace(part, process="")  # who knows has said that it is not there
        return before if isinstance(error, NotSent | NotHolder) else part

    def _again(self, pending: PendingDelivery, part: DeliveryPart, *, waits: bool) -> list[DeliveryPart]:
        """Where a part goes that was not acknowledged: nowhere, if only one that is gone could tell whether it was."""
        if not part.process:
            return pending.cut_anew(part, self._holders, self._max_ids)
        owner = address_of(part.process)
        if owner in self._addresses() and self._process(owner) == part.process:
            return [replace(part, address=owner)]
        if part.process in self._keepers:
            self._account()  # who goes on for it says so
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
        except AttemptFailed as exc:  # another thread has just hung up
            error = exc

        def failed() -> R:
            raise error

        return failed

    def _glance(self) -> None:
        """While a reply is waited for: hang up on slow gears that hold nothing any more."""
        if self._glancing.acquire(blocking=False):
            try:
                self._read_holders()
            except SchedulerUnavailable as exc:
                logger.debug("%s", exc)
            finally:
                self._glancing.release()

    def _refresh(self, *, required: bool = False) -> None:
        """Ask the scheduler who holds what; account for those who are gone."""
        try:
            self._read_holders()
        except SchedulerUnavailable:
            if required:
                raise
            return  # it may come back; the slow gears are known as they were
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
        """What every slow gear says, and which do not answer."""
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
        """The versions of all slow gears go on side by side, and back together when the cluster is restored."""
        if address is not None:
            with self._lock:
                self._versions[address] = dense_version

    def _patience(self) -> Patience:
        return Patience(self._config.recovery_timeout_seconds, longest_pause_seconds=_LONGEST_PAUSE_SECONDS)

    def _pause(self, patience: Patience) -> None:
        """Wait a little before the next attempt. Raises GearUnavailable when it has been long enough."""
        if patience.seconds:  # how long a lease is, is known once the holders are
            patience.seconds = max(self._config.recovery_timeout_seconds, _LEASES * self._lease_seconds)
        if patience.is_fresh:
            logger.warning(
                "slow gears of %r: %s; waiting up to %g s (the ids of one that died are free when its lease ends: "
                "scheduler setting stream_lease_seconds)",
                self._name,
                patience.error or "some ids have no holder",
                patience.seconds,
            )
        if not patience.pause():
            raise GearUnavailable(
                f"the slow gears of {self._name!r} did not answer for all ids within {patience.seconds:g} s: "
                f"{patience.error or 'some partitions have no holder'}. Start them with 'geartrain slowgear', or raise "
                "the client setting recovery_timeout_seconds (it is waited for one and a half leases at least)"
            ) from patience.error
