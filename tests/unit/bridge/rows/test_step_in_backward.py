"""The step of rows at the end of a backward pass, before DDP waits for the gradients of the backbone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import geartrain as gt
from geartrain.ams.values.errors import InvalidArgument, NonFinite

SUMMED = 7.0


@pytest.fixture(autouse=True)
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def model_and_head() -> tuple[nn.Module, gt.ClassHead]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 8))
    return model, gt.ClassHead(None, "t", num_classes=50, dim=8, rows="ranks", optimizer=gt.SparseMomentum(0.5))


def loss_of(model: nn.Module, head: gt.ClassHead) -> Tensor:
    loss: Tensor = head(model(torch.randn(6, 4, generator=torch.Generator().manual_seed(1))), torch.arange(6))
    return loss


def summed_later(_: Any, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations, as objects
    future = torch.futures.Future[Any]()
    future.set_result(torch.full_like(bucket.buffer(), SUMMED))
    return future


def test_rows_are_written_before_ddp_hands_out_the_sums_and_are_those_of_a_step() -> None:
    model, head = model_and_head()
    rows = gt.RowOptimizer(head)
    loss_of(model, head).backward()
    rows.step()
    expected = head.weights()

    model, head = model_and_head()
    rows, gradients_then = gt.RowOptimizer(head), list[Tensor]()
    model.register_comm_hook(None, summed_later)
    rows.register_step_post_hook(lambda *_: gradients_then.extend(p.grad.clone() for p in model.parameters()))
    loss = loss_of(model, head)
    rows.step_in_backward(loss)
    loss.backward()
    assert torch.equal(head.weights(), expected)
    assert len(gradients_then) == 2 and not any((grad == SUMMED).any() for grad in gradients_then)
    assert all((param.grad == SUMMED).all() for param in model.parameters())


def test_backward_raises_what_the_step_does_and_the_next_pass_goes_on() -> None:
    model, head = model_and_head()
    rows = gt.RowOptimizer(head)
    loss = loss_of(model, head)
    rows.step_in_backward(loss)
    with pytest.raises(NonFinite):
        (loss * torch.inf).backward()
    rows.zero_grad()
    before, loss = head.weights(), loss_of(model, head)
    rows.step_in_backward(loss)
    loss.backward()
    assert not torch.equal(head.weights(), before)


@pytest.mark.parametrize("factor", [0.25, 65536.0])
def test_a_loss_that_is_scaled_first_is_refused_and_no_row_written(factor: float) -> None:
    model, head = model_and_head()
    before, rows, loss = head.weights(), gt.RowOptimizer(head), loss_of(model, head)
    rows.step_in_backward(loss)
    with pytest.raises(InvalidArgument, match=f"multiplied by {factor:g} before"):
        (loss * factor).backward()
    assert torch.equal(head.weights(), before)
    rows.zero_grad()
    loss = loss_of(model, head) * factor
    rows.step_in_backward(loss)  # the remedy
    loss.backward()
    assert not torch.equal(head.weights(), before)


def test_a_loss_without_a_graph_is_refused() -> None:
    model, head = model_and_head()
    with torch.no_grad():
        loss = loss_of(model, head)
    with pytest.raises(InvalidArgument, match="outside torch"):
        gt.RowOptimizer(head).step_in_backward(loss)
