"""Where kernels are started."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from geartrain.bridge.kernels.launch import Cost, launch


@pytest.mark.parametrize(("where", "entered"), [("cuda:0", []), ("cuda:1", [1]), ("cpu", [])])
def test_a_kernel_is_started_on_the_device_of_its_tensors(
    where: str, entered: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    starts: list[list[int]] = []

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        found.append(index)
        yield

    class Kernel:
        """Notes which device was made the current one before it is started."""

        def __getitem__(self, grid: tuple[int, ...]) -> object:
            return lambda *_, **__: starts.append(list(found))

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", device)
    with FakeTensorMode():
        rows = torch.empty(2, device=where)
    launch(Kernel(), (1,), None, rows, 3, cost=Cost(0.0))
    assert starts == [entered]
