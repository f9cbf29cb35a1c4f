"""What goes between host and device without either waiting for more than it needs."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def upload(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """The array as a tensor on ``device``. On a CPU the same memory; to a CUDA device a copy by way of pinned memory,
    for which the host does not wait.
    """
    host = torch.from_numpy(array)
    if device.type == "cpu":
        return host
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


class Readback:
    """An integer on its way to the host, which waits only for what the device was given before."""

    def __init__(self) -> None:
        self._number: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None

    def begin(self, number: Tensor) -> None:
        """Ask for a number (0-dim); it takes the place of one that was asked for before."""
        self._number, self._arrived = number, None
        if number.device.type == "cuda":
            self._number = torch.empty((), dtype=number.dtype, pin_memory=True).copy_(number, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record(torch.cuda.current_stream(number.device))

    def result(self) -> int:
        """The number that was asked for since the last time; 0 if none was."""
        number, self._number = self._number, None
        if self._arrived is not None:
            self._arrived.synchronize()
        return 0 if number is None else int(number)
