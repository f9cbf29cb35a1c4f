"""Memory for large tensors that each step makes anew, on the host.

The allocator of the C library gives large tensors back to the operating system when they are freed, and gets them as
pages that are zeroed one by one: of a gradient of 256 MB that takes as long as computing it. Devices have allocators
that keep memory.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

GLIBC_FRESH_BYTES = 32 << 20
"""From this size on glibc's malloc asks the operating system for every tensor anew (its largest mmap threshold)."""


class KeptMemory:
    """Room for one tensor, given out again once nobody has the last one, nor anything that shares its memory."""

    def __init__(self) -> None:
        self._room: np.ndarray | None = None
        self._given: weakref.ref[np.ndarray] | None = None

    def empty(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """A tensor of the type and on the device of ``like``, its values any; in kept memory if free and worth it."""
        num_bytes = math.prod(shape) * like.element_size()
        is_given = self._given is not None and self._given() is not None
        if like.device.type != "cpu" or num_bytes < GLIBC_FRESH_BYTES or is_given:
            return torch.empty(*shape, dtype=like.dtype, device=like.device)
        if self._room is None or self._room.nbytes < num_bytes:
            self._room = None  # first, for both need not fit
            self._room = torch.empty(num_bytes, dtype=torch.uint8).numpy()
        own = self._room[:num_bytes]  # the tensor's storage holds this view of the room for as long as it is there
        self._given = weakref.ref(own)
        return torch.from_numpy(own).view(like.dtype).view(*shape)

    def __reduce__(self) -> tuple[type[KeptMemory], tuple[()]]:
        """A copy has room of its own."""
        return KeptMemory, ()
