"""Launch of Triton kernels, and the choice between a kernel and its reference.

On a CUDA device functions of :mod:`geartrain.bridge.kernels` start a Triton kernel; elsewhere, and without Triton, they
run their reference in tensor operations. Tests run the kernels on a CPU, in Triton's interpreter
(``TRITON_INTERPRET=1`` before Triton is imported). An observer receives each start with its cost.
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
    """Bytes and operations of one kernel start, for a model of a device."""

    num_bytes: float
    """Bytes read from and written to the device's memory, each counted once."""
    flops: float = 0.0
    """Operations of products on matrix units."""
    dtype: torch.dtype = torch.float32
    """Type of the operands of these products."""


Observer = Callable[[Any, Cost, Callable[[], None]], None]
"""Receives a kernel, its cost and a function that starts it: a recorder starts nothing, a timer starts it."""

_observer: Observer | None = None
_interpreted = False
_captures = False
# Per process, not per thread: autograd works on threads of its own.


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def runs_kernels(device: torch.device) -> bool:
    """Return whether kernels, not the reference, work on tensors of this device."""
    return (device.type == "cuda" and _has_triton()) or _interpreted


def is_capturing(device: torch.device) -> bool:
    """Return whether this device is capturing a CUDA graph: work is recorded for replays, not done now."""
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
    """Start a kernel. Tests replace this on a machine with a GPU, to move the CPU's tensors there first."""
    with _on_device_of(args):
        kernel[grid](*args, **options)


def _on_device_of(args: tuple[Any, ...]) -> contextlib.AbstractContextManager[object]:
    """Make the tensors' device the current one: Triton starts there, where pointers of other devices are invalid."""
    index = next(
        (arg.device.index for arg in args if isinstance(arg, torch.Tensor) and arg.device.type == "cuda"), None
    )
    if index is None or index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(index)


def on_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Return the numbers as int64 on the device, through pinned memory: the host does not wait."""
    host = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def address(tensor: Tensor | None) -> int:
    """Return the address of a tensor's first element; 0 for None and for a tensor without memory."""
    return 0 if tensor is None or isinstance(tensor, FakeTensor) else tensor.data_ptr()


@contextlib.contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Inside, ``observer`` receives each kernel and decides whether to start it."""
    global _observer
    before, _observer = _observer, observer
    try:
        yield
    finally:
        _observer = before


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Inside, kernels also work on tensors of the CPU, in Triton's interpreter; for tests."""
    global _interpreted
    before, _interpreted = _interpreted, True
    try:
        yield
    finally:
        _interpreted = before


@contextlib.contextmanager
def captured() -> Iterator[None]:
    """Inside, :func:`is_capturing` is true for every device; for tests, where nothing can be captured."""
    global _captures
    before, _captures = _captures, True
    try:
        yield
    finally:
        _captures = before
