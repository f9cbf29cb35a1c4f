"""What fast and slow gears say to each other: plain values, the same in one process and over the wire.

Legend: D width of a dense feature, K distinct ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from geartrain.ams.values.errors import GeartrainError, SampleError, error_named
from geartrain.ams.values.rpc import Rpc
from geartrain.ams.values.specs import Ids

Features = npt.NDArray[np.float32]


class Failure(NamedTuple):
    """Why there is no dense feature, or no gradient, of one id."""

    error: str
    """Name of the class of :mod:`geartrain.ams.values.errors` that says it."""
    reason: str


Failures = Mapping[int, Failure]


class Freshness(NamedTuple):
    """Which features of a cache will do."""

    max_age_seconds: float | None = None
    max_version_lag: int | None = None
    """Dense updates since it was computed."""


@dataclass(frozen=True, kw_only=True)
class FeatureReply:
    """Dense features of K distinct ids, in the order of the request."""

    vectors_KD: Features
    """[K, D] float32; zeros where there is a failure."""
    versions: npt.NDArray[np.int64]
    """[K]: dense version of the weights that computed each."""
    times: npt.NDArray[np.float64]
    """[K]: unix seconds at which each was computed."""
    failures: Failures
    dense_version: int
    """Of the weights that the slow gear holds now."""

    def at(self, chosen: npt.NDArray[Any]) -> FeatureReply:
        """Those features alone; ``chosen`` are their places, or which they are."""
        return replace(
            self, vectors_KD=self.vectors_KD[chosen], versions=self.versions[chosen], times=self.times[chosen]
        )


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """The feature gradients of one step of one fast gear: K *gradients*, one for each distinct id."""

    source: str
    """The fast gear. Behind a tab: a series of deliveries of its own."""
    incarnation: int
    """Of the fast gear: a lower one than was seen of this source is refused."""
    sequence: int
    """From 1, rising by source: a delivery that is sent again counts once."""
    ids: Ids
    """[K] int64, distinct."""
    gradients_KD: Features
    """[K, D] float32, finite."""
    versions: npt.NDArray[np.int64]
    """[K]: dense versions of the features that the gradients are of."""
    lr: float | None
    """Learning rate of the dense update that they become part of; None: that of the dense table."""
    table: int = 0
    """Incarnation of the dense table that the fast gear knows: another one after a restore. 0: any."""
    lost: int = 0
    """Gradients that the fast gear has to count as lost so far; see :class:`GearAccount`."""


@dataclass(frozen=True, kw_only=True)
class GearAccount:
    """What became of the gradients that were delivered: ``received`` is the sum of all others, always."""

    received: int = 0
    waiting: int = 0
    """In batches that are not full."""
    due: int = 0
    """In full batches whose backward pass is to come."""
    applied: int = 0
    """Part of a dense update."""
    dropped_stale: int = 0
    """Of features too old, by the rule for them."""
    dropped_failed: int = 0
    """Their sample or their backward pass failed."""
    non_finite: int = 0
    lost: int = 0
    """A slow gear died with them, or died before it told that it had taken or applied them."""

    @property
    def adds_up(self) -> bool:
        """Whether every gradient received is in one of the other places."""
        others: int = sum(getattr(self, place.name) for place in fields(self) if place.name != "received")
        return self.received == others

    def __add__(self, other: GearAccount) -> GearAccount:
        names = [place.name for place in fields(self)]
        return GearAccount(**{name: getattr(self, name) + getattr(other, name) for name in names})


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What a slow gear says when it has taken gradients."""

    account: GearAccount
    """Of their source."""
    dense_version: int
    process: str
    is_repeat: bool = False
    """It was counted before, and not again."""


@dataclass(frozen=True, kw_only=True)
class GearState:
    """One slow gear as it describes itself."""

    name: str
    dim: int
    address: str
    process: str
    """Names what the account is of: "address#incarnation"."""
    partitions: tuple[int, ...]
    """It holds now."""
    dense_version: int
    cache_hits: int
    cache_misses: int
    queued_ids: int
    """Whose features wait to be computed."""
    account: GearAccount
    uptime_seconds: float
    error: str = ""
    """Why it does not apply what is due; empty if it does."""
    gradients_per_id: int = 0
    """That make one backward pass."""
    lost: Mapping[str, int] = field(default_factory=dict)
    """By fast gear: the gradients that it counts as lost with slow gears that died, as it said with its last delivery.
    Every slow gear that it delivers to hears it."""
    taken_over: tuple[str, ...] = ()
    """Processes of slow gears that have left in order, or that it goes on for; what became of their gradients is in the
    account."""
    keeps_gradients: bool = False
    """If it is killed, the gradients that wait are kept for a slow gear that is started in its place."""


@dataclass(frozen=True, kw_only=True)
class AskFeatures(Rpc[FeatureReply], name="Features"):
    """Ask for the dense features of distinct ids."""

    name: str
    """Of the dense part, here and below: a slow gear refuses what is meant for another."""
    ids: Ids
    max_age_seconds: float | None = None
    """As of :class:`Freshness`."""
    max_version_lag: int | None = None


@dataclass(frozen=True, kw_only=True)
class PushFeatureGradients(Rpc[Taken]):
    """Hand gradients over."""

    name: str
    delivery: Delivery
    wait: bool
    """Answer when every update that they made due is applied."""
    sent_to: str
    """Process of the slow gear that was sent this before and may have counted it: another one refuses."""


@dataclass(frozen=True, kw_only=True)
class FlushGradients(Rpc[int]):
    """Apply every gradient that waits, partial batches with their true count; the reply is the dense version."""

    name: str


@dataclass(frozen=True, kw_only=True)
class DescribeGear(Rpc[GearState]):
    """Ask how a slow gear is, and what became of the gradients of these fast gears; none: of all."""

    sources: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class HandOver(Rpc[None]):
    """Say what became of the gradients that a slow gear was given which leaves. Idempotent."""

    name: str
    process: str
    """Of the one that leaves."""
    accounts: Mapping[str, GearAccount]
    """By source."""


class GearPort(Protocol):
    """The slow gears of one dense part, as a fast gear reaches them: in its own process, or over the wire.

    Thread-safe. Every call may raise a GeartrainError.
    """

    @property
    def dense_version(self) -> int:
        """The highest dense version that was heard of."""

    def features(self, ids: Ids) -> FeatureReply:
        """Dense features of distinct ids [K] int64. Ids that have none are in ``failures``; the others live."""

    def deliver(self, delivery: Delivery) -> GearAccount:
        """Hand gradients over; in sync mode return when every update that they made due is applied."""

    def flush(self) -> None:
        """Apply every gradient that waits, partial batches with their true count. Returns when that is done."""

    def account(self, source: str | None = None) -> GearAccount:
        """What became of the gradients of one fast gear; None: of all."""

    def close(self) -> None:
        """Let go of what it holds; what waits in slow gears of this process is applied first. Idempotent."""


def process_at(address: str, incarnation: int) -> str:
    """Names the process of a slow gear: one that is started again at the same address is another."""
    return f"{address}#{incarnation}"


def address_of(process: str) -> str:
    """The address of a slow gear's process."""
    return process.partition("#")[0]


def family_of(source: str) -> str:
    """The fast gear that a series of deliveries is of."""
    return source.partition("\t")[0]


def first_error(failures: Failures, what: str) -> GeartrainError:
    """Return the error that stands for all of ``failures``, which are not empty: it names the first id."""
    failure = failures[min(failures)]
    kind = error_named(failure.error)
    others = sorted(failures)[1:]
    named = ", ".join(map(str, others[:8])) + (", …" if len(others) > 8 else "")
    more = f" (and {what} of {len(others)} more: {named})" if others else ""
    error = kind(f"{failure.reason}{more}")
    if isinstance(error, SampleError):
        error.ids = tuple(sorted(failures))
    return error


def without(ids: Ids, failures: Iterable[int]) -> npt.NDArray[np.bool_]:
    """Say which of ``ids`` [K] are not among the failures, [K] bool."""
    return ~np.isin(ids, np.fromiter(failures, np.int64))
