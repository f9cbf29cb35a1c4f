"""What goes between host and device without either waiting for more than it needs."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def upload(array: npt.NDArray[Any] | Tensor, device: torch.device) -> Tensor:
    """The array as a tensor on ``device``. On a CPU the same memory; to a CUDA device a copy by way of pinned memory,
    for which the host does not wait. A tensor that is there already is returned as it is.
    """
    if isinstance(array, Tensor) and array.device == device:
        return array
    host = array if isinstance(array, Tensor) else torch.from_numpy(array)
    if device.type == "cpu":
        return host
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


class Readback:
    """A small tensor on its way to the host, which asks whether it is there and never waits."""

    def __init__(self, values: Tensor) -> None:
        """Ask for ``values``, as the device will have them by what it was given so far."""
        self._host = values
        self._arrived: torch.cuda.Event | None = None
        if values.device.type == "cuda":
            room = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host = room.copy_(values.detach(), non_blocking=True)
            event = self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(values.device))

    @property
    def is_here(self) -> bool:
        """Whether :meth:`values` need not wait."""
        if self._arrived is not None and self._arrived.query():  # type: ignore[no-untyped-call]
            self._arrived = None
        return self._arrived is None

    def values(self) -> Tensor:
        """What was asked for, on the host; waits until it :attr:`is_here`."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host
