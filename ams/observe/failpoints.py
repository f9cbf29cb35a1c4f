"""Failpoints: places with a name at which a test makes this process die, wait or fail.

``GEARTRAIN_FAILPOINTS="shard.apply.after=kill@3;file.sync.before=error(ENOSPC)"`` arms them, for every process that
inherits it: name, action, and ``@n`` for the n-th pass alone (else every pass). Actions:

kill            SIGKILL of this process, as the kernel or an operator would
exit            this process ends at once with :data:`EXIT_CODE`
stop            SIGSTOP of this process, until somebody sends SIGCONT
sleep(SECONDS)  this thread waits
pause(PATH)     this thread waits until the file exists
error           the place fails as it can fail in life; error(ENOSPC) names the errno of one that uses a disk

Where nothing can fail (between rows and their mark), ``error`` is refused. Unarmed, a pass costs one look at an empty
list. Never armed in production mode.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from geartrain.ams.values.config import suggestion
from geartrain.ams.values.errors import ConfigError, GeartrainError, InternalError, ShardUnavailable, StateFailed

logger = logging.getLogger(__name__)

VARIABLE = "GEARTRAIN_FAILPOINTS"
MODE_VARIABLE = "GEARTRAIN_MODE"
PRODUCTION = "production"
EXIT_CODE = 70
"""Of a process that the action ``exit`` ended."""
_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Failpoint:
    """One place."""

    where: str
    """What has happened there, and what has not."""
    fails_with: type[GeartrainError | OSError] | None = None
    """What the action ``error`` raises; None: nothing can fail there."""


FAILPOINTS: Mapping[str, Failpoint] = {
    "client.send.before": Failpoint("a write has its number, nothing of it was sent", ShardUnavailable),
    "client.reply.after": Failpoint("all shards have answered a write, its caller does not know", ShardUnavailable),
    "shard.parts.before": Failpoint("one part of a large write has arrived and is not kept yet", ShardUnavailable),
    "shard.apply.before": Failpoint("a write was admitted, no row has changed", ShardUnavailable),
    "shard.apply.after": Failpoint("the rows of a write have changed, nothing else has"),
    "shard.mark.before": Failpoint("a write is applied and counted, not marked as applied"),
    "shard.mark.after": Failpoint("a write is applied and marked, nobody was answered"),
    "shard.reply.before": Failpoint("a request that changes the shard is done, its reply not sent", ShardUnavailable),
    "freeze.before": Failpoint("a shard is about to hold a moment for a snapshot", InternalError),
    "freeze.after": Failpoint("a shard holds a moment for a snapshot, and has not said so", InternalError),
    "thaw.before": Failpoint("a shard is about to end a freeze", InternalError),
    "block.write.before": Failpoint("a file of a snapshot (rows, job) is about to be written", OSError),
    "block.write.after": Failpoint("a file of a snapshot (rows, job) is safe, nobody was told", OSError),
    "file.sync.before": Failpoint("a snapshot's file, also its manifest, is written and not synced", OSError),
    "file.rename.before": Failpoint("a snapshot's file is synced and has not got its name", OSError),
    "folder.sync.before": Failpoint(
        "a name was given in a snapshot's folder or root, the folder is not synced", OSError
    ),
    "manifest.write.before": Failpoint("all files of a snapshot are safe, its manifest is not there", OSError),
    "manifest.write.after": Failpoint("the manifest is safe, in a folder that no reader looks at", OSError),
    "snapshot.rename.before": Failpoint("a snapshot is whole and has not got its name", OSError),
    "snapshot.rename.after": Failpoint("a snapshot has its name, which is not synced", OSError),
    "snapshot.commit.after": Failpoint("a snapshot is there for good, the shards still hold its moment"),
    "prune.before": Failpoint("a snapshot to remove is hidden, its files are there", OSError),
    "restore.create.after": Failpoint("a table of a snapshot was made anew, without rows", InternalError),
    "restore.block.before": Failpoint(
        "a block to restore is read and checked, none of its rows is written", InternalError
    ),
    "restore.block.after": Failpoint("the rows of one block to restore are written", InternalError),
    "restore.publish.before": Failpoint("every shard has the rows of a restore, nobody may read them", InternalError),
    "restore.publish.after": Failpoint("the tables of a restore are open, who restored them has not gone on"),
    "model.publish.before": Failpoint("all files of a saved model are safe, the model is the one before", OSError),
    "lease.heartbeat.before": Failpoint("a shard is about to renew its lease", InternalError),
    "lease.heartbeat.after": Failpoint("a shard has renewed its lease", InternalError),
    "scheduler.register.before": Failpoint("a shard asks to join, the scheduler has not decided", InternalError),
    "scheduler.version.before": Failpoint("a shard was replaced, the cluster version is the old one"),
    "scheduler.version.after": Failpoint("the cluster version moved on, nobody was told"),
    "state.write.before": Failpoint("a change of the scheduler's state is decided, not written", StateFailed),
    "state.write.after": Failpoint("a change of the scheduler's state is written, not shown"),
    "table.create.before": Failpoint("a table is to be made, no shard has been told", InternalError),
    "table.create.after": Failpoint("every shard has a new table, the scheduler has not noted it", InternalError),
    "table.publish.before": Failpoint("restored tables are to be opened, no shard has been told", InternalError),
    "table.publish.after": Failpoint("every shard has opened restored tables, the scheduler has not", InternalError),
    "graph.part.after": Failpoint("a part of a graph is built and kept, the next one not begun", InternalError),
    "job.torch.before": Failpoint("a worker has read its flags, and has not loaded torch"),
    "job.data.before": Failpoint("a worker is about to load its data"),
    "job.connect.before": Failpoint("a worker has its data, and no cluster"),
    "job.restore.before": Failpoint("a worker has its cluster, and none of the rows of its snapshot are back"),
    "job.step.before": Failpoint("a worker is about to do a step"),
    "job.report.before": Failpoint("a worker has trained and saved, and has not tested its model"),
    "job.save.before": Failpoint("a worker is about to save its job", OSError),
    "job.save.after": Failpoint("a worker has saved its job and not gone on", OSError),
}
"""Every failpoint, by name."""

ACTIONS = ("kill", "exit", "stop", "sleep", "pause", "error")
_ASSIGNMENT = re.compile(r"(?P<action>[a-z]+)(?:\((?P<argument>[^()]*)\))?(?:@(?P<nth>\d+))?")


@dataclass(frozen=True)
class Arming:
    """What happens at one failpoint."""

    act: Callable[[], None]
    text: str
    """The action as it was given, such as ``kill@3``."""
    nth: int | None = None
    """The one pass at which it happens, from 1; None: every pass."""


@dataclass
class Passes:
    """What was armed and how often it was met. Thread-safe."""

    armings: Mapping[str, Arming] = field(default_factory=dict)
    passed: Counter[str] = field(default_factory=Counter)
    """How often each armed failpoint was passed."""
    fired: Counter[str] = field(default_factory=Counter)
    """How often its action was taken."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def meet(self, name: str) -> Arming | None:
        """Count a pass; return what is to happen now."""
        arming = self.armings.get(name)
        if arming is None:
            assert name in FAILPOINTS, name
            return None
        with self._lock:
            self.passed[name] += 1
            if arming.nth not in (None, self.passed[name]):
                return None
            self.fired[name] += 1
            return arming


_armed: list[Passes] = []
"""What is armed now; empty if nothing is. (An empty list is what costs least to test.)"""
_read: set[str] = set()
"""The text that this process took from its environment."""


def reach(name: str) -> None:
    """Say that the place called ``name`` is reached. Does nothing unless it is armed."""
    for passes in _armed:
        if (arming := passes.meet(name)) is not None:
            logger.warning("failpoint %s: %s", name, arming.text)
            arming.act()


def arm_from_environment(mode: str | None = None, environ: Mapping[str, str] = os.environ) -> None:
    """Arm what :data:`VARIABLE` says, once in the life of a process, and warn of it.

    ``mode`` is that of the configuration; by default what ``GEARTRAIN_MODE`` says. Raises ConfigError as
    :func:`require_allowed`.
    """
    armings = require_allowed(mode, environ)
    text = environ.get(VARIABLE, "")
    if armings and text not in _read:
        _read.add(text)
        _arm(Passes(armings))
        logger.warning("%s is set: this process will misbehave on purpose (%s)", VARIABLE, text)


def require_allowed(mode: str | None = None, environ: Mapping[str, str] = os.environ) -> dict[str, Arming]:
    """Return what :data:`VARIABLE` asks for, and arm nothing.

    Raises ConfigError if it is set in production mode, or names an unknown failpoint or action.
    """
    text = environ.get(VARIABLE, "")
    if not text.strip():
        return {}
    mode = mode or environ.get(MODE_VARIABLE) or "development"
    if mode == PRODUCTION:
        raise ConfigError(
            f"{VARIABLE} is set ({text!r}) and mode is {PRODUCTION}: failpoints make a process die or fail on purpose; "
            f"unset {VARIABLE}, or use mode development"
        )
    return parse(text)


@contextmanager
def armed(text: str) -> Iterator[Passes]:
    """Arm failpoints of this process until the block ends, for tests; yields their counts. Raises ConfigError."""
    passes = Passes(parse(text))
    before = list(_armed)
    _arm(passes)
    try:
        yield passes
    finally:
        _arm(*before)


def _arm(*passes: Passes) -> None:
    """Let ``passes`` be what is armed in this process, in Python and in the compiled part."""
    from geartrain.ams.kernels import _core  # arrays and kernels are loaded only where something is armed

    _armed[:] = passes
    _core.arm_failpoints(bool(passes))


def parse(text: str) -> dict[str, Arming]:
    """Read ``name=action[(argument)][@n][;…]``. Raises ConfigError naming what is wrong and what was probably meant."""
    armings: dict[str, Arming] = {}
    for item in filter(None, (part.strip() for part in text.split(";"))):
        name, equals, assignment = (part.strip() for part in item.partition("="))
        if name not in FAILPOINTS:
            meant = suggestion(name, FAILPOINTS).replace("the keys here", "there")
            raise ConfigError(
                f"{VARIABLE}: there is no failpoint {name!r}; {meant}; 'geartrain failpoints' lists them all"
            )
        if name in armings:
            raise ConfigError(f"{VARIABLE}: {name!r} is given twice; keep one")
        match = _ASSIGNMENT.fullmatch(assignment)
        if not equals or match is None or match["action"] not in ACTIONS:
            action = match["action"] if match else assignment
            meant = suggestion(action, ACTIONS).replace("the keys here", "there")
            raise ConfigError(
                f"{VARIABLE}: {item!r} has no action {action!r}; {meant} (write {name}=kill@2, sleep(0.5), error)"
            )
        nth = None if match["nth"] is None else int(match["nth"])
        if nth == 0:
            raise ConfigError(f"{VARIABLE}: {item!r} has pass 0; passes count from 1")
        armings[name] = Arming(_action(item, name, match["action"], match["argument"]), assignment, nth)
    return armings


def _action(item: str, name: str, action: str, argument: str | None) -> Callable[[], None]:
    needs = {"sleep": "seconds", "pause": "the path of a file"}.get(action)
    if needs is not None and not argument:
        raise ConfigError(f"{VARIABLE}: {item!r} lacks {needs}; write {name}={action}(…)")
    if argument is not None and needs is None and action != "error":
        raise ConfigError(f"{VARIABLE}: {item!r} gives {argument!r} to {action}, which takes nothing")
    if action == "error":
        return _failure(item, name, argument)
    if action == "sleep":
        seconds = _seconds(item, argument or "")
        return lambda: time.sleep(seconds)
    if action == "pause":
        path = Path(argument or "")
        return lambda: _wait_for(path)
    if action == "stop":
        return lambda: os.kill(os.getpid(), signal.SIGSTOP)
    return _kill if action == "kill" else lambda: os._exit(EXIT_CODE)


def _failure(item: str, name: str, errno_name: str | None) -> Callable[[], None]:
    kind = FAILPOINTS[name].fails_with
    if kind is None:
        raise ConfigError(f"{VARIABLE}: {item!r}: nothing can fail there; use kill, exit, stop or sleep")
    if issubclass(kind, GeartrainError):
        if errno_name is not None:
            raise ConfigError(
                f"{VARIABLE}: {item!r} gives {errno_name!r}, but no disk is used there; write {name}=error"
            )
        message = f"failpoint {name}: {FAILPOINTS[name].where}"
        return lambda: _raise(kind(message))
    number = getattr(errno, errno_name or "EIO", None)
    if not isinstance(number, int):
        raise ConfigError(f"{VARIABLE}: {item!r} has errno {errno_name!r}; use a name such as EIO or ENOSPC")
    return lambda: _raise(OSError(number, f"{os.strerror(number)} (failpoint {name})"))


def _raise(error: BaseException) -> NoReturn:
    raise error


def _seconds(item: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e6:
        raise ConfigError(f"{VARIABLE}: {item!r} has {text!r} for seconds; write a number such as 0.5")
    return seconds


def _wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(_POLL_SECONDS)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    while True:  # the signal may find another thread first: this one does nothing more
        time.sleep(1.0)
