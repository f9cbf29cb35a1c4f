"""What became of the gradients of one fast gear, when slow gears come and go."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace

from geartrain.ams.gear_messages import GearAccount, GearState
from geartrain.ams.words import counted

logger = logging.getLogger(__name__)


def gear_key(address: str, incarnation: int) -> str:
    """One process of a slow gear."""
    return f"{address}#{incarnation}"


@dataclass(frozen=True)
class _Told:
    account: GearAccount
    is_durable: bool


class GearLedger:
    """The last that every slow gear told; of one that is gone, what somebody took over, else what is lost. Thread-safe.

    A gradient counts as lost if its slow gear is gone, left it to nobody, and never told that it had applied or
    dropped it: an upper bound by what it did between its last word and its end.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._told: dict[str, _Told] = {}
        self._gone = GearAccount()
        self._lock = threading.Lock()

    def note(self, key: str, account: GearAccount, *, is_durable: bool) -> None:
        """A slow gear has told what became of the gradients that it was given."""
        with self._lock:
            self._told[key] = _Told(account, is_durable)

    def knows_gone(self, live: Iterable[str]) -> bool:
        """Whether a slow gear that has told something is not at any of these addresses."""
        addresses = set(live)
        with self._lock:
            return any(key.rpartition("#")[0] not in addresses for key in self._told)

    def settle(self, states: Iterable[GearState], silent: Iterable[str]) -> None:
        """These are all slow gears there are; of those at the addresses ``silent`` nothing new is known."""
        states, unheard = list(states), set(silent)
        former = {key for state in states for key in state.former}
        with self._lock:
            for state in states:
                key = gear_key(state.address, state.incarnation)
                self._told[key] = _Told(state.account, state.is_durable)
            live = {gear_key(state.address, state.incarnation) for state in states}
            for key in [key for key in self._told if key not in live]:
                if key.rpartition("#")[0] in unheard:
                    continue
                if key in former:
                    del self._told[key]  # its gradients are in the account of the one that took over
                elif not self._told[key].is_durable:
                    self._bury(key)

    def total(self) -> GearAccount:
        """What became of all gradients."""
        with self._lock:
            return sum((told.account for told in self._told.values()), self._gone)

    def _bury(self, key: str) -> None:
        account = self._told.pop(key).account
        lost = account.waiting + account.due
        self._gone += replace(account, waiting=0, due=0, lost=account.lost + lost)
        if lost:
            logger.warning(
                "slow gear %s of %r is gone: %s that it held, or had not yet said to be applied, count as lost",
                key.rpartition("#")[0],
                self._name,
                counted(lost, "gradient"),
            )
        else:
            logger.info("slow gear %s of %r is gone; nothing waited there", key.rpartition("#")[0], self._name)
