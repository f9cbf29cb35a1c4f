"""Saved state of a build of neighbours, to resume after a kill: finished parts, and the part under way.

The head of each file identifies its build. A file that is damaged, or of other rows, another k, engine or partition, is
ignored: its part is built anew.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from geartrain.ams.storage.array_file import Arrays, read_arrays, write_arrays
from geartrain.ams.storage.durable import create_folders
from geartrain.ams.values.errors import ConfigError, StateDamaged

_log = logging.getLogger(__name__)


class PartFolder:
    """Saved parts of one build. Files of another build are overwritten as this one advances."""

    def __init__(self, folder: Path, build: Mapping[str, Any]) -> None:
        """``build`` has the facts that a part must match. Raises ConfigError if the folder cannot be created."""
        self._folder, self._build = folder, dict(build)
        try:
            create_folders(folder)
        except OSError as exc:
            raise ConfigError(f"the folder {str(folder)!r} cannot be used: {exc.strerror}") from exc

    def save_finished(self, part: int, lists: npt.NDArray[np.int32]) -> None:
        """Save the lists of a part and remove its running state. Raises StateFailed."""
        self._save(f"part-{part:05d}.done", {"part": part}, {"lists": lists})
        with contextlib.suppress(OSError):  # a leftover is harmless: the finished part is read first
            (self._folder / f"part-{part:05d}.running").unlink(missing_ok=True)

    def save_running(self, part: int, steps: int, arrays: Arrays) -> None:
        """Save the state of a part after so many of its steps. Raises StateFailed."""
        self._save(f"part-{part:05d}.running", {"part": part, "steps": steps}, arrays)

    def finished(self, part: int) -> npt.NDArray[np.int32] | None:
        """Return the lists of a part, if they were saved."""
        found = self._load(f"part-{part:05d}.done", part)
        return None if found is None else found[1]["lists"]

    def running(self, part: int) -> tuple[int, dict[str, npt.NDArray[Any]]] | None:
        """Return (steps, state) of a part under way, if they were saved."""
        found = self._load(f"part-{part:05d}.running", part)
        return None if found is None else (int(found[0]["steps"]), found[1])

    def _save(self, name: str, facts: Mapping[str, Any], arrays: Arrays) -> None:
        remedy = "give a folder with room, or build without one"
        write_arrays(self._folder / name, {**self._build, **facts}, arrays, remedy)

    def _load(self, name: str, part: int) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]] | None:
        try:
            head, arrays = read_arrays(self._folder / name)
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise ConfigError(f"{self._folder / name} cannot be read: {exc.strerror}") from exc
        except StateDamaged as exc:
            _log.warning("%s; its part of the graph is built anew", exc)
            return None
        if any(head.get(key) != value for key, value in {**self._build, "part": part}.items()):
            _log.info("%s belongs to another build; its part is built anew", self._folder / name)
            return None
        return head, arrays
