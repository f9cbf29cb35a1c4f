"""Where kernels are tested: on a CUDA device if there is one, else in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

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
