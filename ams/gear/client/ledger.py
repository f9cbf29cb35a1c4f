"""Account of a fast gear's gradients: applied, dropped or lost, as slow gears come and go."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterable
from dataclasses import replace

from geartrain.ams.values.gear_messages import GearAccount, GearState, address_of
from geartrain.ams.values.text import counted

logger = logging.getLogger(__name__)


class GearLedger:
    """Last account of every slow gear, and the losses with those that are gone. Thread-safe.

    A gradient counts as lost if its slow gear is gone and never reported it as applied or dropped: an upper bound, too
    high by its work between its last report and its end. A slow gear that answers again had lost nothing; one that left
    in order has handed its account to another.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._told: dict[str, GearAccount] = {}
        self._lost: dict[str, GearAccount] = {}
        self._given_up = 0
        self._lock = threading.Lock()

    def record(self, process: str, account: GearAccount) -> None:
        """Record a slow gear's account of the gradients sent to it."""
        with self._lock:
            self._told[process] = account
            self._lost.pop(process, None)

    def record_loss(self, process: str, count: int) -> None:
        """Record the loss of ``count`` gradients, sent to a slow gear that is gone and did not acknowledge them."""
        with self._lock:
            self._given_up += count
        logger.warning(
            "slow gear %s of %r is gone: %s of a delivery that it did not acknowledge count as lost",
            address_of(process),
            self._name,
            counted(count, "gradient"),
        )

    def knows_gone(self, live: Iterable[str]) -> bool:
        """Return whether a slow gear that has reported is at none of these addresses."""
        addresses = set(live)
        with self._lock:
            return any(address_of(process) not in addresses for process in self._told)

    def update(self, states: Iterable[GearState], silent: Iterable[str], keepers: Collection[str] = ()) -> None:
        """Record all existing slow gears, and the addresses of those that did not answer (``silent``)."""
        states, unheard = list(states), set(silent)
        taken_over = {process for state in states for process in state.taken_over}
        with self._lock:
            for state in states:
                self._told[state.process] = state.account
                self._lost.pop(state.process, None)
            live = {state.process for state in states}
            for process in taken_over:
                self._lost.pop(process, None)
            for process in [known for known in self._told if known not in live and address_of(known) not in unheard]:
                if process in taken_over:
                    del self._told[process]  # its gradients are in the account of its successor
                elif process not in keepers:  # its gradients wait in a store for its replacement
                    self._lose(process)

    def total(self) -> GearAccount:
        """Return the account of all gradients."""
        with self._lock:
            given_up = GearAccount(received=self._given_up, lost=self._given_up)
            return sum((*self._told.values(), *self._lost.values()), given_up)

    def _lose(self, process: str) -> None:
        account = self._told.pop(process)
        lost = account.waiting + account.due
        self._lost[process] = replace(account, waiting=0, due=0, lost=account.lost + lost)
        logger.log(
            logging.WARNING if lost else logging.INFO,
            "slow gear %s of %r is gone: %s that it held, or had not yet said to be applied, count as lost",
            address_of(process),
            self._name,
            counted(lost, "gradient"),
        )
