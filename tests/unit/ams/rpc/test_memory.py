"""What a flood took is given back to the system."""

from __future__ import annotations

import subprocess
import sys

import pytest

FLOOD = """
import ctypes, threading
from pathlib import Path
from geartrain.ams.rpc.server import memory
memory._POLL_SECONDS, memory._MUCH_BYTES = 0.05, 16 << 20  # so much may stay of what is freed between looks
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
pages = lambda: int(Path("/proc/self/statm").read_text().split()[1])
before = pages()
memory.watch_memory()
pieces = [libc.malloc(4000) for _ in range(50_000)]
for piece in pieces:
    ctypes.memset(piece, 1, 4000)
assert pages() - before > 45_000
threading.Event().wait(0.2)  # several looks
for number, piece in enumerate(pieces):
    if number % 100:  # the others are in use: nothing at the end of the heap is free
        libc.free(piece)
while pages() - before > 10_000:
    threading.Event().wait(0.01)
"""


@pytest.mark.exact_memory
def test_what_is_free_between_what_is_in_use_is_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", FLOOD], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
