"""Follower of a training: each snapshot becomes the served version, unless an operator has rolled back."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from geartrain.ams.storage.snapshot.folder import Snapshot
from geartrain.ams.values.errors import GeartrainError
from geartrain.serving.live.child import NICE
from geartrain.serving.live.training import ExportedModel, Progress, Training
from geartrain.serving.live.versions import LiveVersion, LiveVersions

logger = logging.getLogger(__name__)

_SELDOM = 8
_NO_ROOM = os.strerror(errno.ENOSPC)
_SLOW_SECONDS = 10.0
"""Lag after which a follower logs a warning."""


class Follower:
    """Updates a model on a thread of its own.

    A snapshot that cannot be used (damaged, a full disk, removed meanwhile) is retried, as is the next one; the current
    version stays served.
    """

    def __init__(
        self,
        training: Training,
        versions: LiveVersions,
        serve: Callable[[LiveVersion], object],
        *,
        served: LiveVersion | None = None,
        held_at: Callable[[], int | None] = lambda: None,
        tell: Callable[[Mapping[str, Any]], object] = lambda _: None,
        every_seconds: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``serve`` makes a version current, or returns False if it waits. ``served`` is current already. ``held_at``
        returns the version that an operator has rolled back to, which blocks newer ones; None: no rollback. ``tell`` is
        called with the facts after each poll."""
        self._training, self._versions, self._serve = training, versions, serve
        self._held_at, self._tell, self._every, self._clock = held_at, tell, every_seconds, clock
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self._served = served
        """Version written last."""
        self._shown = served
        """Current version, unless an operator has rolled back."""
        self._newest: Snapshot | ExportedModel | None = None
        self._passed_over = ""
        """Newest snapshot when older ones were tried, or why the training could not be read."""
        self._newer_since: float | None = None
        """Earliest time at which a snapshot that is not served may have come; None: there is none."""
        self._polled_at: float | None = None
        """Time when the last poll began."""
        self._progress: Progress | None = None
        self._state = "waiting"
        self._error = ""
        self._told = ""
        self._last_seconds = 0.0
        self._num_versions = self._num_failures = 0
        self._in_row = 0
        """Failures since the last version; more of them slow the polls down."""
        self._thread = threading.Thread(target=self._run, name="geartrain-follow", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self, seconds: float = 10.0) -> None:
        """Stop the thread after the version in progress, waiting ``seconds`` at most."""
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join(seconds)

    @property
    def facts(self) -> Mapping[str, Any]:
        """Facts for people, such as the lag behind the training. From any thread."""
        with self._lock:
            served, since = self._shown, self._newer_since
            at = 0 if served is None else served.step
            newest = at if self._newest is None else _moment(self._newest)[0]
            trained = at if self._progress is None else self._progress.step
            return {
                "state": self._state,
                "error": self._error,
                "step": None if served is None else served.step,
                "age_seconds": None if served is None else round(time.time() - served.created, 3),
                "seconds_behind": 0.0 if since is None else round(self._clock() - since, 3),
                "steps_behind": max(at, newest, trained) - at,
                "versions": self._num_versions,
                "failures": self._num_failures,
                "last_version_seconds": round(self._last_seconds, 3),
            }

    def poll(self) -> bool:
        """Poll once; return whether a version became current. For the thread, and for tests."""
        began = self._clock()
        try:
            newest, progress = self._training.newest(), self._training.progress()
        except (GeartrainError, OSError) as exc:
            self._failed(f"the training cannot be looked at: {exc}")
            return self._served is None and self._load_older(str(exc))
        held_at = self._held_at()
        polled_before, self._polled_at = self._polled_at, began
        with self._lock:
            self._newest, self._progress, self._shown = newest, progress, self._served
            if held_at is not None:
                written = self._versions.written()
                self._shown = next((version for version in written if version.version == held_at), self._served)
            if newest is None or _is_of(newest, self._shown):
                self._newer_since, self._error, self._told = None, "", ""
                self._state = "waiting" if newest is None else "following"
                if newest is None:
                    self._error = f"there is no snapshot yet in {self._training.where}; it is looked for again"
                    if self._served is not None:
                        self._error = "there is no snapshot any more; what was served is served on"
            elif self._newer_since is None:
                # It came after the last poll, perhaps while the version of that one was written.
                self._newer_since = began if polled_before is None else polled_before
            if held_at is not None:
                self._state = "held"
        if newest is None or held_at is not None or _is_of(newest, self._served):
            return False
        return self._load(newest) or (self._served is None and self._load_older(_moment(newest)[1]))

    def _load_older(self, newest: str) -> bool:
        """While no version is served, try once each snapshot before ``newest``, which cannot be used."""
        if self._passed_over == newest:
            return False
        self._passed_over = newest
        with self._lock:
            error, since = self._error, self._newer_since or self._clock()
        try:
            is_taken = any(self._load(older) for older in self._training.older())
        except (GeartrainError, OSError):
            is_taken = False
        with self._lock:
            self._state, self._error, self._told, self._newer_since = "failing", error, error, since
        return is_taken

    def _load(self, newest: Snapshot | ExportedModel) -> bool:
        began, (step, _) = self._clock(), _moment(newest)
        version: LiveVersion | None = None
        try:
            version = self._versions.write(newest, self._ending.is_set)
            is_current = self._serve(version) is not False
        except (GeartrainError, OSError) as exc:
            if version is not None:
                self._versions.drop(version)
            remedy = "; free room, or name another folder by --versions" if _NO_ROOM in str(exc) else ""
            self._failed(f"no version of step {step:,}: {exc}{remedy}")
            return False
        with self._lock:
            self._served, self._state, self._error, self._told = version, "held", "", ""
            if is_current:
                self._shown, self._newer_since, self._state = version, None, "following"
            self._last_seconds = self._clock() - began
            self._in_row = 0
            self._num_versions += 1
        logger.info("step %d %s (%.2f s)", step, "is served" if is_current else "waits", self._last_seconds)
        return is_current

    def _failed(self, why: str) -> None:
        with self._lock:
            self._state, self._error = "failing", why
            self._num_failures += 1
            self._in_row += 1
            is_told, self._told = self._told == why, why
        if not is_told:
            behind = self.facts["seconds_behind"], self.facts["steps_behind"]
            served = "no version is served yet" if self._served is None else "still serving the last version"
            logger.warning("%s; %s, %.0f s and %d steps behind", why, served, *behind)

    def _run(self) -> None:
        told, is_nice = 0.0, False
        while not self._ending.is_set():
            if self._served is not None and not is_nice:
                is_nice = True
                with suppress(OSError):  # answers have priority
                    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
            is_newer = False
            try:
                is_newer = self.poll()
                self._tell(self.facts)
            except Exception:  # nobody would see a follower whose thread ended
                logger.exception("cannot follow the training; retrying")
                self._failed("an error that the log names")
            facts, now = self.facts, self._clock()
            seconds = facts["seconds_behind"]
            if seconds > _SLOW_SECONDS and now - told > _SLOW_SECONDS and facts["state"] != "held":
                told = now
                logger.warning("the served version is %.0f s and %d steps behind", seconds, facts["steps_behind"])
            if not is_newer:  # while it was written another may have come
                self._ending.wait(self._every * min(1 + self._in_row, _SELDOM))


def _moment(found: Snapshot | ExportedModel) -> tuple[int, str]:
    """Return the step and the id of a moment."""
    said = found if isinstance(found, ExportedModel) else found.manifest
    return said.step, said.moment_id


def _is_of(found: Snapshot | ExportedModel, version: LiveVersion | None) -> bool:
    return version is not None and _moment(found)[1] == version.moment_id
