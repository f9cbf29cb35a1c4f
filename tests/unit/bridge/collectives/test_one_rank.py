"""A rank that is alone makes no collective, but where it is told to: one card holds one rank of NCCL."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import geartrain as gt
from geartrain.bridge.collectives.communicator import Communicator
from geartrain.bridge.kernels.launch import interpreted


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


def embedded() -> torch.Tensor:
    """The rows of embeddings after a step."""
    settings: Any = {"num_rows": 9, "padding_id": 3}
    fields = [gt.Field("a", dim=4, pooling="mean", **settings), gt.Field("b", dim=3, **settings)]
    group = gt.EmbeddingGroup(None, "e", fields, rows="ranks", optimizer=gt.Adagrad(0.1))
    rows = gt.RowOptimizer(group)
    ids = torch.randint(9, (5, 3), generator=torch.Generator().manual_seed(1))
    vectors = group({"a": ids, "b": ids})
    torch.cat(list(vectors.values()), 1).square().sum().backward()
    rows.step()
    return torch.cat([torch.as_tensor(group.table(name).pull(torch.arange(9))) for name in "ab"], 1)


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("by_kernels", [False, True])
def test_embeddings_that_travel_to_the_rank_itself_are_the_same(
    by_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = embedded()
    monkeypatch.setenv("GEARTRAIN_COLLECTIVES_OF_ONE", "1")
    if by_kernels:
        pytest.importorskip("triton")
    with interpreted() if by_kernels and not torch.cuda.is_available() else contextlib.nullcontext():
        torch.testing.assert_close(embedded(), expected, rtol=1e-6 if by_kernels else 0, atol=0)
