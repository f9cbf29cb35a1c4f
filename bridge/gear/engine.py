"""Engine of a slow gear: computes dense features of ids, and makes dense updates from their gradients.

Legend: D width of a dense feature, K distinct ids, P parameters of the module.
"""

from __future__ import annotations

import logging
import math
import threading
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from geartrain.ams.values.errors import (
    GeartrainError,
    InvalidArgument,
    NonFinite,
    StaleClient,
    StateError,
    StoreUnavailable,
    TableNotFound,
)
from geartrain.ams.values.gear_messages import (
    Delivery,
    Failure,
    FeatureReply,
    Freshness,
    GearAccount,
    family_of,
    without,
)
from geartrain.ams.values.specs import Ids
from geartrain.ams.values.text import counted
from geartrain.bridge.dense.dense_table import DenseTable
from geartrain.bridge.gear.batch_state import DueBatch
from geartrain.bridge.gear.coalescer import Coalescer
from geartrain.bridge.gear.config import SlowGearConfig
from geartrain.bridge.gear.dense_cache import FeatureCache
from geartrain.bridge.gear.dense_pass import DensePass
from geartrain.bridge.gear.gradient_batcher import GradientBatcher
from geartrain.bridge.gear.gradient_journal import GradientJournal
from geartrain.bridge.gear.update_thread import UpdateThread
from geartrain.bridge.rows.transfers import download

logger = logging.getLogger(__name__)


Mode = Literal["async", "sync"]
_ANY = Freshness()
_MAX_DUE = 65_536
"""Most gradients that may be due before deliveries wait."""


@dataclass
class _UnfinishedStep:
    """Batch whose gradients are in ``.grad`` of the parameters; a retry after an error continues from here."""

    batch: DueBatch
    failures: dict[int, Failure]
    is_pushed: bool = False
    """Whether it was pushed: a second push would count twice."""


class DenseEngine:
    """Computes features of ids, batched over the requesting threads, and makes dense updates from due gradients.

    Implements :class:`geartrain.ams.values.gear_messages.GearPort` for a fast gear of this process. Thread-safe. Cost
    of :meth:`features`: one forward pass of the ids not in ``cache``. Cost of :meth:`apply_due`: one forward and
    backward pass of the due ids, one dense push (4·P bytes), and one pull of the weights (4·P bytes).
    """

    def __init__(
        self,
        dense_pass: DensePass,
        dense: DenseTable,
        batcher: GradientBatcher,
        config: SlowGearConfig,
        *,
        cache: FeatureCache | None = None,
        worker_cache: FeatureCache | None = None,
        mode: Mode = "sync",
        journal: GradientJournal | None = None,
    ) -> None:
        """Start without features, with the gradients of the ``journal``.

        Args:
            dense_pass: The module and its samples.
            dense: The module's weights in the cluster.
            batcher: Collects the gradients.
            config: Settings of the slow gear.
            cache: Cache of features; None: none.
            worker_cache: Cache of a fast gear in this process. Features that a backward pass recomputed go into both
                caches (but see ``train_mode`` of the pass), so that an id with regular gradients is seldom computed for
                its feature alone.
            mode: With ``"sync"`` the delivering thread makes dense updates before its call returns; with ``"async"`` a
                background thread does, and a delivery waits only while 65,536 gradients are due, as backpressure.
            journal: Keeps waiting gradients for the next process; None: they are lost with this one.
        """
        self.batcher = batcher
        self._journal = journal
        self.cache = cache
        self._caches = [kept for kept in (cache, worker_cache) if kept is not None]
        dense_pass.on_recomputed = self._store_recomputed if self._caches else None
        self._pass = dense_pass
        self._dense = dense
        self._refresh_seconds = config.refresh_seconds
        self._clock = config.clock
        self._refreshed: float | None = None
        self._applying = threading.Lock()
        self._begun: _UnfinishedStep | None = None
        self._incarnations = {} if journal is None else journal.open(dense.incarnation, batcher)
        self._adding = threading.Lock()
        self._asked = Coalescer(
            self._compute, _part_of, max_ids=config.max_batch, max_wait_seconds=config.max_wait_seconds
        )
        self._is_closed = self._is_dropped = False
        self._features_since = -math.inf
        self._updates = None
        if mode == "async":
            tick_seconds = max(0.01, min(1.0, (config.flush_seconds or 4.0) / 4))
            self._updates = UpdateThread(self.apply_due, lambda: self.account().due, tick_seconds=tick_seconds)

    @property
    def dim(self) -> int:
        """Width of a dense feature."""
        return self._pass.dim

    @property
    def dense_version(self) -> int:
        """Dense version of the held weights."""
        return self._dense.version

    @property
    def table_incarnation(self) -> int:
        """Incarnation of the dense table of the held weights; a restore changes it."""
        return self._dense.incarnation

    @property
    def update_error(self) -> GeartrainError | None:
        """Error for which the update thread cannot apply due gradients; it retries."""
        return None if self._updates is None else self._updates.error

    @property
    def queued_ids(self) -> int:
        """Number of ids that wait for a device batch."""
        return self._asked.queued_ids

    def features(self, ids: Ids, freshness: Freshness = _ANY) -> FeatureReply:
        """Return the dense features of distinct ids; the reply names ids that have none."""
        if not len(ids):
            return self._reply(ids, np.empty((0, self.dim), np.float32), {})
        if self.cache is None:
            return self._asked.get(ids)
        now, version = self._clock(), self.dense_version
        try:
            found, hit = self.cache.lookup(ids, now=now, dense_version=version)
        except (StateError, StoreUnavailable) as exc:
            logger.warning("features are computed, not looked up: %s", exc)
            return self._asked.get(ids)
        hit = hit & (found.times >= self._features_since)
        if freshness.max_age_seconds is not None:
            hit = hit & (freshness.max_age_seconds > np.abs(now - found.times))
        if freshness.max_version_lag is not None:
            hit = hit & (freshness.max_version_lag >= np.abs(version - found.versions))
        if hit.all():
            return found
        return _joined(found, hit, self._asked.get(ids[~hit]))

    def deliver(self, delivery: Delivery) -> GearAccount:
        """Add a delivery and return its source's account. Raises InvalidArgument after :meth:`close`."""
        if self._is_closed:
            raise InvalidArgument("this slow gear was closed, and accepts no more gradients; make another SlowGear")
        self.add(delivery)
        self.apply_soon()
        return self.account(delivery.source)

    def add(self, delivery: Delivery) -> None:
        """Add the gradients of a step; a delivery that was counted before is not counted again.

        A restarted fast gear keeps its numbers, so deliveries of its last incarnation are duplicates. Raises
        StaleClient for an incarnation that was superseded.
        """
        with self._adding:
            family = family_of(delivery.source)
            latest = self._incarnations.get(family, 0)
            if delivery.incarnation < latest:
                raise StaleClient(
                    f"incarnation {delivery.incarnation} of fast gear {family!r} was superseded by {latest}: another "
                    "process has its name; stop this one"
                )
            version = self.dense_version
            if self._journal is not None and not self.batcher.has_counted(delivery):
                self._journal.delivered(delivery, version)
            self.batcher.add(delivery, version)
            self._incarnations[family] = delivery.incarnation

    def has_counted(self, delivery: Delivery) -> bool:
        """Return whether a delivery was counted before: it is a retry after a lost answer."""
        return self.batcher.has_counted(delivery)

    def apply_soon(self, *, wait: bool = False) -> None:
        """Have due gradients applied: with ``wait``, or in sync mode, before this returns."""
        if wait or self._updates is None:
            self.apply_all()
        else:
            self._updates.wake()
            self._updates.wait_until_due(_MAX_DUE)

    def apply_due(self) -> bool:
        """Make one dense update of the due gradients; return False if there are none.

        After an error the batch is still due: the next call continues it.
        """
        with self._applying:
            batch, number = self._pop_due()
            if batch is None:
                return False
            failures = self._update(batch, number)
            if failures:
                logger.warning(
                    "left %d of %d ids out of a dense update: %s",
                    len(failures),
                    len(batch.ids),
                    next(iter(failures.values())).reason,
                )
            with self._adding:
                if self._journal is not None:
                    self._journal.settled(sorted(failures))
                self.batcher.complete(failures)
            return True

    def apply_all(self) -> None:
        """Make dense updates until nothing is due."""
        while self.apply_due():
            pass

    def flush(self) -> None:
        """Apply every waiting gradient, in batches of their true count."""
        self.batcher.flush()
        self.apply_all()

    def account(self, source: str | None = None) -> GearAccount:
        """Return the account of the gradients of ``source``; None: of all sources."""
        return self.batcher.account(source)

    def families(self) -> dict[str, GearAccount]:
        """Return the account of each fast gear that has delivered, over all of its streams."""
        found: dict[str, GearAccount] = {}
        for source, account in self.batcher.accounts().items():
            found[family_of(source)] = found.get(family_of(source), GearAccount()) + account
        return found

    def close(self) -> None:
        """Apply all waiting gradients and end. After an error they still wait: call it again, or check the account.

        If the dense table was dropped or restored, waiting gradients are of weights that are gone: they are dropped,
        and logged.
        """
        try:
            if left := self.account().waiting + self.account().due:
                try:
                    self.flush()
                except TableNotFound as exc:
                    logger.warning("%s will not be applied: %s", counted(left, "gradient"), exc)
        finally:
            self._is_closed = True
            if self._updates is not None:
                self._updates.stop()

    def forget_features(self) -> None:
        """Use no features computed before now: they are of a dense table that is gone."""
        self._features_since = self._clock()

    def drop(self) -> None:
        """End after the current update; waiting gradients are of a dense table that is gone."""
        self._is_closed = True
        if self._updates is not None:
            self._updates.stop()
        with self._applying:  # held by the thread of a delivery
            self._is_dropped = True

    def abandon(self) -> None:
        """End without :meth:`close`; gradients that are left are logged."""
        if self._updates is not None:
            self._updates.request_stop()
        account = self.account()
        if left := account.waiting + account.due:
            logger.warning("%s will not be applied: close() of the slow gear was not called", counted(left, "gradient"))

    def _pop_due(self) -> tuple[DueBatch | None, int | None]:
        """Take the due batch; return it with the number of its update in the journal.

        Raises TableNotFound after :meth:`drop`: the journal then belongs to another engine.
        """
        if self._is_dropped:
            raise TableNotFound(f"dense table {self._dense.name!r} was restored, and another engine goes on from there")
        with self._adding:  # so that the journal has deliveries and batches in their order
            if self._journal is not None and self._journal.is_full:
                self.batcher.flush()
            batch = self.batcher.due()
            number = None if batch is None or self._journal is None else self._journal.taken(batch, self.batcher)
        return batch, number

    def _update(self, batch: DueBatch, number: int | None) -> dict[int, Failure]:
        begun = self._begun
        if begun is None or begun.batch is not batch:
            if self._refresh_seconds > 0:  # with 0 the weights were just pulled for the features: use the same here
                with self._pass.lock:
                    self._refresh()
            begun = self._begun = _UnfinishedStep(
                batch, self._pass.backward(batch.ids, torch.from_numpy(batch.gradients))
            )
        with self._pass.lock:
            if len(begun.failures) < len(batch.ids):
                if not begun.is_pushed:
                    try:
                        self._dense.push(number, lr=batch.lr)
                    except NonFinite as exc:  # of the sum, or of the updated weights: a retry cannot help
                        self._dense.zero_grad()
                        return begun.failures | dict.fromkeys(batch.ids.tolist(), Failure(NonFinite.__name__, str(exc)))
                    begun.is_pushed = True
                self._refresh(needed=True)
            return begun.failures

    def _store_recomputed(self, ids: Ids, vectors_BD: Tensor) -> None:
        reply = self._reply(ids, download(vectors_BD).numpy(), {})
        for cache in self._caches:
            cache.insert(ids, reply)

    def _refresh(self, *, needed: bool = False) -> None:
        now = self._clock()
        if needed or self._refreshed is None or abs(now - self._refreshed) >= self._refresh_seconds:
            self._dense.refresh()
            self._refreshed = now

    def _compute(self, ids: Ids) -> FeatureReply:
        with self._pass.lock:
            self._refresh()
            version = self.dense_version
        vectors_KD, failures = self._pass.features(ids)
        reply = self._reply(ids, vectors_KD.numpy(), failures, version)
        if self.cache is not None:
            good = without(ids, failures)
            try:
                self.cache.insert(ids[good], reply.at(good))
            except (StateError, StoreUnavailable) as exc:
                logger.warning("features are not kept: %s", exc)
        return reply

    def _reply(
        self,
        ids: Ids,
        vectors_KD: npt.NDArray[np.float32],
        failures: dict[int, Failure],
        version: int | None = None,
    ) -> FeatureReply:
        version = self.dense_version if version is None else version
        return FeatureReply(
            vectors_KD=vectors_KD,
            versions=np.full(len(ids), version, np.int64),
            times=np.full(len(ids), self._clock(), np.float64),
            failures=failures,
            dense_version=version,
        )


def _part_of(reply: FeatureReply, positions: Ids, ids: Ids) -> FeatureReply:
    failed = {number: reply.failures[number] for number in ids.tolist() if number in reply.failures}
    return replace(reply.at(positions), failures=failed)


def _joined(found: FeatureReply, hit: npt.NDArray[np.bool_], fresh: FeatureReply) -> FeatureReply:
    """Return ``found`` with its misses overwritten by ``fresh``."""
    found.vectors_KD[~hit], found.versions[~hit], found.times[~hit] = fresh.vectors_KD, fresh.versions, fresh.times
    return replace(found, failures=fresh.failures, dense_version=fresh.dense_version)
