"""Lifecycle of a role process: start, readiness, serving, and clean shutdown on request."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
import threading
import time
from typing import Any, Protocol

from geartrain.ams.values.config import identity, is_loopback
from geartrain.ams.values.errors import GeartrainError
from geartrain.ams.values.rpc import version

logger = logging.getLogger(__name__)

STOP_GRACE_SECONDS = 3.0
"""Time for calls in progress when a role is stopped."""
KILL_AFTER_SECONDS = STOP_GRACE_SECONDS + 2.0
"""Time for the whole process to stop; then it is killed."""
_POLL_SECONDS = 1.0
"""Longest delay until a signal is noticed."""


class RunningRole(Protocol):
    """A service that runs until it is stopped."""

    @property
    def stop_reason(self) -> str | None:
        """Reason why it ended by itself; None if it did not."""

    def wait(self) -> object:
        """Block until it has ended or was stopped."""

    def stop(self, grace_seconds: float) -> None:
        """Stop; calls in progress have ``grace_seconds``."""


class RoleEnded(GeartrainError):
    """A role stopped serving without being told to."""


def print_ready(role: str, *, as_json: bool = False, **facts: Any) -> None:
    """Report on stdout that the role serves: on a terminal as a sentence, else as a line of JSON."""
    if as_json or not sys.stdout.isatty():
        print(json.dumps({"ready": role, **facts, "pid": os.getpid()}), flush=True)
    elif "url" in facts:
        print(f"Ready; open this in a browser (Ctrl-C ends it):\n{facts['url']}", flush=True)
    else:
        addresses = facts.get("addresses", [facts.get("address")])
        print(f"The {role} serves at {', '.join(map(str, addresses))}; Ctrl-C ends it", flush=True)


def exit_with_parent() -> None:
    """End this process as if by SIGTERM when stdin closes: the parent holds the other end and is gone."""

    def watch() -> None:
        # The descriptor, not sys.stdin: a buffered read would hold a lock that interpreter shutdown wants.
        while os.read(0, 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(KILL_AFTER_SECONDS)
        os._exit(1)  # no parent is left to kill a process that cannot stop

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def raise_open_files() -> None:
    """Raise this process's limit of open files to the system's: connections of strangers must not use it up."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def warn_if_open(listen: str) -> None:
    """Warn if anybody on the network can reach a role. (The configuration refuses that unless told otherwise.)"""
    if not is_loopback(listen) and identity(listen)[0] is None:
        logger.warning("serving on %s without encryption or authentication: keep it on a private network", listen)


def serve(role: str, service: RunningRole, *, as_json: bool = False, **facts: Any) -> None:
    """Report a started service as ready, with ``facts``; serve until SIGTERM or SIGINT, then stop in order.

    The same signal once more ends the process at once.

    Raises:
        RoleEnded: the service ended by itself.
    """
    told = threading.Event()
    ended = threading.Event()

    signals: set[int] = set()

    def on_signal(number: int, _: object) -> None:
        name = signal.Signals(number).name
        if number in signals:
            logger.warning("%s: %s again, ending at once", role, name)
            os._exit(1)
        signals.add(number)  # a terminal's SIGINT and a parent's SIGTERM are one request
        logger.info("%s: %s, stopping", role, name)
        told.set()
        ended.set()

    def watch() -> None:
        service.wait()
        ended.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    logger.info("%s: Geartrain %s", role, version())
    print_ready(role, as_json=as_json, **facts)  # the reader may stop this process at once: the handlers are installed
    threading.Thread(target=watch, name="service-watch", daemon=True).start()
    # Python runs handlers on this thread alone; a signal that another thread receives does not wake it, hence the
    # timeout.
    while not ended.wait(_POLL_SECONDS):
        pass
    service.stop(STOP_GRACE_SECONDS)
    if not told.is_set():
        raise RoleEnded(f"the {role} stopped serving by itself: {service.stop_reason or 'its log says why'}")
