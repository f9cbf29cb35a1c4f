"""Memory that is used again: steps of one shape ask the system for none after the first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import geartrain as gt
from geartrain.bridge.placements import workspace
from geartrain.bridge.placements.workspace import Scratch

CPU = torch.device("cpu")
NUM_CLASSES = 2 * 3072 + 100
"""The last chunk is a small one."""


@pytest.fixture
def one_thread() -> Any:
    """Whichever thread of a pool takes a chunk, it is always the same."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each piece of memory that is asked for."""
    sizes: list[int] = []
    allocate: Callable[..., torch.Tensor] = workspace._allocate

    def noted(num_bytes: int, *arguments: Any, **named: Any) -> torch.Tensor:
        sizes.append(num_bytes)
        return allocate(num_bytes, *arguments, **named)

    monkeypatch.setattr(workspace, "_allocate", noted)
    return sizes


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", ["pull", "ranks"])
@pytest.mark.parametrize(
    ("select", "micro_batches"), [(gt.FullSoftmax(), 1), (gt.FullSoftmax(), 2), (gt.PartialFC(0.9), 1)]
)
def test_a_second_step_takes_no_new_memory(
    allocated: list[int], select: Any, rows: Any, dtype: Any, micro_batches: int
) -> None:
    with gt.local(1) as cluster:
        head = gt.ClassHead(
            None if rows == "ranks" else cluster,
            "head",
            num_classes=NUM_CLASSES,
            dim=8,
            select=select,
            margin=gt.ArcFace(scale=64),
            optimizer=gt.SparseMomentum(lr=0.1),
            rows=rows,
            config=gt.HeadConfig(dtype=dtype, slot_dtype=dtype),
        )
        optimizer = gt.RowOptimizer(head)
        sizes = []
        for _ in range(3):
            for part in range(micro_batches):
                generator = torch.Generator().manual_seed(part)
                features = torch.randn(4, 8, generator=generator, requires_grad=True)
                head(features, torch.randint(NUM_CLASSES, (4,), generator=generator)).backward()
            optimizer.step()
            sizes.append(list(allocated))
            allocated.clear()
    assert sizes[0]
    assert sizes[1:] == [[], []]


def test_scratch_outlasts_a_small_use_but_not_a_small_head() -> None:
    own = Scratch()
    large = own.view("rows", (1000,), torch.float32, CPU)
    own.view("rows", (10,), torch.float32, CPU)
    again = own.view("rows", (900,), torch.float32, CPU)
    assert again.data_ptr() == large.data_ptr()
    for _ in range(100):
        small = own.view("rows", (10,), torch.float32, CPU)
    assert small.untyped_storage().nbytes() == 40
    assert own.view("rows", (20,), torch.float32, CPU).shape == (20,)
