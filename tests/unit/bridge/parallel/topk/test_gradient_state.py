"""What waits in the residuals goes on: from memory, from a saved model, on another number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import geartrain as gt
from geartrain.ams.values.errors import InvalidArgument, SpecMismatch
from geartrain.bridge.parallel.topk import selection
from tests.support.rank_processes import on_ranks, run_ranks
from tests.unit.bridge.parallel.topk.test_topk_gradients import LR, step_of
from tests.unit.bridge.parallel.topk.test_topk_gradients import made as made_tensors

Parts = tuple[DistributedDataParallel, torch.optim.Optimizer, gt.TopKGradients]
INPUTS, OUTPUTS = 12, 8


def made(**settings: Any) -> Parts:
    selection.SMALL = OUTPUTS
    torch.manual_seed(1)
    network = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(4, OUTPUTS))
    network.to(memory_format=torch.channels_last)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"sparsity": 0.9, "weight_decay": 0.01, **settings}
    return model, optimizer, gt.TopKGradients(**settings).attach(model, optimizer)


def train(parts: Parts, rank: int, steps: range) -> None:
    model, optimizer, _ = parts
    for step in steps:
        random = torch.Generator().manual_seed(100 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(5, 3, 2, 2, generator=random)).square().sum().backward()
        optimizer.step()


def waiting(parts: Parts) -> dict[str, torch.Tensor]:
    """The mean over the ranks of what waits, in float64."""
    found = {}
    state = parts[2]._attached.state  # type: ignore[attr-defined]
    for kind, tensors in state.shaped().items():
        for name, tensor in tensors.items():
            total = tensor.double().contiguous()
            dist.all_reduce(total)
            found[f"{kind} {name}"] = total / dist.get_world_size()
    return found


def save_on_ranks(rank: int, folder: Path) -> None:
    parts = made()
    train(parts, rank, range(6))
    before = waiting(parts)
    with pytest.raises(InvalidArgument, match=r"call merge\(\) on every rank before state_dict\(\)"):
        parts[2].state_dict()
    parts[2].merge()
    after = waiting(parts)
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=1e-6, atol=1e-7)
    assert any("residual" in name and tensor.any() for name, tensor in after.items())
    state = parts[2].state_dict()
    bytes_before = parts[2].traffic.bytes["all-reduce"]
    parts[2].merge()
    assert parts[2].traffic.bytes["all-reduce"] == bytes_before, "nothing was left to merge"
    gt.save(parts[0], folder / "saved", state={"topk": parts[2]})
    if rank == 0:
        torch.save(after, folder / "waiting.pt")
        torch.save({"model": parts[0].module.state_dict(), "topk": state}, folder / "plain.pt")
    dcp.save({"topk": parts[2]}, checkpoint_id=str(folder / "dcp"))
    assert state["steps"] == 6
    random = torch.Generator().manual_seed(100 * 6 + rank)
    parts[1].zero_grad()
    parts[0](torch.randn(5, 3, 2, 2, generator=random)).square().sum().backward()
    with pytest.raises(InvalidArgument, match="save after the step"):
        gt.save(parts[0], folder / "early", state={"topk": parts[2]})
    parts[1].step()
    train(parts, rank, range(7, 9))
    torch.save(parts[0].module.state_dict(), folder / f"uninterrupted-{rank}.pt")


def load_on_ranks(rank: int, ranks: int, folder: Path) -> None:
    parts = made()
    gt.load(parts[0], folder / "saved", state={"topk": parts[2]})
    assert parts[2].steps == 6
    found = waiting(parts)
    for name, tensor in torch.load(folder / "waiting.pt").items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-7)
    other = made()
    dcp.load({"topk": other[2]}, checkpoint_id=str(folder / "dcp"))
    assert other[2].steps == 6
    for name, tensor in waiting(other).items():
        assert torch.equal(tensor, found[name])
    plain = torch.load(folder / "plain.pt")
    other[0].module.load_state_dict(plain["model"])
    other[2].load_state_dict(plain["topk"])
    train(parts, rank, range(6, 9))
    train(other, rank, range(6, 9))
    for parameter, same in zip(other[0].parameters(), parts[0].parameters(), strict=True):
        assert torch.equal(parameter, same)
    if ranks == 2:
        expected = torch.load(folder / f"uninterrupted-{rank}.pt")
        for name, tensor in parts[0].module.state_dict().items():
            assert torch.equal(tensor, expected[name])


def test_what_waits_is_saved_and_loads_on_any_number_of_ranks(tmp_path: Path) -> None:
    run_ranks(save_on_ranks, 2, tmp_path)
    run_ranks(load_on_ranks, 2, tmp_path)
    run_ranks(load_on_ranks, 3, tmp_path)


@on_ranks(2)
def test_a_loaded_residual_of_a_dense_tensor_is_sent_once(rank: int) -> None:
    """A loaded residual of a tensor that travels dense from now on is sent with the next step, once."""
    parts = made(weight_decay=0.0)
    train(parts, rank, range(4))
    parts[2].merge()
    saved = parts[2].state_dict()
    dense = made(sparsity=0, weight_decay=0.0)
    dense[0].module.load_state_dict(parts[0].module.state_dict())
    dense[2].load_state_dict(saved)
    before = {name: parameter.detach().clone() for name, parameter in dense[0].module.named_parameters()}
    momentum = {name: item.clone() for name, item in saved["momentum"].items()}
    residual = {name: item.clone() for name, item in saved["residual"].items()}
    assert residual
    train(dense, rank, range(4, 5))
    plain = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(4, OUTPUTS))
    plain.load_state_dict(before)
    replica = DistributedDataParallel(plain)
    replica(torch.randn(5, 3, 2, 2, generator=torch.Generator().manual_seed(400 + rank))).square().sum().backward()
    for name, parameter in plain.named_parameters():
        applied = 0.9 * momentum[name] + parameter.grad + residual.get(name, 0.0)
        torch.testing.assert_close(dense[0].module.get_parameter(name), before[name] - 0.1 * applied)
    dense[2].merge()
    assert not dense[2].state_dict()["residual"]


@on_ranks(2)
def test_the_momentum_of_a_decay_that_ended_fades(rank: int) -> None:
    """The momentum that weight decay left fades as that of SGD does, where weights decay no longer."""
    before = made_tensors(weight_decay=0.5)
    for step in range(3):
        step_of(before, step, rank)
    before[2].merge()
    state, weights = before[2].state_dict(), before[0].module.state_dict()
    decay = state["decay"]["large"].clone()
    assert decay.all()
    ends = []
    for item in (state, {**state, "decay": {}}):
        parts = made_tensors()
        parts[0].module.load_state_dict(weights)
        parts[2].load_state_dict(item)
        for step in range(3, 5):
            step_of(parts, step, rank)
        ends.append(parts[0].module.large.detach())
    torch.testing.assert_close(ends[0], ends[1] - LR * (0.9 + 0.9**2) * decay)


@on_ranks(1)
def test_a_state_of_other_parameters_is_refused() -> None:
    parts = made()
    state = parts[2].state_dict()
    for kind in ("momentum", "residual"):
        short = {**state, kind: {**state[kind], "2.weight": torch.zeros(2, 2)}}
        with pytest.raises(SpecMismatch, match=r"'2\.weight' has shape \[2, 2\], the parameter \[8, 4\]"):
            parts[2].load_state_dict(short)
    with pytest.raises(SpecMismatch, match="the saved state alone has gradients of 'more'"):
        parts[2].load_state_dict({**state, "momentum": {**state["momentum"], "more": torch.zeros(1)}})
    with pytest.raises(SpecMismatch, match=r"this model alone has gradients of '0\.bias'"):
        fewer = {name: item for name, item in state["momentum"].items() if name != "0.bias"}
        parts[2].load_state_dict({**state, "momentum": fewer})
