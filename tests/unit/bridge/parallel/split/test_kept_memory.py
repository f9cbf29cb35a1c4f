"""Large logits and gradients of a split layer use the memory of the last step, and never memory that somebody has."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import geartrain as gt
from geartrain.bridge.parallel.split import kept_memory
from geartrain.bridge.parallel.split.kept_memory import KeptMemory


@pytest.fixture(autouse=True)
def _any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_memory, "GLIBC_FRESH_BYTES", 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_memory_is_given_again_once_nobody_has_it(dtype: torch.dtype) -> None:
    memory, like = KeptMemory(), torch.empty(0, dtype=dtype)
    first = memory.empty((4, 3), like)
    address, alias = first.data_ptr(), first[1:].T
    assert (first.shape, first.dtype) == ((4, 3), dtype)
    other = memory.empty((4, 3), like)
    del first
    assert memory.empty((4, 3), like).data_ptr() != address  # the alias has it still
    alias.fill_(7)
    del alias
    smaller = memory.empty((2, 3), like)
    assert smaller.data_ptr() == address
    assert not {other.data_ptr()} & {address}


def losses(model: nn.Module, parameters: list[Tensor], batches: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Of a training that accumulates, holds what a step gave, and looks twice before it goes backward."""
    optimizer = torch.optim.SGD(parameters, lr=0.5, momentum=0.9)
    found: list[Tensor] = []
    held: list[Tensor] = []
    for number, (images, labels) in enumerate(batches):
        first, second = model(images, labels), model(images.flip(0), labels)
        (first + second).backward()
        if number % 3 == 1:  # else gradients add up
            optimizer.step()
            held += [one.grad for one in parameters if one.grad is not None]
            optimizer.zero_grad()
        found += [first.detach(), second.detach()]
    return [*found, *held, *(one.detach() for one in parameters)]


class Plain(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.linear(images), labels)


@pytest.mark.parametrize("bias", [True, False])
def test_training_is_that_of_the_plain_layer(bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(5, 9, bias=bias, dtype=torch.float64)
    batches = [(torch.randn(size, 5, dtype=torch.float64), torch.randint(9, (size,))) for size in (6, 6, 3, 6, 1, 6)]
    plain = Plain(copy.deepcopy(linear))
    split = gt.parallelize(linear, gt.mesh(), {"": gt.Split()}, loss=nn.CrossEntropyLoss())
    found = losses(split, list(split.parameters()), batches)
    for mine, theirs in zip(found, losses(plain, list(plain.parameters()), batches), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_steps_take_turns_in_one_room() -> None:
    model = gt.parallelize(nn.Linear(4, 6), gt.mesh(), {"": gt.Split()}, loss=nn.CrossEntropyLoss())
    (weight,) = [one for one in model.parameters() if one.ndim == 2]
    places = set()
    for _ in range(3):
        model(torch.ones(2, 4), torch.tensor([1, 2])).backward()
        assert weight.grad is not None
        places.add(weight.grad.data_ptr())
        weight.grad = None
    assert len(places) == 1
    copy.deepcopy(model.module)
