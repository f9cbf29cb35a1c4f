"""Memory limit of this process's rows, with their slots and indexes."""

from __future__ import annotations

from geartrain.ams.kernels import _core
from geartrain.ams.values.errors import InvalidArgument

UNLIMITED = 2**63 - 1


def set_memory_limit(num_bytes: int) -> None:
    """Refuse writes that would take all tables of this process beyond so many bytes, :data:`UNLIMITED` at first.

    Counted are the pages of 2 MiB that rows and slots touch, their indexes (except a few bits an id), and the rows
    copied for freezes. Present tables stay unchanged. Any thread. Raises InvalidArgument if it is below 0.
    """
    if not 0 <= num_bytes <= UNLIMITED:
        raise InvalidArgument(f"the memory limit is {num_bytes}; it must lie in [0, {UNLIMITED}]")
    _core.set_memory_limit(num_bytes)


memory_limit, memory_used = _core.memory_limit, _core.memory_used
"""Limit of the bytes of all tables of this process; and the used bytes that count towards it."""
