"""Memory that a head uses again in every step: fresh pages cost more than the arithmetic on a CPU."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_FREE_BUFFERS_KEPT = 4
_SMALL_USES = 64


def _allocate(num_bytes: int, device: torch.device, *, pinned: bool = False) -> Tensor:
    # A tensor born in inference mode could not be written to outside it.
    with torch.inference_mode(False):
        return torch.empty(num_bytes, dtype=torch.uint8, device=device, pin_memory=pinned)


def wait_for_copies(device: torch.device) -> None:
    """Wait until no copy between ``device`` and the host is under way, before host memory serves another purpose."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Scratch:
    """Named scratch tensors; asking for a name again invalidates the tensor given before. Belongs to one thread."""

    def __init__(self) -> None:
        self._flat: dict[tuple[str, torch.device], Tensor] = {}
        self._small_uses: dict[tuple[str, torch.device], int] = {}
        """How often in a row less than a quarter of it would have done."""

    def view(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uninitialised contiguous tensor of this shape, in memory that is kept under ``name``."""
        num_bytes = math.prod(shape) * dtype.itemsize
        flat = self._flat.get((name, device))
        small_uses = 0
        if flat is not None and len(flat) > 4 * num_bytes:  # the last chunk, or another head
            small_uses = self._small_uses[name, device] + 1
        if flat is None or len(flat) < num_bytes or small_uses > _SMALL_USES:
            flat, small_uses = _allocate(num_bytes, device), 0
            self._flat[name, device] = flat
        self._small_uses[name, device] = small_uses
        return flat[:num_bytes].view(dtype).view(shape)


class Buffer:
    """A lent piece of memory; :meth:`BufferPool.give_back` it when nothing refers to its tensors any more."""

    def __init__(self, flat: Tensor) -> None:
        self.flat = flat

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Contiguous tensor of this shape, at the start of the buffer."""
        num_bytes = math.prod(shape) * dtype.itemsize
        return self.flat[:num_bytes].view(dtype).view(shape)


class BufferPool:
    """Lends buffers and keeps those given back for the next step; one that never comes back is simply collected."""

    def __init__(self) -> None:
        self._free: list[Buffer] = []

    def take(self, num_bytes: int, device: torch.device, *, pinned: bool = False) -> Buffer:
        """Lend a buffer of at least ``num_bytes``; ``pinned`` asks for page-locked host memory."""
        for buffer in self._free:
            flat = buffer.flat
            if num_bytes <= len(flat) <= 2 * num_bytes and flat.device == device and flat.is_pinned() == pinned:
                self._free.remove(buffer)
                return buffer
        return Buffer(_allocate(num_bytes, device, pinned=pinned))

    def give_back(self, buffer: Buffer) -> None:
        """Keep the buffer for the next :meth:`take`."""
        self._free.append(buffer)
        del self._free[:-_FREE_BUFFERS_KEPT]
