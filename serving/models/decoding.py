"""Pictures that strangers send, decoded within bounds: a small file may hold a picture that takes long."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from io import BytesIO

import numpy as np
import numpy.typing as npt

from geartrain.ams.values.errors import Busy, InvalidArgument
from geartrain.ams.values.text import quoted
from geartrain.serving.answers import require_time
from geartrain.workers.data.bitmaps import MAX_PIXELS, Preprocessing, decode_picture

MOST_PIXELS = 2 * MAX_PIXELS
"""Of all pictures of a question: about a second."""
QUICK_PIXELS = 1 << 17
"""Of a question that is read at once: a millisecond or two."""
LARGE_PIXELS = 4 << 20
"""More are decoded by few threads at once, so that others go on with small ones."""
MOST_LARGE = 8
"""Questions with such a picture, those that wait included; fewer than there are threads that read."""
_places = threading.Semaphore(MOST_LARGE)
_turns = threading.Semaphore(max(1, len(os.sched_getaffinity(0)) // 2))


@dataclass
class QuestionPictures:
    """Those of one question."""

    _preprocessing: Preprocessing
    _pixels: int = 0

    def bitmap(self, picture: object, where: str) -> npt.NDArray[np.uint8]:
        """[K, S, S] of an image file, named as ``where``. Raises InvalidArgument, and Busy: too many are large."""
        if not isinstance(picture, bytes):
            raise InvalidArgument(f"{where} is {quoted(picture)}; give the bytes of an image file")
        with ExitStack() as held:
            decoded = decode_picture(BytesIO(picture), where, partial(self._admit, where, held))
            try:
                return self._preprocessing.bitmap(decoded)
            except InvalidArgument as exc:
                raise InvalidArgument(f"{where}: {exc}") from exc

    def _admit(self, where: str, held: ExitStack, pixels: int) -> None:
        self._pixels += pixels
        if self._pixels > MOST_PIXELS:
            raise InvalidArgument(
                f"the pictures up to {where} have more than {MOST_PIXELS:,} pixels together; scale them down, or ask "
                "in several requests"
            )
        if self._pixels > QUICK_PIXELS:
            require_time()
        if pixels > LARGE_PIXELS:
            if not _places.acquire(blocking=False):
                raise Busy(
                    f"{MOST_LARGE} questions with pictures of more than {LARGE_PIXELS:,} pixels are under way; scale "
                    "yours down, or ask again in a second"
                )
            held.callback(_places.release)
            held.enter_context(_turns)
