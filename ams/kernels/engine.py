"""What a shard knows of its callers, compiled: whether it is its own, which writes it has applied, which ranks wait.

``ams/kernels/csrc/engine`` and ``writes`` beside it have a header for each part, which says what it promises and words
its errors.
"""

from __future__ import annotations

from geartrain.ams.kernels._core import (
    Alarm,
    CompletedWrites,
    Engine,
    HeldStreams,
    Kind,
    Lease,
    Place,
    ServedTable,
    SyncGroups,
    Turn,
    Waiter,
    boot_seconds,
)

__all__ = [
    "Alarm",
    "CompletedWrites",
    "Engine",
    "HeldStreams",
    "Kind",
    "Lease",
    "Place",
    "ServedTable",
    "SyncGroups",
    "Turn",
    "Waiter",
    "boot_seconds",
]
