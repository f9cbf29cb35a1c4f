"""Tensors of the host stay there under ``torch.set_default_device``; the meta device stands for a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import geartrain as gt
from geartrain.ams.client.cluster import Cluster

HOST, OTHER = torch.device("cpu"), torch.device("meta")


@pytest.mark.parametrize(
    ("rows", "settings"),
    [
        ("pull", {}),
        ("pull", {"margin": gt.ArcFace(8.0), "sub_centers": 2}),
        ("pull", {"select": gt.KNNSoftmax(active=0.5, k=2)}),
        ("hosted", {}),
        ("ranks", {}),
        ("ranks", {"select": gt.KNNSoftmax(active=0.5, k=2)}),
    ],
)
def test_a_head_is_trained_saved_and_read(cluster: Cluster, tmp_path: Path, rows: str, settings: Any) -> None:
    where = None if rows == "ranks" else cluster
    head = gt.ClassHead(where, "head", num_classes=9, dim=5, rows=rows, **{"margin": None, **settings})
    model = nn.ModuleDict({"backbone": nn.Linear(5, 5), "head": head})
    optimizer = gt.joint(torch.optim.Adam(model["backbone"].parameters()), head)
    inputs, labels = torch.randn(8, 5), torch.arange(8)
    with OTHER:
        for _ in range(2):
            head(model["backbone"](inputs), labels).backward()
            gt.clip_grad_norm_(model["backbone"].parameters(), optimizer, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        gt.save(model, tmp_path / "model", state={"optimizer": optimizer})
        before = head.weights()
        gt.load(model, tmp_path / "model", state={"optimizer": optimizer}, replace=True)
        assert torch.equal(head.weights(), before) and before.device == HOST
        assert head.predict(model["backbone"](inputs), 2)[1].device == HOST
        head.imprint([(inputs, labels)], model["backbone"])


@pytest.mark.parametrize("rows", ["pull", "ranks"])
def test_embeddings_are_trained(cluster: Cluster, rows: str) -> None:
    fields = [gt.Field("user", dim=3), gt.Field("past", dim=3, pooling=None)]
    group = gt.EmbeddingGroup(None if rows == "ranks" else cluster, "ctr", fields, rows=rows)
    optimizer = gt.RowOptimizer(group)
    ids = torch.arange(8).view(4, 2)
    with OTHER:
        for _ in range(2):
            vectors = group({"user": ids, "past": ids})
            (vectors["user"].sum() + vectors["past"].sum()).backward()
            gt.clip_grad_norm_([], optimizer, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        assert vectors["user"].device == HOST


def test_an_attached_module_is_trained(cluster: Cluster) -> None:
    module, inputs = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)), torch.randn(8, 5)
    first = module[0].weight.clone()
    with OTHER:
        dense = gt.attach(module, cluster, name="dense")
        module(inputs).square().sum().backward()
        dense.step()
    assert not torch.equal(module[0].weight, first)
