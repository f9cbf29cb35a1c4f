"""What became of the gradients of one fast gear, when slow gears come and go."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from dataclasses import replace

from geartrain.ams.values.gear_messages import GearAccount, GearState
from geartrain.ams.values.text import counted

logger = logging.getLogger(__name__)
_MEMORY = "#"


def journal_of(address: str, incarnation: int, *, survives: bool) -> str:
    """Names what a slow gear accounts for; see :class:`geartrain.ams.values.gear_messages.GearState`."""
    return address if survives else f"{address}{_MEMORY}{incarnation}"


def address_of(journal: str) -> str:
    """The slow gear that a journal is of."""
    return journal.partition(_MEMORY)[0]


class GearLedger:
    """The last that every slow gear told; of one that is gone, what somebody took over, else what is lost. Thread-safe.

    A gradient counts as lost if its slow gear held it in memory, is gone, and never told that it had applied or dropped
    it: an upper bound by what it did between its last word and its end. What is in a journal that survives is as it was
    told last, until somebody takes the journal over. One that only seemed to be gone and is heard again had lost
    nothing.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._told: dict[str, GearAccount] = {}
        self._buried: dict[str, GearAccount] = {}
        self._given_up = 0
        self._lock = threading.Lock()

    def note(self, journal: str, account: GearAccount) -> None:
        """A slow gear has told what became of the gradients that it was given."""
        with self._lock:
            self._told[journal] = account
            self._buried.pop(journal, None)

    def give_up(self, journal: str, count: int) -> None:
        """A slow gear is gone that was sent so many gradients, and did not say whether it has taken them."""
        with self._lock:
            self._given_up += count
        logger.warning(
            "slow gear %s of %r is gone: %s of a delivery that it did not acknowledge count as lost",
            address_of(journal),
            self._name,
            counted(count, "gradient"),
        )

    def knows_gone(self, live: Iterable[str]) -> bool:
        """Whether a slow gear that has told something is not at any of these addresses."""
        addresses = set(live)
        with self._lock:
            return any(address_of(journal) not in addresses for journal in self._told)

    def settle(self, states: Iterable[GearState], silent: Iterable[str]) -> None:
        """These are all slow gears there are, and ``silent`` the addresses of those that did not answer."""
        states, unheard = list(states), set(silent)
        former = {journal for state in states for journal in state.former}
        with self._lock:
            for state in states:
                self._told[state.journal] = state.account
                self._buried.pop(state.journal, None)
            live = {state.journal for state in states}
            for journal in [one for one in self._told if one not in live and address_of(one) not in unheard]:
                if journal in former:
                    del self._told[journal]  # its gradients are in the account of the one that took over
                elif _MEMORY in journal:
                    self._bury(journal)

    def total(self) -> GearAccount:
        """What became of all gradients."""
        with self._lock:
            given_up = GearAccount(received=self._given_up, lost=self._given_up)
            return sum((*self._told.values(), *self._buried.values()), given_up)

    def _bury(self, journal: str) -> None:
        account = self._told.pop(journal)
        lost = account.waiting + account.due
        self._buried[journal] = replace(account, waiting=0, due=0, lost=account.lost + lost)
        logger.log(
            logging.WARNING if lost else logging.INFO,
            "slow gear %s of %r is gone: %s that it held, or had not yet said to be applied, count as lost",
            address_of(journal),
            self._name,
            counted(lost, "gradient"),
        )
