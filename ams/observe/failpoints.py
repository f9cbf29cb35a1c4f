"""Failpoints: named places at which a test makes this process die, wait or fail.

``GEARTRAIN_FAILPOINTS="shard.apply.after=kill@3;file.sync.before=error(ENOSPC)"`` arms them, for every process that
inherits it: name, action, and ``@n`` for the n-th pass alone (else every pass). Actions:

kill            SIGKILL of this process, as the kernel or an operator would
exit            this process ends at once with :data:`EXIT_CODE`
stop            SIGSTOP of this process, until somebody sends SIGCONT
sleep(SECONDS)  this thread waits
pause(PATH)     this thread waits until the file exists
error           the place raises its own error; error(ENOSPC) names the errno at a place that uses a disk

Where nothing can fail (between rows and their mark), ``error`` is refused. Unarmed, a pass tests an empty list. Never
armed in production mode.
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
"""Exit code of a process that the action ``exit`` ended."""
_POLL_SECONDS = 0.02


FAILPOINTS: Mapping[str, type[GeartrainError | OSError] | None] = {
    "client.send.before": ShardUnavailable,  # a write has its number, nothing of it was sent
    "client.reply.after": ShardUnavailable,  # all shards have answered a write, its caller does not know
    "shard.parts.before": ShardUnavailable,  # one part of a large write has arrived and is not kept yet
    "shard.apply.before": ShardUnavailable,  # a write was admitted, no row has changed
    "shard.apply.after": None,  # the rows of a write have changed, nothing else has
    "shard.mark.before": None,  # a write is applied and counted, not marked as applied
    "shard.mark.after": None,  # a write is applied and marked, nobody was answered
    "shard.reply.before": ShardUnavailable,  # a request that changes the shard is done, its reply not sent
    "freeze.before": InternalError,  # a shard is about to hold a moment for a snapshot
    "freeze.after": InternalError,  # a shard holds a moment for a snapshot, and has not said so
    "thaw.before": InternalError,  # a shard is about to end a freeze
    "block.write.before": OSError,  # a file of a snapshot (rows, job) is about to be written
    "block.write.after": OSError,  # a file of a snapshot (rows, job) is safe, nobody was told
    "file.sync.before": OSError,  # a snapshot's file, also its manifest, is written and not synced
    "file.rename.before": OSError,  # a snapshot's file is synced and has not got its name
    "folder.sync.before": OSError,  # a name was given in a snapshot's folder or root, the folder is not synced
    "manifest.write.before": OSError,  # all files of a snapshot are safe, its manifest is not there
    "manifest.write.after": OSError,  # the manifest is safe, in a folder that no reader looks at
    "snapshot.rename.before": OSError,  # a snapshot is whole and has not got its name
    "snapshot.rename.after": OSError,  # a snapshot has its name, which is not synced
    "snapshot.commit.after": None,  # a snapshot is there for good, the shards still hold its moment
    "prune.before": OSError,  # a snapshot to remove is hidden, its files are there
    "restore.create.after": InternalError,  # a table of a snapshot was made anew, without rows
    "restore.block.before": InternalError,  # a block to restore is read and checked, none of its rows is written
    "restore.block.after": InternalError,  # the rows of one block to restore are written
    "restore.publish.before": InternalError,  # every shard has the rows of a restore, nobody may read them
    "restore.publish.after": None,  # the tables of a restore are open, who restored them has not gone on
    "model.publish.before": OSError,  # all files of a saved model are safe, the model is the one before
    "lease.heartbeat.before": InternalError,  # a shard is about to renew its lease
    "lease.heartbeat.after": InternalError,  # a shard has renewed its lease
    "scheduler.register.before": InternalError,  # a shard asks to join, the scheduler has not decided
    "scheduler.version.before": None,  # a shard was replaced, the cluster version is the old one
    "scheduler.version.after": None,  # the cluster version moved on, nobody was told
    "state.write.before": StateFailed,  # a change of the scheduler's state is decided, not written
    "state.write.after": None,  # a change of the scheduler's state is written, not shown
    "table.create.before": InternalError,  # a table is to be made, no shard has been told
    "table.create.after": InternalError,  # every shard has a new table, the scheduler has not noted it
    "table.publish.before": InternalError,  # restored tables are to be opened, no shard has been told
    "table.publish.after": InternalError,  # every shard has opened restored tables, the scheduler has not
    "graph.part.after": InternalError,  # a part of a graph is built and kept, the next one not begun
    "job.torch.before": None,  # a worker has read its flags, and has not loaded torch
    "job.data.before": None,  # a worker is about to load its data
    "job.connect.before": None,  # a worker has its data, and no cluster
    "job.restore.before": None,  # a worker has its cluster, and none of the rows of its snapshot are back
    "job.step.before": None,  # a worker is about to do a step
    "job.report.before": None,  # a worker has trained and saved, and has not tested its model
    "job.save.before": OSError,  # a worker is about to save its job
    "job.save.after": OSError,  # a worker has saved its job and not gone on
}
"""All failpoints, by the error that ``error`` raises there; None: nothing can fail there."""

_ITEM = re.compile(
    r"(?P<name>[\w.]+)\s*=\s*(?P<text>(?P<action>[a-z]+)(?:\((?P<argument>[^()]+)\))?(?:@(?P<nth>[1-9]\d*))?)"
)


@dataclass(frozen=True)
class ArmedAction:
    """Action at one failpoint."""

    act: Callable[[], None]
    text: str
    """The action as it was given, such as ``kill@3``."""
    nth: int | None = None
    """Pass at which it happens, from 1; None: every pass."""


@dataclass
class Passes:
    """Armed failpoints with their counts. Thread-safe."""

    armings: Mapping[str, ArmedAction] = field(default_factory=dict)
    passed: Counter[str] = field(default_factory=Counter)
    """Passes of each armed failpoint."""
    fired: Counter[str] = field(default_factory=Counter)
    """Passes at which the action happened."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count_pass(self, name: str) -> ArmedAction | None:
        """Count a pass; return the action that is due."""
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
"""Armed failpoints. (An empty list is cheapest to test.)"""
_read: set[str] = set()
"""Texts that this process read from its environment."""


def reach(name: str) -> None:
    """Pass the failpoint ``name``: do its action if it is armed."""
    for passes in _armed:
        if (arming := passes.count_pass(name)) is not None:
            logger.warning("failpoint %s: %s", name, arming.text)
            arming.act()


def arm_from_environment(mode: str | None = None, environ: Mapping[str, str] = os.environ) -> None:
    """Arm the failpoints in :data:`VARIABLE` once in the life of a process, and log a warning.

    ``mode`` is that of the configuration; by default what ``GEARTRAIN_MODE`` says. Raises ConfigError as
    :func:`require_allowed`.
    """
    armings = require_allowed(mode, environ)
    text = environ.get(VARIABLE, "")
    if armings and text not in _read:
        _read.add(text)
        _arm(Passes(armings))
        logger.warning("%s is set: this process will misbehave on purpose (%s)", VARIABLE, text)


def require_allowed(mode: str | None = None, environ: Mapping[str, str] = os.environ) -> dict[str, ArmedAction]:
    """Return the failpoints in :data:`VARIABLE` without arming them.

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
    """Arm exactly ``passes`` in this process, in Python and in the compiled part."""
    from geartrain.ams.kernels import _core  # arrays and kernels are loaded only where something is armed

    _armed[:] = passes
    _core.arm_failpoints(bool(passes))


def parse(text: str) -> dict[str, ArmedAction]:
    """Read ``name=action[(argument)][@n][;…]``. Raises ConfigError naming what is wrong."""
    armings: dict[str, ArmedAction] = {}
    for item in filter(None, map(str.strip, text.split(";"))):
        name = item.partition("=")[0].strip()
        if name not in FAILPOINTS:
            meant = suggestion(name, FAILPOINTS).replace("the keys here", "there")
            raise ConfigError(f"{VARIABLE}: there is no failpoint {name!r}; {meant}")
        match = _ITEM.fullmatch(item)
        act = None if match is None or name in armings else _action(name, match["action"], match["argument"])
        if match is None or act is None:
            can = "nothing can" if FAILPOINTS[name] is None else "error can, error(ENOSPC) of a disk"
            raise ConfigError(
                f"{VARIABLE}: {item!r} cannot be armed; once for a place write {name}=kill, exit, stop, sleep(SECONDS) "
                f"or pause(FILE), with @2 for the second pass alone; there {can} fail"
            )
        armings[name] = ArmedAction(act, match["text"], None if match["nth"] is None else int(match["nth"]))
    return armings


def _action(name: str, action: str, argument: str | None) -> Callable[[], None] | None:
    """Return the function of ``action`` at the failpoint; None: there is no such action there."""
    fails_with = FAILPOINTS[name]
    match action, argument:
        case "kill", None:
            return _kill
        case "exit", None:
            return lambda: os._exit(EXIT_CODE)
        case "stop", None:
            return lambda: os.kill(os.getpid(), signal.SIGSTOP)
        case "sleep", str() if re.fullmatch(r"\d{1,6}(\.\d+)?", argument):
            return lambda: time.sleep(float(argument))
        case "pause", str():
            return lambda: _wait_for(Path(argument))
        case "error", _ if fails_with is OSError and isinstance(number := getattr(errno, argument or "EIO", None), int):
            return lambda: _raise(OSError(number, f"{os.strerror(number)} (failpoint {name})"))
        case "error", None if fails_with not in (None, OSError):
            return lambda: _raise(fails_with(f"failpoint {name}"))
    return None


def _raise(error: BaseException) -> NoReturn:
    raise error


def _wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(_POLL_SECONDS)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    while True:  # the signal may find another thread first: this one does nothing more
        time.sleep(1.0)
