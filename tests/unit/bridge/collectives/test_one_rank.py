"""A rank that is alone makes no collective, but where it is told to: one card holds one rank of NCCL."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import geartrain as gt
from geartrain.bridge.collectives.communicator import Communicator


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def step() -> tuple[float, torch.Tensor]:
    """The loss of a head's step, and its rows after it."""
    head = gt.ClassHead(None, "t", num_classes=50, dim=8, margin=gt.ArcFace(scale=16), rows="ranks")
    rows = gt.RowOptimizer(head)
    loss = head(torch.randn(6, 8, generator=torch.Generator().manual_seed(1)), torch.arange(6))
    loss.backward()
    rows.step()
    return loss.item(), head.weights()


@pytest.mark.usefixtures("group_of_one")
def test_collectives_of_one_rank_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Communicator()
    assert link.exchange([3]) == [[3]]
    assert link.traffic == Communicator().traffic
    expected = step()
    monkeypatch.setenv("GEARTRAIN_COLLECTIVES_OF_ONE", "1")
    link = Communicator()
    assert link.exchange([3]) == [[3]]
    assert link.traffic != Communicator().traffic
    loss, rows = step()
    assert loss == expected[0]
    assert torch.equal(rows, expected[1])
