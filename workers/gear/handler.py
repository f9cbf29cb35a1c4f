"""Request handler of a slow gear: an engine, its partitions, and their handover at shutdown."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from geartrain.ams.gear.held_partitions import HeldPartitions
from geartrain.ams.observe.metrics import Metric
from geartrain.ams.rpc.carrier import AttemptFailed
from geartrain.ams.rpc.client.gear import GrpcGearCarrier
from geartrain.ams.rpc.codec.gear import require_distinct
from geartrain.ams.rpc.ping import PingHandler
from geartrain.ams.rpc.server.binding import Call, Handlers
from geartrain.ams.values.errors import (
    GeartrainError,
    GearUnavailable,
    InvalidArgument,
    InvalidRows,
    MessageTooLarge,
    NotHolder,
    StaleClient,
    StateFailed,
    TableNotFound,
)
from geartrain.ams.values.gear_messages import (
    AskFeatures,
    Delivery,
    DeliveryAck,
    DescribeGear,
    FeatureReply,
    FlushGradients,
    Freshness,
    GearAccount,
    GearState,
    HandOver,
    PushFeatureGradients,
    family_of,
    process_at,
)
from geartrain.ams.values.rpc import Ping
from geartrain.ams.values.scheduler_messages import StreamHolders
from geartrain.bridge.gear.engine import DenseEngine
from geartrain.bridge.gear.gradient_journal import GradientJournal

logger = logging.getLogger(__name__)

_HAND_OVER_SECONDS = 5.0
_BYTES_BESIDE = 16
"""Bytes of an id in a reply, beside its vector."""


class SlowGearHandler:
    """Answers requests with an engine of this process; checks input from the network. Thread-safe."""

    def __init__(
        self,
        name: str,
        address: str,
        engine: DenseEngine,
        partitions: HeldPartitions,
        *,
        incarnation: int,
        gradients_per_id: int,
        max_message_bytes: int,
        holders: Callable[[], StreamHolders],
        open_peer: Callable[[str], GrpcGearCarrier],
        journal: GradientJournal | None = None,
        open_engine: Callable[[], DenseEngine] | None = None,
    ) -> None:
        """Start to serve the partitions of ``partitions``; :meth:`drain` ends it."""
        self.name = name
        self.dim = engine.dim
        self._address = address
        self._engine = engine
        self._partitions = partitions
        self._gradients_per_id = gradients_per_id
        self._holders = holders
        self._open_peer = open_peer
        self._process = process_at(address, incarnation)
        self._started = time.monotonic()
        self._journal = journal
        self._open_engine = open_engine
        """Makes a new engine over a restored dense table; None: restores are not followed."""
        self._predecessors = frozenset(() if journal is None else journal.processes)
        """Killed slow gears whose gradients and accounts the engine has."""
        self._taken_over: dict[str, Mapping[str, GearAccount]] = {gone: {} for gone in self._predecessors}
        self._lost: dict[str, int] = {}
        self._changed = threading.Condition()
        self._taking = threading.Lock()
        """Held while a delivery is taken, so that a repeat of it is not refused while the first is still being
        taken."""
        self._delivering = 0
        self._max_message_bytes = max_message_bytes
        self.by_request: Handlers = {
            Ping: PingHandler("slowgear", lambda: incarnation),
            AskFeatures: self.features,
            PushFeatureGradients: self._push,
            FlushGradients: self._flush,
            DescribeGear: lambda describe, _: self.describe(describe.sources),
            HandOver: self._adopt_accounts,
        }

    def features(self, ask: AskFeatures, _: Call | None = None) -> FeatureReply:
        """Return dense features by id."""
        self._require_name(ask.name)
        require_distinct(ask.ids)
        age = ask.max_age_seconds
        if age is not None and not age >= 0:
            raise InvalidArgument(f"max_age_seconds is {age!r}; it must be >= 0")
        lag = None if ask.max_version_lag is None else min(ask.max_version_lag, 2**62)
        if (size := len(ask.ids) * (4 * self.dim + _BYTES_BESIDE)) > self._max_message_bytes:
            raise MessageTooLarge(
                f"the features of {len(ask.ids)} ids take {size} bytes, the limit is {self._max_message_bytes}; ask "
                "for fewer at once (lower the client's part_bytes), or raise max_message_bytes on both ends"
            )
        self._partitions.require(ask.ids)
        engine = self._engine
        try:
            return engine.features(ask.ids, Freshness(age, lag))
        except TableNotFound:
            self._follow_restore(engine)
            return self._engine.features(ask.ids, Freshness(age, lag))

    def _push(self, push: PushFeatureGradients, _: Call) -> DeliveryAck:
        delivery, lr = push.delivery, push.delivery.lr
        if not len(delivery.ids):
            delivery = replace(delivery, gradients_KD=np.empty((0, self.dim), np.float32))
        if (width := delivery.gradients_KD.shape[1]) != self.dim:
            raise InvalidRows(f"gradients have width {width}, the features have {self.dim}")
        require_distinct(delivery.ids)
        if lr is not None and not (math.isfinite(lr) and lr >= 0):
            raise InvalidArgument(f"lr is {lr!r}; it must be finite and >= 0, or none for the table's own")
        self._require_name(push.name)
        return self.deliver(delivery, wait=push.wait, sent_to=push.sent_to)

    def deliver(self, delivery: Delivery, *, wait: bool, sent_to: str) -> DeliveryAck:
        """Take gradients; with ``wait`` apply the updates they make due. ``sent_to``: process that received the
        delivery before and may have counted it; another one refuses. Empty: none.

        Raises NotHolder, StaleClient (a lower incarnation of the source).
        """
        if sent_to not in ("", self._process, *self._predecessors):
            raise NotHolder(f"this slow gear is {self._process}; whether {sent_to} had counted it is unknown")
        engine = self._engine
        if delivery.table_incarnation > engine.table_incarnation:
            self._follow_restore(engine)
        with self._counted():
            try:
                with self._taking:
                    if delivery.table_incarnation and delivery.table_incarnation != self._engine.table_incarnation:
                        raise TableNotFound(
                            f"the gradients are of a dense table {self.name!r} from before a restore; compute them anew"
                        )
                    is_repeat = self._engine.has_counted(delivery)
                    if not is_repeat:
                        self._partitions.require(delivery.ids)
                    self._engine.add(delivery)
                    self._lost[family_of(delivery.source)] = delivery.lost
                self._engine.apply_soon(wait=wait)
            except StateFailed as exc:  # another slow gear takes its place
                raise GearUnavailable(f"slow gear {self._process} accepts no more gradients: {exc}") from exc
        return DeliveryAck(
            account=self._account(family_of(delivery.source)),
            dense_version=self._engine.dense_version,
            process=self._process,
            is_repeat=is_repeat,
        )

    def require_whole(self) -> None:
        """Raise StaleClient if it can neither count nor apply gradients any more, so that another slow gear should have
        its partitions."""
        if (torn := self._engine.batcher.torn) is not None:
            raise StaleClient(f"slow gear {self._process} no longer knows its counts of gradients: {torn!r}")

    def follow_restore(self) -> None:
        """Start again over a restored dense table, if an update has found one."""
        engine = self._engine
        if isinstance(engine.update_error, TableNotFound):
            self._follow_restore(engine)

    def _follow_restore(self, engine: DenseEngine) -> None:
        """Continue with the rows of a restore; the gradients of ``engine`` and its features are outdated."""
        if self._open_engine is None:
            raise TableNotFound(f"dense table {self.name!r} was restored or dropped; start this slow gear anew")
        with self._taking:
            if engine is self._engine:  # else another thread has just done it
                engine.drop()
                self._engine = self._open_engine()
                self._engine.forget_features()
                logger.warning("dense table %r was restored: its slow gear goes on from there", self.name)

    def flush(self) -> None:
        """Apply all waiting gradients."""
        self._engine.flush()

    def _flush(self, flush: FlushGradients, _: Call) -> int:
        self._require_name(flush.name)
        self.flush()
        return self._engine.dense_version

    def describe(self, sources: Sequence[str]) -> GearState:
        """Return its state; the account is that of ``sources``, by default of all."""
        families: list[str | None] = [*sorted({family_of(source) for source in sources})] or [None]
        report: dict[str, Any] = {} if self._engine.cache is None else self._engine.cache.report()
        error = self._engine.update_error
        return GearState(
            name=self.name,
            dim=self.dim,
            address=self._address,
            process=self._process,
            partitions=tuple(sorted(self._partitions.now)),
            dense_version=self._engine.dense_version,
            cache_hits=report.get("hits", 0),
            cache_misses=report.get("misses", 0),
            queued_ids=self._engine.queued_ids,
            account=sum(map(self._account, families), GearAccount()),
            uptime_seconds=time.monotonic() - self._started,
            error="" if error is None else str(error),
            lost=dict(self._lost),
            taken_over=tuple(sorted(self._taken_over)),
            keeps_gradients=self._journal is not None,
            gradients_per_id=self._gradients_per_id,
        )

    def metrics(self) -> Iterator[Metric]:
        """Yield the figures of :meth:`describe`."""
        state = self.describe(())
        of = state.account
        waiting = {"batch": of.waiting, "backward": of.due}
        ended = {
            "applied": of.applied,
            "stale": of.dropped_stale,
            "failed": of.dropped_failed,
            "non_finite": of.non_finite,
            "lost": of.lost,
        }
        due, became = "Gradients that wait for more gradients, or for a backward pass.", "Gradients, by outcome."
        yield Metric("gear_gradients_waiting", "gauge", due, ("gear", "for"), self._by(waiting))
        yield Metric("gear_gradients_total", "counter", became, ("gear", "outcome"), self._by(ended))
        for name, text, number in (
            ("gear_queued_ids", "Ids whose features wait to be computed.", state.queued_ids),
            ("gear_partitions", "Partitions of ids that the slow gear holds.", len(state.partitions)),
            ("gear_dense_version", "Dense updates of the slow gear's module.", state.dense_version),
            ("gear_failing", "1 if updates that are due fail; the log says why.", int(bool(state.error))),
        ):
            yield Metric(name, "gauge", text, ("gear",), [((self.name,), number)])

    def _by(self, values: Mapping[str, int]) -> list[tuple[tuple[str, str], int]]:
        return [((self.name, key), value) for key, value in values.items()]

    def _adopt_accounts(self, left: HandOver, _: Call) -> None:
        """Take over the account of a slow gear that leaves. Idempotent."""
        self._require_name(left.name)
        if not left.process:
            raise InvalidArgument("process is empty; it must be that of the slow gear that shuts down")
        with self._changed:
            self._taken_over[left.process] = dict(left.accounts)
        logger.info("slow gear %s has left and handed its account over", left.process)

    def _require_name(self, name: str) -> None:
        if name != self.name:
            raise InvalidArgument(f"this slow gear serves {self.name!r}, not {name!r}; look for its address again")

    def drain(self) -> None:
        """Refuse new requests, apply all waiting gradients, hand over the account, and release the partitions.

        Gradients that cannot be applied are lost: that is logged, the account is not handed over, and fast gears count
        it.
        """
        self._partitions.refuse()
        with self._changed:
            self._changed.wait_for(lambda: not self._delivering)
        try:
            self._engine.close()
            logger.info("drained: %s", self._engine.account())
        except GeartrainError as exc:
            logger.error("leaving with gradients that were not applied, %s: %s", self._engine.account(), exc)
        except Exception:  # the user's module may raise anything
            logger.exception("leaving with gradients that were not applied, %s", self._engine.account())
        try:
            if not (self._engine.account().waiting + self._engine.account().due):
                self._hand_over()
        except GeartrainError as exc:
            logger.warning("no slow gear has taken over the account: %s", exc)
        finally:
            self._partitions.release_all()

    def _hand_over(self) -> None:
        """Send the account to another slow gear, before this one's partitions are free."""
        accounts = {**self._taken_over, self._process: self._engine.families()}
        for address in sorted({holder for holder in self._holders().holders if holder} - {self._address}):
            peer = self._open_peer(address)
            try:
                for process, handed in accounts.items():
                    peer.hand_over(self.name, process, handed, _HAND_OVER_SECONDS)
                if self._journal is not None:
                    self._journal.handed_over(self._engine.batcher)
                return
            except (AttemptFailed, GeartrainError) as exc:
                logger.info("slow gear %s has not taken over the account: %s", address, exc)
            finally:
                peer.close()

    def _account(self, family: str | None) -> GearAccount:
        with self._changed:
            handed = [
                account
                for accounts in self._taken_over.values()
                for source, account in accounts.items()
                if family in (None, source)
            ]
        own = self._engine.account() if family is None else self._engine.families().get(family, GearAccount())
        return sum(handed, own)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        with self._changed:
            self._delivering += 1
        try:
            yield
        finally:
            with self._changed:
                self._delivering -= 1
                self._changed.notify_all()
