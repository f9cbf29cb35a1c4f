"""What slow gears that are gone have left in a store that others share: taken over, applied, and answered for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from geartrain.ams.cluster import Cluster
from geartrain.ams.errors import GeartrainError, GearUnavailable, NotHolder
from geartrain.ams.gear.remote import heir_partition
from geartrain.ams.gear_messages import Delivery, GearAccount
from geartrain.ams.storage.kv import KeyValueStore
from geartrain.ams.transport.carrier import StreamHolders
from geartrain.ams.words import counted
from geartrain.bridge.gear.engine import DenseEngine

logger = logging.getLogger(__name__)


@dataclass
class Journal:
    """An engine on the gradients that one slow gear keeps or has left, and what it holds."""

    engine: DenseEngine
    cluster: Cluster
    store: KeyValueStore | None

    def close(self) -> None:
        """Let go of it."""
        if self.store is not None:
            self.store.close()
        self.cluster.close()


class Heirs:
    """The journals of others that this slow gear has taken over. Thread-safe.

    The heir of a slow gear at an address is whoever holds the partition that the address hashes to. It opens the
    journal, which shuts its last owner out (also of the dense table, whose stream it takes over), applies every
    gradient that waits there, and takes deliveries that were sent to that owner and not acknowledged.
    """

    def __init__(self, address: str, open_journal: Callable[[str], Journal]) -> None:
        self._address = address
        self._open = open_journal
        self._journals: dict[str, Journal] = {}
        self._lock = threading.Lock()

    @property
    def former(self) -> tuple[str, ...]:
        """The addresses whose journals it has."""
        with self._lock:
            return tuple(sorted(self._journals))

    def look(self, holders: StreamHolders, held: frozenset[int]) -> None:
        """Take over what is left to this slow gear, which holds these partitions; give up what is not its own."""
        live = set(holders.holders)
        for address in holders.incarnations:
            if self._is_broken(address):  # its store failed it: what is there has to be read again
                self._give_up(address)
            if address in (*live, self._address) or heir_partition(address) not in held:
                self._give_up(address)
            elif address not in self._journals:
                try:
                    self._take_over(address)
                except GeartrainError as exc:
                    logger.warning("what slow gear %s left cannot be taken over yet: %s", address, exc)
                except Exception:  # of the user's module
                    logger.exception("what slow gear %s left cannot be taken over yet", address)

    def deliver(self, former: str, delivery: Delivery) -> GearAccount:
        """Take, and apply, what was sent to a slow gear that is gone. Raises NotHolder."""
        with self._lock:
            journal = self._journals.get(former)
            if journal is None:
                raise NotHolder(f"what slow gear {former} left is not here (yet); the scheduler knows who is its heir")
            journal.engine.fence(delivery)
            try:
                journal.engine.add(delivery)
                journal.engine.flush()
            except GearUnavailable as exc:  # its owner is back
                raise NotHolder(f"what slow gear {former} left is not here any more: {exc}") from exc
        return self.account(delivery.source)

    def account(self, family: str | None) -> GearAccount:
        """What became of the gradients of a fast gear, or of all, that were given to those who are gone."""
        with self._lock:
            accounts = [journal.engine.family_account(family) for journal in self._journals.values()]
        return sum(accounts, GearAccount())

    def close(self) -> None:
        """Let go of all."""
        with self._lock:
            for journal in self._journals.values():
                journal.close()
            self._journals.clear()

    def _take_over(self, address: str) -> None:
        journal = self._open(address)
        try:
            waiting = journal.engine.account()
            journal.engine.flush()
        except BaseException:
            journal.close()
            raise
        left = counted(waiting.waiting + waiting.due, "gradient")
        logger.warning("slow gear %s is gone: %s that it had left were applied here", address, left)
        with self._lock:
            self._journals[address] = journal

    def _is_broken(self, address: str) -> bool:
        with self._lock:
            journal = self._journals.get(address)
        return journal is not None and journal.engine.lost is not None

    def _give_up(self, address: str) -> None:
        with self._lock:
            journal = self._journals.pop(address, None)
        if journal is not None:
            journal.close()
