"""gt.save and gt.load of models of which each rank has a part: nothing is gathered, and other ranks go on from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import geartrain as gt
from geartrain.ams.values.errors import InvalidArgument, ModelDamaged, SpecMismatch, SyncError
from geartrain.bridge.checkpoint import rank_rows
from geartrain.bridge.parallel.scopes import Scope
from tests.support.rank_processes import run_ranks

CLASSES, DIM, INPUTS, BATCH = 11, 4, 5, 6
SCOPES: dict[str, dict[str, Scope]] = {
    "replicated": {"": gt.Replicate()},
    "split": {"backbone": gt.Replicate(), "head": gt.Split()},
    "sharded": {"backbone": gt.Replicate(shard=True), "head": gt.Split()},
}


class Classifier(nn.Module):
    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.backbone = nn.Sequential(nn.Linear(INPUTS, DIM), nn.LayerNorm(DIM))
        self.register_buffer("scale", torch.tensor([2.0]))
        self.head = nn.Linear(DIM, classes)

    def forward(self, inputs: Tensor) -> Any:
        return self.head(torch.tanh(self.scale * self.backbone(inputs)))


def made(scopes: str, classes: int = CLASSES) -> tuple[Any, torch.optim.Optimizer]:
    model = gt.parallelize(Classifier(classes), gt.mesh(), SCOPES[scopes], loss=nn.CrossEntropyLoss())
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def trained(rank: int, ranks: int, model: Any, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[float]:
    losses = []
    for step in range(steps):
        random = torch.Generator().manual_seed(step)
        inputs = torch.randn(BATCH, INPUTS, generator=random)
        labels = torch.randint(0, CLASSES, (BATCH,), generator=random)
        loss = model(inputs[rank::ranks], labels[rank::ranks])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def save(rank: int, ranks: int, folder: Path) -> None:
    rank_rows.PIECE_BYTES = 64
    for name in SCOPES:
        model, optimizer = made(name)
        trained(rank, ranks, model, optimizer)
        traffic = model.mesh.whole.link.traffic
        traffic.clear()
        gt.save(model, folder / name, state={"optimizer": optimizer, "epoch": 7, "weight": model.state_dict()})
        assert {*traffic.calls} <= {"all-gather"}
        assert traffic.bytes["all-gather"] < 200, "ids and failures alone travel"
        losses = trained(rank, ranks, model, optimizer)
        if rank == 0:
            (folder / f"{name}.json").write_text(json.dumps(losses))
    assert gt.save(model, folder / "sharded", state={"optimizer": optimizer, "epoch": 7}) == folder / "sharded"


def go_on(rank: int, ranks: int, folder: Path) -> None:
    for saved in ("replicated", "split", "alone"):
        expected = json.loads((folder / f"{saved}.json").read_text())
        for name in SCOPES:
            model, optimizer = made(name)
            values = gt.load(model, folder / saved, state={"optimizer": optimizer})
            assert values["epoch"] == 7
            assert trained(rank, ranks, model, optimizer) == pytest.approx(expected, rel=1e-4)


def test_other_ranks_in_other_scopes_go_on_from_what_ranks_saved(tmp_path: Path) -> None:
    model, optimizer = made("replicated")
    trained(0, 1, model, optimizer)
    gt.save(model, tmp_path / "alone", state={"optimizer": optimizer, "epoch": 7})
    alone = trained(0, 1, model, optimizer)
    (tmp_path / "alone.json").write_text(json.dumps(alone))
    run_ranks(save, 2, tmp_path)
    run_ranks(go_on, 3, tmp_path)
    go_on(0, 1, tmp_path)
    for saved in SCOPES:
        plain = Classifier()
        values = gt.load(plain, tmp_path / saved)
        assert plain.head.weight.shape == (CLASSES, DIM)
        if saved != "sharded":
            assert torch.equal(values["weight"]["head.weight"], plain.head.weight)
        assert json.loads((tmp_path / f"{saved}.json").read_text()) == pytest.approx(alone, rel=1e-4)
    # A rank writes its own rows, in small files.
    for name, divided in (("replicated", False), ("split", True), ("sharded", True)):
        pieces = json.loads((tmp_path / name / "model.json").read_text()).get("pieces", [])
        assert {path.name for path in (tmp_path / name).glob("rank-*")} == {piece["file"] for piece in pieces}
        assert bool(pieces) is divided
        weight = {
            tuple(piece["rows"]["state['model']['head.weight']"]): piece["file"].split("-")[2]
            for piece in pieces
            if "state['model']['head.weight']" in piece["rows"]
        }
        if divided:
            assert weight == {(0, 4): "0", (4, 6): "0", (6, 10): "1", (10, 11): "1"}


def refuse(rank: int, ranks: int, folder: Path) -> None:
    model, optimizer = made("sharded")
    gt.save(model, folder / "model", state={"optimizer": optimizer})
    files = {path.name for path in (folder / "model").iterdir()}
    with pytest.raises(InvalidArgument if rank == 1 else SyncError):
        gt.save(model, folder / "model", state={} if rank == 0 else {1: 2})  # type: ignore[dict-item]
    trained(rank, ranks, model, optimizer, 1)
    with pytest.raises(SpecMismatch if rank == 0 else SyncError, match="written by no rank" if rank == 0 else "rank 0"):
        gt.save(model, folder / "model", state={"optimizer": optimizer} if rank == 0 else {})
    dist.barrier()  # rank 0 sweeps
    assert {path.name for path in (folder / "model").iterdir()} == files
    with pytest.raises(SpecMismatch, match=r"'head.weight' of .* has shape \[11, 4\], that of this model \[12, 4\]"):
        gt.load(made("split", 12)[0], folder / "model")
    columns = nn.Module()
    columns.weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), model.mesh.whole.device_mesh, [Shard(1)]))
    with pytest.raises(InvalidArgument, match=r"Shard\(dim=1\).* Save others with torch.distributed.checkpoint"):
        gt.save(columns, folder / "columns")


def test_what_cannot_be_saved_leaves_the_old_model_and_is_an_error_on_all(tmp_path: Path) -> None:
    run_ranks(refuse, 2, tmp_path)
    piece = next((tmp_path / "model").glob("rank-*-1-0.safetensors"))
    whole = piece.read_bytes()
    for damage in (whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1])):
        piece.write_bytes(damage)
        with pytest.raises(ModelDamaged, match=piece.name):
            gt.load(Classifier(), tmp_path / "model")
    piece.unlink()
    with pytest.raises(ModelDamaged, match="cannot be read"):
        gt.load(Classifier(), tmp_path / "model")


def use_fsdp(folder: Path) -> None:
    model = Classifier()
    fully_shard(model.backbone[0])
    fully_shard(model)
    gt.save(model, folder / "fsdp")
    again = Classifier()
    fully_shard(again)
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.zero_()
    gt.load(again, folder / "fsdp")
    assert torch.equal(again.head.weight.full_tensor(), Classifier().head.weight)  # type: ignore[operator]
    larger = Classifier(CLASSES + 1)
    fully_shard(larger)
    with torch.no_grad():
        larger.backbone[0].weight.zero_()
    gt.load(larger, folder / "fsdp", strict=False)
    assert torch.equal(larger.backbone[0].weight.full_tensor(), Classifier().backbone[0].weight)


class WithHead(nn.Module):
    """Its class rows are a snapshot, its backbone is divided."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.backbone = nn.Linear(INPUTS, DIM)
        self.head = gt.ClassHead(None, "classes", num_classes=CLASSES, dim=DIM, rows="ranks")

    def forward(self, inputs: Tensor, labels: Tensor) -> Any:
        return self.head(self.backbone(inputs), labels)


def save_head(folder: Path) -> None:
    model = gt.parallelize(WithHead(), gt.mesh(), {"backbone": gt.Replicate(shard=True), "head": gt.Split()})
    model.module.head.table.assign(np.arange(CLASSES), np.ones((CLASSES, DIM), np.float32))
    gt.save(model, folder / "head")


def test_rows_of_a_head_and_a_divided_backbone_are_one_model(tmp_path: Path) -> None:
    run_ranks(save_head, 2, tmp_path)
    model = WithHead()
    with torch.no_grad():
        model.backbone.weight.zero_()
    gt.load(model, tmp_path / "head")
    assert torch.equal(model.backbone.weight, WithHead().backbone.weight)
    assert torch.equal(model.head.weights(), torch.ones(CLASSES, DIM))


def test_a_model_under_fsdp2_alone_is_saved_and_loaded(tmp_path: Path) -> None:
    run_ranks(use_fsdp, 2, tmp_path)
    model = Classifier()
    with torch.no_grad():
        model.head.weight.zero_()
    gt.load(model, tmp_path / "fsdp")
    assert torch.equal(model.head.weight, Classifier().head.weight)
