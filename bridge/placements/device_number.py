"""Numbers that change with each step and that kernels read on the device, so that a CUDA graph can hold a step."""

from __future__ import annotations

import torch
from torch import Tensor

from geartrain.bridge.kernels.launch import is_capturing, runs_kernels


class DeviceNumber:
    """A number on the host and, where kernels run, its copy on their device, written when the number changes."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._copy: Tensor | None = None
        self._value: float | None = None
        """Value of the copy; None: unknown."""

    def on(self, value: float, device: torch.device) -> float | Tensor:
        """Return ``value`` as a 0-dim tensor on ``device``, in the same memory until ``device`` changes; as is where no
        kernel reads it.

        While a CUDA graph is captured the copy is not written: call :meth:`write` before each replay.
        """
        if not (runs_kernels(device) or is_capturing(device)):
            return value
        if self._copy is None or self._copy.device != device:
            with torch.inference_mode(False):
                self._copy, self._value = torch.empty((), dtype=self._dtype, device=device), None
        if not is_capturing(device):
            self.write(value)
        return self._copy

    def write(self, value: float) -> None:
        """Write the copy, if there is one."""
        if self._copy is not None and value != self._value:
            self._copy.fill_(value)
            self._value = value
