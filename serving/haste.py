"""Questions that are read by the thread that answers others: what takes long there is put off, to another thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

from geartrain.serving.answers import Question

_here = threading.local()


class PutOff(Exception):
    """The question takes long to be read."""


def hasty(read: Callable[[], Question]) -> Callable[[], Question]:
    """``read``, but with PutOff as soon as it is seen to take long."""

    def read_in_haste() -> Question:
        _here.is_hasty = True
        try:
            return read()
        finally:
            _here.is_hasty = False

    return read_in_haste


def put_off() -> None:
    """What takes milliseconds comes next. Raises PutOff where there is no time for it."""
    if getattr(_here, "is_hasty", False):
        raise PutOff
