"""What slow gears that are gone have left in a store that others share: taken over, applied, and answered for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from geartrain.ams.gear.client.remote import heir_partition
from geartrain.ams.rpc.carrier import StreamHolders
from geartrain.ams.storage.kv.store import KeyValueStore
from geartrain.ams.values.errors import GeartrainError, GearUnavailable, NotHolder
from geartrain.ams.values.gear_messages import Delivery, GearAccount
from geartrain.ams.values.text import counted
from geartrain.bridge.gear.engine import DenseEngine, family_accounts
from geartrain.bridge.gear.gradient_batcher import GradientBatcher

logger = logging.getLogger(__name__)

OpenJournal = Callable[[str], tuple[KeyValueStore, GradientBatcher]]
"""Opens what is kept under an address, which shuts its last owner out."""
UseEngine = Callable[[str, GradientBatcher, Callable[[DenseEngine], None]], None]
"""Makes an engine on these gradients, in the stream of that address, for the time of one call."""


@dataclass(frozen=True)
class _Left:
    """What is known of a journal while it is closed."""

    marks: Mapping[str, int]
    """The last delivery of each series."""
    accounts: Mapping[str, GearAccount]
    """By fast gear."""

    @classmethod
    def of(cls, batcher: GradientBatcher) -> _Left:
        marks = {source: mark[1] for source, mark in batcher.report()["sources"].items()}
        return cls(marks, family_accounts(batcher))


class Heirs:
    """The journals of others that this slow gear has taken over. Thread-safe.

    The heir of a slow gear at an address is whoever holds the partition that the address hashes to. It opens the
    journal, which shuts its last owner out (also of the dense table, whose stream it takes over), applies every
    gradient that waits there, and takes deliveries that were sent to that owner and not acknowledged. Journals are
    closed in between: one of a gear that died long ago costs its account.
    """

    def __init__(self, address: str, open_journal: OpenJournal, use_engine: UseEngine) -> None:
        self._address = address
        self._open = open_journal
        self._use_engine = use_engine
        self._left: dict[str, _Left] = {}
        self._lock = threading.Lock()

    @property
    def former(self) -> tuple[str, ...]:
        """The addresses whose journals it has."""
        with self._lock:
            return tuple(sorted(self._left))

    def look(self, holders: StreamHolders, held: frozenset[int]) -> None:
        """Take over what is left to this slow gear, which holds these partitions; give up what is not its own."""
        live = {*holders.holders, self._address}
        for address in holders.incarnations:
            if address in live or heir_partition(address) not in held:
                with self._lock:
                    self._left.pop(address, None)
            elif address not in self.former:
                try:
                    with self._lock:
                        self._take_over(address)
                except GeartrainError as exc:
                    logger.warning("what slow gear %s left cannot be taken over yet: %s", address, exc)
                except Exception:  # of the user's module
                    logger.exception("what slow gear %s left cannot be taken over yet", address)

    def deliver(self, former: str, delivery: Delivery) -> None:
        """Take, and apply, what was sent to a slow gear that is gone. Raises NotHolder."""
        with self._lock:
            left = self._left.get(former)
            if left is None:
                raise NotHolder(f"what slow gear {former} left is not here (yet); the scheduler knows who is its heir")
            if delivery.sequence <= left.marks.get(delivery.source, 0):
                return

            def use(engine: DenseEngine) -> None:
                engine.add(delivery)
                engine.flush()

            try:
                self._with_journal(former, lambda batcher: self._use_engine(former, batcher, use))
            except GearUnavailable as exc:  # its owner is back
                raise NotHolder(f"what slow gear {former} left is not here any more: {exc}") from exc

    def account(self, family: str | None) -> GearAccount:
        """What became of the gradients of a fast gear, or of all, that were given to those who are gone."""
        with self._lock:
            every = [left.accounts for left in self._left.values()]
        found = [account for accounts in every for name, account in accounts.items() if family in (None, name)]
        return sum(found, GearAccount())

    def _take_over(self, address: str) -> None:
        def apply(batcher: GradientBatcher) -> None:
            before = batcher.account()
            waiting = before.waiting + before.due
            if waiting:
                self._use_engine(address, batcher, DenseEngine.flush)
            log = logger.warning if waiting else logger.info
            log("slow gear %s is gone: %s that it had left were applied here", address, counted(waiting, "gradient"))

        self._with_journal(address, apply)

    def _with_journal(self, address: str, work: Callable[[GradientBatcher], None]) -> None:
        store, batcher = self._open(address)
        self._left.pop(address, None)  # after an error it is taken over anew: something may wait in it
        try:
            work(batcher)
            self._left[address] = _Left.of(batcher)
        finally:
            store.close()
