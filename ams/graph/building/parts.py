"""What a build of neighbours keeps on disk so that it can go on after a kill: finished parts, and the part at work.

Each file begins with the XXH3 of the rest and a JSON head that says what it belongs to; it appears whole and synced or
not at all. A file that is damaged, or of other rows, another k, engine or partition, is passed over: its part is built
anew.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from geartrain.ams.storage.durable import create_folders, sync_folder, write_file
from geartrain.ams.values.errors import ConfigError, StateFailed

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["PartFolder"]

Arrays = Mapping[str, npt.NDArray[Any]]
_SUM_BYTES = 8
_LENGTH_BYTES = 8
_log = logging.getLogger(__name__)


class PartFolder:
    """Saved parts of one build. Files of another build are overwritten as this one advances."""

    def __init__(self, folder: Path, build: Mapping[str, Any]) -> None:
        """``build`` is what a part must agree with. Raises ConfigError if the folder cannot be made."""
        self._folder, self._build = folder, dict(build)
        try:
            create_folders(folder)
        except OSError as exc:
            raise ConfigError(f"the folder {str(folder)!r} cannot be used: {exc.strerror}") from exc

    def save_finished(self, part: int, lists: npt.NDArray[np.int32]) -> None:
        """Keep the lists of a part; its running state is removed. Raises StateFailed."""
        self._save(f"part-{part:05d}.done", {"part": part}, {"lists": lists})
        with contextlib.suppress(OSError):  # whoever finds it finds the finished part first
            (self._folder / f"part-{part:05d}.running").unlink(missing_ok=True)

    def save_running(self, part: int, steps: int, arrays: Arrays) -> None:
        """Keep the state of a part after so many of its steps. Raises StateFailed."""
        self._save(f"part-{part:05d}.running", {"part": part, "steps": steps}, arrays)

    def finished(self, part: int) -> npt.NDArray[np.int32] | None:
        """The lists of a part, if they were kept."""
        found = self._load(f"part-{part:05d}.done", part)
        return None if found is None else found[1]["lists"]

    def running(self, part: int) -> tuple[int, dict[str, npt.NDArray[Any]]] | None:
        """(steps, state) of a part that was at work, if they were kept."""
        found = self._load(f"part-{part:05d}.running", part)
        return None if found is None else (int(found[0]["steps"]), found[1])

    def _save(self, name: str, facts: Mapping[str, Any], arrays: Arrays) -> None:
        shapes = [[key, array.dtype.str, list(array.shape)] for key, array in arrays.items()]
        head = json.dumps({**self._build, **facts, "arrays": shapes}, sort_keys=True).encode()
        body: list[Buffer] = [len(head).to_bytes(_LENGTH_BYTES, "little"), head]
        body += [_bytes_of(array) for array in arrays.values()]
        seen = xxhash.xxh3_64()
        for piece in body:
            seen.update(piece)
        try:
            write_file(self._folder / name, b"".join([seen.digest(), *body]))
            sync_folder(self._folder)
        except OSError as exc:
            raise StateFailed(
                f"{self._folder / name} could not be written: {exc.strerror}; give a folder with room, or build "
                "without one"
            ) from exc

    def _load(self, name: str, part: int) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]] | None:
        try:
            data = (self._folder / name).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise ConfigError(f"{self._folder / name} cannot be read: {exc.strerror}") from exc
        body = memoryview(data)[_SUM_BYTES:]
        if len(data) < _SUM_BYTES + _LENGTH_BYTES or xxhash.xxh3_64(body).digest() != data[:_SUM_BYTES]:
            _log.warning("%s is damaged; its part of the graph is built anew", self._folder / name)
            return None
        length = int.from_bytes(body[:_LENGTH_BYTES], "little")
        head = json.loads(bytes(body[_LENGTH_BYTES : _LENGTH_BYTES + length]))
        if any(head.get(key) != value for key, value in {**self._build, "part": part}.items()):
            _log.info("%s belongs to another build; its part is built anew", self._folder / name)
            return None
        arrays, at = {}, _LENGTH_BYTES + length
        for key, dtype, shape in head["arrays"]:
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            arrays[key] = np.frombuffer(body[at : at + size], dtype).reshape(shape)
            at += size
        return head, arrays


def _bytes_of(array: npt.NDArray[Any]) -> Buffer:
    flat: npt.NDArray[Any] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return flat.data
