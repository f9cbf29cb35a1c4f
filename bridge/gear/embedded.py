"""A slow gear inside the fast gear's process: the same engine, no wire."""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from typing import Literal

from geartrain.ams.values.errors import GeartrainError, InternalError, InvalidArgument, ModuleFailed, TableNotFound
from geartrain.ams.values.gear_messages import Delivery, FeatureReply, GearAccount
from geartrain.ams.values.specs import Ids
from geartrain.ams.values.text import counted
from geartrain.bridge.gear.engine import DenseEngine

logger = logging.getLogger(__name__)

Mode = Literal["async", "sync"]


class EmbeddedGear:
    """Implements :class:`geartrain.ams.values.gear_messages.GearPort` over an engine of this process.

    ``mode="sync"``: dense updates are made by the thread that delivers, before its call returns. ``"async"``: by a
    thread of its own; a delivery waits only while ``max_due`` gradients are due, so that they cannot pile up.
    """

    def __init__(self, engine: DenseEngine, *, mode: Mode, max_due: int = 65_536, tick_seconds: float = 1.0) -> None:
        self._engine = engine
        self._max_due = max_due
        self.worker = None if mode == "sync" else GearWorker(engine, tick_seconds=tick_seconds)
        self._is_closed = False
        weakref.finalize(self, _let_go, engine, self.worker)

    @property
    def dense_version(self) -> int:
        """See :class:`GearPort`."""
        return self._engine.dense_version

    def features(self, ids: Ids) -> FeatureReply:
        """See :class:`GearPort`."""
        return self._engine.features(ids)

    def deliver(self, delivery: Delivery) -> GearAccount:
        """See :class:`GearPort`. Raises InvalidArgument after :meth:`close`: nobody would apply it."""
        if self._is_closed:
            raise InvalidArgument("this slow gear was closed, it takes no gradients any more; make another SlowGear")
        self._engine.add(delivery)
        if self.worker is None:
            self._engine.apply_all()
        else:
            self.worker.wake()
            self.worker.wait_until_due(self._max_due)
        return self._engine.account(delivery.source)

    def flush(self) -> None:
        """See :class:`GearPort`."""
        self._engine.flush()

    def account(self, source: str | None = None) -> GearAccount:
        """See :class:`GearPort`."""
        return self._engine.account(source)

    def close(self) -> None:
        """See :class:`GearPort`. After an error what waits is still there: close again, or look at the account.

        If the dense table was dropped or restored, what waits is for weights that are gone: it is left, and logged.
        """
        try:
            if left := self._engine.account().waiting + self._engine.account().due:
                try:
                    self.flush()
                except TableNotFound as exc:
                    logger.warning("%s will not be applied: %s", counted(left, "gradient"), exc)
        finally:
            self._is_closed = True
            if self.worker is not None:
                self.worker.stop()


def _let_go(engine: DenseEngine, worker: GearWorker | None) -> None:
    if worker is not None:
        worker.end()
    account = engine.account()
    if left := account.waiting + account.due:
        logger.warning("%s will not be applied: nobody called close() of the slow gear", counted(left, "gradient"))


class GearWorker:
    """The thread of a slow gear that makes dense updates as gradients become due.

    At the end of the process, if not before, it ends after the update under way: torch does not survive being torn
    out of one.
    """

    def __init__(self, engine: DenseEngine, *, tick_seconds: float = 1.0) -> None:
        """It looks every ``tick_seconds`` for batches that have waited too long."""
        self._engine = engine
        self._tick_seconds = tick_seconds
        self._changed = threading.Condition()
        self._is_awake = self._is_ended = False
        self._error: GeartrainError | None = None
        self._thread = threading.Thread(target=self._run, name="geartrain-slow-gear", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    @property
    def error(self) -> GeartrainError | None:
        """Why the last attempt failed; it is repeated."""
        return self._error

    def wake(self) -> None:
        """Say that something may be due."""
        with self._changed:
            self._is_awake = True
            self._changed.notify_all()

    def raise_error(self) -> None:
        """Raise why updates are not applied, if they are not."""
        if (error := self._error) is not None:
            raise error

    def wait_until_due(self, most: int, longest_seconds: float = 10.0) -> None:
        """Wait, for so long, while more than ``most`` gradients are due. Raises why, if they are not applied."""
        if self._engine.account().due <= most:
            return
        deadline = time.monotonic() + longest_seconds
        with self._changed:
            while not self._is_ended and self._engine.account().due > most and time.monotonic() < deadline:
                self.raise_error()
                self._changed.wait(self._tick_seconds)

    def stop(self) -> None:
        """End the thread after the update under way. Idempotent."""
        self.end()
        self._thread.join()

    def end(self) -> None:
        """As :meth:`stop`, without waiting for it."""
        with self._changed:
            self._is_ended = True
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            self._work()
        finally:
            atexit.unregister(self.stop)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_awake or self._is_ended, self._tick_seconds)
                if self._is_ended:
                    return
                self._is_awake = False
            self._apply()
            with self._changed:
                self._changed.notify_all()

    def _apply(self) -> None:
        try:
            while not self._is_ended and self._engine.apply_due():
                self._error = None
        except GeartrainError as exc:
            if self._error is None:
                logger.warning("dense updates wait: %s", exc, exc_info=isinstance(exc, ModuleFailed))
            self._error = exc
        except Exception as exc:  # a defect of ours must not end the thread: it is tried again
            if self._error is None:
                logger.exception("dense updates wait")
            self._error = InternalError(f"a dense update failed: {type(exc).__name__}: {exc}")
