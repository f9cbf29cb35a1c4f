"""Release of memory to the system after a flood of connections, which the allocator would keep for ever."""

from __future__ import annotations

import ctypes
import functools
import threading
import time
from typing import Any

from geartrain.ams.values.config import MIB

_POLL_SECONDS = 5.0
_MUCH_BYTES = 64 * MIB
"""Drop of used memory below its peak that triggers a release."""


_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Allocated(ctypes.Structure):  # glibc's mallinfo2
    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


@functools.cache
def watch_memory() -> None:
    """Start the thread that releases this process's memory, once. Does nothing without glibc."""
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
        time.sleep(_POLL_SECONDS)
