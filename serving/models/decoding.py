"""Decoder of untrusted pictures with limits: a small file may hold a picture that takes long."""

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
"""Most pixels of all pictures of a request: about a second."""
QUICK_PIXELS = 1 << 17
"""Most pixels of a request that is read at once: a millisecond or two."""
LARGE_PIXELS = 4 << 20
"""Pixels from which few threads decode at once, so that others go on with small pictures."""
MAX_LARGE = 8
"""Most requests with such a picture, including waiting ones; fewer than the threads that read."""
_places = threading.Semaphore(MAX_LARGE)
_turns = threading.Semaphore(max(1, len(os.sched_getaffinity(0)) // 2))


@dataclass
class QuestionPictures:
    """Pictures of one request."""

    _preprocessing: Preprocessing
    _pixels: int = 0

    def bitmap(self, picture: object, where: str) -> npt.NDArray[np.uint8]:
        """Decode an image file to [channels, side, side]; ``where`` names it in errors. Raises InvalidArgument, Busy
        (too many large ones)."""
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
                f"the pictures up to {where} have more than {MOST_PIXELS:,} pixels together; scale them down, or send "
                "them in several requests"
            )
        if self._pixels > QUICK_PIXELS:
            require_time()
        if pixels > LARGE_PIXELS:
            if not _places.acquire(blocking=False):
                raise Busy(
                    f"{MAX_LARGE} requests with pictures of more than {LARGE_PIXELS:,} pixels are under way; scale "
                    "yours down, or ask again in a second"
                )
            held.callback(_places.release)
            held.enter_context(_turns)
