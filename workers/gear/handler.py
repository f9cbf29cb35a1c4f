"""The slow gear of the role: an engine, the partitions it answers for, and what it leaves when it goes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from geartrain.ams.gear.service.held_partitions import HeldPartitions
from geartrain.ams.rpc.carrier import AttemptFailed
from geartrain.ams.rpc.client.gear import GrpcGearCarrier
from geartrain.ams.values.errors import GeartrainError, GearUnavailable, NotHolder, StaleClient, StateFailed
from geartrain.ams.values.gear_messages import (
    Delivery,
    FeatureReply,
    Freshness,
    GearAccount,
    GearState,
    Taken,
    family_of,
    process_at,
)
from geartrain.ams.values.scheduler_messages import StreamHolders
from geartrain.ams.values.specs import Ids
from geartrain.bridge.gear.engine import DenseEngine

logger = logging.getLogger(__name__)

_HAND_OVER_SECONDS = 5.0


class SlowGearHandler:
    """Implements ``GearHandler`` of ``ams/values/gear_messages.py`` over an engine of this process. Thread-safe."""

    def __init__(
        self,
        name: str,
        address: str,
        engine: DenseEngine,
        partitions: HeldPartitions,
        *,
        incarnation: int,
        gradients_per_id: int,
        holders: Callable[[], StreamHolders],
        open_peer: Callable[[str], GrpcGearCarrier],
    ) -> None:
        """Begin to answer for what ``partitions`` hold; :meth:`drain` ends it."""
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
        self._taken_over: dict[str, Mapping[str, GearAccount]] = {}
        self._lost: dict[str, int] = {}
        self._changed = threading.Condition()
        self._taking = threading.Lock()
        """So that one which is refused is not being taken behind: it was sent again before that was done."""
        self._delivering = 0

    @property
    def dense_version(self) -> int:
        """See :class:`GearHandler`."""
        return self._engine.dense_version

    def features(self, ids: Ids, freshness: Freshness) -> FeatureReply:
        """See :class:`GearHandler`."""
        self._partitions.require(ids)
        return self._engine.features(ids, freshness)

    def deliver(self, delivery: Delivery, *, wait: bool, sent_to: str) -> Taken:
        """See :class:`GearHandler`."""
        if sent_to not in ("", self._process):
            raise NotHolder(f"this slow gear is {self._process}; nobody knows whether {sent_to} had taken it")
        with self._counted():
            try:
                with self._taking:
                    is_repeat = self._engine.has_counted(delivery)
                    if not is_repeat:
                        self._partitions.require(delivery.ids)
                    self._engine.add(delivery)
                    self._lost[family_of(delivery.source)] = delivery.lost
                self._engine.apply_soon(wait=wait)
            except StateFailed as exc:  # another one takes its place
                raise GearUnavailable(f"slow gear {self._process} takes no gradients any more: {exc}") from exc
        return Taken(
            account=self._account(family_of(delivery.source)),
            dense_version=self.dense_version,
            process=self._process,
            is_repeat=is_repeat,
        )

    def require_whole(self) -> None:
        """Raise StaleClient if it can neither count nor apply gradients any more, so that another should have its
        partitions."""
        if (torn := self._engine.batcher.torn) is not None:
            raise StaleClient(f"slow gear {self._process} cannot tell any more what it has counted: {torn!r}")

    def flush(self) -> None:
        """See :class:`GearHandler`."""
        self._engine.flush()

    def describe(self, sources: Sequence[str]) -> GearState:
        """See :class:`GearHandler`."""
        families: list[str | None] = [*sorted({family_of(source) for source in sources})] or [None]
        report: dict[str, Any] = {} if self._engine.cache is None else self._engine.cache.report()
        error = self._engine.update_error
        return GearState(
            name=self.name,
            dim=self.dim,
            address=self._address,
            process=self._process,
            partitions=tuple(sorted(self._partitions.now)),
            dense_version=self.dense_version,
            cache_hits=report.get("hits", 0),
            cache_misses=report.get("misses", 0),
            queued_ids=self._engine.queued_ids,
            account=sum(map(self._account, families), GearAccount()),
            uptime_seconds=time.monotonic() - self._started,
            error="" if error is None else str(error),
            lost=dict(self._lost),
            taken_over=tuple(sorted(self._taken_over)),
            gradients_per_id=self._gradients_per_id,
        )

    def take_over(self, process: str, accounts: Mapping[str, GearAccount]) -> None:
        """See :class:`GearHandler`."""
        with self._changed:
            self._taken_over[process] = dict(accounts)
        logger.info("slow gear %s has left and handed its account over", process)

    def drain(self) -> None:
        """Refuse what is new, apply all that waits, say what became of it, and give the partitions back.

        What cannot be applied is lost: it is logged, nobody takes the account over, and fast gears count it.
        """
        self._partitions.refuse()
        with self._changed:
            self._changed.wait_for(lambda: not self._delivering)
        try:
            self._engine.close()
            logger.info("drained: %s", self._engine.account())
        except GeartrainError as exc:
            logger.error("leaving with gradients that were not applied, %s: %s", self._engine.account(), exc)
        except Exception:  # of the user's module
            logger.exception("leaving with gradients that were not applied, %s", self._engine.account())
        try:
            if not (self._engine.account().waiting + self._engine.account().due):
                self._hand_over()
        except GeartrainError as exc:
            logger.warning("nobody has taken the account over: %s", exc)
        finally:
            self._partitions.leave()

    def _hand_over(self) -> None:
        """Tell another slow gear what became of the gradients, before this one's partitions are free."""
        accounts = {**self._taken_over, self._process: self._engine.families()}
        for address in sorted({holder for holder in self._holders().holders if holder} - {self._address}):
            peer = self._open_peer(address)
            try:
                for process, handed in accounts.items():
                    peer.hand_over(self.name, process, handed, _HAND_OVER_SECONDS)
                return
            except (AttemptFailed, GeartrainError) as exc:
                logger.info("slow gear %s does not take the account: %s", address, exc)
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
