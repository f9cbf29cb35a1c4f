"""Index for successive versions: built in the background, and used while its recall is high enough.

Versions come every few seconds, and an index of millions of classes takes minutes. So an earlier version's index is
used: scores are of the current rows, and newer classes are searched beside it. Recall is measured for each version;
where it is too low the version is searched exactly, and a new index is built.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from geartrain.ams.values.errors import GeartrainError
from geartrain.ams.values.specs import Ids
from geartrain.serving.index import shortcut
from geartrain.serving.index.choice import EXACT_IS_ENOUGH, sample_queries
from geartrain.serving.index.exact import Floats
from geartrain.serving.index.registry import FACTS, PLACES, write_index
from geartrain.serving.live.child import NICE, run_child

logger = logging.getLogger(__name__)

_QUERIES = 256
_GROWN = 1.25
"""Growth of the classes that justifies another attempt, where no index was fast enough or the index lacks that many."""


class LiveIndex:
    """Index of the versions in a folder. Used from one thread."""

    def __init__(self, out: Path, asked_recall: float) -> None:
        """``asked_recall`` 1: exact search, without a file. Raises ConfigError if faiss is needed and missing."""
        self._built, self._asked = out / ".index", asked_recall
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()
        self._is_wanted = False
        if asked_recall < 1:
            shortcut.load_faiss()

    def write(
        self, staging: Path, centers: Floats, biases: Floats | None, ids: Ids, *, is_cosine: bool
    ) -> dict[str, Any] | None:
        """Write the files of a version's index; return the value of its ``config["index"]``, None: nothing.

        Raises InvalidRows, OSError.
        """
        self._is_wanted = False
        if self._asked == 1 or centers.size <= EXACT_IS_ENOUGH:
            return None
        write = functools.partial(
            write_index, staging, centers, biases, is_cosine=is_cosine, asked_recall=self._asked, ids=ids
        )
        if not self._is_building and (self._built / FACTS).exists():
            try:
                facts = write(queries=sample_queries(centers, _QUERIES), older=self._built)
                built = json.loads((self._built / FACTS).read_text(encoding="utf-8"))
                is_useless = (
                    built["kind"] == "exact"
                    and built["asked_recall"] <= self._asked
                    and len(centers) < _GROWN * built["classes"]
                )
                has_aged = facts.get("younger", 0) > (_GROWN - 1) * len(centers)
                self._is_wanted = has_aged or (facts["kind"] == "exact" and not is_useless)
                return facts
            except (GeartrainError, ValueError, KeyError) as exc:
                logger.warning("cannot use the index of an older version, building another: %s", exc)
                for name in (shortcut.FILE, PLACES):
                    (staging / name).unlink(missing_ok=True)
        self._is_wanted = True
        return write(kind="exact")

    def start(self, version: Path) -> None:
        """Start to build an index of a written version in the background, if one is needed."""
        if self._is_wanted and not self._is_building:
            self._thread = threading.Thread(target=self._build, args=(version,), name="index", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Wait for the index being built."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Stop building."""
        self._ending.set()
        self.wait()

    @property
    def _is_building(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _build(self, version: Path) -> None:
        with suppress(OSError):  # answers have priority
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        staging = self._built.with_name(".index-new")
        try:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir()
            arguments = (str(version), str(staging), str(self._asked))
            run_child(
                f"the index of {version}",
                "geartrain.serving.live.build_index",
                *arguments,
                is_ending=self._ending.is_set,
            )
            shutil.rmtree(self._built, ignore_errors=True)
            staging.rename(self._built)
            logger.info("built an index of %s, for the versions that follow", version)
        except (GeartrainError, OSError) as exc:
            if not self._ending.is_set():
                logger.warning("cannot build an index, searching versions exactly: %s", exc)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
