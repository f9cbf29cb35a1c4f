"""The slow gear of the role: an engine, the partitions it answers for, and what it leaves when it goes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from geartrain.ams.gear.client.ledger import journal_of
from geartrain.ams.rpc.carrier import AttemptFailed, StreamHolders
from geartrain.ams.values.errors import GeartrainError, NotHolder
from geartrain.ams.values.gear_messages import (
    Delivery,
    FeatureReply,
    Freshness,
    GearAccount,
    GearState,
    Taken,
    family_of,
)
from geartrain.ams.values.specs import Ids
from geartrain.bridge.gear.embedded import GearWorker
from geartrain.bridge.gear.engine import DenseEngine
from geartrain.workers.gear.heirs import Heirs
from geartrain.workers.gear.partitions import HeldPartitions

logger = logging.getLogger(__name__)

MAX_DUE = 65_536
"""Gradients that may be due before deliveries wait."""
_HAND_OVER_SECONDS = 5.0


class Peer(Protocol):
    """Another slow gear (``grpc_gear``)."""

    def hand_over(self, name: str, former: str, accounts: Mapping[str, GearAccount], timeout_seconds: float) -> None:
        """Tell it what became of the gradients that a slow gear was given."""
        ...

    def close(self) -> None:
        """Let go of the connection."""
        ...


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
        open_peer: Callable[[str], Peer],
        heirs: Heirs | None,
        survives: bool,
        tick_seconds: float = 1.0,
    ) -> None:
        """``survives``: what waits here is in a store; ``heirs``: which other slow gears share."""
        self.name = name
        self.dim = engine.dim
        self._address = address
        self._engine = engine
        self._partitions = partitions
        self._gradients_per_id = gradients_per_id
        self._holders = holders
        self._open_peer = open_peer
        self._heirs = heirs
        self._journal = journal_of(address, incarnation, survives=survives)
        self._survives = survives
        self._started = time.monotonic()
        self._handed: dict[str, Mapping[str, GearAccount]] = {}
        self._hits = self._misses = 0
        self._changed = threading.Condition()
        self._taking = threading.Lock()
        """So that one which is refused is not being taken behind: it was sent again before that was done."""
        self._delivering = 0
        self._is_leaving = False
        self._worker = GearWorker(engine, tick_seconds=tick_seconds)

    @property
    def dense_version(self) -> int:
        """See :class:`GearHandler`."""
        return self._engine.dense_version

    def features(self, ids: Ids, freshness: Freshness) -> FeatureReply:
        """See :class:`GearHandler`."""
        self._partitions.require(ids)
        return self._engine.features(ids, freshness)

    def deliver(self, delivery: Delivery, *, wait: bool, former: str) -> Taken:
        """See :class:`GearHandler`."""
        is_repeat = False
        if former not in ("", self._journal):
            if self._heirs is None:
                raise NotHolder(f"this slow gear is {self._journal}; nobody knows whether {former} had taken it")
            self._engine.fence(delivery)
            if former in self._holders().holders:
                raise NotHolder(f"slow gear {former} is back; ask it")
            self._heirs.deliver(former, delivery)
        else:
            with self._counted():
                with self._taking:
                    is_repeat = self._engine.has_counted(delivery)
                    if not is_repeat:
                        self._partitions.require(delivery.ids)
                    self._engine.add(delivery)
                if wait:
                    self._engine.apply_all()
                else:
                    self._worker.wake()
                    self._worker.wait_until_due(MAX_DUE)
        family = family_of(delivery.source)
        return Taken(
            account=self._account(family),
            dense_version=self.dense_version,
            journal=self._journal,
            is_repeat=is_repeat,
        )

    def flush(self) -> None:
        """See :class:`GearHandler`."""
        self._engine.flush()

    def describe(self, sources: Sequence[str]) -> GearState:
        """See :class:`GearHandler`."""
        families: list[str | None] = [*sorted({family_of(source) for source in sources})] or [None]
        report: dict[str, Any] = {} if self._engine.cache is None else self._engine.cache.report()
        error = self._worker.error
        return GearState(
            name=self.name,
            dim=self.dim,
            address=self._address,
            journal=self._journal,
            partitions=tuple(sorted(self._partitions.now)),
            dense_version=self.dense_version,
            cache_hits=report.get("hits", 0),
            cache_misses=report.get("misses", 0),
            queued_ids=self._engine.queued_ids,
            account=sum(map(self._account, families), GearAccount()),
            uptime_seconds=time.monotonic() - self._started,
            error="" if error is None else str(error),
            is_durable=self._heirs is not None,
            former=(*sorted(self._handed), *(self._heirs.former if self._heirs is not None else ())),
            gradients_per_id=self._gradients_per_id,
        )

    def take_over(self, former: str, accounts: Mapping[str, GearAccount]) -> None:
        """See :class:`GearHandler`."""
        with self._changed:
            self._handed[former] = dict(accounts)
        logger.info("slow gear %s has left and handed its account over", former)

    @property
    def lost(self) -> str | None:
        """Why it cannot go on: another process has taken over what it keeps."""
        return self._engine.lost

    def look_for_heritage(self) -> None:
        """Take over what others have left. For one thread, now and then."""
        if self._heirs is not None and not self._is_leaving:
            self._heirs.look(self._holders(), self._partitions.now)

    def drain(self) -> None:
        """Refuse what is new, apply all that waits, say what became of it, and give the partitions back.

        What cannot be applied is lost: it is logged, nobody takes the account over, and fast gears count it.
        """
        self._partitions.refuse()
        self._is_leaving = True
        with self._changed:
            self._changed.wait_for(lambda: not self._delivering)
        try:
            self._apply_all()
            self._worker.stop()
            if not self._survives and not (self._engine.account().waiting + self._engine.account().due):
                self._hand_over()
        except GeartrainError as exc:
            logger.warning("nobody has taken the account over: %s", exc)
        finally:
            self._worker.stop()
            self._partitions.leave()

    def _apply_all(self) -> None:
        try:
            self._engine.flush()
            logger.info("drained: %s", self._engine.account())
        except GeartrainError as exc:
            logger.error("leaving with gradients that were not applied, %s: %s", self._engine.account(), exc)
        except Exception:  # of the user's module
            logger.exception("leaving with gradients that were not applied, %s", self._engine.account())

    def _hand_over(self) -> None:
        """Tell another slow gear what became of the gradients, before this one's partitions are free."""
        accounts = {**self._handed, self._journal: self._engine.families()}
        for address in sorted({one for one in self._holders().holders if one and one != self._address}):
            peer = self._open_peer(address)
            try:
                for former, handed in accounts.items():
                    peer.hand_over(self.name, former, handed, _HAND_OVER_SECONDS)
                return
            except (AttemptFailed, GeartrainError) as exc:
                logger.info("slow gear %s does not take the account: %s", address, exc)
            finally:
                peer.close()

    def _account(self, family: str | None) -> GearAccount:
        with self._changed:
            handed = [
                account
                for accounts in self._handed.values()
                for source, account in accounts.items()
                if family in (None, source)
            ]
        total = sum(handed, self._engine.family_account(family))
        return total if self._heirs is None else total + self._heirs.account(family)

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
