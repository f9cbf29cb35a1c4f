"""Ranks that train rows of a served cluster together save and load one model, here and in another cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.ams.values.errors import SpecMismatch, SyncError
from tests.integration.conftest import ServedCluster
from tests.support.rank_processes import run_ranks
from tests.unit.bridge.checkpoint.test_saved_models import BATCH, Trainer


def save_and_load(rank: int, ranks: int, folder: Path, address: str, elsewhere: str) -> None:
    def made(cluster: Cluster) -> Trainer:
        trainer = Trainer(cluster, sync=True)
        trainer.model.backbone = nn.parallel.DistributedDataParallel(trainer.model.backbone)
        return trainer

    def go_on(trainer: Trainer) -> list[float]:
        return trainer.train(range(3, 5), slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks))

    with gt.connect(address) as cluster:
        first = made(cluster)
        go_on(first)
        gt.save(first.model, folder / "model", state=first.state)
        expected = go_on(first)
        gt.load(first.model, folder / "model", state=first.state, replace=True)
        assert go_on(first) == expected
        with pytest.raises(SpecMismatch if rank == 0 else SyncError):
            gt.load(nn.Sequential(first.model) if rank == 0 else first.model, folder / "model", replace=True)
        assert len(go_on(first)) == 2  # nothing was changed
        dist.barrier()
    with gt.connect(elsewhere) as cluster:
        second = made(cluster)
        gt.load(second.model, folder / "model", state=second.state)
        assert go_on(second) == pytest.approx(expected, rel=1e-5)  # the shards sum by another map
        dist.barrier()


def test_ranks_go_on_together_from_a_saved_model(tmp_path: Path) -> None:
    served = [ServedCluster(2), ServedCluster(1)]
    try:
        run_ranks(save_and_load, 2, tmp_path, *(item.address for item in served))
    finally:
        for item in served:
            item.stop()
