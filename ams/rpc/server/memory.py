"""Gives memory back to the system that a flood of connections took, and that the allocator would keep for ever."""

from __future__ import annotations

import ctypes
import functools
import threading
import time
from typing import Any

from geartrain.ams.values.config import MIB

_LOOK_SECONDS = 5.0
_MUCH_BYTES = 64 * MIB
"""Of which so many are in use no more."""


_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Allocated(ctypes.Structure):  # what glibc calls mallinfo2
    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


@functools.cache
def watch_memory() -> None:
    """Begin to look after the memory of this process, unless it is done. Other C libraries than glibc are let be."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallinfo2") and hasattr(library, "malloc_trim"):
        library.mallinfo2.restype = _Allocated
        threading.Thread(target=_watch, args=(library,), name="geartrain-memory", daemon=True).start()


def _watch(library: Any) -> None:
    most = 0
    while True:
        used = library.mallinfo2().uordblks
        most = max(most, used)
        if most - used > _MUCH_BYTES:
            library.malloc_trim(0)
            most = used
        time.sleep(_LOOK_SECONDS)
