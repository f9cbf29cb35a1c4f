"""Parameters and optimizer state of a parallel model: saved by some ranks, read by others; norms are those of all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import geartrain as gt
from geartrain.ams.values.errors import InvalidArgument, SpecMismatch
from tests.support.rank_processes import run_ranks

CLASSES, DIM, INPUTS, BATCH = 11, 4, 5, 6


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.backbone = nn.Linear(INPUTS, DIM)
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, inputs: Tensor) -> Any:
        return self.head(torch.tanh(self.backbone(inputs)))


def prepared(*, shard: bool = False) -> tuple[Any, torch.optim.Optimizer]:
    scopes = {"backbone": gt.Replicate(shard=shard), "head": gt.Split()}
    model = gt.parallelize(Classifier(), gt.mesh(), scopes, loss=nn.CrossEntropyLoss())  # type: ignore[arg-type]
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def step(rank: int, ranks: int, model: Any, optimizer: torch.optim.Optimizer) -> float:
    torch.manual_seed(6)
    inputs, labels = torch.randn(BATCH, INPUTS), torch.randint(0, CLASSES, (BATCH,))
    optimizer.zero_grad()
    loss = model(inputs[rank::ranks], labels[rank::ranks])
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def state_of(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model.module, optimizer)}


def whole(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in values.items()}


def save(rank: int, ranks: int, folder: Path) -> None:
    model, optimizer = prepared()
    step(rank, ranks, model, optimizer)
    dcp.save(state_of(model, optimizer), checkpoint_id=folder / "checkpoint")
    kept = {"state": {name: value.clone() for name, value in whole(model.state_dict()).items()}}
    kept["losses"] = torch.tensor([step(rank, ranks, model, optimizer) for _ in range(3)])  # type: ignore[assignment]
    if rank == 0:
        torch.save(kept, folder / "kept.pt")


def load(rank: int, ranks: int, folder: Path) -> None:
    kept = torch.load(folder / "kept.pt", weights_only=True)
    for shard in (False, True):
        model, optimizer = prepared(shard=shard)
        state = state_of(model, optimizer)
        dcp.load(state, checkpoint_id=folder / "checkpoint")
        model.load_state_dict(state["model"])
        set_optimizer_state_dict(model.module, optimizer, state["optimizer"])
        for name, value in whole(model.state_dict()).items():
            assert torch.equal(value, kept["state"][name]), name
        losses = torch.tensor([step(rank, ranks, model, optimizer) for _ in range(3)])
        torch.testing.assert_close(losses, kept["losses"])
    # The state of a model that is not parallel, too.
    model, _ = prepared()
    model.load_state_dict(kept["state"])
    assert torch.equal(whole(model.state_dict())["head.weight"], kept["state"]["head.weight"])
    with pytest.raises(SpecMismatch, match=r"head.bias of the state has shape \(12,\), this layer \(11,\)"):
        model.load_state_dict({**kept["state"], "head.bias": torch.zeros(12)})


def clip(rank: int, ranks: int, folder: Path) -> None:
    alone = torch.load(folder / "norms.pt", weights_only=True)
    for shard in (False, True):
        model, optimizer = prepared(shard=shard)
        step(rank, ranks, model, optimizer)
        assert gt.clip_grad_norm_(model.parameters(), [], 1e-3) == pytest.approx(alone["norm"], rel=1e-5)
        gradients = [parameter.grad for parameter in model.parameters()]
        norms = torch.stack([torch.linalg.vector_norm(item) for item in whole(dict(enumerate(gradients))).values()])
        assert float(torch.linalg.vector_norm(norms)) == pytest.approx(1e-3, rel=1e-4)
    # All of its parameters are DTensors.
    optimizer.zero_grad()
    step(rank, ranks, model, optimizer)
    norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert float(norm.full_tensor()) == pytest.approx(alone["second"], rel=1e-5)
    model, optimizer = prepared()
    step(rank, ranks, model, optimizer)
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(InvalidArgument, match="Move the model before"):
        model.to("cpu")


def test_a_checkpoint_of_two_ranks_is_read_by_three(tmp_path: Path) -> None:
    run_ranks(save, 2, tmp_path)
    run_ranks(load, 3, tmp_path)


def test_the_norm_of_gradients_is_that_of_all_ranks(tmp_path: Path) -> None:
    model, optimizer = prepared()
    norms = {}
    for name in ("norm", "second"):
        step(0, 1, model, optimizer)
        norms[name] = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3))
    torch.save(norms, tmp_path / "norms.pt")
    run_ranks(clip, 2, tmp_path)
