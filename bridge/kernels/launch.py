"""Where kernels run and how they are started.

On a CUDA device functions of :mod:`geartrain.bridge.kernels` start a Triton kernel; elsewhere, and where Triton is not
installed, they are the tensor operations of their reference. Tests run the kernels on a CPU, in Triton's interpreter
(``TRITON_INTERPRET=1`` before Triton is imported). An observer is told of each start and what it costs.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor


@dataclass(frozen=True)
class Cost:
    """What one start of a kernel moves and computes: what a model of a device needs."""

    num_bytes: float
    """Read from and written to the device's memory, each once."""
    flops: float = 0.0
    """Of products on matrix units."""
    dtype: torch.dtype = torch.float32
    """Of their operands."""


Observer = Callable[[Any, Cost, Callable[[], None]], None]
"""Is told the kernel, its cost, and what starts it: a recorder lets it be, a stopwatch starts it between two events."""

_observer: Observer | None = None
_interpreted = False
_captures = False
# Of the process, not of a thread: autograd works on threads of its own.


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def runs_kernels(device: torch.device) -> bool:
    """Whether tensors of this device are worked on by kernels; if not, by the reference."""
    return (device.type == "cuda" and _has_triton()) or _interpreted


def is_capturing(device: torch.device) -> bool:
    """Whether what this device is given becomes a part of a CUDA graph, to be done at each replay, and not now."""
    return _captures or (device.type == "cuda" and torch.cuda.is_current_stream_capturing())


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, cost: Cost, **options: Any) -> None:
    """Start ``kernel`` (of ``triton.jit``) on the current stream of the device of its tensors, whichever is current;
    ``options`` are its constants and ``num_warps``. A grid without programs starts nothing.
    """
    if 0 in grid:
        return

    def start() -> None:
        run(kernel, grid, args, options)

    if _observer is None:
        start()
    else:
        _observer(kernel, cost, start)


def run(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """What starts a kernel; tests on a machine with a GPU bring the CPU's tensors there first."""
    with _on_device_of(args):
        kernel[grid](*args, **options)


def _on_device_of(args: tuple[Any, ...]) -> contextlib.AbstractContextManager[object]:
    """Triton starts on the current device, on which a pointer to another's memory is none."""
    index = next(
        (arg.device.index for arg in args if isinstance(arg, torch.Tensor) and arg.device.type == "cuda"), None
    )
    if index is None or index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(index)


def on_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """int64, by way of pinned memory: the host does not wait."""
    host = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def address(tensor: Tensor | None) -> int:
    """Of its first element on its device; 0 of none, and of a tensor without memory."""
    return 0 if tensor is None or isinstance(tensor, FakeTensor) else tensor.data_ptr()


@contextlib.contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Inside, ``observer`` is told of each kernel and starts it, or not."""
    global _observer
    before, _observer = _observer, observer
    try:
        yield
    finally:
        _observer = before


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Inside, tensors of the CPU go through the kernels, too: in Triton's interpreter, for tests."""
    global _interpreted
    before, _interpreted = _interpreted, True
    try:
        yield
    finally:
        _interpreted = before


@contextlib.contextmanager
def captured() -> Iterator[None]:
    """Inside, every device :func:`is_capturing`: for tests, where nothing can be captured."""
    global _captures
    before, _captures = _captures, True
    try:
        yield
    finally:
        _captures = before
