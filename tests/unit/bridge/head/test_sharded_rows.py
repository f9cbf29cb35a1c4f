"""``torch.distributed.checkpoint`` saves class rows on ranks beside a backbone; any number of ranks loads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

import geartrain as gt
from geartrain.ams.values.errors import InvalidArgument, SpecMismatch
from tests.support.rank_processes import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
DIM, BATCH = 5, 12
CASES: dict[str, tuple[int, Any]] = {
    "elapsed": (7, gt.SparseMomentum(0.5, weight_decay=1e-3, untouched="elapsed")),
    "adamw": (4, gt.AdamW(0.05)),  # of three ranks the last holds no class
}


class Model(nn.Module):
    def __init__(self, classes: int, optimizer: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.backbone = nn.Linear(DIM, DIM)
        self.head = gt.ClassHead(
            None,
            "classes",
            num_classes=classes,
            dim=DIM,
            select=gt.PartialFC(0.5),
            margin=gt.CosFace(16, 0.1),
            optimizer=optimizer,
            rows="ranks",
        )

    def checkpoint(self) -> dict[str, Any]:
        return {"model": self.state_dict(), "rows": self.head.sharded_rows()}

    def train_rows(self, steps: range, rank: int, ranks: int) -> float:
        """The joint loss of the last step."""
        rows = gt.RowOptimizer(self.head)
        share = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            features = torch.randn(BATCH, DIM, generator=generator)[share]
            labels = torch.randint(self.head.num_classes, (BATCH,), generator=generator)[share]
            loss = self.head(self.backbone(features), labels)
            loss.backward()
            rows.step()
            rows.zero_grad()
        peers = self.head.backend.peers
        assert peers is not None
        return float(peers.sum(loss.detach() * len(labels) / BATCH))


def save(rank: int, ranks: int, folder: Path) -> None:
    for name, case in CASES.items():
        model = Model(*case)
        model.train_rows(range(3), rank, ranks)
        with torch.no_grad():
            model.backbone.weight.mul_(2)
        dcp.save(model.checkpoint(), checkpoint_id=folder / name)
        loss = model.train_rows(range(3, 5), rank, ranks)
        (folder / f"{name}-loss").write_text(str(loss))


def load(rank: int, ranks: int, folder: Path) -> None:
    for name, case in CASES.items():
        model = Model(*case)
        checkpoint = model.checkpoint()
        dcp.load(checkpoint, checkpoint_id=folder / name)
        model.load_state_dict(checkpoint["model"])
        assert model.head.step == 3
        if ranks > 1:
            dcp.async_save(model.checkpoint(), checkpoint_id=folder / f"{name}-again").result()
        else:
            again = Model(*case)
            dcp.load({"rows": again.head.sharded_rows()}, checkpoint_id=folder / f"{name}-again")
            assert torch.equal(again.head.weights(), model.head.weights())
        loss = model.train_rows(range(3, 5), rank, ranks)
        assert loss == pytest.approx(float((folder / f"{name}-loss").read_text()), rel=1e-5)


def test_rows_saved_on_two_ranks_go_on_on_three_and_on_one(tmp_path: Path) -> None:
    run_ranks(save, 2, tmp_path)
    run_ranks(load, 3, tmp_path)
    load(0, 1, tmp_path)


def test_rows_of_other_settings_are_not_taken(tmp_path: Path) -> None:
    model = Model(7, gt.SparseMomentum(0.5))
    model.train_rows(range(2), 0, 1)
    dcp.save({"rows": model.head.sharded_rows()}, checkpoint_id=tmp_path)
    other = Model(7, gt.Momentum(0.5))
    first = other.head.weights()
    with pytest.raises(SpecMismatch, match=r"optimizer is SparseMomentum"):
        dcp.load({"rows": other.head.sharded_rows()}, checkpoint_id=tmp_path)
    assert torch.equal(other.head.weights(), first)
    slower = Model(7, gt.SparseMomentum(0.1))
    dcp.load({"rows": slower.head.sharded_rows()}, checkpoint_id=tmp_path)
    assert torch.equal(slower.head.weights(), model.head.weights())
    wider = Model(8, gt.SparseMomentum(0.5))
    with pytest.raises(CheckpointException, match=r"Size mismatch .*\[7, 5\]"):
        dcp.load({"rows": wider.head.sharded_rows()}, checkpoint_id=tmp_path)
    assert wider.head.step == 0


def test_rows_in_a_cluster_name_the_way_they_are_saved() -> None:
    with gt.local() as cluster:
        head = gt.ClassHead(cluster, "classes", num_classes=7, dim=DIM)
        with pytest.raises(InvalidArgument, match=r"geartrain\.save"):
            head.sharded_rows()
