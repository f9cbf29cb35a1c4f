"""Where kernels are tested: on a CUDA device if there is one, else in Triton's interpreter."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import partialmethod
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from geartrain.bridge.kernels import launch
from geartrain.bridge.kernels.launch import interpreted


@pytest.fixture
def kernel_device() -> Iterator[torch.device]:
    """The device of the tensors that a kernel under test is given."""
    if torch.cuda.is_available():
        yield torch.device("cuda")
        return
    pytest.importorskip("triton")
    with interpreted():
        yield torch.device("cpu")


@pytest.fixture(autouse=True)
def kernels_run_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is a GPU, tensors of the CPU go there for each kernel and come back; no interpreter takes part.

    Else the interpreter's maximum and minimum pass over NaN, as a card's do.
    """
    if torch.cuda.is_available():
        monkeypatch.setattr(launch, "run", run_there)
    elif importlib.util.find_spec("triton"):
        interpreter = importlib.import_module("triton.runtime.interpreter").InterpreterBuilder
        for name, function in (("create_maxnumf", np.fmax), ("create_minnumf", np.fmin)):
            monkeypatch.setattr(interpreter, name, partialmethod(interpreter.binary_op, op=function))


def run_there(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Run a kernel on a GPU over copies of whole storages, so that strides and what tensors share stay."""
    memory: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def there(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        _, copy = memory.setdefault(storage.data_ptr(), (storage, storage.cuda()))
        moved = torch.empty(0, dtype=tensor.dtype, device="cuda")
        return moved.set_(copy, tensor.storage_offset(), tensor.shape, tensor.stride())

    on_cpu = lambda value: isinstance(value, Tensor) and value.device.type == "cpu"  # noqa: E731
    kernel[grid](*(there(arg) if on_cpu(arg) else arg for arg in args), **options)
    for storage, copy in memory.values():
        storage.copy_(copy)
