"""A saved model loaded into one with other fields and layers: what both have goes on, the rest is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import geartrain as gt
from geartrain.ams.client.cluster import Cluster

DIMS = {"user": 3, "item": 2, "brand": 4}


class Clicks(nn.Module):
    """Some fields and two layers behind them."""

    def __init__(self, cluster: Cluster, *names: str, **settings: object) -> None:
        super().__init__()
        fields = [
            gt.Field(name, dim=DIMS[name], optimizer=gt.SGD(0.1) if name == "item" else None, **settings)  # type: ignore[arg-type]
            for name in names
        ]
        self.fields = gt.EmbeddingGroup(cluster, "ctr", fields, optimizer=gt.Adagrad(0.5))
        self.first = nn.Linear(sum(DIMS[name] for name in names), 4)
        self.last = nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """One number a sample."""
        vectors = self.fields({field.name: ids for field in self.fields.fields})
        logits: torch.Tensor = self.last(self.first(torch.cat(list(vectors.values()), dim=1)))
        return logits


IDS = torch.arange(20)


def train(model: Clicks, steps: int) -> None:
    optimizer = gt.joint(torch.optim.SGD([*model.first.parameters(), *model.last.parameters()], lr=0.1), model.fields)
    for _ in range(steps):
        (model(IDS) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


Saved = tuple[Path, dict[str, torch.Tensor], dict[str, torch.Tensor]]


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    """A saved model of users and items: its folder, rows by field, and tensors."""
    with gt.local(2) as cluster:
        model = Clicks(cluster, "user", "item")
        train(model, 3)
        gt.save(model, tmp_path / "model", state={"epoch": 7})
        rows = {name: model.fields.table(name).pull(IDS) for name in ("user", "item")}
        tensors = {name: value.detach().clone() for name, value in model.named_parameters()}
    return tmp_path / "model", rows, tensors


def test_fields_come_and_go_and_the_others_go_on(saved: Saved, caplog: pytest.LogCaptureFixture) -> None:
    folder, rows, tensors = saved
    with gt.local(1) as cluster:
        model = Clicks(cluster, "brand", "item")
        fresh = {name: value.detach().clone() for name, value in model.named_parameters()}
        before = model.fields.table("brand").pull(IDS)
        with pytest.raises(gt.errors.SpecMismatch):
            gt.load(model, folder)
        assert gt.load(model, folder, strict=False) == {"epoch": 7}
        (said,) = [record.message for record in caplog.records]
        assert "new, and as they were made: table ctr/brand, first.weight [4, 6], saved as [4, 5]" in said
        assert said.endswith("left out: table ctr/user")
        assert torch.equal(model.fields.table("item").pull(IDS), rows["item"])
        assert torch.equal(model.fields.table("brand").pull(IDS), before)
        assert torch.equal(model.last.weight, tensors["last.weight"])
        assert torch.equal(model.first.weight, fresh["first.weight"])
        assert {part.row_update.name: part.row_update.step for part in model.fields} == {"ctr/brand": 0, "ctr/item": 3}
        train(model, 2)
        assert not torch.equal(model.fields.table("item").pull(IDS), rows["item"])
        with pytest.raises(gt.errors.TableExists, match="replace=True"):
            gt.load(model, folder, strict=False)
        gt.load(model, folder, strict=False, replace=True)
        assert torch.equal(model.fields.table("item").pull(IDS), rows["item"])


def test_more_fields_in_one_optimizer_and_slots_of_the_old_ones(
    saved: Saved, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, rows, _ = saved
    with gt.local(1) as cluster:
        model = Clicks(cluster, "user", "item", "brand")
        gt.load(model, folder, strict=False)
        assert {part.row_update.step for part in model.fields} == {3}
        for name, known in rows.items():
            assert torch.equal(model.fields.table(name).pull(IDS), known)
        gt.save(model, tmp_path / "more")
    with gt.local(2) as cluster:
        strictly = Clicks(cluster, "user", "item")
        gt.load(strictly, folder)
        train(strictly, 1)
        expected = strictly.fields.table("item").pull(IDS)
    caplog.clear()
    with gt.local(2) as cluster:
        back = Clicks(cluster, "user", "item")
        gt.load(back, folder, strict=False)
        assert not caplog.records, "there was nothing to say"
        train(back, 1)
        assert torch.equal(back.fields.table("item").pull(IDS), expected)


def test_what_does_not_fit_even_so_is_refused_and_nothing_is_changed(saved: Saved) -> None:
    folder, _, _ = saved
    with gt.local(1) as cluster:
        model = Clicks(cluster, "user", dtype="bfloat16")
        before = model.fields.table("user").pull(IDS)
        with pytest.raises(gt.errors.SpecMismatch, match=r"table 'ctr/user' .* dtype .*under another name"):
            gt.load(model, folder, strict=False)
        assert torch.equal(model.fields.table("user").pull(IDS), before)
        with pytest.raises(gt.errors.SpecMismatch, match="no table and no tensor of this model"):
            gt.load(nn.Sequential(nn.Linear(2, 2)), folder, strict=False)
        with pytest.raises(gt.errors.InvalidArgument, match="strict is 'no'"):
            gt.load(model, folder, strict="no")  # type: ignore[arg-type]


def test_a_snapshot_of_the_cluster_is_a_warm_start_too(tmp_path: Path) -> None:
    with gt.local(2) as cluster:
        model = Clicks(cluster, "user", "item")
        train(model, 2)
        path = cluster.snapshot(tmp_path / "s").result()
        rows = model.fields.table("item").pull(IDS)
    with gt.local(1) as cluster:
        cluster.restore(path, tables=["ctr/item"])
        group = gt.EmbeddingGroup(
            cluster,
            "ctr",
            [gt.Field("item", dim=2, optimizer=gt.SGD(0.1)), gt.Field("brand", dim=4)],
            optimizer=gt.Adagrad(0.5),
            reuse=True,
        )
        assert torch.equal(group.table("item").pull(IDS), rows)
        assert [table.name for table in cluster.status().tables] == ["ctr/item", "ctr/brand"]


def test_tables_of_two_clusters_that_share_a_name_are_refused(tmp_path: Path) -> None:
    with gt.local() as one, gt.local() as other:
        both = nn.ModuleList(gt.Embedding(cluster, "items", dim=2) for cluster in (one, other))
        tables = [cluster.table("items") for cluster in (one, other)]
        for value, table in enumerate(tables, 1):
            table.assign([5], np.full((1, 2), value, np.float32))
        gt.save(both, tmp_path / "both")
        gt.save(both[0], tmp_path / "one")
        for folder, model in (("both", both), ("both", both[0]), ("one", both)):
            with pytest.raises(gt.errors.InvalidArgument, match="tables of two clusters are called 'items'"):
                gt.load(model, tmp_path / folder, strict=False, replace=True)
        assert [table.pull([5])[0, 0] for table in tables] == [1, 2]
