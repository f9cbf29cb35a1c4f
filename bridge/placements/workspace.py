"""Memory that steps reuse, as fresh pages cost a CPU more than arithmetic, and the dtypes of a pass."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from geartrain.bridge.kernels.launch import is_capturing
from geartrain.bridge.rows.native_types import gives_float32_products, product_type
from geartrain.bridge.rows.transfers import DeviceEvent

_FREE_BUFFERS_KEPT = 4
_SMALL_USES = 64


def _allocate(num_bytes: int, device: torch.device, *, pinned: bool = False) -> Tensor:
    # A tensor born in inference mode could not be written to outside it.
    with torch.inference_mode(False):
        return torch.empty(num_bytes, dtype=torch.uint8, device=device, pin_memory=pinned)


class Scratch:
    """Named scratch tensors; asking for a name again invalidates the tensor given before. Belongs to one thread."""

    def __init__(self) -> None:
        self._flat: dict[tuple[str, torch.device], Tensor] = {}
        self._small_uses: dict[tuple[str, torch.device], int] = {}
        """Times in a row that less than a quarter of the tensor was needed."""

    def view(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised contiguous tensor of this shape, in the memory of ``name``."""
        num_bytes = math.prod(shape) * dtype.itemsize
        flat = self._flat.get((name, device))
        small_uses = 0
        if flat is not None and len(flat) > 4 * num_bytes:  # maybe only the last chunk, or another head
            small_uses = self._small_uses[name, device] + 1
        if flat is None or len(flat) < num_bytes or small_uses > _SMALL_USES:
            flat, small_uses = _allocate(num_bytes, device), 0
            self._flat[name, device] = flat
        self._small_uses[name, device] = small_uses
        return flat[:num_bytes].view(dtype).view(shape)


class Buffer:
    """A lent piece of memory; :meth:`BufferPool.release` it when no tensor in it is used any more."""

    def __init__(self, flat: Tensor) -> None:
        self.flat = flat
        self.is_of_graph = is_capturing(flat.device)
        """Whether the buffer belongs to a CUDA graph, each replay of which writes to it."""
        self.busy_until: DeviceEvent | None = None

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Contiguous tensor of this shape, at the start of the buffer."""
        num_bytes = math.prod(shape) * dtype.itemsize
        return self.flat[:num_bytes].view(dtype).view(shape)


class BufferPool:
    """Lends buffers and keeps returned ones for the next step; one that is never returned is freed as usual."""

    def __init__(self) -> None:
        self._free: list[Buffer] = []

    def acquire(self, num_bytes: int, device: torch.device, *, pinned: bool = False) -> Buffer:
        """Return a buffer of at least ``num_bytes``; ``pinned``: in page-locked host memory."""
        for buffer in () if is_capturing(device) else self._free:
            flat = buffer.flat
            if buffer.busy_until is not None and not buffer.busy_until.is_over:
                continue
            if num_bytes <= len(flat) <= 2 * num_bytes and flat.device == device and flat.is_pinned() == pinned:
                self._free.remove(buffer)
                return buffer
        return Buffer(_allocate(num_bytes, device, pinned=pinned))

    def release(self, buffer: Buffer, busy_until: DeviceEvent | None = None) -> None:
        """Keep the buffer for a later :meth:`acquire`, which returns it once ``busy_until`` is over.

        Only the four released last are kept, and none of a CUDA graph.
        """
        if buffer.is_of_graph:
            return
        buffer.busy_until = busy_until
        self._free.append(buffer)
        del self._free[:-_FREE_BUFFERS_KEPT]


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """Device and dtypes of a pass."""

    device: torch.device
    compute: torch.dtype
    """Dtype of statistics, sums and gradients."""
    matmul: torch.dtype
    """Dtype of the operands of large products."""

    @staticmethod
    def of(features: Tensor) -> Arithmetic:
        """Return the dtypes by ``features`` and autocast; but none that is slower on a CPU."""
        kind = features.device.type
        compute = torch.float64 if features.dtype == torch.float64 else torch.float32
        autocast = torch.is_autocast_enabled(kind)
        matmul = product_type(features.device, torch.get_autocast_dtype(kind), compute) if autocast else compute
        return Arithmetic(device=features.device, compute=compute, matmul=matmul)


class Workspace:
    """Scratch tensors of one thread, in the types of one pass."""

    def __init__(self, arithmetic: Arithmetic, scratch: Scratch) -> None:
        self.arithmetic = arithmetic
        self._scratch = scratch

    def empty(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return an uninitialised tensor in the compute dtype (or ``dtype``), valid until ``name`` is asked again."""
        return self._scratch.view(name, shape, dtype or self.arithmetic.compute, self.arithmetic.device)

    def narrow(self, name: str, tensor: Tensor) -> Tensor:
        """Return ``tensor`` in the dtype of a product's operand."""
        if tensor.dtype == self.arithmetic.matmul:
            return tensor
        narrowed = self.empty(name, *tensor.shape, dtype=self.arithmetic.matmul)
        narrowed.copy_(tensor)
        return narrowed

    def load_rows(self, rows_ND: Tensor) -> Tensor:
        """Return the rows on the device in the compute dtype: the same tensor if possible, else a scratch copy.

        The host does not wait for a copy from its pinned memory: leave that as it is until a :class:`DeviceEvent` ends.
        """
        if rows_ND.device == self.arithmetic.device and rows_ND.dtype == self.arithmetic.compute:
            return rows_ND
        loaded_ND = self.empty("rows", *rows_ND.shape)
        loaded_ND.copy_(rows_ND, non_blocking=True)
        return loaded_ND

    def product(self, name: str, left: Tensor, right: Tensor) -> Tensor:
        """Return ``left`` @ ``right``, both in the matmul dtype, as a scratch tensor in the compute dtype."""
        return self.product_into(self.empty(name, left.shape[0], right.shape[1]), left, right)

    def product_into(self, out: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """Write ``left`` @ ``right``, both in the matmul dtype, to ``out`` in the compute dtype, without rounding sums.

        Where the device cannot return such sums the operands are widened, which is exact and slow.
        """
        if left.dtype == out.dtype:
            return torch.mm(left, right, out=out)
        if gives_float32_products(left.device, left.dtype):
            return torch.mm(left, right, out_dtype=out.dtype, out=out)
        return torch.mm(left.to(out.dtype), right.to(out.dtype), out=out)
