"""How much memory the rows of this process may take, their slots and indexes included."""

from __future__ import annotations

from geartrain.ams.kernels import _core
from geartrain.ams.values.errors import InvalidArgument

UNLIMITED = 2**63 - 1


def set_memory_limit(num_bytes: int) -> None:
    """Refuse from now on what would take all tables of this process beyond so many bytes, :data:`UNLIMITED` at first.

    Counted are the pages of 2 MiB that rows and slots touch, their indexes (but for a few bits an id), and the rows
    that freezes keep. Tables that are there stay as they are. Any thread. Raises InvalidArgument if it is below 0.
    """
    if not 0 <= num_bytes <= UNLIMITED:
        raise InvalidArgument(f"the memory limit is {num_bytes}; it must lie in [0, {UNLIMITED}]")
    _core.set_memory_limit(num_bytes)


memory_limit, memory_used = _core.memory_limit, _core.memory_used
"""Bytes that all tables of this process may take; and those that they take, of those that the limit bounds."""
