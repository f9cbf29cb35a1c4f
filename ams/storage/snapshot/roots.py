"""Check of the snapshot paths and ids that other processes send to a role.

A role reads and writes snapshots with its own rights, at the place that a peer names. So a place is a path or URL of a
known kind (``snapshot_store.place``) below the role's setting ``snapshot_roots``. Without that setting a role on
loopback accepts any place from processes of its own user, which have the same rights, and none from others. A folder is
opened part by part without following links, so a link made after the check changes nothing.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from geartrain.ams.storage.snapshot.store import Place, RealName, parse_place, place
from geartrain.ams.values.config import is_loopback
from geartrain.ams.values.errors import ConfigError, InvalidArgument, SnapshotRefused
from geartrain.ams.values.text import quoted

logger = logging.getLogger(__name__)

_MAX_SHOWN = 300
"""Characters of a path that a message shows."""
_ID = re.compile(r"[0-9a-f]{32}")


class SnapshotRoots:
    """The places below which a role reads and writes snapshots for its peers. Thread-safe."""

    def __init__(self, role: str, listen: str, roots: Sequence[str] | None) -> None:
        """``role`` is the section of the settings, ``listen`` its address; None as ``roots``: anywhere for the
        own user if nobody but this machine can reach it, else nowhere, which is logged.

        Raises ConfigError if a root is not an absolute path or a URL of a known kind.
        """
        self._setting = f"{role}.snapshot_roots"
        self._flag = f"--snapshot-roots FOLDER of 'geartrain {role}'"
        self._roots = None if roots is None else tuple(self._root(root) for root in roots)
        self._is_own = roots is None and is_loopback(listen)
        if self._roots is None and not self._is_own:
            logger.warning(
                "%s is not set and %s can be reached from other machines: snapshots are refused here; name the folders "
                "or URLs that hold them (%s)",
                self._setting,
                listen,
                self._flag,
            )

    def resolve(self, named: str, user: Callable[[], int | None]) -> str:
        """Return the place that a peer names, without symbolic links and ``..``; ``user`` says whose process it is.

        Raises InvalidArgument unless it can be the place of a snapshot, and SnapshotRefused for one outside the roots;
        neither depends on what is there.
        """
        shown = repr(named[:_MAX_SHOWN])
        if self._is_own:
            if (asking := user()) not in (os.geteuid(), 0):
                who = "of a user who is not known" if asking is None else f"of user {asking}"
                raise SnapshotRefused(
                    f"{shown} is refused: the process that names it is {who}, and user {os.geteuid()} runs this "
                    f"{self._setting.partition('.')[0]}; others read and write snapshots only below its setting "
                    f"{self._setting}, which is not set; set it there ({self._flag}) and start it again"
                )
            found = place(named)
            return RealName(os.path.realpath(found)) if isinstance(found, Path) else found
        if self._roots is None:
            raise SnapshotRefused(
                f"{shown} is refused: this {self._setting.partition('.')[0]} listens beyond its own machine, "
                f"and then reads and writes snapshots only below its setting {self._setting}, which is not set; set it "
                f"there ({self._flag}) and start it again"
            )
        found = parse_place(named)
        if isinstance(found, Path):
            found = Path(os.path.realpath(found))
            is_inside = any(
                Path(os.path.realpath(root)) in found.parents for root in self._roots if isinstance(root, Path)
            )
        else:
            is_inside = any(found.startswith(f"{root}/") for root in self._roots if isinstance(root, str))
        if not is_inside:
            roots = ", ".join(map(str, self._roots)) or "none"
            raise SnapshotRefused(
                f"{shown} is refused: it does not lie below {self._setting} ({roots}); take snapshots into a "
                f"folder below those, or add its root there ({self._flag})"
            )
        return RealName(found) if isinstance(found, Path) else str(place(found))

    def _root(self, text: str) -> Place:
        try:
            return parse_place(text)
        except InvalidArgument as exc:
            raise ConfigError(f"{self._setting}: {exc}") from exc


def checked_snapshot_id(name: str, value: str, *, may_be_empty: bool = False) -> str:
    """Return ``value``, the id of a snapshot that a peer sends as its field ``name``. Raises InvalidArgument."""
    if _ID.fullmatch(value) or (may_be_empty and not value):
        return value
    raise InvalidArgument(f"{name} is {quoted(value)}; it must be 32 hexadecimal digits, 0-9 and a-f")
